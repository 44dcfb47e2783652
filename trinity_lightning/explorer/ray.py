"""Runners in processes of their own, on this machine or another: Ray actors, replaced when they die."""

import asyncio
import logging
import os
import pickle
import socket
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, ClassVar, cast

from trinity_lightning.common.experience import Experience, ExperienceError
from trinity_lightning.common.inference import HeldModel, InferenceModel
from trinity_lightning.config.servers import check_engine_for_ray, require_ray
from trinity_lightning.errors import ConfigError, RolloutError, TrinityError, WorkerDiedError
from trinity_lightning.explorer.rewards import resolve_rewards
from trinity_lightning.explorer.tasks.task import Task
from trinity_lightning.explorer.workflow_runner import CANCEL_GRACE_SECONDS, Attempt, WorkflowRunner
from trinity_lightning.explorer.workflows.workflow import resolve_workflow

# -- the far side: a WorkflowRunner with its own copy of the models ----------------------------------------------------


PACKAGE = __name__.partition(".")[0]
# A worker whose workflows log without end keeps the last of it.
MAX_LOG_RECORDS = 1000


@dataclass
class Answer:
    """An Attempt on its way back."""

    experiences: bytes  # a payload of `Experience.serialize_many`
    errors: dict[int, BaseException]  # by run; each survives pickling
    seconds: float
    log: list[tuple[str, int, str]]  # logger, level and text of what was logged since the last answer


class RayWorker:
    """The actor.

    Args:
        setup: a pickle of (config, rollout model, auxiliary models); within bytes, so that Ray does not explain at
            length what cannot be pickled.
        import_path: where the program that started it looks for modules; looked at last.
        runner_id: for messages.
        log_level: from which level on this library's log is sent back; of others', warnings are.
    """

    def __init__(self, setup: bytes, import_path: list[str], runner_id: int | None, log_level: int) -> None:
        sys.path += [folder for folder in import_path if folder not in sys.path]
        config, model, auxiliary_models = pickle.loads(setup)  # noqa: S301 - from the program that started this one
        self._model = _Copy(model)
        self._runner = WorkflowRunner(config, cast("InferenceModel", self._model), auxiliary_models, runner_id)
        self._log = _Records()
        logging.getLogger().addHandler(self._log)
        logging.getLogger(PACKAGE).setLevel(log_level)

    async def ready(self) -> int:
        """The process id, once everything is imported."""
        return os.getpid()

    async def attempt(self, task: bytes, runs: Sequence[int], limit: float | None, version: int) -> Answer:
        """See `WorkflowRunner.attempt`; `task` is a pickle, and `version` that of the model's present weights."""
        try:
            loaded = pickle.loads(task)  # noqa: S301 - from the program that started this one
        except Exception as error:
            reason = f"the task cannot be read in a Ray worker: {type(error).__name__}: {error}"
            return self._answer(Attempt([], dict.fromkeys(runs, ConfigError(reason)), 0.0), runs)
        self._model.model_version = version
        return self._answer(await self._runner.attempt(loaded, runs, limit), runs)

    def _answer(self, attempt: Attempt, runs: Sequence[int]) -> Answer:
        errors = {run: portable(error) for run, error in attempt.errors.items()}
        try:
            payload = Experience.serialize_many(attempt.experiences)
        except ExperienceError as error:
            payload, errors = Experience.serialize_many([]), errors | dict.fromkeys(runs, error)
        return Answer(payload, errors, attempt.seconds, self._log.take())


class _Copy:
    """A copy of a model, which is given its version: weights are synced from the program that trains."""

    model_version = 0

    def __init__(self, model: InferenceModel) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class _Records(logging.Handler):
    """Keeps what is logged until it is taken."""

    def __init__(self) -> None:
        super().__init__()
        self._records: deque[tuple[str, int, str]] = deque(maxlen=MAX_LOG_RECORDS)

    def emit(self, record: logging.LogRecord) -> None:
        self._records.append((record.name, record.levelno, self.format(record)))

    def take(self) -> list[tuple[str, int, str]]:
        taken = list(self._records)
        self._records.clear()
        return taken


