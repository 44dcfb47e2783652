"""How often a step may be refilled."""

import asyncio

import pytest

from trinity_lightning.explorer.step_rollouts import StepRollouts


class EndlessTasks:
    """A source that never runs out."""

    def next_tasks(self, tasks: int) -> list[object]:
        raise AssertionError("asked for more tasks than allowed")


@pytest.mark.parametrize("max_refills", [0, -1])
def test_a_step_without_refills_asks_for_no_more_tasks(max_refills: int) -> None:
    rollouts = StepRollouts(1, 2, max_refills, EndlessTasks(), run=None)  # type: ignore[arg-type]
    assert asyncio.run(rollouts(1)) == []
