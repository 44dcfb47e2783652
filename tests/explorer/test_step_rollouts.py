"""How often a step may be refilled, and what becomes of refills that fail."""

import asyncio
from typing import Any

import pytest

from trinity_lightning.common.experience import EID, Experience
from trinity_lightning.explorer.step_rollouts import StepRollouts
from trinity_lightning.explorer.workflow_runner import Status


class EndlessTasks:
    """A source that never runs out."""

    def next_tasks(self, tasks: int) -> list[object]:
        raise AssertionError("asked for more tasks than allowed")


@pytest.mark.parametrize("max_refills", [0, -1])
def test_a_step_without_refills_asks_for_no_more_tasks(max_refills: int) -> None:
    rollouts = StepRollouts(1, 2, max_refills, EndlessTasks(), run=None)  # type: ignore[arg-type]
    assert asyncio.run(rollouts(1)) == []


class Source:
    """So many tasks, and a taskset that learns nothing of them."""

    def __init__(self, tasks: int) -> None:
        self.left = tasks
        self.taskset = self

    def next_tasks(self, tasks: int) -> list[object]:
        given, self.left = min(tasks, self.left), self.left - min(tasks, self.left)
        return [object()] * given

    def update(self, pass_rates: object) -> None:
        pass


def rounds(*succeed: bool) -> Any:
    """Runs tasks: round after round all succeed or all fail."""
    left = list(succeed)

    async def run(tasks: list[Any], step: int) -> tuple[list[Status], list[Experience]]:
        if not left.pop(0):
            return [Status(False, {}, "the verifier is down") for _ in tasks], []
        made = [
            Experience(eid=EID(batch=1, task=i), tokens=[1, 2], prompt_length=1, reward=1.0) for i in range(len(tasks))
        ]
        return [Status(True, {}) for _ in tasks], made

    return run


def test_a_round_whose_tasks_all_failed_is_followed_by_the_next(caplog: pytest.LogCaptureFixture) -> None:
    rollouts = StepRollouts(1, 2, 3, Source(20), rounds(True, False, True, False))  # type: ignore[arg-type]

    async def body() -> tuple[int, int]:
        assert len(await rollouts.begin() or []) == 2
        return len(await rollouts(2)), len(await rollouts(2))  # the third refill fails, and is the last

    assert asyncio.run(body()) == (2, 0)
    metrics = rollouts.metrics()
    assert (metrics["rollout/refill_tasks"], metrics["rollout/failed_tasks"]) == (6, 4)
    assert "explore step 1, refill: 2 of 2 tasks failed: the verifier is down" in caplog.text


def test_refills_end_with_the_taskset() -> None:
    rollouts = StepRollouts(1, 2, 9, Source(3), rounds(True, False))  # type: ignore[arg-type]

    async def body() -> list[Experience]:
        await rollouts.begin()
        return await rollouts(2)

    assert asyncio.run(body()) == []
