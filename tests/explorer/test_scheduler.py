import asyncio
import contextlib
import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import numpy as np
import pytest
from support.fake_model import (
    FakeModel,
    LeapingLoop,
    Scripted,
    ScriptedRepeatable,
    an_experience,
    hang,
    scripted,
    succeed,
)
from support.places import without_places

from trinity_lightning.common.experience import Experience
from trinity_lightning.common.random_state import rollout_seed
from trinity_lightning.config.explorer import DynamicTimeoutConfig, ExplorerConfig, OverRolloutConfig
from trinity_lightning.errors import ConfigError, PromptTooLongError, RewardError
from trinity_lightning.explorer import RunnerWrapper, Scheduler, TaskWrapper, workflow_runner
from trinity_lightning.explorer.batches import enough_of
from trinity_lightning.explorer.rewards import resolve_rewards, score
from trinity_lightning.explorer.tasks.task import Task
from trinity_lightning.explorer.workflow_runner import Attempt, Outcomes, WorkflowRunner
from trinity_lightning.explorer.workflows import PartialFailure


def running(
    body: Callable[[Scheduler], Coroutine[Any, Any, Any]],
    models: int = 1,
    loop: Callable[[], asyncio.AbstractEventLoop] = LeapingLoop,
    **config: Any,
) -> Any:
    """Run `body` with a started scheduler (2 runners a model, no retries, attempts of at most 5 s)."""
    settings: dict[str, Any] = {"runner_per_model": 2, "max_retry_times": 0, "max_timeout": 5.0} | config

    async def main() -> Any:
        scheduler = Scheduler(ExplorerConfig(**settings), [FakeModel() for _ in range(models)])
        await scheduler.start()
        try:
            return await body(scheduler)
        finally:
            await scheduler.stop()

    with asyncio.Runner(loop_factory=loop) as workflow_runner:
        return workflow_runner.run(main())


def now() -> float:
    return asyncio.get_running_loop().time()


def slow(seconds: float, log: list[Any] | None = None) -> Callable[[Any], Any]:
    """A body that takes its time, and logs (batch, task) when it ends."""

    async def body(workflow: Any) -> list[Experience]:
        await asyncio.sleep(seconds)
        if log is not None:
            log.append((workflow.task.batch_id, workflow.task.task_id))
        return [an_experience()]

    return body


def tids(experiences: list[Experience]) -> list[tuple[int | str, int | str]]:
    return [(experience.eid.batch, experience.eid.task) for experience in experiences]


# -- scheduling -------------------------------------------------------------------------------------------------------


def test_schedule_returns_at_once_and_results_come_in_the_order_of_tasks() -> None:
    async def body(scheduler: Scheduler) -> None:
        log: list[Any] = []
        scheduler.schedule([scripted(slow(s, log)) for s in (0.03, 0.01, 0.02)], 4)
        assert scheduler.has_step(4)
        assert log == []
        statuses, experiences = await scheduler.get_results(4)
        assert [status.ok for status in statuses] == [True] * 3
        assert tids(experiences) == [(4, 0), (4, 1), (4, 2)]
        assert all(status.metric["task_run_time"] > 0 for status in statuses)
        assert not scheduler.has_step(4)

    running(body)


def test_scheduling_nothing_is_a_no_op() -> None:
    async def body(scheduler: Scheduler) -> None:
        scheduler.schedule([], 3)
        assert not scheduler.has_step(3)
        assert await scheduler.get_results(3) == ([], [])
        await scheduler.wait_all(timeout=0.01)

    running(body)


@pytest.mark.parametrize("batch_id", ["", "eval/7", "x", 1.0, None, True, (1,), "-1/x"])
def test_other_batch_ids_are_refused(batch_id: Any) -> None:
    async def body(scheduler: Scheduler) -> None:
        for call in (lambda: scheduler.schedule([scripted(succeed)], batch_id), lambda: scheduler.has_step(batch_id)):
            with pytest.raises(ValueError, match="batch_id"):
                call()
        with pytest.raises(ValueError, match="batch_id"):
            await scheduler.get_results(batch_id)

    running(body)


@pytest.mark.parametrize("batch_id", [0, 7, "7", "123/my_task", "5 odd"])
def test_batch_ids_reach_the_experiences(batch_id: int | str) -> None:
    async def body(scheduler: Scheduler) -> None:
        scheduler.schedule([scripted(succeed)], batch_id)
        _, experiences = await scheduler.get_results(batch_id)
        assert tids(experiences) == [(batch_id, 0)]

    running(body)


def test_lower_steps_first_then_train_before_eval_then_first_come() -> None:
    async def body(scheduler: Scheduler) -> None:
        log: list[Any] = []
        await scheduler.stop()
        for batch_id in ("2/b", "2/a", 2, "1/x", 10, 1):
            scheduler.schedule([scripted(slow(0.0, log)) for _ in range(2)], batch_id)
        await scheduler.start()
        await scheduler.wait_all()
        expected = [1, "1/x", 2, "2/b", "2/a", 10]
        assert log == [(batch, task) for batch in expected for task in range(2)]

    running(body, runner_per_model=1)


def test_a_more_urgent_batch_overtakes_what_waits() -> None:
    async def body(scheduler: Scheduler) -> None:
        log: list[Any] = []
        scheduler.schedule([scripted(slow(0.005, log)) for _ in range(3)], "1/eval")
        scheduler.schedule([scripted(slow(0.005, log))], 1)
        await scheduler.wait_all()
        assert log == [("1/eval", 0), (1, 0), ("1/eval", 1), ("1/eval", 2)]

    running(body, runner_per_model=1)


def test_a_batch_scheduled_again_continues_its_numbers_also_after_it_was_collected() -> None:
    async def body(scheduler: Scheduler) -> None:
        scheduler.schedule([scripted(succeed)] * 2, 1)
        scheduler.schedule([scripted(succeed)], 1)
        _, experiences = await scheduler.get_results(1)
        assert tids(experiences) == [(1, 0), (1, 1), (1, 2)]
        scheduler.schedule([scripted(succeed)] * 2, 1)
        assert tids((await scheduler.get_results(1))[1]) == [(1, 3), (1, 4)]

    running(body)


