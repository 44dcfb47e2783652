"""Runners in processes of their own, on this machine or others: Ray actors, which are replaced when they die."""

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
from trinity_lightning.config.explorer import ExplorerConfig
from trinity_lightning.config.servers import check_engine_for_ray, require_ray
from trinity_lightning.errors import ConfigError, RolloutError, TrinityError, WorkerDiedError
from trinity_lightning.explorer.rewards import resolve_rewards
from trinity_lightning.explorer.tasks.task import Task
from trinity_lightning.explorer.workflow_runner import CANCEL_GRACE_SECONDS, Attempt, Runners, WorkflowRunner
from trinity_lightning.explorer.workflows.workflow import resolve_workflow

logger = logging.getLogger(__name__)

PACKAGE = __name__.partition(".")[0]
MAX_LOG_RECORDS = 1000  # newest log records that a worker keeps for its next answer
# A worker imports torch first, on a machine that may be busy with the imports of all the others.
START_SECONDS = 300.0
# A worker that answers later than this after its limit (or, when cancelled, after its clean-up) is replaced.
ANSWER_SECONDS = 10.0
END_SECONDS = 1.0  # for a worker that is killed to end
# Experiences larger than 100 kB pass through the object store, and leave it as soon as they are read.
OBJECT_STORE_BYTES = 256 * 2**20
CONNECT_SECONDS = 10.0  # for a cluster to answer at its address
LOCAL_SETTINGS = {
    "address": "local",
    "include_dashboard": False,
    "object_store_memory": OBJECT_STORE_BYTES,
    "_node_ip_address": "127.0.0.1",
}
# Settings of Ray and its processes. By the first, no usage statistics are sent. By the second, a cluster of this
# machine alone listens on the loopback interface only: otherwise Ray turns 127.0.0.1 into the machine's address.
LOCAL_ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}

# -- in the worker: a WorkflowRunner with its own copy of the models ---------------------------------------------------


@dataclass
class Answer:
    """An Attempt on its way back to the runner.

    Attributes:
        experiences: a payload of `Experience.serialize_many`.
        errors: errors by run; each survives pickling.
        seconds: duration of the attempt.
        log: logger, level and text of the records since the last answer.
    """

    experiences: bytes
    errors: dict[int, BaseException]
    seconds: float
    log: list[tuple[str, int, str]]


