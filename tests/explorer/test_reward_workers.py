import asyncio
import functools
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from pebble import ProcessPool
from support import reward_functions
from support.errors import refuses
from support.fake_model import FakeModel
from support.reward_functions import (
    Scale,
    WaitHere,
    dies,
    hangs,
    leaves,
    length,
    parts,
    process_id,
    raises,
    returns_text,
    wait_here,
)
from support.runs import ROOT, wait_for

from trinity_lightning.common.pictures.picture import Picture
from trinity_lightning.config.explorer import ExplorerConfig, SamplingConfig
from trinity_lightning.errors import ConfigError, RolloutError
from trinity_lightning.explorer import Explorer, Scheduler
from trinity_lightning.explorer.models.openai_api import OpenAIModel
from trinity_lightning.explorer.rewards import SCORER, Reward, resolve_rewards, score
from trinity_lightning.explorer.rewards.workers import RewardWorkers, check_importable
from trinity_lightning.explorer.task_source import TaskSource
from trinity_lightning.explorer.tasks import Task, Taskset

a_task = Task("simple", {"answer": "12", "more": 1})
HERE = "support.reward_functions"
TWICE = f"{HERE}.twice"


@asynccontextmanager
async def running(seconds: float = 60.0) -> AsyncIterator[RewardWorkers]:
    workers = RewardWorkers(1, seconds)
    await workers.start()
    token = SCORER.set(workers)
    try:
        yield workers
    finally:
        SCORER.reset(token)
        await workers.stop()


@pytest.fixture(scope="module")
def with_workers() -> Iterator[Callable[[Callable[[], Awaitable[Any]]], Any]]:
    """Runs a coroutine function with one worker."""
    with asyncio.Runner() as runner:
        context = running()
        workers = runner.run(context.__aenter__())

        async def scored(function: Callable[[], Awaitable[Any]]) -> Any:
            SCORER.set(workers)
            return await function()

        yield lambda function: runner.run(scored(function))
        runner.run(context.__aexit__(None, None, None))


@pytest.mark.parametrize(
    "reward_fn",
    [
        f"{HERE}.length",
        length,
        TWICE,
        "format",
        "math",
        {"accuracy": 1.0, f"{HERE}.parts": 0.5, f"{HERE}.length": -0.25},
        {"name": f"{HERE}.Scale", "args": {"factor": 3.0}},
        {"name": f"{HERE}.scaled", "args": {"factor": 3.0}},
    ],
)
def test_workers_say_what_this_process_would(with_workers: Any, reward_fn: Any) -> None:
    rewards = resolve_rewards(reward_fn)
    here = asyncio.run(score(rewards, "12", a_task))
    assert with_workers(lambda: score(rewards, "12", a_task)) == here
    assert here[0] != 0 or reward_fn == "format"


@pytest.mark.parametrize("reward_fn", ["math", "accuracy"])
def test_workers_compare_by_math_verify(with_workers: Any, reward_fn: str) -> None:
    task = Task("simple", {"answer": "(x+1)^2"})
    rewards = resolve_rewards(reward_fn)
    for response, value in ((r"\boxed{x^2 + 2x + 1}", 1.0), (r"\boxed{x^2 + 2x - 1}", 0.0)):
        assert with_workers(lambda response=response: score(rewards, response, task))[0] == value


def test_rewards_are_called_elsewhere_unless_they_need_this_process(with_workers: Any) -> None:
    elsewhere, _ = with_workers(lambda: score(resolve_rewards(process_id), "x", a_task))
    here, _ = with_workers(lambda: score([Reward("judge", process_id)], "x", a_task))
    assert here == os.getpid() != elsewhere