def portable(error: BaseException) -> BaseException:
    """The error itself if a pickle of it is the same again; otherwise a RolloutError with its type and text."""
    try:
        copy = pickle.loads(pickle.dumps(error))  # noqa: S301 - made here
    except Exception:
        copy = None
    same = type(copy) is type(error) and str(copy) == str(error)
    return error if same else RolloutError(f"{type(error).__name__}: {error}")


# -- the runner --------------------------------------------------------------------------------------------------------


logger = logging.getLogger(__name__)

# A worker imports torch first, on a machine that may be busy with the imports of all the others.
START_SECONDS = 300.0
# How much longer than its limit (or its clean-up, when cancelled) a worker may take to answer before it is replaced.
ANSWER_SECONDS = 10.0
# For a worker that is killed to end.
END_SECONDS = 1.0


@dataclass(eq=False)
class RayRunner(WorkflowRunner):
    """A WorkflowRunner whose workflows run in a Ray actor; Ray must have been started (`RayCluster`).

    The actor works with copies of the models: requests go from there to the engine's server.
    """

    # A worker that does not answer is replaced; its successor may have to start within the next attempt.
    overrun: ClassVar[float] = ANSWER_SECONDS + END_SECONDS + START_SECONDS

    _actor: Any = field(default=None, init=False)
    _pid: int | None = field(default=None, init=False)  # of the actor, once it is ready
    _greeting: Any = field(default=None, init=False)  # reference to that number

    def launch(self) -> None:
        """Begin to start the worker. ConfigError: a model cannot be sent to it; RolloutError: Ray does not run."""
        import ray

        if not ray.is_initialized():  # else Ray would start itself, with settings of its own
            raise RolloutError("Ray does not run in this program: await Scheduler.start() first.")
        models = (self.model, self.auxiliary_models)
        setup = _pickled((self.config, *models), f"the engine {type(self.model).__name__}")
        level = logging.getLogger(PACKAGE).getEffectiveLevel()
        # No CPU is reserved: what computes is the engine, and a machine holds as many runners as are asked for.
        options = {"num_cpus": 0, "scheduling_strategy": "SPREAD", "max_restarts": 0, "max_task_retries": 0}
        self._actor = _actor_class().options(**options).remote(setup, sys.path, self.runner_id, level)
        self._pid, self._greeting = None, self._actor.ready.remote()

    async def ready(self) -> None:
        """Wait until the worker, one that was replaced too, can be given tasks. RolloutError: it does not start."""
        from ray.exceptions import RayError

        if self._pid is not None:
            return
        if self._actor is None:
            self.launch()
        greeting = _future(self._greeting)
        await asyncio.wait([greeting], timeout=START_SECONDS)
        if not greeting.done():
            self.kill()
            raise RolloutError(f"a Ray worker did not start within {START_SECONDS:g} s")
        try:
            self._pid = greeting.result()
        except RayError as error:
            self.kill()
            raise RolloutError(f"a Ray worker does not start: {_last_line(error)}") from error

    def kill(self) -> None:
        """End the worker at once, also in the middle of an attempt; twice is allowed."""
        import ray

        if self._actor is not None:
            ray.kill(self._actor)
        self._actor = self._pid = self._greeting = None

    async def attempt(self, task: Task, runs: Sequence[int], limit: float | None = None) -> Attempt:
        """See `WorkflowRunner.attempt`. A worker that dies or does not answer fails these runs, and is replaced."""
        clock = asyncio.get_running_loop().time
        start = clock()
        try:
            async with asyncio.timeout(limit):
                await self._start_dead_servers()
            await self.ready()
            answer = await self._ask(_sendable(task), list(runs), limit)
            experiences = Experience.deserialize_many(answer.experiences)
        except (TrinityError, TimeoutError) as error:
            return Attempt([], dict.fromkeys(runs, error), clock() - start)
        for name, level, text in answer.log:
            logging.getLogger(name).log(level, "runner %s: %s", self.runner_id, text)
        return Attempt(experiences, answer.errors, answer.seconds)

    async def _start_dead_servers(self) -> None:
        """The worker's copies of the models cannot: this process has started the servers."""
        for model in (self.model, *(self.auxiliary_models or ())):
            if isinstance(model, HeldModel) and model.restarts is not None:
                await model.load()

    async def _ask(self, task: bytes, runs: list[int], limit: float | None) -> Answer:
        """The worker's answer; WorkerDiedError or TimeoutError if there is none, RolloutError if it failed."""
        import ray

        call = self._actor.attempt.remote(task, runs, limit, self.model.model_version)
        answer = _future(call)
        try:
            await asyncio.wait([answer], timeout=None if limit is None else limit + ANSWER_SECONDS)
        except asyncio.CancelledError:
            ray.cancel(call)
            await asyncio.wait([answer], timeout=CANCEL_GRACE_SECONDS + ANSWER_SECONDS)
            if not answer.done():
                await self._replace(answer)
            raise
        if not answer.done():
            await self._replace(answer)
            raise TimeoutError(f"not done within {limit:g} s, nor did its worker answer: it was replaced")
        return await self._result(answer)

    async def _result(self, answer: "asyncio.Future[Answer]") -> Answer:
        from ray.exceptions import RayError, RayTaskError

        try:
            return answer.result()
        except RayTaskError as error:  # the worker lives: its task was cancelled from elsewhere
            raise RolloutError(f"a Ray worker failed: {_last_line(error)}") from error
        except RayError as error:
            died = WorkerDiedError(f"the worker (pid {self._pid}) died: {type(error).__name__}: {_cause(error)}")
            await self._replace(answer)
            raise died from error

    async def _replace(self, answer: "asyncio.Future[Answer]") -> None:
        """Be rid of a worker that died or is to die; the next attempt starts another, wherever Ray finds a place."""
        logger.warning("runner %s: its worker (pid %s) is replaced.", self.runner_id, self._pid)
        self.kill()
        await asyncio.wait(
            [answer], timeout=END_SECONDS
        )  # it ends with the worker, and must not outlive this event loop


