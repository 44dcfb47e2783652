"""Rollouts that go on while the main thread does something else: waited for, failed, given up."""

import asyncio
from typing import Any

import pytest
from support.fake_model import FakeModel
from support.rollouts import training_rollouts

from trinity_lightning.common.experience import Experience
from trinity_lightning.config.explorer import ExplorerConfig
from trinity_lightning.errors import RolloutError
from trinity_lightning.explorer import rollouts
from trinity_lightning.explorer.explorer import Explorer
from trinity_lightning.explorer.interruption import CtrlC
from trinity_lightning.explorer.rollouts import PendingSteps, overlap
from trinity_lightning.explorer.task_source import TaskSource
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


class Ahead:
    """Rollouts ahead of four tasks a step, and what their sink was given."""

    def __init__(self, model: FakeModel, reward: Any = None) -> None:
        self.taken: list[int] = []
        self.reasons: list[BaseException] = []  # to end what is waited for
        source = TaskSource(Taskset([{"prompt": str(i)} for i in range(4)]), "simple", reward or (lambda *_: 1.0))
        self.explorer = Explorer(ExplorerConfig(batch_size=4, repeat_times=1, max_retry_times=0), [model], source)
        self.pending = PendingSteps()
        self.rollouts = training_rollouts(
            self.explorer, self.pending, lambda: self.reasons[0] if self.reasons else None
        )
        self.rollouts.prepare(self.sink)

    async def sink(self, experiences: list[Experience], step: int, more: Any) -> dict[str, float]:
        self.taken.append(len(experiences))
        return {"taken": 1.0}


def test_what_was_begun_is_waited_for_and_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Ahead(FakeModel())
    start = made.rollouts.driver.start

    def start_and_fall_behind(coroutine: Any) -> Any:
        begun = start(coroutine)
        made.rollouts.driver.wait(start(until(lambda: begun.done)))
        return begun

    monkeypatch.setattr(made.rollouts.driver, "start", start_and_fall_behind)
    made.rollouts._begin(2)
    monkeypatch.undo()
    assert made.rollouts.under_way
    made.rollouts.wait()
    assert made.taken == [4, 4]
    assert not made.rollouts.under_way
    assert made.pending.metrics[1]["taken"] == 1
    assert made.pending.metrics[2]["rollout/overlap"] == pytest.approx(1.0)
    made.rollouts.close()


def test_what_is_given_up_leaves_no_part_of_a_step() -> None:
    model = Gated()
    made = Ahead(model)
    made.rollouts._begin(1)
    made.rollouts.driver.run(until(lambda: model.asked == 4))
    made.rollouts.close()
    assert made.taken == []
    assert made.explorer.step == 0
    assert made.pending == PendingSteps(target=1)


@pytest.mark.slow
def test_waiting_may_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollouts, "STOP_SECONDS", 0.2)
    made, ctrl_c = Ahead(Gated()), CtrlC()
    made.rollouts._begin(1)
    made.rollouts.settle_shortly(ctrl_c)
    ctrl_c.restore()
    assert ctrl_c.count == 1  # the next one ends the run at once
    with pytest.raises(TimeoutError):
        made.rollouts.wait()
    assert (made.taken, made.explorer.step, made.pending.target) == ([], 0, 1)
    made.rollouts.close()


def broken(response: str, task: Any) -> float:
    raise OSError("no reward today")


def test_a_failure_waits_until_the_step_is_needed() -> None:
    made = Ahead(FakeModel(), broken)
    made.rollouts._begin(1)
    made.rollouts.settle()  # a checkpoint of the step before
    assert made.explorer.state_dict()["step"] == 0
    with pytest.raises(RolloutError, match="no reward today"):
        made.rollouts.wait()
    made.rollouts.close()


def test_a_failure_that_nobody_waits_for_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    made = Ahead(FakeModel(), broken)
    made.rollouts._begin(1)
    made.rollouts.settle()
    made.rollouts.close()
    assert "begun ahead failed: RewardError: explore step 1" in caplog.text
    assert "no reward today" in caplog.text


def test_a_failure_that_came_before_it_was_given_up_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    made = Ahead(FakeModel(), broken)
    made.rollouts._begin(1)
    _, begun = made.rollouts._begun or (0, None)
    assert begun is not None
    made.rollouts.driver.run(until(lambda: begun.done))
    made.rollouts.close()
    assert "no reward today" in caplog.text


@pytest.mark.slow
def test_ctrl_c_ends_the_wait_for_rollouts_at_once() -> None:
    model = Gated()
    made = Ahead(model)
    for wait in (made.rollouts.wait, made.rollouts.settle):
        model.asked = 0
        made.rollouts._begin(1)
        made.rollouts.driver.run(until(lambda: model.asked == 4))
        made.reasons.append(SystemExit("enough"))
        with pytest.raises(SystemExit, match="enough"):
            wait()
        made.reasons.clear()
        assert (made.taken, made.explorer.step, made.pending.target) == ([], 0, 1)
    made.rollouts.close()


async def until(condition: Any) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - the model of a test tells nobody
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("one", "other", "share"),
    [
        ((0, 10), (2, 4), 1.0),
        ((0, 10), (8, 12), 0.5),
        ((0, 10), (10, 20), 0.0),
        ((5, 50), (0, 10), 0.5),
        ((0, 0), (0, 10), 0.0),
    ],
)
def test_overlap_is_a_share_of_the_shorter(one: tuple[float, float], other: tuple[float, float], share: float) -> None:
    assert overlap(one, other) == overlap(other, one) == share
