"""Rollouts are solved by named components of the reward, never by a sum of them that happens to reach 1."""

from typing import Any

import pytest

from trinity_lightning.common.criterion import Criterion, components, criterion_of
from trinity_lightning.common.experience import EID, Experience
from trinity_lightning.common.solved import is_solved, metrics_of


def run_of(reward: float | None, *steps: dict[str, float]) -> list[Experience]:
    """A run of one experience a step, which have these metrics."""
    return [
        Experience(eid=EID(step=step), tokens=[1, 2], prompt_length=1, reward=reward, metrics=metrics)
        for step, metrics in enumerate(steps)
    ]


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        (["turns", "accuracy"], []),
        (["reward/math", "turns"], ["reward/math"]),
        (["reward/mine/right", "reward/mine/short", "reward/mine"], ["reward/mine/right", "reward/mine/short"]),
        (["reward/mine", "reward/mine_too"], ["reward/mine", "reward/mine_too"]),
    ],
)
def test_components_are_functions_or_the_parts_that_they_return(metrics: list[str], expected: list[str]) -> None:
    assert components(metrics) == expected


@pytest.mark.parametrize(
    ("metrics", "named", "criterion"),
    [
        ([], None, "reward at 1"),
        (["accuracy"], None, "reward at 1"),  # measured by a workflow, and no part of the reward
        (["reward/last_number"], None, "last_number at 1"),
        (["reward/math", "reward/format"], None, "math at 1"),
        (["reward/format", "reward/accuracy"], None, "accuracy at 1"),
        (["reward/accuracy", "reward/math"], None, "math at 1"),
        (["reward/mine/accuracy", "reward/mine/short", "reward/mine"], None, "mine/accuracy at 1"),
        (["reward/mine/right", "reward/mine/short", "reward/mine"], None, None),
        (["reward/a", "reward/b"], None, None),
        (["reward/mine/right", "reward/mine/short", "reward/mine"], {"right": 1.0}, "mine/right at 1"),
        (["reward/mine/right", "reward/mine/short", "reward/mine"], {"mine": 1.5}, "mine at 1.5"),
        (["reward/mine/right", "reward/other/right"], {"mine/right": 0.5}, "mine/right at 0.5"),
        (["reward/mine/right", "reward/other/right"], {"right": 1.0}, "mine/right at 1 and other/right at 1"),
        (["reward/a", "reward/b"], {"a": 1.0, "b": -2.0}, "a at 1 and b at -2"),
        (["reward/math", "turns"], {"turns": 2.0}, "turns at 2"),
        (["reward/a", "reward/b"], {"reward": 1.5}, "reward at 1.5"),
        (["reward/math"], {"mth": 1.0}, None),
        (["reward/math", "reward/b"], {"math": 1.0, "c": 1.0}, None),
    ],
)
def test_the_criterion_is_named_or_the_usual_component_or_the_only_one(
    metrics: list[str], named: dict[str, float] | None, criterion: str | None
) -> None:
    decided = criterion_of(metrics, named)
    assert (None if decided is None else str(decided)) == criterion


@pytest.mark.parametrize(
    ("reward", "metrics", "solved"),
    [
        (1.1, {"reward/right": 0.6, "reward/short": 0.5}, False),  # two partial rewards
        (1.0, {"reward/right": 1.0, "reward/short": 0.0}, True),
        (-4.0, {"reward/right": 1.0, "reward/short": -5.0}, True),
        (9.0, {"reward/short": 9.0}, None),
        (1.0, {"reward/right": float("nan")}, None),
    ],
)
def test_a_run_is_solved_by_its_components_not_by_their_sum(
    reward: float, metrics: dict[str, float], solved: bool | None
) -> None:
    assert is_solved(Criterion({"reward/right": 1.0}), run_of(reward, metrics)) is solved


def test_of_several_steps_the_last_one_counts() -> None:
    steps: tuple[dict[str, Any], ...] = ({"reward/right": 1.0}, {"reward/right": 0.0})
    assert is_solved(Criterion({"reward/right": 1.0}), run_of(1.0, *steps)) is False
    assert is_solved(Criterion({"reward": 1.0}), run_of(1.0, *steps)) is True
    assert metrics_of(run_of(1.0, *steps)) == ["reward/right"]