def test_a_batch_that_was_dropped_begins_its_numbers_again() -> None:
    async def body(scheduler: Scheduler) -> None:
        for _ in range(2):
            scheduler.schedule([scripted(succeed)] * 2, 1)
            assert tids((await scheduler.get_results(1))[1]) == [(1, 0), (1, 1)]
            await scheduler.drop(1)

    running(body)


def test_every_runner_runs_one_task_at_a_time() -> None:
    async def body(scheduler: Scheduler) -> None:
        busy, peak, per_model = 0, 0, {}

        async def work(workflow: Any) -> list[Experience]:
            nonlocal busy, peak
            busy += 1
            peak = max(peak, busy)
            key = id(workflow.model._model)
            per_model[key] = per_model.get(key, 0) + 1
            await asyncio.sleep(0.005)
            busy -= 1
            return [an_experience()]

        scheduler.schedule([scripted(work)] * 18, 1)
        await scheduler.get_results(1)
        assert peak == 6
        assert list(per_model.values()) == [6, 6, 6]

    running(body, models=3)


@pytest.mark.parametrize(
    ("settings", "runners"),
    [({}, 8), ({"runner_per_model": None}, 64), ({"runner_per_model": None, "batch_size": 100}, 100)],
)
def test_a_model_has_eight_runners_or_one_for_every_task(settings: dict[str, Any], runners: int) -> None:
    assert len(Scheduler(ExplorerConfig(**settings), [FakeModel(), FakeModel()]).runners) == 2 * runners


@pytest.mark.parametrize(
    ("settings", "runners"),
    [({}, 64 + 16), ({"max_repeat_times_per_runner": 3}, 64 + 48), ({"runner_per_model": 8}, 8)],
)
def test_groups_under_way_have_a_runner_for_each_chunk(settings: dict[str, Any], runners: int) -> None:
    config = {"runner_per_model": None, "batch_size": 8, "repeat_times": 8, "max_staleness": 1} | settings
    assert len(Scheduler(ExplorerConfig(**config), [FakeModel()]).runners) == runners


def test_runners_get_one_engine_of_each_auxiliary_model() -> None:
    a, b = [FakeModel(), FakeModel()], [FakeModel()]
    scheduler = Scheduler(ExplorerConfig(runner_per_model=4), [FakeModel()], [a, b])
    assert [workflow_runner.runner.auxiliary_models for workflow_runner in scheduler.runners] == [
        [a[0], b[0]], [a[1], b[0]], [a[0], b[0]], [a[1], b[0]]
    ]  # fmt: skip


@pytest.mark.parametrize("workflow", [Scripted, ScriptedRepeatable])
def test_a_task_is_split_into_chunks_and_merged_into_one_status(workflow: type) -> None:
    async def body(scheduler: Scheduler) -> None:
        chunks = []

        async def work(flow: Any) -> list[Experience]:
            chunks.append((flow.run_id_base, flow.repeat_times))
            runs = range(flow.run_id_base, flow.run_id_base + flow.repeat_times)
            await asyncio.sleep(0.001 * (5 - flow.run_id_base))
            return [an_experience(run, metrics={"reward/x": float(run)}) for run in runs]

        scheduler.schedule([scripted(work, workflow, repeat_times=5)] * 2, 1)
        statuses, experiences = await scheduler.get_results(1)
        assert len(statuses) == 2
        assert [e.eid.run for e in experiences] == [0, 1, 2, 3, 4] * 2
        assert tids(experiences) == [(1, 0)] * 5 + [(1, 1)] * 5
        if workflow is ScriptedRepeatable:
            assert sorted(chunks) == [(0, 2), (0, 2), (2, 2), (2, 2), (4, 1), (4, 1)]
            assert statuses[0].metric["reward/x"] == 2.0
        assert {"task_run_time", "time_per_task"} <= statuses[0].metric.keys()
        assert statuses[0].ok
        assert statuses[0].num_runs == 5

    running(body, max_repeat_times_per_runner=2)


@pytest.mark.parametrize("size", [None, 1, 2, 5])
@pytest.mark.parametrize("workflow", [Scripted, ScriptedRepeatable])
def test_chunks_ask_with_the_seeds_of_the_whole(size: int | None, workflow: type) -> None:
    async def body(scheduler: Scheduler) -> None:
        model = scheduler.runners[0].runner.model
        assert isinstance(model, FakeModel)

        async def ask(flow: Any) -> list[Experience]:
            await flow.model.generate([1], n=flow.repeat_times)
            return [an_experience(flow.run_id_base + i) for i in range(flow.repeat_times)]

        scheduler.schedule([scripted(ask, workflow, repeat_times=5)] * 2, 3)
        await scheduler.get_results(3)
        asked = sorted(call["seed"] + i for call in model.calls for i in range(call["n"]))
        assert asked == sorted(rollout_seed(0, 3, task, 0, run) for task in range(2) for run in range(5))

    running(body, max_repeat_times_per_runner=size)


def test_a_failed_chunk_fails_its_task_and_the_other_chunks_are_kept() -> None:
    async def body(scheduler: Scheduler) -> None:
        async def work(flow: Any) -> list[Experience]:
            if flow.run_id_base == 2:
                raise ValueError("no luck")
            return [an_experience(flow.run_id_base + i) for i in range(flow.repeat_times)]

        scheduler.schedule([scripted(work, ScriptedRepeatable, repeat_times=5)], 1)
        (status,), experiences = await scheduler.get_results(1)
        assert not status.ok
        assert without_places(status.message) == "2 of 5 runs failed: 2 x ValueError: no luck"
        assert [e.eid.run for e in experiences] == [0, 1, 4]

    running(body, max_repeat_times_per_runner=2)


# -- get_results ------------------------------------------------------------------------------------------------------


