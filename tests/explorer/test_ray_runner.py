"""Ray runners: the same results as local ones, and nothing lost when workers die, hang, or are not answered for."""

import asyncio
import importlib.util
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import torch
from support.compose import composed
from support.errors import refuses
from support.fake_model import FakeModel, Scripted, ScriptedRepeatable, an_experience, hang, scripted, succeed
from support.runs import environment

from trinity_lightning.common.experience import EID, Experience
from trinity_lightning.common.experience.fields import PLACES
from trinity_lightning.common.inference import Completion
from trinity_lightning.common.pictures.picture import Picture
from trinity_lightning.common.tidied import TidiedGroup
from trinity_lightning.config.explorer import ExplorerConfig
from trinity_lightning.config.run import validate
from trinity_lightning.errors import PromptTooLongError, RolloutError
from trinity_lightning.explorer import Scheduler, Status
from trinity_lightning.explorer import ray as ray_runner_module
from trinity_lightning.explorer.groups import GroupBuffer, GroupRollouts, StepOfGroups
from trinity_lightning.explorer.models.transformers_engine import TransformersEngine
from trinity_lightning.explorer.models.vllm_server import VLLMServerEngine
from trinity_lightning.explorer.ray import RayRunner
from trinity_lightning.explorer.rewards import resolve_rewards
from trinity_lightning.explorer.staleness import StalenessController
from trinity_lightning.explorer.task_source import TaskSource
from trinity_lightning.explorer.tasks import Task
from trinity_lightning.explorer.tasks.taskset import Taskset
from trinity_lightning.explorer.workflows import WORKFLOWS, Workflow

Results = tuple[list[Status], list[Experience]]
SETTINGS: dict[str, Any] = {"runner_per_model": 2, "max_retry_times": 1, "max_timeout": 60.0, "seed": 3}


class Waiting(FakeModel):
    """Answers at once, unless it is asked to wait."""

    async def generate(self, prompt: Sequence[int] | str, n: int = 1, **sampling: Any) -> list[Completion]:
        self.latency = 100.0 if prompt == "wait" else 0.0
        return await super().generate(prompt, n, **sampling)


