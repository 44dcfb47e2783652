"""Groups of rollouts that go on across steps, with a fake model, and the real scheduler, runners and controller."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import pytest
from support.errors import refuses
from support.fake_model import FakeModel, LeapingLoop

from trinity_lightning.buffer.pipeline import ExperiencePipeline
from trinity_lightning.common.experience import EID, Experience
from trinity_lightning.common.tidied import TidiedGroup
from trinity_lightning.config.engines import SynchronizerConfig
from trinity_lightning.config.explorer import ExplorerConfig
from trinity_lightning.errors import OperatorError, RewardError, StorageError
from trinity_lightning.explorer import driver as driver_module
from trinity_lightning.explorer.async_rollouts import AsyncRollouts
from trinity_lightning.explorer.clock import CLOCK
from trinity_lightning.explorer.explorer import NOBODY, Explorer
from trinity_lightning.explorer.groups import GroupBuffer
from trinity_lightning.explorer.rollouts import PendingSteps, WeightVersions
from trinity_lightning.explorer.task_source import TaskSource
from trinity_lightning.explorer.tasks.taskset import Taskset


class Paced(FakeModel):
    """Answers after seconds that depend on the task, or after an event, and goes on after weight syncs."""

    def __init__(self, seconds: Callable[[int], float], in_process: bool = False) -> None:
        super().__init__()
        self.capabilities = replace(FakeModel.capabilities, goes_on_after_sync=True, overlaps_training=not in_process)
        self.seconds = seconds

    async def generate(self, prompt: Any, n: int = 1, **sampling: Any) -> Any:
        text = prompt if isinstance(prompt, str) else "".join(map(chr, prompt))
        self.latency = self.seconds(int(text.split()[0]))
        return await super().generate(prompt, n, **sampling)


def source(size: int, reward: Any = lambda response, task: float(index_of(task))) -> TaskSource:
    entries = [{"prompt": f"{i} + {i}?", "answer": str(2 * i)} for i in range(size)]
    return TaskSource(Taskset(entries, order="sequential", epochs=1), workflow="simple", reward_fn=reward)


def index_of_experience(experience: Experience) -> int:
    return experience.info["task_index"]["index"]


def index_of(task: Any) -> int:
    return task.raw_task["task_index"]["index"]


class Buffer:
    """Keeps the steps that it is given; `tidy` leaves out the tasks that `refused` names."""

    def __init__(self, refused: Sequence[int] = ()) -> None:
        self.steps: list[list[list[Experience]]] = []
        self.filtered: list[int] = []
        self.refused = refused

    async def tidy(self, experiences: list[Experience], batch: int) -> TidiedGroup:
        assert {experience.eid.batch for experience in experiences} == {batch}
        if experiences[0].info["task_index"]["index"] in self.refused:
            return TidiedGroup([], experiences)
        return TidiedGroup(experiences)

    async def fill(self, groups: Sequence[TidiedGroup], filtered: Sequence[TidiedGroup], step: int) -> dict[str, float]:
        self.steps.append([group.kept for group in groups])
        self.filtered.append(len(filtered))
        return {}

    def tasks(self) -> list[list[int]]:
        return [[group[0].info["task_index"]["index"] for group in step] for step in self.steps]


def explorer(model: FakeModel, train: TaskSource, **fields: Any) -> Explorer:
    """2 tasks a step, 3 runs a task, one step ahead, no retries."""
    settings: dict[str, Any] = {"batch_size": 2, "repeat_times": 3, "max_staleness": 1, "max_retry_times": 0}
    settings["runner_per_model"] = None
    return Explorer(ExplorerConfig(**(settings | fields)), [model], train)


def within(explored: Explorer, buffer: Buffer, body: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """Run `body` while the explorer is prepared, in time that leaps."""

    async def main() -> Any:
        await explored.prepare(GroupBuffer(buffer.tidy, buffer.fill))
        try:
            return await body()
        finally:
            await explored.shutdown()

    with asyncio.Runner(loop_factory=LeapingLoop) as runner:
        return runner.run(main())


def steps(explored: Explorer, number: int) -> Callable[[], Coroutine[Any, Any, list[dict[str, float]]]]:
    """So many steps, each after a weight sync; returns their metrics."""

    async def body() -> list[dict[str, float]]:
        metrics = []
        for _ in range(number):
            explored.begin_groups()
            if not await explored.explore_step():
                break
            metrics.append(explored.metrics)
        return metrics

    return body


def test_a_step_takes_the_groups_that_are_complete_and_the_slow_one_follows_in_time() -> None:
    buffer, model = Buffer(), Paced(lambda task: 50.0 if task == 0 else 1.0)
    explored = explorer(model, source(12), max_staleness=2, run_ahead=1)
    metrics = within(explored, buffer, steps(explored, 4))
    assert buffer.tasks()[0] == [1, 2]
    [step] = [number for number, tasks in enumerate(buffer.tasks()) if 0 in tasks]
    assert metrics[step]["sample/staleness/max"] == step <= 2
    assert f"response_length/staleness_{step}/mean" in metrics[step]
    assert metrics[0]["rollout/suspended"] == 3.0  # the rollouts of the slow group; another one is complete


def test_a_group_keeps_its_identity_wherever_it_is_trained() -> None:
    fast, slow = Buffer(), Buffer()
    for buffer, seconds in ((fast, lambda task: 1.0), (slow, lambda task: 30.0 if task % 3 == 0 else 1.0)):
        model = Paced(seconds)
        explored = explorer(model, source(20), max_staleness=3)
        within(explored, buffer, steps(explored, 10))
    assert fast.tasks() != slow.tasks()

    def groups(buffer: Buffer) -> list[Any]:
        return sorted(
            (index_of_experience(e), e.eid.batch, e.eid.task, e.eid.run, list(map(int, e.tokens)))
            for e in chain(*chain(*buffer.steps))
        )

    assert groups(fast) == groups(slow)
    for number, batch, task, *_ in groups(slow):
        assert (batch, task) == (number // 2 + 1, number % 2)
    for number, step in enumerate(slow.steps, 1):
        assert {e.info["trained_step"] for group in step for e in group} == {number}


def test_failed_and_filtered_groups_free_their_places_and_the_last_step_is_short() -> None:
    def reward(response: str, task: Any) -> float:
        if index_of(task) == 1:
            raise ArithmeticError("cannot judge")
        return 1.0

    buffer = Buffer(refused=[2, 3])
    explored = explorer(Paced(lambda task: 1.0), source(8, reward))
    metrics = within(explored, buffer, steps(explored, 9))
    assert buffer.tasks() == [[0, 4], [5, 6], [7]]
    assert buffer.filtered[0] == 2
    assert (metrics[0]["rollout/tasks"], metrics[0]["rollout/failed_tasks"]) == (5, 1)
    assert metrics[0]["rollout/experiences"] == 12  # of the groups that the filter left out, too
    assert explored.step == 3


def test_filters_that_leave_out_everything_fill_no_memory() -> None:
    explored = explorer(Paced(lambda task: 1.0), source(50), max_concurrent=3)
    assert explored.groups is not None
    assert within(explored, Buffer(refused=range(50)), steps(explored, 1)) == []
    given_up = explored.groups._given_up
    assert len(given_up) == 50
    assert 2 <= sum(bool(group.tidied.experiences) for group in given_up) <= 10  # 4 steps between two warnings


def test_messages_name_failed_tasks_with_their_batches(caplog: pytest.LogCaptureFixture) -> None:
    def reward(response: str, task: Any) -> float:
        if index_of(task) in (1, 3):
            raise ArithmeticError("cannot judge")
        return 1.0

    explored = explorer(Paced(lambda task: 1.0), source(8, reward))
    within(explored, Buffer(), steps(explored, 1))
    assert "explore step 1: 2 of 4 tasks failed (1/1, 2/1)" in caplog.text


def test_a_batch_whose_groups_all_fail_ends_the_run() -> None:
    def reward(response: str, task: Any) -> float:
        raise ArithmeticError("cannot judge")

    explored = explorer(Paced(lambda task: 1.0), source(8, reward))
    with pytest.raises(RewardError):
        within(explored, Buffer(), steps(explored, 1))


def test_a_run_that_ends_by_failures_names_these_alone() -> None:
    def reward(response: str, task: Any) -> float:
        if index_of(task) > 0:
            raise ArithmeticError("cannot judge")
        return 1.0

    explored = explorer(Paced(lambda task: 1.0 + (task > 0)), source(8, reward))
    with pytest.raises(RewardError, match="none of its 2 tasks gave an experience: reward"):
        within(explored, Buffer(refused=[0]), steps(explored, 1))


def test_a_batch_that_fails_while_the_buffer_takes_a_step_ends_the_run_afterwards() -> None:
    def reward(response: str, task: Any) -> float:
        if index_of(task) in (2, 3):
            raise ArithmeticError("cannot judge")
        return 1.0

    class Slow(Buffer):
        async def fill(self, *args: Any, **named: Any) -> dict[str, float]:
            await asyncio.sleep(1)
            return await super().fill(*args, **named)

    explored = explorer(Paced(lambda task: 1.5 if task in (2, 3) else 1.0), source(8, reward))
    with pytest.raises(RewardError, match="none of its 2 tasks gave an experience"):
        within(explored, Slow(), steps(explored, 2))
    assert explored.step == 1


def test_groups_that_fail_at_once_do_not_end_a_run_whose_others_take_long() -> None:
    def reward(response: str, task: Any) -> float:
        if index_of(task) % 2:
            raise ArithmeticError("cannot judge")
        return 1.0

    buffer = Buffer()
    explored = explorer(Paced(lambda task: 0.0 if task % 2 else 30.0), source(32, reward), batch_size=4)
    assert len(within(explored, buffer, steps(explored, 9))) == 4
    assert sorted(chain(*buffer.tasks())) == list(range(0, 32, 2))


def test_an_operator_that_fails_ends_the_run_and_another_one_goes_on_with_its_group() -> None:
    buffer, sound = Buffer(), Buffer()

    async def broken(experiences: list[Experience], batch: int) -> TidiedGroup:
        raise OperatorError("it is broken")

    buffer.tidy = broken  # type: ignore[method-assign]
    explored = explorer(Paced(lambda task: 1.0), source(8))
    with pytest.raises(OperatorError):
        within(explored, buffer, steps(explored, 1))
    within(explored, sound, steps(explored, 4))
    assert sound.tasks() == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_a_taskset_that_cannot_be_read_any_more_ends_the_run_after_the_steps_before() -> None:
    train, buffer = source(12), Buffer()
    next_tasks = train.next_tasks

    def broken(n: int, repeat_times: int | None = None) -> Any:
        tasks = next_tasks(n, repeat_times)
        if index_of(tasks[0]) == 5:
            raise StorageError("a disk is full")
        return tasks

    train.next_tasks = broken  # type: ignore[method-assign]
    explored = explorer(Paced(lambda task: 1.0), train)
    with pytest.raises(StorageError):
        within(explored, buffer, steps(explored, 4))
    assert explored.groups is not None
    assert explored.step == explored.groups.controller.taken == len(buffer.steps) > 0


def test_no_more_rollouts_are_under_way_than_allowed() -> None:
    model, most, now = Paced(lambda task: 1.0), [0], [0]
    generate = model.generate

    async def counted(*arguments: Any, **settings: Any) -> Any:
        now[0] += 1
        most[0] = max(most[0], now[0])
        try:
            return await generate(*arguments, **settings)
        finally:
            now[0] -= 1

    model.generate = counted  # type: ignore[method-assign]
    explored = explorer(model, source(12), max_concurrent=4)
    within(explored, Buffer(), steps(explored, 3))
    assert most == [1]  # a call with 3 rollouts: a second one would have the 4th to 6th


def test_an_engine_of_this_process_begins_no_groups_between_a_step_and_the_sync() -> None:
    for in_process in (True, False):
        model = Paced(lambda task: 1.0, in_process)
        explored = explorer(model, source(12))

        async def body(explored: Explorer = explored, model: Paced = model) -> tuple[int, int, int]:
            explored.begin_groups()
            await explored.explore_step()
            await asyncio.sleep(5)
            before = len(model.calls)
            assert explored.groups is not None
            explored.groups.controller.synced = explored.groups.controller.taken
            explored.begin_groups()
            await asyncio.sleep(5)
            synced = len(model.calls)
            await explored.explore_step()
            explored.begin_groups()
            await asyncio.sleep(5)
            return before, synced, len(model.calls)

        # With a server's older weights, no further group would be in time. In process the next step is complete, and
        # groups that begin before it is trained would rest at once.
        assert within(explored, Buffer(), body) == ((4, 4, 8) if in_process else (4, 6, 8))


@pytest.mark.parametrize("in_flight", ["continue", "wait"])
def test_in_process_two_steps_of_groups_begin_together_and_are_trained_one_after_the_other(in_flight: str) -> None:
    explored = explorer(Paced(lambda task: 1.0, in_process=True), source(12), in_flight=in_flight)
    metrics = within(explored, buffer := Buffer(), steps(explored, 4))
    assert [step["sample/staleness/mean"] for step in metrics] == [0.0, 1.0, 0.0, 1.0]
    assert buffer.tasks() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    two = metrics[2:]  # the second of them finds its rollouts complete, in no time
    tokens = sum(step["response_length/mean"] * step["rollout/experiences"] for step in two)
    assert two[1]["rollout/tokens_per_second"] == pytest.approx(tokens / sum(step["time/rollout"] for step in two))


def test_in_process_no_group_begins_once_the_next_step_is_complete() -> None:
    explored = explorer(Paced(lambda task: 1.0, in_process=True), source(12), max_concurrent=3)
    metrics = within(explored, buffer := Buffer(), steps(explored, 4))
    assert [step["sample/staleness/max"] for step in metrics] == [0.0] * 4
    assert buffer.tasks() == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_the_groups_that_begin_before_a_sync_that_waits_do_not_depend_on_time() -> None:
    """Neither on an evaluation, which drives the engine meanwhile, nor on the moment of a checkpoint."""

    def waiting() -> tuple[Explorer, Buffer]:
        model = Paced(lambda task: 1.0, in_process=True)
        return explorer(model, source(20), max_concurrent=3, in_flight="wait"), Buffer()

    async def four_steps(explored: Explorer, evaluated: float) -> list[float]:
        metrics = []
        for _ in range(4):
            explored.begin_groups()
            await asyncio.sleep(evaluated)
            assert explored.groups is not None
            await explored.groups.drain()
            explored.begin_groups()
            assert await explored.explore_step()
            metrics.append(explored.metrics["sample/staleness/mean"])
        return metrics

    async def until_stopped(explored: Explorer, stopped: float) -> Any:
        explored.begin_groups()
        await asyncio.sleep(stopped)
        return explored.state_dict()

    ages = [0.0, 1.0, 0.0, 1.0]
    for evaluated in (0.0, 1.5, 2.5, 9.0):
        explored, buffer = waiting()
        assert within(explored, buffer, partial(four_steps, explored, evaluated)) == ages
    for stopped in (0.5, 2.5, 3.5):
        explored, buffer = waiting()
        state = within(explored, buffer, partial(until_stopped, explored, stopped))
        resumed, buffer = waiting()
        resumed.load_state_dict(state)
        metrics = within(resumed, buffer, steps(resumed, 4))
        assert [step["sample/staleness/mean"] for step in metrics] == ages


def test_a_group_that_is_cancelled_before_its_first_step_begins_again() -> None:
    explored, buffer = explorer(Paced(lambda task: 1.0), source(8)), Buffer()

    async def body() -> Any:
        explored.begin_groups()
        assert explored.groups is not None
        await explored.groups.close()  # in the same turn of the loop
        await explored.groups.drain()
        return await steps(explored, 9)()

    assert len(within(explored, buffer, body)) == 4
    assert buffer.tasks() == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_a_sync_that_waits_finds_nothing_under_way() -> None:
    explored = explorer(Paced(lambda task: 40.0 if task == 3 else 1.0), source(12), in_flight="wait")
    assert explored.groups is not None
    groups = explored.groups

    async def body() -> tuple[int, int]:
        explored.begin_groups()
        await explored.explore_step()
        before = groups.controller.running
        await groups.drain()
        return before, groups.controller.running

    assert within(explored, Buffer(), body) == (1, 0)


@pytest.mark.parametrize("taken", range(4))
def test_a_restored_run_trains_the_same_groups(taken: int) -> None:
    def paced() -> Paced:
        return Paced(lambda task: 25.0 if task % 4 == 0 else 1.0, in_process=True)

    whole, first, second = Buffer(), Buffer(refused=[5]), Buffer(refused=[5])
    whole.refused = [5]
    explored = explorer(paced(), source(16), max_staleness=2)
    within(explored, whole, steps(explored, 8))

    stopped = explorer(paced(), source(16), max_staleness=2)

    async def until_stopped() -> Any:
        await steps(stopped, taken)()
        stopped.begin_groups()
        await asyncio.sleep(1.5)
        return stopped.state_dict()

    state = within(stopped, first, until_stopped)
    resumed = explorer(paced(), source(16), max_staleness=2)
    resumed.load_state_dict(state)
    within(resumed, second, steps(resumed, 8))
    tasks = [*chain(*first.tasks(), *second.tasks())]
    assert sorted(tasks) == sorted(chain(*whole.tasks()))
    assert len(set(tasks)) == len(tasks)


def test_a_run_goes_on_with_groups_and_without_them() -> None:
    def without(**fields: Any) -> Explorer:
        return explorer(Paced(lambda task: 1.0), source(12), **fields)

    plain = without(max_staleness=0)
    sink: list[Any] = []

    async def take(experiences: list[Experience], step: int, more: Any) -> dict[str, float]:
        sink.append(experiences[0].info["task_index"]["index"])
        return {}

    async def two_steps() -> Any:
        await plain.prepare(take)
        try:
            return [await plain.explore_step(), await plain.explore_step(), plain.state_dict()][2]
        finally:
            await plain.shutdown()

    with asyncio.Runner(loop_factory=LeapingLoop) as runner:
        state = runner.run(two_steps())
    grouped, buffer = without(), Buffer()
    grouped.load_state_dict(state)
    within(grouped, buffer, steps(grouped, 9))
    assert buffer.tasks() == [[4, 5], [6, 7], [8, 9], [10, 11]]
    assert buffer.steps[0][0][0].eid.batch == 3
    without(max_staleness=0).load_state_dict(grouped.state_dict())
    under_way = without()
    state = within(under_way, Buffer(), lambda: _begun(under_way))
    with refuses("explorer.max_staleness"):
        without(max_staleness=0).load_state_dict(state)
    with refuses("explorer.batch_size"):
        without(batch_size=3).load_state_dict(state)


def test_a_finished_run_goes_on_with_more_epochs_and_other_batches() -> None:
    def with_epochs(epochs: int, **fields: Any) -> Explorer:
        train = source(8)
        train.taskset.tasksets["taskset"].epochs = epochs
        return explorer(Paced(lambda task: 1.0), train, **fields)

    whole, first, second = Buffer(), Buffer(), Buffer()
    finished, resumed = with_epochs(1), with_epochs(2, batch_size=4)
    assert len(within(finished, first, steps(finished, 9))) == 4
    resumed.load_state_dict(finished.state_dict())
    within(resumed, second, steps(resumed, 9))
    assert second.tasks() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    whole.steps = first.steps + second.steps
    ids = [group[0].eid.tid for step in whole.steps for group in step]
    assert len(set(ids)) == len(ids) == 16


async def _begun(explored: Explorer) -> Any:
    explored.begin_groups()
    return explored.state_dict()


def test_a_lower_staleness_than_the_groups_of_a_checkpoint_have_is_refused() -> None:
    explored = explorer(
        Paced(lambda task: 1e6 if task in (0, 1) else 1.0, in_process=True), source(20), max_staleness=3
    )
    state = within(explored, Buffer(), lambda: _after(explored, 2))
    for lower in (0, 1):
        with refuses("explorer.max_staleness"):
            explorer(Paced(lambda task: 1.0), source(20), max_staleness=lower).load_state_dict(state)
    explorer(Paced(lambda task: 1.0), source(20), max_staleness=2).load_state_dict(state)


async def _after(explored: Explorer, number: int) -> Any:
    await steps(explored, number)()
    return explored.state_dict()


def test_a_run_that_ends_because_a_workflow_blocks_the_loop_leaves_a_checkpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(driver_module, "BLOCKED_SECONDS", 0.1)
    explored, released, policy = explorer(Paced(lambda task: 1.0), source(8)), threading.Event(), Any
    rollouts = AsyncRollouts(
        *(explored, PendingSteps(), SynchronizerConfig(), policy, WeightVersions(), None, lambda: None, NOBODY)  # type: ignore[arg-type]
    )
    rollouts.driver.limit_blocking(0.2)

    async def block() -> None:
        released.wait(30)

    rollouts.driver.start(block())
    try:
        assert rollouts.state(False)["groups"]["controller"]["next_group"] == 0
        assert not released.is_set()
    finally:
        released.set()
        rollouts.driver.close()


def test_the_clock_of_time_outs_stands_still_while_engines_rest() -> None:
    explored = explorer(Paced(lambda task: 20.0, in_process=True), source(8), max_timeout=30.0)
    buffer = Buffer()

    async def body() -> bool:
        explored.begin_groups()
        await asyncio.sleep(1)
        explored.clock.stop()
        await asyncio.sleep(15)
        stood = explored.clock.time()
        await asyncio.sleep(1)
        assert explored.clock.time() == stood
        explored.clock.go()
        return await explored.explore_step()

    assert within(explored, buffer, body)
    assert CLOCK.get() is not explored.clock

    late = explorer(Paced(lambda task: 45.0), source(8), max_timeout=30.0)
    with pytest.raises(Exception, match="not done within 30"):
        within(late, Buffer(), steps(late, 1))


# -- configurations ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "fields"),
    [
        ("explorer.sync_offset", {"max_staleness": 1, "sync_offset": 1}),
        ("explorer.sync_interval", {"max_staleness": 1, "sync_interval": 2}),
        ("explorer.over_rollout.ratio", {"max_staleness": 1, "over_rollout": {"ratio": 0.5}}),
        ("explorer.run_ahead", {"max_staleness": 1, "run_ahead": 2}),
        ("explorer.in_flight", {"max_staleness": 1}),
        ("explorer.run_ahead", {"run_ahead": 1}),
        ("explorer.in_flight", {"in_flight": "wait"}),
        ("explorer.max_concurrent", {"max_concurrent": 3}),
    ],
)
def test_settings_that_contradict_each_other_are_refused(key: str, fields: dict[str, Any]) -> None:
    with refuses(key):
        Explorer({"batch_size": 2, **fields}, [FakeModel()], source(4))


# -- the buffer's part -------------------------------------------------------------------------------------------------


def group(task: int, rewards: Sequence[float]) -> list[Experience]:
    return [
        Experience(eid=EID(batch=1, task=task, run=run), tokens=[1, 2, 3], prompt_length=1, reward=reward)
        for run, reward in enumerate(rewards)
    ]


def test_groups_are_weighed_as_a_whole_step_is() -> None:
    rewards = ((0.0, 1.0), (1.0, 1.0), (2.0, 0.5))
    whole, alone = ExperiencePipeline("grpo"), ExperiencePipeline("grpo")
    experiences, metrics = asyncio.run(whole.process([e for i, r in enumerate(rewards) for e in group(i, r)], 1))

    async def one_by_one() -> Any:
        groups = [await alone.tidy_group(group(i, r), 1) for i, r in enumerate(rewards)]
        return await alone.weigh_groups(groups, [], 1)

    others, other_metrics = asyncio.run(one_by_one())
    for experience, other in zip(experiences, others, strict=True):
        assert other.eid == replace(experience.eid, suffix=other.eid.suffix)
        assert other.advantages is not None
        assert experience.advantages is not None
        assert other.advantages.equal(experience.advantages)
    assert {n: v for n, v in metrics.items() if "time" not in n} == {
        n: v for n, v in other_metrics.items() if "time" not in n
    }


def test_the_filter_whose_tasks_are_replaced_leaves_out_whole_groups_with_their_reason() -> None:
    pipeline = ExperiencePipeline([("dapo", {}), ("grpo", {})])

    async def body() -> Any:
        kept = await pipeline.tidy_group(group(0, (0.0, 1.0)), 1)
        dropped = await pipeline.tidy_group(group(1, (1.0, 1.0)), 1)
        return kept, dropped, await pipeline.weigh_groups([kept], [dropped], 1)

    kept, dropped, (weighed, metrics) = asyncio.run(body())
    assert (len(kept.kept), kept.left_out, dropped.kept, len(dropped.left_out)) == (2, [], [], 2)
    assert {e.eid.task for e in weighed} == {0}
    assert metrics["experience_pipeline/untrained/filtered_by_dapo"] == 2.0