def test_min_num_returns_everything_that_is_ready_and_the_rest_goes_on() -> None:
    async def body(scheduler: Scheduler) -> None:
        gate = asyncio.Event()

        async def gated(workflow: Any) -> list[Experience]:
            await gate.wait()
            return [an_experience()]

        scheduler.schedule([*[scripted(succeed)] * 3, scripted(gated)], 1)
        await asyncio.sleep(0.05)
        statuses, _ = await scheduler.get_results(1, min_num=2)
        assert len(statuses) == 3
        assert scheduler.has_step(1)
        gate.set()
        statuses, experiences = await scheduler.get_results(1, min_num=9)  # never that many: all there are
        assert tids(experiences) == [(1, 3)]
        assert statuses[0].ok

    running(body, runner_per_model=4)


@pytest.mark.parametrize("clear", [True, False])
def test_fewer_than_min_num_are_returned_after_the_time_out(clear: bool) -> None:
    async def body(scheduler: Scheduler) -> None:
        scheduler.schedule([scripted(succeed), *[scripted(slow(0.2))] * 2], 1)
        statuses, _ = await scheduler.get_results(1, min_num=2, timeout=0.05, clear_timeout_tasks=clear)
        assert len(statuses) == 1
        assert scheduler.has_step(1) is not clear
        assert tids((await scheduler.get_results(1))[1]) == ([] if clear else [(1, 1), (1, 2)])

    running(body, runner_per_model=3)


@pytest.mark.parametrize(
    ("min_num", "ratio"), [(None, 0.0), (None, 0.25), (30, 0.0)], ids=["all", "over_rollout", "min_num"]
)
def test_a_batch_whose_rewards_all_fail_is_given_up(min_num: int | None, ratio: float) -> None:
    async def without_reward(workflow: Any) -> list[Experience]:
        raise RewardError("no reward today")

    async def body(scheduler: Scheduler) -> None:
        start = now()
        scheduler.schedule([scripted(without_reward)] * 16 + [scripted(hang)] * 24, 1)
        statuses, experiences = await scheduler.get_results(1, min_num)
        assert (len(statuses), experiences) == (16, [])
        assert now() - start < 1  # of the 5 s after which the others would fail
        assert not scheduler.has_step(1)

    running(body, over_rollout=OverRolloutConfig(ratio=ratio))


async def raising(workflow: Any) -> list[Experience]:
    async def of_the_user(response: str, task: Task) -> float:
        return task.raw_task["nonsense"]

    await score(resolve_rewards(of_the_user), "7", workflow.task)
    raise AssertionError("not reached")


def test_a_reward_that_raises_everywhere_is_told_once_with_its_traceback_and_not_tried_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    attempts = 0

    async def counted(workflow: Any) -> list[Experience]:
        nonlocal attempts
        attempts += 1
        return await raising(workflow)

    async def body(scheduler: Scheduler) -> None:
        scheduler.schedule([scripted(counted)] * 40, 1)
        statuses, _ = await scheduler.get_results(1)
        [message] = {status.message for status in statuses}
        assert str(message).startswith(f"1 of 1 runs failed: RewardError: {why} (")
        assert re.search(r"test_scheduler\.py:\d+ in of_the_user\)$", str(message))

    why = "reward function 'of_the_user' raised KeyError: 'nonsense'"
    with caplog.at_level(logging.INFO):
        running(body, max_retry_times=2)
    assert attempts < 16 * 3
    assert caplog.text.count(f"attempt 1: RewardError: {why}") == 1
    assert caplog.text.count('return task.raw_task["nonsense"]') == 1
    assert "rewards/__init__.py" not in caplog.text
    assert caplog.text.count("1 of 1 runs failed") == 1


class ServerError(Exception):
    """An error of a server's client, of no kind that Python knows."""


def test_what_the_log_has_had_is_remembered_for_a_while_only() -> None:
    outcomes = Outcomes()
    assert [outcomes.is_new(text) for text in ("a", "a", "b")] == [True, False, True]
    for number in range(workflow_runner.REMEMBERED):
        outcomes.is_new(f"took {number} s")
    assert len(outcomes.logged) < workflow_runner.REMEMBERED


@pytest.mark.parametrize(("tasks", "error"), [(1, KeyError), (8, ConnectionRefusedError), (8, ServerError)])
def test_a_reward_that_raises_is_tried_again_while_it_may_pass(tasks: int, error: type[Exception]) -> None:
    """The error of a single task may pass, and so may the error of a server that does not answer."""
    attempts: Counter[int] = Counter()

    async def body(workflow: Any) -> list[Experience]:
        async def asks(response: str, task: Task) -> float:
            attempts[int(task.task_id)] += 1
            raise error("no server")

        await score(resolve_rewards(asks), "7", workflow.task)
        raise AssertionError("not reached")

    async def scheduled(scheduler: Scheduler) -> None:
        scheduler.schedule([scripted(body, repeat_times=16)] * tasks, 1)
        await scheduler.get_results(1)

    running(scheduled, max_retry_times=2, runner_per_model=8)
    assert attempts == dict.fromkeys(range(tasks), 16 * 3)


def test_min_num_in_time_gives_nothing_up() -> None:
    async def body(scheduler: Scheduler) -> None:
        scheduler.schedule([scripted(slow(0.04)), scripted(slow(0.2))], 1)
        began = now()
        assert len((await scheduler.get_results(1, min_num=1, timeout=0.05))[0]) == 1
        assert now() - began == pytest.approx(0.04)
        assert tids((await scheduler.get_results(1))[1]) == [(1, 1)]

    running(body)


def test_an_unknown_batch_returns_at_once() -> None:
    async def body(scheduler: Scheduler) -> None:
        began = now()
        assert await scheduler.get_results(9) == ([], [])
        assert await scheduler.get_results("9/x", min_num=3) == ([], [])
        scheduler.schedule([scripted(succeed)], 1)
        await scheduler.get_results(1)
        assert await scheduler.get_results(1, min_num=1) == ([], [])  # collected: unknown again
        assert now() == began

    running(body)