class Cluster:
    """A scheduler with two Ray runners, in an event loop of its own that lasts for all tests of this module."""

    def __init__(self) -> None:
        self.loop = asyncio.Runner()
        self.model = Waiting()
        self.scheduler = Scheduler(ExplorerConfig(runner="ray", **SETTINGS), [self.model])
        self._batch = 0

    def wait(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run(coroutine)

    def results(self, tasks: list[Task], seconds: float = 60) -> Results:
        async def body() -> Results:
            self._batch += 1
            self.scheduler.schedule(tasks, self._batch)
            return await self.scheduler.get_results(self._batch, timeout=seconds)

        return self.wait(body())

    def assert_all_runners_work(self) -> None:
        """Both are free, and take tasks."""
        assert self.scheduler.idle == 2
        statuses, experiences = self.results([scripted(succeed)] * 4)
        assert [status.ok for status in statuses] == [True] * 4
        assert len(experiences) == 4


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Its end is a test of its own: no process that the scheduler started outlives `stop`."""
    before = set(psutil.Process().children(recursive=True))
    cluster = Cluster()
    cluster.wait(cluster.scheduler.start())
    yield cluster
    cluster.wait(cluster.scheduler.stop())
    cluster.loop.close()
    assert not ray.is_initialized()
    assert set(psutil.Process().children(recursive=True)) <= before


def test_only_this_machine_reaches_a_cluster_of_its_own(cluster: Cluster) -> None:
    listening = [
        connection.laddr.ip
        for process in psutil.Process().children(recursive=True)
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert listening
    assert {address.removeprefix("::ffff:") for address in listening} == {"127.0.0.1"}


async def ask(flow: Any) -> list[Experience]:
    """One experience a run, of what the model answers."""
    runs = range(flow.run_id_base, flow.run_id_base + flow.repeat_times)
    completions = await flow.model.generate([1, 2], n=len(runs), temperature=0.5)
    return [
        Experience(
            eid=EID(run=run),
            tokens=[*completion.prompt_token_ids, *completion.token_ids],
            prompt_length=2,
            reward=float(completion.text) % 7,
            metrics={"reward/x": float(run)},
        )
        for run, completion in zip(runs, completions, strict=True)
    ]


def comparable(results: Results) -> list[Any]:
    """Everything that does not depend on the clock or on chance."""
    statuses, experiences = results
    of_statuses = [(s.ok, s.message, s.num_runs, s.metric.get("reward/x"), len(s.eval_experiences)) for s in statuses]
    of_experiences = [
        (e.eid.batch, e.eid.task, e.eid.run, e.tokens.tolist(), e.reward, e.metrics, e.info, e.prompt_length)
        for e in [*experiences, *(e for s in statuses for e in s.eval_experiences)]
    ]
    return [of_statuses, of_experiences]


async def fail(flow: Any) -> list[Experience]:
    raise PromptTooLongError("600 tokens")


def test_results_are_those_of_local_runners(cluster: Cluster) -> None:
    tasks = [
        scripted(ask, repeat_times=4),
        scripted(ask, ScriptedRepeatable, repeat_times=3, raw_task={"task_index": 9}),
        scripted(ask, ScriptedRepeatable, repeat_times=2, is_eval=True),
        scripted(fail, repeat_times=2),
    ]
    cluster.wait(cluster.model.sync_weights((), 5))

    async def local() -> Results:
        scheduler = Scheduler(ExplorerConfig(**SETTINGS), [cluster.model])
        await scheduler.start()
        scheduler.schedule(tasks, 1)
        return await scheduler.get_results(1)

    cluster._batch = 0  # seeds follow from the batch
    there, here = comparable(cluster.results(tasks)), comparable(asyncio.run(local()))
    assert there == here
    assert [info["model_version"] for *_, info, _ in there[1]] == [5] * 9
    assert there[0][3][:2] == (False, "2 of 2 runs failed: 2 x PromptTooLongError: prompt_truncated: 600 tokens")


async def see(flow: Any) -> list[Experience]:
    """One experience a run, with the same picture."""
    runs = range(flow.run_id_base, flow.run_id_base + flow.repeat_times)
    inputs = {"pixels": torch.arange(6.0), PLACES: torch.tensor([0])}
    return [Experience(eid=EID(run=run), tokens=[9, 1], multi_modal_inputs=inputs) for run in runs]


def test_pictures_come_back_and_are_shared(cluster: Cluster) -> None:
    _, experiences = cluster.results([scripted(see, ScriptedRepeatable, repeat_times=4)])
    inputs = [experience.multi_modal_inputs for experience in experiences]
    assert len(inputs) == 4
    assert all(of_one is inputs[0] for of_one in inputs)
    assert inputs[0] is not None
    assert {name: tensor.tolist() for name, tensor in inputs[0].items()} == {"pixels": [*range(6)], PLACES: [0]}


def dying(folder: Path, times: int) -> Callable[[Any], Coroutine[Any, Any, list[Experience]]]:
    """A body that kills its worker as many times."""

    def die_or_not() -> None:
        deaths = len(list(folder.iterdir()))
        if deaths < times:
            (folder / f"death {deaths}").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    async def body(flow: Any) -> list[Experience]:
        die_or_not()
        return [an_experience()]

    return body


def test_groups_go_on_across_steps(cluster: Cluster) -> None:
    config = ExplorerConfig(runner="ray", batch_size=2, repeat_times=2, max_staleness=1, **SETTINGS)
    tasks = Taskset([{"prompt": f"{i}?"} for i in range(6)], order="sequential", epochs=1)
    controller = StalenessController(2, max_staleness=1, run_ahead=1, rollouts=2)
    run_group = cluster.scheduler.run_group
    groups = GroupRollouts(config, TaskSource(tasks, "simple", "contains_digits"), run_group, controller, overlaps=True)
    steps: list[StepOfGroups | None] = []

    async def tidy(experiences: list[Experience], batch: int) -> TidiedGroup:
        return TidiedGroup(experiences)

    async def fill(groups: Sequence[TidiedGroup], filtered: Sequence[TidiedGroup], step: int) -> dict[str, float]:
        return {}

    async def body() -> None:
        for step in range(1, 5):
            groups.synced()
            steps.append(await groups.next_step(step))

    groups.buffer = GroupBuffer(tidy, fill)
    cluster.wait(body())
    assert steps.pop() is None
    trained = [e for step in steps if step is not None for e in step.experiences]
    ids = {(e.eid.batch, e.eid.task, e.eid.run): e.info["task_index"]["index"] for e in trained}
    assert len(trained) == 12
    assert ids == {(i // 2 + 1, i % 2, run): i for i in range(6) for run in range(2)}
    assert [e.info["trained_step"] for e in trained] == [1] * 4 + [2] * 4 + [3] * 4
    cluster.assert_all_runners_work()


def test_a_task_whose_worker_is_killed_is_tried_again_on_another(cluster: Cluster, tmp_path: Path) -> None:
    statuses, experiences = cluster.results([scripted(dying(tmp_path, 1)), scripted(succeed)])
    assert [status.ok for status in statuses] == [True, True]
    assert len(experiences) == 2
    cluster.assert_all_runners_work()


def test_a_task_that_kills_its_workers_for_good_fails(cluster: Cluster, tmp_path: Path) -> None:
    (status,), experiences = cluster.results([scripted(dying(tmp_path, 9))])
    assert len(list(tmp_path.iterdir())) == 2  # attempts
    assert (status.ok, experiences) == (False, [])
    assert status.message is not None
    assert status.message.startswith("1 of 1 runs failed: WorkerDiedError: the worker (pid ")
    assert "ActorDiedError" in status.message
    cluster.assert_all_runners_work()


def test_a_task_that_hangs_is_timed_out_and_its_runner_is_free(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(cluster.scheduler.config, "max_timeout", 1.0)
        (status,), _ = cluster.results([scripted(hang)])
    assert str(status.message).startswith("1 of 1 runs failed: TimeoutError: not done within 1 s: workflow 'Scripted' ")
    cluster.assert_all_runners_work()


def test_a_worker_that_does_not_answer_is_replaced(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    async def block(flow: Any) -> list[Experience]:
        time.sleep(100)  # noqa: ASYNC251 - what a workflow must not do
        return []

    monkeypatch.setattr(ray_runner_module, "ANSWER_SECONDS", 0.2)
    runner = cluster.scheduler.runners[0].runner
    attempt = cluster.wait(runner.attempt(scripted(block, batch_id=1, task_id=0), [0, 1], 0.2))
    assert [str(error) for error in attempt.errors.values()] == [
        "not done within 0.2 s, nor did its worker answer: it was replaced"
    ] * 2
    cluster.assert_all_runners_work()


def test_cancelling_reaches_the_model(cluster: Cluster, tmp_path: Path) -> None:
    async def body(flow: Any) -> list[Experience]:
        (tmp_path / "begun").touch()
        try:
            await flow.model.generate("wait")
        except asyncio.CancelledError:
            (tmp_path / "aborted").write_text(str(flow.model._model.aborted))
            raise
        return []

    async def cancelled() -> Results:
        cluster.scheduler.schedule([scripted(body)], batch_id=10**6)
        while not (tmp_path / "begun").exists():  # noqa: ASYNC110 - another process makes it
            await asyncio.sleep(0.01)
        return await cluster.scheduler.get_results(10**6, timeout=0.01)

    assert cluster.wait(cancelled()) == ([], [])
    assert (tmp_path / "aborted").read_text() == "1"
    cluster.assert_all_runners_work()


def test_what_only_this_program_knows_is_sent_along(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(Workflow):
        async def run(self) -> list[Experience]:
            [reward] = resolve_rewards(self.task.reward_fn)
            return [an_experience(reward=reward.function("four", self.task))]

    monkeypatch.setitem(WORKFLOWS._items, "only_here", Own)
    (status,), (experience,) = cluster.results([Task("only_here", reward_fn=lambda response, task: len(response))])
    assert (status.ok, experience.reward) == (True, 4.0)


class OddError(Exception):
    """Cannot be unpickled: it would be made of one argument."""

    def __init__(self, one: int, other: int) -> None:
        super().__init__(f"{one} and {other}")


def test_what_cannot_be_sent_is_told(cluster: Cluster, tmp_path: Path) -> None:
    async def odd(flow: Any) -> list[Experience]:
        raise OddError(1, 2)

    async def plain(flow: Any) -> list[Experience]:
        raise KeyError("x")

    async def unserializable(flow: Any) -> list[Experience]:
        return [an_experience(info={"lock": threading.Lock()})]

    tasks = [scripted(odd), scripted(plain), scripted(unserializable), Task("simpel")]
    tasks.append(Task(Scripted, workflow_args={"lock": threading.Lock()}))
    tasks.append(Task(Scripted, {"images": [Picture(tmp_path / "lost.png")]}))
    messages = [str(status.message) for status in cluster.results(tasks)[0]]
    expected = [
        "RolloutError: OddError: 1 and 2",
        "KeyError: 'x'",
        "ExperienceError: ",
        "ConfigError: unknown workflow 'simpel'. Did you mean 'simple'",
        "cannot be sent to Ray runners: TypeError: cannot pickle '_thread.lock' object",
        f"ConfigError: picture '{tmp_path}/lost.png': there is no such file",
    ]
    assert all(part in message for part, message in zip(expected, messages, strict=True)), messages
    assert "cannot be sent" not in messages[-1]


def test_what_workflows_log_reaches_the_log_of_the_run(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    async def body(flow: Any) -> list[Experience]:
        logging.getLogger("my_workflow").warning("the tool is %s", "slow")
        return [an_experience()]

    cluster.results([scripted(body)])
    assert [(r.name, r.levelno) for r in caplog.records if "the tool is slow" in r.message] == [
        ("my_workflow", logging.WARNING)
    ]


JOIN = """
import asyncio, json, os, signal, sys
import ray
from support.fake_model import FakeModel, scripted, succeed
from trinity_lightning.config.run import ExplorerConfig
from trinity_lightning.explorer import Scheduler
from trinity_lightning.explorer.interruption import keep_sigterm

async def main(address):
    done = []
    signal.signal(signal.SIGTERM, lambda *_: done.append("caught"))
    scheduler = Scheduler(ExplorerConfig(runner="ray", ray_address=address, runner_per_model=1), [FakeModel()])
    for batch in (1, 2):
        await scheduler.start()
        scheduler.schedule([scripted(succeed)], batch)
        statuses, _ = await scheduler.get_results(batch)
        done += [status.ok for status in statuses]
        keep_sigterm()
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.1)
        await scheduler.stop()
        done.append(ray.is_initialized())
    print(json.dumps(done))