class RayWorker:
    """The Ray actor, which runs a `WorkflowRunner` for a `RayRunner`.

    Args:
        setup: a pickle of (config, rollout model, auxiliary models). It is made here and not by Ray, whose errors for
            objects that cannot be pickled are very long.
        import_path: the import path of the program that started the worker; it is searched last.
        runner_id: the runner's number, for messages.
        log_level: lowest level of this library's log records that are sent back. Other libraries' warnings are, too.
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
        """See `WorkflowRunner.attempt`; `task` is a pickle, and `version` the version of the present weights."""
        try:
            loaded = pickle.loads(task)  # noqa: S301 - from the program that started this one
        except Exception as error:
            reason = f"the task cannot be read in a Ray worker: {type(error).__name__}: {error}"
            return self._answer(Attempt([], dict.fromkeys(runs, ConfigError(reason, key="explorer.runner")), 0.0), runs)
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
    """A copy of a model, whose version each request sets, because another process syncs the weights."""

    model_version = 0

    def __init__(self, model: InferenceModel) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class _Records(logging.Handler):
    """Keeps log records until they are taken."""

    def __init__(self) -> None:
        super().__init__()
        self._records: deque[tuple[str, int, str]] = deque(maxlen=MAX_LOG_RECORDS)

    def emit(self, record: logging.LogRecord) -> None:
        self._records.append((record.name, record.levelno, self.format(record)))

    def take(self) -> list[tuple[str, int, str]]:
        """Logger, level and text of each record; the records are then forgotten."""
        records = list(self._records)
        self._records.clear()
        return records


def portable(error: BaseException) -> BaseException:
    """The error itself, if it survives pickling; otherwise a RolloutError with its type and text."""
    try:
        copy = pickle.loads(pickle.dumps(error))  # noqa: S301 - made here
    except Exception:
        copy = None
    same = type(copy) is type(error) and str(copy) == str(error)
    return error if same else RolloutError(f"{type(error).__name__}: {error}")


# -- the runner --------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class RayRunner(WorkflowRunner):
    """A WorkflowRunner whose workflows run in a Ray actor; `RayRunners` has to start Ray before.

    The actor has copies of the models: its requests go to the engine's server directly.
    """

    # A worker that does not answer is replaced; the new one may have to start within the next attempt.
    overrun: ClassVar[float] = ANSWER_SECONDS + END_SECONDS + START_SECONDS

    _actor: Any = field(default=None, init=False)
    _pid: int | None = field(default=None, init=False)  # process id of the actor, once it is ready
    _pid_reference: Any = field(default=None, init=False)  # Ray's reference to the process id, from the start on

    def launch(self) -> None:
        """Begin to start the worker. ConfigError: a model cannot be sent to it; RolloutError: Ray does not run."""
        import ray

        if not ray.is_initialized():  # else Ray would start itself, with settings of its own
            raise RolloutError("Ray does not run in this program: await Scheduler.start() first.")
        models = (self.model, self.auxiliary_models)
        setup = _pickled((self.config, *models), f"the engine {type(self.model).__name__}")
        level = logging.getLogger(PACKAGE).getEffectiveLevel()
        # No CPU is reserved: the engine computes, and a machine holds as many runners as are asked for.
        options = {"num_cpus": 0, "scheduling_strategy": "SPREAD", "max_restarts": 0, "max_task_retries": 0}
        self._actor = _actor_class().options(**options).remote(setup, sys.path, self.runner_id, level)
        self._pid, self._pid_reference = None, self._actor.ready.remote()

    async def ready(self) -> None:
        """Wait until the worker can take tasks, and start it if it was killed. RolloutError: it does not start."""
        from ray.exceptions import RayError

        if self._pid is not None:
            return
        if self._actor is None:
            self.launch()
        started = _future(self._pid_reference)
        await asyncio.wait([started], timeout=START_SECONDS)
        if not started.done():
            self.kill()
            raise RolloutError(f"a Ray worker did not start within {START_SECONDS:g} s")
        try:
            self._pid = started.result()
        except RayError as error:
            self.kill()
            raise RolloutError(f"a Ray worker does not start: {_last_line(error)}") from error

    def kill(self) -> None:
        """End the worker at once, also in the middle of an attempt; twice is allowed."""
        import ray

        if self._actor is not None:
            ray.kill(self._actor)
        self._actor = self._pid = self._pid_reference = None

    async def attempt(self, task: Task, runs: Sequence[int], limit: float | None = None) -> Attempt:
        """See `WorkflowRunner.attempt`. If the worker dies or does not answer, these runs fail, and it is replaced."""
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
        """Restart servers that died: this process can, because it started them, but the worker has only copies."""
        for model in (self.model, *(self.auxiliary_models or ())):
            if isinstance(model, HeldModel) and model.restarts is not None:
                await model.load()

    async def _ask(self, task: bytes, runs: list[int], limit: float | None) -> Answer:
        """Have the worker try these runs; WorkerDiedError or TimeoutError: no answer; RolloutError: it failed."""
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
        """Kill a worker that died or does not answer; the next attempt starts another, wherever Ray finds a place."""
        logger.warning("runner %s: its worker (pid %s) is replaced.", self.runner_id, self._pid)
        self.kill()
        # The answer's future ends with the worker, and must not outlive this event loop.
        await asyncio.wait([answer], timeout=END_SECONDS)


@cache
def _actor_class() -> Any:
    import ray

    return ray.remote(RayWorker)


def _sendable(task: Task) -> bytes:
    """A pickle of the task with its names resolved, because only this process has the program's registrations."""
    rewards = None if task.reward_fn is None else resolve_rewards(task.reward_fn)
    return _pickled(
        replace(task, workflow=resolve_workflow(task.workflow), reward_fn=rewards),
        f"task {task.batch_id}/{task.task_id}",
    )