def test_a_time_out_returns_what_is_there_cancels_the_rest_and_frees_its_runners() -> None:
    async def body(scheduler: Scheduler) -> None:
        cancelled = []

        async def work(workflow: Any) -> list[Experience]:
            try:
                return await hang(workflow)
            except asyncio.CancelledError:
                cancelled.append(workflow.task.task_id)
                raise

        scheduler.schedule([scripted(succeed), scripted(work), scripted(work), scripted(work)], 1)
        statuses, experiences = await scheduler.get_results(1, timeout=0.05)
        assert [status.ok for status in statuses] == [True]
        assert tids(experiences) == [(1, 0)]
        assert sorted(cancelled) == [1, 2]  # 3 never began
        assert not scheduler.has_step(1)
        scheduler.schedule([scripted(slow(0.01))] * 4, 2)
        statuses, _ = await scheduler.get_results(2, timeout=1)
        assert len(statuses) == 4

    running(body)


def test_a_time_out_without_clearing_lets_the_rest_be_collected_later() -> None:
    async def body(scheduler: Scheduler) -> None:
        scheduler.schedule([scripted(succeed), scripted(slow(0.2))], 1)
        statuses, _ = await scheduler.get_results(1, timeout=0.05, clear_timeout_tasks=False)
        assert len(statuses) == 1
        assert scheduler.has_step(1)
        assert tids((await scheduler.get_results(1))[1]) == [(1, 1)]

    running(body)


def test_the_default_time_out_is_that_of_all_attempts() -> None:
    async def body(scheduler: Scheduler) -> None:
        scheduler.schedule([scripted(hang)] * 3, 1)  # one runner: the third is not reached in time
        began = now()
        statuses, _ = await scheduler.get_results(1)
        assert now() - began == pytest.approx(0.08)
        assert [status.ok for status in statuses] in ([False], [])

    running(body, runner_per_model=1, max_timeout=0.04, max_retry_times=1)


def test_the_last_attempt_ends_within_the_default_time_out() -> None:
    """By a real clock, on which every attempt takes a little longer than it may."""

    async def body(scheduler: Scheduler) -> None:
        tries = Counter[int]()

        async def second_hangs(workflow: Any) -> list[Experience]:
            tries["all"] += 1  # type: ignore[index]
            return await (succeed if tries.total() == 1 else hang)(workflow)

        scheduler.schedule([scripted(second_hangs, repeat_times=2), scripted(hang)], 1)
        statuses, experiences = await scheduler.get_results(1)
        [message] = [str(status.message) for status in statuses]
        assert message.startswith("1 of 2 runs failed: TimeoutError: not done within 0.02 s: workflow 'Scripted' ")
        assert tids(experiences) == [(1, 0)]

    running(body, loop=asyncio.SelectorEventLoop, runner_per_model=1, max_timeout=0.02, max_retry_times=1)


@pytest.mark.parametrize("min_num", [None, 1, 2])
def test_a_task_that_needed_all_attempts_is_there_at_the_default_time_out(min_num: int | None) -> None:
    """Each attempt of a run that goes on after it was cancelled takes its limit, and the grace for its end."""

    async def body(scheduler: Scheduler) -> None:
        tries = Counter[int]()

        async def ignores_cancellation(workflow: Any) -> list[Experience]:
            tries[workflow.task.task_id] += 1
            if tries[workflow.task.task_id] == 3:
                return [an_experience()]
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(1000)
            await asyncio.sleep(1000)
            return []

        scheduler.schedule([scripted(ignores_cancellation), scripted(ignores_cancellation)], 1)
        statuses, experiences = await scheduler.get_results(1, min_num)
        assert len(statuses) >= (min_num or 2)
        assert all(status.ok for status in statuses)
        assert len(experiences) == len(statuses)

    running(body, max_timeout=5.0, max_retry_times=2)