def test_async_functions_wait_beside_each_other_in_this_process(with_workers: Any) -> None:
    async def together() -> Any:
        rewards = resolve_rewards([wait_here, WaitHere()])
        return await asyncio.gather(*(score(rewards, "x", a_task) for _ in range(20)))

    reward_functions.most_waiting = 0
    scored = with_workers(together)
    assert reward_functions.most_waiting == 20  # of each the first
    assert {total for total, _ in scored} == {2 * os.getpid()}
    assert with_workers(lambda: score(resolve_rewards(f"{HERE}.wait_here"), "x", a_task))[0] == os.getpid()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (raises, "reward function 'raises' raised ZeroDivisionError: with x"),
        (leaves, "reward function 'leaves' raised SystemExit: enough"),
        (returns_text, r"reward function 'returns_text' returned 'one', expected a finite number \(in float32\)"),
    ],
)
def test_what_fails_in_a_worker_fails_as_here(with_workers: Any, function: Any, message: str) -> None:
    messages = []
    for run in (with_workers, lambda coroutine: asyncio.run(coroutine())):
        with pytest.raises(RolloutError) as caught:
            run(lambda: score(resolve_rewards(function), "x", a_task))
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    assert re.fullmatch(rf"{message} \(.*reward_functions\.py:\d+ in {function.__name__}\)", messages[0])


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (hangs, r"reward function 'hangs' took longer than 1 s \(explorer.reward_timeout\); its process was ended"),
        (dies, "reward function 'dies' ended its process with exit code 3"),
    ],
)
def test_a_worker_that_hangs_or_dies_fails_the_rollout_and_is_replaced(
    with_workers: Any, function: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def both() -> Any:
        with monkeypatch.context() as patch:
            if function is hangs:  # alone: another process may take long to start
                patch.setattr(SCORER.get(), "_timeout", 1.0)
            with pytest.raises(RolloutError, match=message):
                await score(resolve_rewards(function), "x", a_task)
        return await score(resolve_rewards(length), "x", a_task)

    assert with_workers(both) == (2.0, {"reward/length": 2.0})


@pytest.mark.slow
def test_an_idle_worker_that_somebody_ended_is_replaced() -> None:
    async def run() -> None:
        async with running():
            first, _ = await score(resolve_rewards(process_id), "x", a_task)
            assert first is not None
            psutil.Process(int(first)).kill()
            async with asyncio.timeout(60):
                while True:
                    try:
                        second, _ = await score(resolve_rewards(process_id), "x", a_task)
                    except RolloutError:  # the pool had not seen it yet
                        await asyncio.sleep(0.1)
                    else:
                        break
            assert second != first

    asyncio.run(run())


@pytest.mark.slow
def test_a_pool_that_broke_is_joined_beside_the_loop_and_named_in_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    joined_by = []
    join = ProcessPool.join

    def noted(pool: ProcessPool, *arguments: Any) -> None:
        joined_by.append(threading.current_thread())
        join(pool, *arguments)

    def broken(*arguments: Any, **keywords: Any) -> None:
        raise RuntimeError("The Pool is not active")  # as pebble does

    monkeypatch.setattr(ProcessPool, "join", noted)

    async def run() -> None:
        async with running() as workers:
            assert workers._pool is not None
            workers._pool.stop()
            calls = [score(resolve_rewards(length), "x", a_task) for _ in range(2)]
            assert await asyncio.gather(*calls) == [(2.0, {"reward/length": 2.0})] * 2
            assert len(joined_by) == 1
            assert joined_by[0] is not threading.main_thread()
            monkeypatch.setattr(ProcessPool, "schedule", broken)
            with pytest.raises(RolloutError, match="reward function 'length' was not called: The Pool is not active"):
                await score(resolve_rewards(length), "x", a_task)

    asyncio.run(run())


@pytest.mark.slow
def test_a_rollout_that_is_cancelled_ends_its_reward() -> None:
    async def run() -> None:
        async with running():
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(score(resolve_rewards(hangs), "x", a_task), 1.0)
            value, _ = await asyncio.wait_for(score(resolve_rewards(length), "x", a_task), 60.0)
            assert value == 2.0

    asyncio.run(run())


def local() -> Any:
    return lambda response, task: 1.0


@pytest.mark.parametrize("function", [local(), Scale(3.0), functools.partial(length), random.Random(0).uniform])
def test_what_cannot_be_imported_is_refused(function: Any) -> None:
    with refuses("reward"):
        check_importable(resolve_rewards(function)[0])
    assert check_importable(resolve_rewards(TWICE)[0]) == TWICE


def test_an_explorer_refuses_a_function_that_workers_cannot_import() -> None:
    def explorer(reward_fn: Any, workers: int) -> Explorer:
        source = TaskSource(Taskset.addition(), "simple", reward_fn, SamplingConfig())
        return Explorer(ExplorerConfig(reward_workers=workers), [FakeModel()], source)

    explorer(local(), 0)
    explorer(length, 1)
    with refuses("reward"):
        explorer(local(), 1)


def test_a_task_that_cannot_be_sent_is_refused(with_workers: Any) -> None:
    task = Task("simple", {"answer": local()})
    with refuses("explorer.reward_workers"):
        with_workers(lambda: score(resolve_rewards(length), "x", task))


@pytest.mark.slow
def test_the_scheduler_has_workers_for_the_rewards_of_its_rollouts() -> None:
    async def run() -> tuple[list[Any], list[Any]]:
        scheduler = Scheduler(ExplorerConfig(reward_workers=1, max_retry_times=0), [FakeModel()])
        await scheduler.start()
        scheduler.schedule([Task("simple", {"prompt": "x"}, 2, reward_fn=[process_id, parts])], batch_id=1)
        results = await scheduler.get_results(1)
        await scheduler.stop()
        return results

    (status,), experiences = asyncio.run(run())
    assert status.ok, status.message
    pids = {experience.metrics["reward/process_id"] for experience in experiences}
    assert len(pids) == 1
    assert os.getpid() not in pids
    assert not psutil.pid_exists(int(pids.pop()))


def test_workers_that_do_not_start_are_known_before_an_engine_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []

    async def load(self: OpenAIModel) -> None:
        begun.append("engine")

    async def start(self: RewardWorkers) -> None:
        begun.append("workers")
        raise ConfigError("they do not start")

    monkeypatch.setattr(OpenAIModel, "load", load)
    monkeypatch.setattr(RewardWorkers, "start", start)
    source = TaskSource(Taskset.addition(), "simple", length, SamplingConfig())
    judge = OpenAIModel("http://127.0.0.1:1/v1", "judge")
    explorer = Explorer(ExplorerConfig(reward_workers=1), [FakeModel()], source, auxiliary_models=[[judge]])
    with pytest.raises(ConfigError, match="they do not start"):
        asyncio.run(explorer.prepare())
    assert begun == ["workers"]


def test_a_ray_cluster_that_is_not_there_is_known_before_an_engine_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    async def load(self: OpenAIModel) -> None:
        raise AssertionError("an engine was loaded")

    monkeypatch.setattr(OpenAIModel, "load", load)
    source = TaskSource(Taskset.addition(), "simple", length, SamplingConfig())
    judge = OpenAIModel("http://127.0.0.1:1/v1", "judge")
    config = ExplorerConfig(runner="ray", ray_address="127.0.0.1:1")
    explorer = Explorer(config, [FakeModel()], source, auxiliary_models=[[judge]])
    with refuses("explorer.ray_address"):
        asyncio.run(explorer.prepare())


def test_workers_are_for_local_runners() -> None:
    with refuses("explorer.reward_workers"):
        ExplorerConfig(reward_workers=2, runner="ray")


def run_script(path: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(path)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)


SCRIPT = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores it

import asyncio, os, sys, time
from trinity_lightning.explorer.rewards import resolve_rewards, score
from trinity_lightning.explorer.rewards import SCORER
from trinity_lightning.explorer.rewards.workers import RewardWorkers
from trinity_lightning.explorer.task_source import TaskSource
from trinity_lightning.explorer.tasks import Task, Taskset

def hangs(response, task):
    print(os.getpid(), flush=True)
    while True:
        pass

async def main():
    workers = RewardWorkers(1, 300.0)
    await workers.start()
    SCORER.set(workers)
    await score(resolve_rewards(hangs), "x", Task("simple"))

{guard}asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_workers_end_with_a_script_that_is_killed_or_interrupted(tmp_path: Any, number: int) -> None:
    (tmp_path / "script.py").write_text(SCRIPT.replace("{guard}", 'if __name__ == "__main__":\n    '))
    with subprocess.Popen(
        [sys.executable, str(tmp_path / "script.py")],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            worker = psutil.Process(int(process.stdout.readline()))
            # asyncio loses a signal that comes just before its main thread begins to wait (5% of tries, loaded)
            wait_for(lambda: psutil.Process(process.pid).status() == psutil.STATUS_SLEEPING, process)
            process.send_signal(number)
            process.communicate(timeout=30)
            end = time.monotonic() + 20
            while alive(worker):
                assert time.monotonic() < end, "a worker outlived the script"
                time.sleep(0.02)
        finally:
            process.kill()


def alive(process: psutil.Process) -> bool:
    """If it runs; nobody may be there to take note of the end of an orphan, which stays as a zombie."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


SLOW_TO_END = """
import atexit, multiprocessing.util, time
atexit.register(time.sleep, 0.5)  # something between pebble's own exit and that of multiprocessing

import asyncio, os, signal
from trinity_lightning.explorer.rewards import resolve_rewards
from trinity_lightning.explorer.rewards.workers import RewardWorkers
from trinity_lightning.explorer.tasks import Task

def ends_slowly(*_):
    time.sleep(1.0)
    os._exit(1)

def hangs(response, task):
    signal.signal(signal.SIGTERM, ends_slowly)
    time.sleep(100)

async def main():
    workers = RewardWorkers(1, 300.0)
    await workers.start()
    call = asyncio.create_task(workers.worth(resolve_rewards(hangs)[0], "x", Task("simple")))
    await asyncio.sleep(1.0)
    call.cancel()
    await asyncio.sleep(0.3)  # pebble is ending its process now, and starts another one after that

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.slow
def test_a_script_ends_while_a_worker_is_replaced(tmp_path: Any) -> None:
    (tmp_path / "script.py").write_text(SLOW_TO_END)
    done = run_script(tmp_path / "script.py")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_script_that_starts_a_run_when_it_is_imported_is_told_why(tmp_path: Any) -> None:
    (tmp_path / "script.py").write_text(SCRIPT.replace("{guard}", ""))
    done = run_script(tmp_path / "script.py")
    assert done.returncode != 0
    assert "what starts the run belongs under `if __name__ == '__main__':`" in done.stderr


def test_a_task_whose_picture_is_lost_fails_by_the_pictures_name(tmp_path: Path) -> None:
    task = Task("simple", {"images": [Picture(tmp_path / "lost.png")]})
    (reward,) = resolve_rewards(TWICE)
    with pytest.raises(ConfigError, match=r"^picture '.*lost\.png': there is no such file"):
        asyncio.run(RewardWorkers(1, 1.0).worth(reward, "12", task))