asyncio.run(main(sys.argv[1]))
"""


def test_a_cluster_is_joined_twice_and_left_running_and_sigterm_stays_with_the_program(cluster: Cluster) -> None:
    address = ray.get_runtime_context().gcs_address
    done = subprocess.run(
        [sys.executable, "-c", JOIN, address],
        # Ray would look for the cluster at the machine's address, and this one listens on the loopback interface only.
        env=environment() | {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == [True, "caught", False] * 2
    cluster.assert_all_runners_work()


# -- at the door ------------------------------------------------------------------------------------------------------


def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "ray" else find_spec(name, *a))


def test_the_scheduler_refuses_what_cannot_work(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ExplorerConfig(runner="ray")
    engine = TransformersEngine("tiny")
    for rollout_model, auxiliary_models in (([engine], []), ([FakeModel()], [[engine]])):
        with refuses("explorer.runner") as refused:
            Scheduler(config, rollout_model, auxiliary_models)
        assert "TransformersEngine" in str(refused.value)
    with refuses("explorer.ray_address"):
        Scheduler(ExplorerConfig(runner="ray", ray_address="ray://here:1"), [FakeModel()])
    without_ray(monkeypatch)
    with refuses("explorer.runner") as refused:
        Scheduler(config, [FakeModel()])
    assert "pip install 'trinity-lightning[ray]'" in str(refused.value)


def test_a_run_is_refused_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    config = composed("+recipe=grpo", "model=tiny", "engine=transformers", "explorer.runner=ray")
    with refuses("explorer.runner"):
        validate(config)
    without_ray(monkeypatch)
    with refuses("explorer.runner") as refused:
        validate(composed("+recipe=one_step_off_policy", "model=tiny", "explorer.runner=ray"))
    assert "pip install 'trinity-lightning[ray]'" in str(refused.value)


def test_a_runner_needs_ray_to_run_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    runner = RayRunner(ExplorerConfig(), FakeModel())
    attempt = asyncio.run(runner.attempt(scripted(succeed), [0], 1.0))
    assert isinstance(attempt.errors[0], RolloutError)
    assert "await Scheduler.start() first" in str(attempt.errors[0])


class Dead(VLLMServerEngine):
    async def load(self) -> None:
        raise RolloutError("the vLLM server died 4 times in 600 s.")


def test_servers_that_died_are_started_again_here_where_they_were_started(cluster: Cluster) -> None:
    dead, alive = Dead("tiny", url="http://127.0.0.1:9"), FakeModel()
    for models in ([dead, []], [alive, [dead]]):
        attempt = cluster.wait(RayRunner(ExplorerConfig(), *models).attempt(scripted(succeed), [0], 1.0))
        assert str(attempt.errors[0]) == "the vLLM server died 4 times in 600 s."


def test_an_engine_that_cannot_be_sent_is_refused_at_start(cluster: Cluster) -> None:
    model = FakeModel()
    model.lock = threading.Lock()  # type: ignore[attr-defined]
    scheduler = Scheduler(ExplorerConfig(runner="ray", runner_per_model=1), [model])
    with refuses("explorer.runner"):
        cluster.wait(scheduler.start())
    cluster.assert_all_runners_work()


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nowhere", "127.0.0.1:port"])
def test_a_cluster_that_is_not_there_is_named_at_once(address: str) -> None:
    scheduler = Scheduler(ExplorerConfig(runner="ray", ray_address=address), [FakeModel()])
    with refuses("explorer.ray_address"):
        asyncio.run(scheduler.start())