@pytest.mark.parametrize("min_num", [None, 1])
def test_the_default_time_out_waits_for_runners_that_answer_late(
    min_num: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's runners are such: they replace a worker that does not answer."""

    async def late(runner: WorkflowRunner, task: Task, runs: Any, limit: float | None = None) -> Attempt:
        await asyncio.sleep((limit or 0) + 15.0)
        return Attempt([], {run: TimeoutError("nor did its worker answer") for run in runs})

    async def body(scheduler: Scheduler) -> None:
        scheduler.schedule([scripted(succeed)], 1)
        statuses, _ = await scheduler.get_results(1, min_num)
        assert [without_places(status.message) for status in statuses] == [
            "1 of 1 runs failed: TimeoutError: nor did its worker answer"
        ]

    monkeypatch.setattr(WorkflowRunner, "attempt", late)
    monkeypatch.setattr(WorkflowRunner, "overrun", 20.0)
    running(body, max_timeout=5.0, max_retry_times=2)


def test_what_a_time_out_gives_up_is_named(caplog: pytest.LogCaptureFixture) -> None:
    async def body(scheduler: Scheduler) -> None:
        async def fail(workflow: Any) -> list[Experience]:
            raise OSError("no disk")

        scheduler.schedule([scripted(succeed), scripted(fail), *[scripted(hang)] * 12], 7)
        await scheduler.get_results(7, timeout=0.05)

    running(body)
    named = "2, 3, 4, 5, 6, 7, 8, 9, 10, 11 and 2 more"
    assert f"batch 7: 2 tasks ended, given up: {named}." in caplog.messages


def test_several_may_wait_at_the_same_time() -> None:
    async def body(scheduler: Scheduler) -> None:
        scheduler.schedule([scripted(slow(0.02))] * 2, 1)
        scheduler.schedule([scripted(slow(0.02))] * 2, "1/e")
        results = await asyncio.gather(*(scheduler.get_results(b) for b in (1, "1/e", 1)), scheduler.wait_all())
        assert sorted(len(result[0]) for result in results[:3] if result) == [0, 2, 2]  # each task is handed out once

    running(body)


def test_a_batch_that_grows_while_it_is_waited_for_is_waited_for_whole() -> None:
    async def body(scheduler: Scheduler) -> None:
        scheduler.schedule([scripted(slow(0.02))], 1)
        waiting = asyncio.create_task(scheduler.get_results(1))
        await asyncio.sleep(0.005)
        scheduler.schedule([scripted(slow(0.04))], 1)
        assert len((await waiting)[0]) == 2

    running(body)


def test_results_of_evaluation_tasks_come_with_their_status_only() -> None:
    async def body(scheduler: Scheduler) -> None:
        async def work(workflow: Any) -> list[Experience]:
            return [an_experience(workflow.run_id_base, reward=1.0, metrics={"reward/x": workflow.run_id_base})]

        task = scripted(work, ScriptedRepeatable, is_eval=True, repeat_times=4)
        scheduler.schedule([task], "3/sums")
        (status,), experiences = await scheduler.get_results("3/sums")
        assert experiences == []
        assert [e.eid.run for e in status.eval_experiences] == [0, 1, 2, 3]
        assert status.metric["reward/x"] == 1.5

    running(body, max_repeat_times_per_runner=1)


# -- wait_all ---------------------------------------------------------------------------------------------------------


def test_wait_all_waits_for_every_batch_and_leaves_results_to_be_collected() -> None:
    async def body(scheduler: Scheduler) -> None:
        for batch_id in (1, 2, "2/e"):
            scheduler.schedule([scripted(slow(0.01))] * 2, batch_id)
        await scheduler.wait_all()
        assert [len((await scheduler.get_results(b, timeout=0))[0]) for b in (1, 2, "2/e")] == [2, 2, 2]

    running(body)


def test_wait_all_goes_on_as_long_as_anything_finishes() -> None:
    async def body(scheduler: Scheduler) -> None:
        scheduler.schedule([scripted(slow(0.06), repeat_times=4)], 1)  # four chunks of one task, one after another
        await scheduler.wait_all(timeout=0.2)
        assert len((await scheduler.get_results(1))[1]) == 4

    running(body, runner_per_model=1, max_repeat_times_per_runner=1)


def test_wait_all_does_not_count_what_is_dropped() -> None:
    async def body(scheduler: Scheduler) -> None:
        async def drop_others() -> None:
            for batch_id in range(2, 10):
                scheduler.schedule([scripted(hang)], batch_id)
                await asyncio.sleep(0.1)
                await scheduler.drop(batch_id)

        scheduler.schedule([scripted(hang)], 1)
        began, dropping = now(), asyncio.create_task(drop_others())
        with pytest.raises(TimeoutError, match=r"nothing finished within 0.25 s: 0 pending, 2 running"):
            await scheduler.wait_all(timeout=0.25)
        assert now() - began == pytest.approx(0.25)
        await dropping

    running(body, max_timeout=100.0)


def test_wait_all_tells_what_is_pending_and_running_and_drops_only_what_is_unfinished() -> None:
    async def body(scheduler: Scheduler) -> None:
        scheduler.schedule([scripted(succeed), *[scripted(hang)] * 5], 1)
        with pytest.raises(TimeoutError, match=r"nothing finished within 0.05 s: 3 pending, 2 running"):
            await scheduler.wait_all(timeout=0.05)
        began = now()
        assert tids((await scheduler.get_results(1))[1]) == [(1, 0)]
        assert now() == began  # nothing is left to wait for
        assert not scheduler.has_step(1)
        scheduler.schedule([scripted(succeed)] * 4, 2)
        await scheduler.wait_all(timeout=1)

    running(body)


def test_wait_all_waits_for_as_long_as_all_attempts_may_take_unless_told_otherwise() -> None:
    async def body(scheduler: Scheduler) -> None:
        scheduler.schedule([scripted(hang)] * 3, 1)
        scheduler.runners[0].config = ExplorerConfig()  # attempts of half an hour
        began = now()
        with pytest.raises(TimeoutError, match="2 pending, 1 running"):
            await scheduler.wait_all()
        assert now() - began == pytest.approx(0.08)

    running(body, runner_per_model=1, max_timeout=0.04, max_retry_times=1)


def test_wait_all_without_clearing_lets_the_rest_go_on() -> None:
    async def body(scheduler: Scheduler) -> None:
        scheduler.schedule([scripted(slow(0.2))], 1)
        with pytest.raises(TimeoutError):
            await scheduler.wait_all(timeout=0.01, clear_timeout_tasks=False)
        await scheduler.wait_all()
        assert len((await scheduler.get_results(1))[0]) == 1

    running(body)


# -- start and stop ---------------------------------------------------------------------------------------------------


def test_stop_cancels_what_runs_waits_for_its_end_and_can_be_started_again() -> None:
    async def body(scheduler: Scheduler) -> None:
        ended = []

        async def work(workflow: Any) -> list[Experience]:
            try:
                return await hang(workflow)
            finally:
                await asyncio.sleep(0.02)
                ended.append(workflow.task.task_id)

        scheduler.schedule([scripted(succeed), *[scripted(work)] * 4], 1)
        waiting = asyncio.create_task(scheduler.get_results(1))
        await asyncio.sleep(0.02)
        await scheduler.stop()
        assert sorted(ended) == [1, 2]
        assert len((await waiting)[0]) == 1  # those who wait get what is there
        assert not scheduler.has_step(1)
        await scheduler.start()
        scheduler.schedule([scripted(succeed)] * 4, 1)
        assert len((await scheduler.get_results(1, timeout=1))[0]) == 4

    running(body)


def test_what_was_finished_before_a_stop_can_be_collected_after_it() -> None:
    async def body(scheduler: Scheduler) -> None:
        scheduler.schedule([*[scripted(succeed)] * 2, scripted(hang)], 1)
        scheduler.schedule([scripted(hang)], "1/eval")
        await asyncio.sleep(0.01)
        await scheduler.stop()
        assert tids((await scheduler.get_results(1))[1]) == [(1, 0), (1, 1)]
        assert not scheduler.has_step(1)
        assert await scheduler.get_results("1/eval") == ([], [])
        await scheduler.wait_all()

    running(body)


def test_what_is_scheduled_before_the_start_runs_then_and_waiting_for_it_before_is_an_error() -> None:
    async def main() -> None:
        scheduler = Scheduler(ExplorerConfig(), [FakeModel()])
        scheduler.schedule([scripted(succeed)], 1)
        with pytest.raises(RuntimeError, match=r"await start\(\) first"):
            await scheduler.get_results(1)
        with pytest.raises(RuntimeError, match=r"await start\(\) first"):
            await scheduler.wait_all()
        await scheduler.start()
        await scheduler.start()
        assert len((await scheduler.get_results(1))[0]) == 1
        await scheduler.stop()
        await scheduler.stop()

    asyncio.run(main())


def test_what_cannot_stop_leaves_the_others_to_be_stopped() -> None:
    class Part:
        def __init__(self, error: Exception | None = None) -> None:
            self.error, self.stopped = error, False

        async def stop(self) -> None:
            self.stopped = True
            if self.error is not None:
                raise self.error

    scheduler: Any = Scheduler(ExplorerConfig(), [FakeModel()])
    scheduler._reward_workers, scheduler._group = Part(OSError("a worker hangs on")), Part()
    with pytest.raises(OSError, match="hangs on"):
        asyncio.run(scheduler.stop())
    assert scheduler._group.stopped


# -- over-rollout and dynamic time-outs -------------------------------------------------------------------------------


def test_over_rollout_finishes_a_step_when_enough_tasks_are_in() -> None:
    async def body(scheduler: Scheduler) -> None:
        tasks = [scripted(slow(s)) for s in (0.0, 0.0, 0.05, 0.07, 100.0)]
        scheduler.schedule(tasks, 1)
        began = now()
        statuses, _ = await scheduler.get_results(1)
        assert len(statuses) == 4  # three suffice, the fourth comes in the extra wait
        assert now() - began == pytest.approx(0.05 + 0.2)
        assert not scheduler.has_step(1)
        scheduler.schedule([scripted(slow(s)) for s in (0.0, 0.0, 0.0, 0.0, 0.3)], "1/eval")
        assert len((await scheduler.get_results("1/eval"))[0]) == 5  # evaluations are complete

    running(body, runner_per_model=5, over_rollout=OverRolloutConfig(ratio=0.4, wait_after_min=0.2))


def test_enough_is_the_rounded_up_share() -> None:
    for size in range(1, 50):
        for tenths in range(10):
            assert enough_of(size, tenths / 10) == -(-(10 - tenths) * size // 10)


def test_dynamic_time_out_follows_the_average_of_train_tasks_after_a_warm_up() -> None:
    async def body(scheduler: Scheduler) -> None:
        scheduler.schedule([*[scripted(succeed)] * 3, scripted(slow(0.14))], 1)  # in the warm-up nothing is cut
        statuses, _ = await scheduler.get_results(1)
        assert [status.ok for status in statuses] == [True] * 4
        scheduler.schedule([scripted(slow(0.01))] * 16, 2)
        await scheduler.get_results(2)
        scheduler.schedule([scripted(succeed), scripted(hang)], 3)
        began = now()
        statuses, _ = await scheduler.get_results(3)
        assert [status.ok for status in statuses] == [True, False]
        assert now() - began == pytest.approx(2 * (0.14 + 16 * 0.01) / 20)  # twice the average
        scheduler.schedule([scripted(slow(0.2), is_eval=True)], "3/eval")
        assert (await scheduler.get_results("3/eval"))[0][0].ok

    running(body, dynamic_timeout=DynamicTimeoutConfig(enable=True, ratio=2.0, warmup_min_steps=1))


def test_tasks_that_a_step_asks_for_later_are_no_further_step_of_the_warm_up() -> None:
    async def body(scheduler: Scheduler) -> None:
        for seconds in (0.01, 0.01, 1.0):  # a step and two refills
            scheduler.schedule([scripted(slow(seconds))], 1)
            assert (await scheduler.get_results(1))[0][0].ok
        scheduler.schedule([scripted(slow(1.0))], 2)
        assert (await scheduler.get_results(2))[0][0].ok
        scheduler.schedule([scripted(hang)], 3)
        began = now()
        await scheduler.get_results(3)
        assert now() - began == pytest.approx(2 * (0.01 + 0.01 + 1.0 + 1.0) / 4)

    running(body, dynamic_timeout=DynamicTimeoutConfig(enable=True, ratio=2.0, warmup_min_steps=2))


def test_a_dynamic_time_out_is_never_longer_than_the_other() -> None:
    async def body(scheduler: Scheduler) -> None:
        scheduler.schedule([scripted(slow(1.0))] * 2, 1)
        await scheduler.get_results(1)
        scheduler.schedule([scripted(hang)], 2)
        (status,), _ = await scheduler.get_results(2, timeout=60)
        assert str(status.message).startswith("1 of 1 runs failed: TimeoutError: not done within 2 s: ")

    running(body, max_timeout=2.0, dynamic_timeout=DynamicTimeoutConfig(enable=True, ratio=3.0))


def test_without_clearing_over_rollout_lets_the_rest_be_collected_later() -> None:
    async def body(scheduler: Scheduler) -> None:
        scheduler.schedule([*[scripted(succeed)] * 3, scripted(slow(1.0))], 1)
        assert len((await scheduler.get_results(1, clear_timeout_tasks=False))[0]) == 3
        assert tids((await scheduler.get_results(1))[1]) == [(1, 3)]

    running(body, runner_per_model=4, over_rollout=OverRolloutConfig(ratio=0.25, wait_after_min=0.1))


# -- runners ----------------------------------------------------------------------------------------------------------


async def _raises(workflow: Any) -> list[Experience]:
    raise KeyError("boom")


async def _exits(workflow: Any) -> list[Experience]:
    raise SystemExit(3)


async def _cancels_itself(workflow: Any) -> list[Experience]:
    raise asyncio.CancelledError


async def _ignores_cancellation(workflow: Any) -> list[Experience]:
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.sleep(100)
    await asyncio.sleep(100)
    return [an_experience()]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (_raises, "KeyError: 'boom'"),
        (_exits, "SystemExit: 3"),
        (_cancels_itself, "cancelled from within"),
        (hang, "TimeoutError: not done within 0.03 s"),
        (_ignores_cancellation, "TimeoutError: not done within 0.03 s"),
    ],
)
def test_a_runner_is_always_freed(bad: Any, message: str) -> None:
    async def body(scheduler: Scheduler) -> None:
        scheduler.schedule([scripted(bad)] * 3, 1)
        statuses, experiences = await scheduler.get_results(1, timeout=5)
        assert len(statuses) == 3
        assert experiences == []
        assert all(message in (status.message or "") for status in statuses)
        assert all("task_run_time" in status.metric for status in statuses)
        scheduler.schedule([scripted(succeed)] * 3, 2)
        statuses, _ = await scheduler.get_results(2, timeout=1)
        assert [status.ok for status in statuses] == [True] * 3

    running(body, max_timeout=0.03, max_retry_times=3 if bad is _raises else 0)