def _pickled(value: object, label: str) -> bytes:
    from ray import cloudpickle  # functions and classes of a script or a notebook too

    try:
        return cloudpickle.dumps(value)  # pyright: ignore[reportPrivateImportUsage]
    except ConfigError:  # of a picture whose file is lost
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        message = f"{label} cannot be sent to Ray runners: {reason}"
        raise ConfigError(message, key="explorer.runner", fix="choose explorer.runner=local") from error


def _future(reference: Any) -> "asyncio.Future[Any]":
    """A future of the value behind one of Ray's references; an error that nobody waits for is not reported."""
    future = asyncio.wrap_future(reference.future())
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    return future


def _last_line(error: BaseException) -> str:
    """The last line of an error's text; Ray puts a traceback before it."""
    return str(error).strip().splitlines()[-1].strip()


def _cause(error: BaseException) -> str:
    """Ray's reason for the end of a worker, without its advice and identifiers."""
    text = " ".join(str(error).split())
    return text.partition("Worker exit detail: ")[2].partition(" Some common causes")[0] or text


# -- the runners of a scheduler, and their cluster: a running one that is joined, or one started here ------------------


class RayRunners(Runners):
    """Starts Ray, if it does not run in this program yet, and the workers of the runners; stops what it started.

    `explorer.ray_address` is the address of a cluster to join: HOST:PORT of its head, or "auto" for the one on this
    machine. None starts a cluster here, which ends with this program at the latest.

    Args:
        config: the explorer's configuration.
        models: all engines that the workers ask.

    Raises:
        ConfigError: Ray is not installed, or an engine computes in this process.
    """

    def __init__(self, config: ExplorerConfig, models: Sequence[InferenceModel]) -> None:
        super().__init__(config, models)
        require_ray()
        for model in models:
            if isinstance(model, HeldModel):  # any other is pickled, or Ray says why not
                check_engine_for_ray(type(model).__name__, model.capabilities)
        self._address = config.ray_address
        self._connected = False
        self._runners: list[RayRunner] = []
        self._thread: ThreadPoolExecutor | None = None

    def make(
        self, model: InferenceModel, auxiliary_models: Sequence[InferenceModel] | None, runner_id: int
    ) -> RayRunner:
        self._runners.append(RayRunner(self.config, model, auxiliary_models, runner_id))
        return self._runners[-1]

    async def prepare(self) -> None:
        """Check the cluster's address, which Ray itself would try for minutes. ConfigError: nothing listens there."""
        await asyncio.to_thread(self._check_address)

    def _check_address(self) -> None:
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

    async def start(self) -> None:
        """Start or join the cluster, and start the workers of the runners; nothing happens if they run already.

        Raises:
            ConfigError: no cluster answers at the address, or a model cannot be sent to workers.
            RolloutError: a worker does not start.
        """
        if self._thread is not None:
            return
        # One thread for the life of the cluster, because Linux ends Ray's processes with the thread that starts them.
        self._thread = ThreadPoolExecutor(1, "ray")
        try:
            await self._in_thread(self._connect)
            for runner in self._runners:
                await self._in_thread(runner.launch)
            ended = await asyncio.gather(*(runner.ready() for runner in self._runners), return_exceptions=True)
            for error in ended:
                if error is not None:
                    raise error
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """End the workers, and the cluster, if it was started here; a cluster that was joined goes on."""
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
                failure = "Ray does not start" if self._address is None else f"explorer.ray_address={self._address}"
                key = "explorer.runner" if self._address is None else "explorer.ray_address"
                reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
                raise ConfigError(f"{failure}: {reason}", key=key) from error
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
    """Set the variables of LOCAL_ENVIRONMENT that the user has not set, while Ray starts."""
    added = {name: value for name, value in LOCAL_ENVIRONMENT.items() if name not in os.environ}
    os.environ.update(added)
    from ray._private import ray_constants

    # Ray reads the second variable when it is imported, and another library such as vLLM may have imported it before.
    before = getattr(ray_constants, "ENABLE_RAY_CLUSTER", True)
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before
        for name in added:
            del os.environ[name]
