"""One equivalence class: the layout, the cut, the order of rows and the number of processes change no step of training.

Eight steps each, of all weights and of adapters, in float32. Weights are never set equal again in between: a
difference in rounding stays in all later steps.
"""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from support.equivalence import OFFLINE, POLICIES, ROLLOUTS, TOGETHER, WAYS, Way, on_dataset, trajectory
from support.replicas import assert_same, start
from support.runs import Commands

pytestmark = pytest.mark.slow

alone = cache(lambda policy: trajectory(policy, Way()))
alone_on_dataset = cache(lambda loss: on_dataset(loss, Way()))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, run_train: Commands) -> list[dict[str, dict[str, Any]]]:
    """Results of two processes for all cases, by rank and strategy."""
    folder: Path = tmp_path_factory.mktemp("equivalence")
    return start(folder, run_train, program="support.equivalence")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("way", WAYS)
def test_layout_cut_and_order_change_no_step(policy: str, way: Way) -> None:
    assert_same(trajectory(policy, way), alone(policy))


@pytest.mark.parametrize(("kind", "case"), [pair for pair in TOGETHER if pair[1] in ROLLOUTS])
def test_two_processes_take_the_same_steps(results: list[dict[str, dict[str, Any]]], kind: str, case: str) -> None:
    policy, _ = ROLLOUTS[case]
    for result in results:
        assert_same(result[kind][case], alone(policy))


@pytest.mark.parametrize(("kind", "case"), [pair for pair in TOGETHER if pair[1] in OFFLINE])
def test_two_processes_learn_from_a_dataset_as_one(
    results: list[dict[str, dict[str, Any]]], kind: str, case: str
) -> None:
    loss, _ = OFFLINE[case]
    one = alone_on_dataset(loss)
    for result in results:
        assert_same(result[kind][case], one)
    shares = [result[kind][case]["rows"] for result in results]
    assert shares[1][0] == []  # one row, or one pair, is of one process
    for every, *shared in zip(one["rows"], *shares, strict=True):
        micro_batches = [rows for share in shared for rows in share]
        assert sorted(row for rows in micro_batches for row in rows) == sorted(row for rows in every for row in rows)
        if loss == "dpo":
            assert all({row ^ 1 for row in rows} == set(rows) for rows in micro_batches)