@cache
def _actor_class() -> Any:
    import ray

    return ray.remote(RayWorker)


def _sendable(task: Task) -> bytes:
    """A pickle of the task; names are resolved here, because only this process has the program's registrations."""
    rewards = None if task.reward_fn is None else resolve_rewards(task.reward_fn)
    return _pickled(
        replace(task, workflow=resolve_workflow(task.workflow), reward_fn=rewards),
        f"task {task.batch_id}/{task.task_id}",
    )


def _pickled(value: object, what: str) -> bytes:
    from ray import cloudpickle  # functions and classes of a script or a notebook too

    try:
        return cloudpickle.dumps(value)  # pyright: ignore[reportPrivateImportUsage]
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"{what} cannot be sent to Ray runners: {reason}", fix="choose explorer.runner=local"
        ) from error


def _future(reference: Any) -> "asyncio.Future[Any]":
    """What a reference refers to; an error that nothing waits for any more is not reported."""
    future = asyncio.wrap_future(reference.future())
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    return future


def _last_line(error: BaseException) -> str:
    """Ray puts a traceback into the text; its last line is the error."""
    return str(error).strip().splitlines()[-1].strip()


def _cause(error: BaseException) -> str:
    """What Ray knows of the end of a worker, without its advice and identifiers."""
    text = " ".join(str(error).split())
    return text.partition("Worker exit detail: ")[2].partition(" Some common causes")[0] or text


# -- the cluster: one that is there already, or one on this machine for as long as runners run ------------------------