def test_a_cancelled_tasks_engine_requests_are_aborted() -> None:
    async def body(scheduler: Scheduler) -> None:
        model = scheduler.runners[0].runner.model
        assert isinstance(model, FakeModel)
        model.latency = 100

        async def work(workflow: Any) -> list[Experience]:
            await workflow.model.generate([1, 2])
            return []

        scheduler.schedule([scripted(work, repeat_times=3)], 1)
        await scheduler.get_results(1, timeout=0.02)
        assert len(model.calls) == model.aborted == 3

    running(body, runner_per_model=1)


def test_a_runner_that_breaks_is_a_failed_task(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(self: Any, task: Any, timeout: float) -> None:  # noqa: ASYNC109
        raise OSError("the actor died")

    monkeypatch.setattr(RunnerWrapper, "run_with_retry", broken)

    async def body(scheduler: Scheduler) -> None:
        scheduler.schedule([scripted(succeed, repeat_times=2)] * 3, 1)
        statuses, _ = await scheduler.get_results(1, timeout=1)
        assert [without_places(status.message) for status in statuses] == [
            "2 of 2 runs failed: 2 x OSError: the actor died"
        ] * 3
        assert all("task_run_time" in status.metric for status in statuses)

    running(body)


def test_progress_is_reported_once_a_task() -> None:
    async def body(scheduler: Scheduler) -> None:
        done: list[int | str] = []
        scheduler.schedule([scripted(succeed, repeat_times=3)] * 2, "1/e", lambda: done.append("1/e"))
        scheduler.schedule([scripted(_raises)], 1, lambda: done.append(1))
        await scheduler.wait_all()
        assert sorted(map(str, done)) == ["1", "1/e", "1/e"]

    running(body, max_repeat_times_per_runner=1)


class _CountingLoop(LeapingLoop):
    turns = 0

    def _run_once(self) -> None:
        self.turns += 1
        super()._run_once()  # type: ignore[misc]


def test_nothing_polls() -> None:
    async def main() -> int:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, _CountingLoop)
        scheduler = Scheduler(ExplorerConfig(), [FakeModel()])
        await scheduler.start()
        scheduler.schedule([scripted(hang)], 1)
        waiting = [asyncio.create_task(scheduler.get_results(1)), asyncio.create_task(scheduler.wait_all())]
        await asyncio.sleep(0.01)
        before = loop.turns
        await asyncio.sleep(0.2)
        turns = loop.turns - before
        await scheduler.stop()
        await asyncio.gather(*waiting)
        return turns

    with asyncio.Runner(loop_factory=_CountingLoop) as workflow_runner:
        assert workflow_runner.run(main()) <= 4


