"""Rollouts that go on while the main thread does something else: waited for, failed, given up."""

import asyncio
import math
import sys
from collections.abc import Iterator
from threading import Thread
from types import FrameType
from typing import Any

import pytest
from support.fake_model import FakeModel

from trinity_lightning.common.experience import Experience
from trinity_lightning.config.schema import ExplorerConfig
from trinity_lightning.errors import RolloutError
from trinity_lightning.explorer.driver import Driver
from trinity_lightning.explorer.explorer import Explorer, TaskSource
from trinity_lightning.explorer.lookahead import Interval, LookAhead, Watchers
from trinity_lightning.explorer.tasks.taskset import Taskset


class Gated(FakeModel):
    """Answers two requests, and any other once `gate` is open."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.asked = 0

    async def chat(self, messages: Any, tools: Any = None, n: int = 1, **sampling: Any) -> Any:
        self.asked += 1
        if self.asked > 2:
            await self.gate.wait()
        return await super().chat(messages, tools, n, **sampling)


@pytest.fixture
def driver() -> Iterator[Driver]:
    driver = Driver()
    yield driver
    driver.close()


class Ahead:
    """A look-ahead over four tasks a step, and what its sink was given."""

    def __init__(self, driver: Driver, model: FakeModel, reward: Any = None) -> None:
        self.taken: list[int] = []
        source = TaskSource(Taskset([{"prompt": str(i)} for i in range(4)]), "simple", reward or (lambda *_: 1.0))
        self.explorer = Explorer(ExplorerConfig(batch_size=4, repeat_times=1, max_retry_times=0), [model], source)
        self.ahead = LookAhead(self.explorer)
        driver.run(self.explorer.prepare(self.sink))

    async def sink(self, experiences: list[Experience], step: int, more: Any) -> dict[str, float]:
        self.taken.append(len(experiences))
        return {"taken": 1.0}


def test_what_was_begun_is_waited_for_and_measured(driver: Driver) -> None:
    made = Ahead(driver, FakeModel())
    made.ahead.training = Interval(0.0)  # since ever
    made.ahead.begin(driver, 2)
    assert made.ahead.under_way
    made.ahead.wait()
    assert not made.ahead.under_way
    assert made.taken == [4, 4]
    assert made.ahead.take(1)["taken"] == 1
    assert made.ahead.take(2)["rollout/overlap"] == pytest.approx(1.0)
    driver.run(made.explorer.shutdown())


def test_what_is_given_up_leaves_no_part_of_a_step(driver: Driver) -> None:
    model = Gated()
    made = Ahead(driver, model)
    made.ahead.begin(driver, 1)
    driver.run(until(lambda: model.asked == 4))
    made.ahead.cancel()
    driver.run(made.explorer.shutdown())
    assert made.taken == []
    assert made.explorer.step == 0
    assert made.ahead.state_dict() == {"target": 1, "metrics": {}}


def test_waiting_may_have_a_limit(driver: Driver) -> None:
    made = Ahead(driver, Gated())
    made.ahead.begin(driver, 1)
    made.ahead.settle(limit=0.2)
    assert not made.ahead.complete
    with pytest.raises(TimeoutError):
        made.ahead.wait()
    assert (made.taken, made.explorer.step) == ([], 0)
    driver.run(made.explorer.shutdown())


def broken(response: str, task: Any) -> float:
    raise OSError("no reward today")


def test_a_failure_waits_until_the_step_is_needed(driver: Driver) -> None:
    made = Ahead(driver, FakeModel(), broken)
    made.ahead.begin(driver, 1)
    made.ahead.settle()  # a checkpoint of the step before
    assert made.explorer.state_dict()["step"] == 0
    with pytest.raises(RolloutError, match="no reward today"):
        made.ahead.wait()
    driver.run(made.explorer.shutdown())


def test_a_failure_that_nobody_waits_for_is_logged(driver: Driver, caplog: pytest.LogCaptureFixture) -> None:
    made = Ahead(driver, FakeModel(), broken)
    made.ahead.begin(driver, 1)
    made.ahead.settle()
    made.ahead.cancel()
    assert "begun ahead failed: RewardError: explore step 1" in caplog.text
    assert "no reward today" in caplog.text
    made.ahead.wait()  # nothing is left of it
    driver.run(made.explorer.shutdown())


def test_a_failure_that_came_before_it_was_given_up_is_logged(driver: Driver, caplog: pytest.LogCaptureFixture) -> None:
    made = Ahead(driver, FakeModel(), broken)
    made.ahead.begin(driver, 1)
    driver.run(until(lambda: made.ahead._job is not None and made.ahead._job.done))
    made.ahead.cancel()
    assert "no reward today" in caplog.text
    driver.run(made.explorer.shutdown())


def test_ctrl_c_ends_the_wait_for_rollouts_at_once() -> None:
    reasons: list[BaseException] = []
    driver = Driver((), lambda: reasons[0] if reasons else None)
    model = Gated()
    made = Ahead(driver, model)
    for wait in (made.ahead.wait, made.ahead.settle):
        model.asked = 0
        made.ahead.begin(driver, 1)
        driver.run(until(lambda: model.asked == 4))
        reasons.append(SystemExit("enough"))
        with pytest.raises(SystemExit, match="enough"):
            wait()
        reasons.clear()
        assert (made.ahead.complete, made.taken, made.explorer.step) == (False, [], 0)
    driver.run(made.explorer.shutdown())
    driver.close()


async def until(condition: Any) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - the model of a test tells nobody
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("one", "other", "share"),
    [
        (Interval(0, 10), Interval(2, 4), 1.0),
        (Interval(0, 10), Interval(8, 12), 0.5),
        (Interval(0, 10), Interval(10, 20), 0.0),
        (Interval(5), Interval(0, 10), 0.5),
        (Interval(0, 0), Interval(0, 10), 0.0),
    ],
)
def test_overlap_is_a_share_of_the_shorter(one: Interval, other: Interval, share: float) -> None:
    assert one.overlap(other) == other.overlap(one) == share
    assert one.end == math.inf or one.end >= one.begin


# -- observations that come from one thread while another shows them -------------------------------------------------


def test_an_observation_is_shown_once_wherever_another_thread_shows_what_there_is() -> None:
    """The other thread runs `flush` before every single instruction of `observe`."""
    shown: list[int] = []
    flushes: list[Thread] = []
    watchers = Watchers(lambda experiences, step, taskset: shown.append(step), None, waiting=lambda: True)

    def flush_before_instructions(frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code is not Watchers.observe.__code__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            flushes.append(Thread(target=watchers.flush))
            flushes[-1].start()
            flushes[-1].join()
        return flush_before_instructions

    def observe() -> None:
        sys.settrace(flush_before_instructions)  # of this thread
        for step in range(3):
            watchers.observe([], step, None)

    observing = Thread(target=observe)
    observing.start()
    observing.join()
    assert len(flushes) > 3
    watchers.flush()
    assert shown == [0, 1, 2]


def test_what_comes_while_others_are_shown_is_shown_after_them() -> None:
    shown: list[int] = []

    def show(experiences: list[Any], step: int, taskset: str | None) -> None:
        shown.append(step)
        if step < 3:
            other = Thread(target=watchers.observe, args=([], step + 1, None))
            other.start()
            other.join()

    watchers = Watchers(show, None, waiting=lambda: True)
    watchers.observe([], 0, None)
    watchers.flush()
    assert shown == [0, 1, 2, 3]