# Experiences larger than 100 kB travel through it, and leave it as soon as they were read.
OBJECT_STORE_BYTES = 256 * 2**20
# For a cluster to answer at its address.
CONNECT_SECONDS = 10.0
LOCAL_SETTINGS = {
    "address": "local",
    "include_dashboard": False,
    "object_store_memory": OBJECT_STORE_BYTES,
    "_node_ip_address": "127.0.0.1",
}
# Of Ray and its processes: nothing is sent to its makers; and a cluster of this machine alone listens on the loopback
# interface only (without the second, Ray turns 127.0.0.1 into the machine's address).
LOCAL_ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}


class RayCluster:
    """Starts Ray if it does not run in this program yet, and ends what it started.

    Args:
        address: of a cluster to join, HOST:PORT of its head, or "auto" for the one on this machine; None starts one
            here, which ends with this program at the latest.
        models: what its workers ask.

    Raises:
        ConfigError: Ray is not installed, or an engine computes in this process.
    """

    def __init__(self, address: str | None, models: Sequence[InferenceModel]) -> None:
        require_ray()
        for model in models:
            if isinstance(model, HeldModel):  # another one is pickled, or Ray says why not
                check_engine_for_ray(type(model).__name__, model.capabilities)
        self._address = address
        self._connected = False
        self._runners: list[RayRunner] = []
        self._thread: ThreadPoolExecutor | None = None

    def check(self) -> None:
        """ConfigError if nothing listens at the cluster's address: Ray would go on asking for minutes."""
        if self._address is None or self._address == "auto":
            return
        host, _, port = self._address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"explorer.ray_address={self._address}: {error}",
                key="explorer.ray_address",
                fix="give HOST:PORT of the cluster's head, or null to start one here",
            ) from error

    async def start(self, runners: Sequence[RayRunner]) -> None:
        """Start or join the cluster, and start the workers of these runners.

        Raises:
            ConfigError: no cluster answers at the address, or a model cannot be sent to workers.
            RolloutError: a worker does not start.
        """
        # One thread, which lives as long as the cluster: Linux ends Ray's processes with the thread that started them.
        self._thread = ThreadPoolExecutor(1, "ray")
        self._runners = list(runners)
        try:
            await self._in_thread(self._connect)
            for runner in runners:
                await self._in_thread(runner.launch)
            ended = await asyncio.gather(*(runner.ready() for runner in runners), return_exceptions=True)
            for error in ended:
                if error is not None:
                    raise error
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """End the workers, and the cluster if it was started here; one that was joined goes on. Twice is allowed."""
        if self._thread is None:
            return
        try:
            await self._in_thread(self._disconnect)
        finally:
            self._thread.shutdown(wait=False)
            self._thread = None

    async def _in_thread(self, function: Callable[[], None]) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, function)

    def _connect(self) -> None:
        with _local() if self._address is None else nullcontext():
            import ray

            if ray.is_initialized():
                return
            settings = LOCAL_SETTINGS if self._address is None else {"address": self._address}
            try:
                # Its warnings say that SIGTERM is left to this program, and that the cluster asks for a token.
                ray.init(**settings, logging_level=logging.ERROR)  # type: ignore[arg-type]
            except Exception as error:
                what = "Ray does not start" if self._address is None else f"explorer.ray_address={self._address}"
                raise ConfigError(f"{what}: {type(error).__name__}: {' '.join(str(error).split())}") from error
            self._connected = True

    def _disconnect(self) -> None:
        import ray

        if ray.is_initialized():
            for runner in self._runners:
                runner.kill()
        if self._connected:
            self._connected = False
            ray.shutdown()


@contextmanager
def _local() -> Iterator[None]:
    """LOCAL_ENVIRONMENT, unless the user set the variables, for as long as Ray starts."""
    added = {name: value for name, value in LOCAL_ENVIRONMENT.items() if name not in os.environ}
    os.environ.update(added)
    from ray._private import ray_constants

    # The second variable is read when Ray is imported, and others import it (vLLM does).
    before = getattr(ray_constants, "ENABLE_RAY_CLUSTER", True)
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before
        for name in added:
            del os.environ[name]