@pytest.mark.slow
def test_a_task_among_thousands_costs_no_more_than_one_among_hundreds() -> None:
    async def seconds_each(scheduler: Scheduler, tasks: int) -> float:
        began = time.thread_time()  # of this thread: others may be busy
        scheduler.schedule([scripted(succeed)] * tasks, 1)
        statuses, _ = await scheduler.get_results(1)
        assert len(statuses) == tasks
        return (time.thread_time() - began) / tasks

    few, many = (running(partial(seconds_each, tasks=tasks), runner_per_model=8) for tasks in (500, 5000))
    assert many < 4 * few


# -- run_with_retry ---------------------------------------------------------------------------------------------------


def retried(task: TaskWrapper, model: FakeModel | None = None, **config: Any) -> Any:
    settings: dict[str, Any] = {"max_timeout": 5.0} | config
    wrapper = RunnerWrapper(7, model or FakeModel(), None, ExplorerConfig(**settings))
    with asyncio.Runner(loop_factory=LeapingLoop) as workflow_runner:
        return workflow_runner.run(wrapper.run_with_retry(task))


class Flaky:
    """Fails the runs of `until` until their attempt of that number; counts the attempts of every run."""

    def __init__(self, until: dict[int, int]) -> None:
        self.until = until
        self.attempts: dict[int, int] = {}

    async def __call__(self, workflow: Any) -> list[Experience]:
        run = workflow.model._run
        self.attempts[run] = self.attempts.get(run, 0) + 1
        await workflow.model.generate([1])
        if self.attempts[run] <= self.until.get(run, 0):
            raise ConnectionError(f"run {run}")
        return [an_experience()]


def test_a_retry_repeats_only_the_runs_that_failed_with_the_same_seeds() -> None:
    body, model = Flaky({5: 1, 6: 2}), FakeModel()
    status, experiences, runner_id = retried(TaskWrapper(scripted(body), 3, run_id_base=4, repeat_times=4), model)
    assert body.attempts == {4: 1, 5: 2, 6: 3, 7: 1}
    assert [(e.eid.batch, e.eid.run) for e in experiences] == [(3, 4), (3, 5), (3, 6), (3, 7)]
    assert (status.ok, status.message, runner_id) == (True, None, 7)
    assert status.metric["task_run_time"] >= status.metric["time_per_task"]
    assert len({call["seed"] for call in model.calls}) == 4


def test_a_retry_of_a_workflow_that_repeats_itself_asks_for_the_runs_that_failed_only() -> None:
    asked: list[list[int]] = []

    async def body(workflow: Any) -> list[Experience]:
        runs = range(workflow.run_id_base, workflow.run_id_base + workflow.repeat_times)
        asked.append(list(runs))
        if len(asked) > 1:
            return [an_experience(run) for run in runs]
        failed: dict[int, Exception] = {run: ConnectionError("away") for run in (3, 4, 6)}
        raise PartialFailure([an_experience(run) for run in runs if run not in failed], failed)

    status, experiences, _ = retried(TaskWrapper(scripted(body, ScriptedRepeatable), 0, run_id_base=2, repeat_times=5))
    assert asked == [[2, 3, 4, 5, 6], [3, 4], [6]]
    assert status.ok
    assert [e.eid.run for e in experiences] == [2, 3, 4, 5, 6]


def test_what_succeeded_is_kept_when_other_runs_fail_for_good() -> None:
    body = Flaky({0: 9, 2: 9})
    status, experiences, _ = retried(TaskWrapper(scripted(body), 0, repeat_times=4))
    assert body.attempts == {0: 3, 1: 1, 2: 3, 3: 1}
    assert [e.eid.run for e in experiences] == [1, 3]
    assert not status.ok
    assert without_places(status.message) == "2 of 4 runs failed: ConnectionError: run 0; ConnectionError: run 2"
    assert "task_run_time" in status.metric


def test_an_error_that_is_not_retried_is_still_told_after_others_were() -> None:
    flaky = Flaky({1: 1})

    async def body(workflow: Any) -> list[Experience]:
        if workflow.model._run == 0:
            raise PromptTooLongError("too long")
        return await flaky(workflow)

    status, experiences, _ = retried(TaskWrapper(scripted(body), 0, repeat_times=2))
    assert [e.eid.run for e in experiences] == [1]
    assert status.message == "1 of 2 runs failed: PromptTooLongError: prompt_truncated: too long"


def test_one_attempt_is_bounded_and_what_it_finished_is_kept() -> None:
    attempts: list[int] = []

    async def body(workflow: Any) -> list[Experience]:
        attempts.append(workflow.model._run)
        await asyncio.sleep(100 if workflow.model._run == 1 else 0)
        return [an_experience()]

    status, experiences, _ = retried(TaskWrapper(scripted(body), 0, repeat_times=3), max_timeout=0.03)
    assert status.metric["task_run_time"] == pytest.approx(0.09)
    assert status.metric["time_per_task"] == pytest.approx(0.03)
    assert sorted(attempts) == [0, 1, 1, 1, 2]
    assert [e.eid.run for e in experiences] == [0, 2]
    assert str(status.message).startswith("1 of 3 runs failed: TimeoutError: not done within 0.03 s: ")


def test_a_prompt_that_is_too_long_is_not_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    attempts = []

    async def body(workflow: Any) -> list[Experience]:
        attempts.append(1)
        raise PromptTooLongError("600 tokens, the context has 512")

    with caplog.at_level(logging.WARNING):
        status, experiences, _ = retried(TaskWrapper(scripted(body, task_id=4), 3))
    assert attempts == [1]
    assert experiences == []
    expected = "1 of 1 runs failed: PromptTooLongError: prompt_truncated: 600 tokens, the context has 512"
    assert status.message == expected
    assert f"task 3/4: {expected}" in caplog.text


def test_a_task_goes_to_the_engine_with_the_fewest_tokens_under_way() -> None:
    long, short = "1+1=" * 1000, "1+1="

    async def body(scheduler: Scheduler) -> None:
        async def ask(workflow: Any) -> list[Experience]:
            await workflow.model.generate(workflow.task.raw_task["prompt"])
            return await slow(1.0)(workflow)

        def make(prompt: str, answer: int, runs: int) -> Any:
            return scripted(ask, raw_task={"prompt": prompt}, rollout_args={"max_tokens": answer}, repeat_times=runs)

        tasks = [(long, 8, 1), (short, 8, 2), (short, 64, 1), (short, 8, 1)]
        engines: list[Any] = [workflow_runner.model for workflow_runner in scheduler.runners[:2]]
        for batch in (1, 2):  # what is done does not count in the next one
            for engine in engines:
                engine.calls.clear()
            scheduler.schedule([make(*arguments) for arguments in tasks], batch)
            await scheduler.get_results(batch)
            prompts = sorted([call["prompt"] for call in engine.calls] for engine in engines)
            assert prompts == sorted([[long], [short] * 4])

    running(body, models=2, runner_per_model=3)


@pytest.mark.parametrize(
    "fields",
    [
        {"rollout_args": {"max_tokens": "64"}},
        {"raw_task": {"messages": np.array([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}])}},
    ],
    ids=["max_tokens", "messages"],
)
def test_a_task_whose_tokens_cannot_be_estimated_leaves_its_runner(fields: dict[str, Any]) -> None:
    async def body(scheduler: Scheduler) -> None:
        scheduler.schedule([scripted(succeed, **fields)], 1)
        assert (await scheduler.get_results(1))[0][0].ok
        scheduler.schedule([scripted(succeed)], 1)
        assert (await scheduler.get_results(1))[0][0].ok

    running(body, runner_per_model=1)


def test_of_tasks_that_are_alike_each_engine_has_as_many_runs() -> None:
    async def body(scheduler: Scheduler) -> None:
        async def ask(workflow: Any) -> list[Experience]:
            await workflow.model.generate("1+1=")
            return await slow(1.0)(workflow)

        scheduler.schedule([scripted(ask, repeat_times=4), scripted(ask), scripted(ask)], 1)
        await scheduler.get_results(1)
        engines: list[Any] = [workflow_runner.model for workflow_runner in scheduler.runners[:2]]
        assert [len(engine.calls) for engine in engines] == [4, 2]

    running(body, models=2)


def test_engines_are_needed() -> None:
    with pytest.raises(ConfigError, match="at least one engine"):
        Scheduler(ExplorerConfig(), [])
    with pytest.raises(ConfigError, match="at least one engine"):
        Scheduler(ExplorerConfig(), [FakeModel()], [[]])
