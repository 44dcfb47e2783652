"""Alerts: each fires on the metrics of a run that went wrong, once, and none on those of runs that did not."""

import csv
import math
from collections.abc import Iterable, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiers import examples

from trinity_lightning.monitor.alerts import Alerts

# Metrics that alerts look at, step by step: of recipes on the tiny model, as benchmarks/learning.py runs them, and of
# recipe=grpo with SmolLM2, in float32 and bfloat16.
RECORDED = Path(__file__).with_name("healthy_curves.csv")

Step = Mapping[str, float]


def fired(steps: Iterable[Step], alerts: Alerts | None = None) -> list[tuple[int, str]]:
    """The steps, from 1, in which alerts were given, and their titles."""
    watch = alerts or Alerts()
    return [(number, alert.title) for number, step in enumerate(steps, 1) for alert in watch.check(step)]


def rollouts(
    reward: float, std: float = 0.4, silent: float = 0.2, tasks: float = 16, **more: float
) -> dict[str, float]:
    step = {"reward/mean": reward, "reward/std": std, "rollout/tasks": tasks, "frac_reward_zero_std": silent}
    return step | more


def trained(difference: float, lag: float = 0.0, lr: float = 1e-5) -> dict[str, float]:
    return {"actor/logprob_diff/mean": difference, "sample/lag/mean": lag, "actor/lr": lr}


# -- healthy runs ------------------------------------------------------------------------------------------------------


def recorded() -> dict[str, list[Step]]:
    with RECORDED.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {
        run: [{name: float(cell) for name, cell in row.items() if name != "run" and cell} for row in steps]
        for run, steps in groupby(rows, key=lambda row: row["run"])
    }


@pytest.mark.parametrize("run", recorded())
def test_no_alert_on_a_recorded_run_that_learned(run: str) -> None:
    steps = recorded()[run]
    assert len(steps) >= 12
    assert fired(steps) == []


@given(
    seed=st.integers(0, 2**32 - 1),
    tasks=st.sampled_from([1, 2, 8, 64]),
    runs=st.sampled_from([2, 8]),
    begin=st.floats(0.05, 0.6),
    gain=st.floats(0.0, 0.35),
    scale=st.sampled_from([0.01, 1.0, 100.0]),
    offset=st.sampled_from([-1.0, 0.0, 1.0]),
    lag=st.sampled_from([1, 4]),
)
@settings(max_examples=examples(30), deadline=None)
def test_no_alert_on_the_noise_of_small_batches(
    seed: int, tasks: int, runs: int, begin: float, gain: float, scale: float, offset: float, lag: int
) -> None:
    """Rewards of 0 or 1 by chance, of tasks of different difficulty, scaled; differences grow with the lag."""
    draw, steps = np.random.default_rng(seed), []
    for number in range(150):
        mean = begin + gain * (1 - math.exp(-number / 50))
        rates = draw.beta(4 * mean, 4 * (1 - mean), tasks)
        rewards = scale * ((draw.random((tasks, runs)) < rates[:, None]) + offset)
        age = number % lag
        step = rollouts(rewards.mean(), rewards.std(), (rewards.std(axis=1) == 0).mean(), tasks)
        lr = 1e-5 * min(number / 10, (149 - number) / 100)  # 0 in the first step and the last
        steps.append(step | trained((0.01 + 0.05 * age) * min(draw.lognormal(0, 0.5), 5.0), age, lr))
    silent = float(np.mean([step["frac_reward_zero_std"] for step in steps]))
    true = ["groups have no signal"] if silent > 0.8 else []  # of pairs of rollouts of hard tasks, say
    assert [title for _, title in fired(steps) if title not in true] == []


def test_a_run_that_has_solved_its_tasks_is_healthy() -> None:
    learned = [rollouts(0.1 + 0.08 * number) for number in range(11)]
    assert fired([*learned, *[rollouts(1.0, std=0.0, silent=1.0)] * 50]) == []


def drawn(rates: Iterable[float], seed: int, tasks: int = 16, runs: int = 8) -> list[Step]:
    """Steps whose rewards are 0 or 1 by chance, at these mean rates, of tasks of different difficulty."""
    draw, steps = np.random.default_rng(seed), []
    for mean in rates:
        of_tasks = draw.beta(4 * mean, 4 * (1 - mean), tasks) if 0 < mean < 1 else np.full(tasks, mean)
        rewards = (draw.random((tasks, runs)) < of_tasks[:, None]).astype(float)
        steps.append(rollouts(rewards.mean(), rewards.std(), (rewards.std(axis=1) == 0).mean(), tasks))
    return steps


@pytest.mark.parametrize("seed", range(5))
def test_rare_rewards_after_a_long_time_without_any_are_no_collapse(seed: int) -> None:
    steps = drawn([0.0] * 400 + [0.04] * 100, seed)
    assert fired(steps) == [(5, "groups have no signal")]


@pytest.mark.parametrize("seed", range(5))
def test_a_run_that_began_well_and_learned_the_rest_is_healthy(seed: int) -> None:
    assert fired(drawn([*np.linspace(0.6, 1, 40), *[1.0] * 100], seed)) == []


@pytest.mark.parametrize("signal", ["group_advantages/reverse_kl/mean", "critic/lr"])
def test_a_teacher_or_a_critic_teaches_groups_with_equal_rewards(signal: str) -> None:
    assert fired([rollouts(0.0, std=0.0, silent=1.0) | {signal: 0.1}] * 40) == []


def test_a_dip_is_no_collapse() -> None:
    """As recipe=grpo had one in float32: 0.98 at step 21, and 0.48 at step 24."""
    curve = [
        0.14,
        0.27,
        0.42,
        0.42,
        0.52,
        0.63,
        0.56,
        0.56,
        0.63,
        0.81,
        0.86,
        0.77,
        0.8,
        0.9,
        0.95,
        0.98,
        0.9,
        0.7,
        0.48,
    ]
    assert fired([rollouts(reward, tasks=8) for reward in curve]) == []


# -- rewards -----------------------------------------------------------------------------------------------------------

# A run whose reward function broke at step 15, as it was printed.
BROKEN = [0.10, 0.12, 0.12, 0.16, 0.20, 0.25, 0.32, 0.36, 0.40, 0.52, 0.61, 0.70, 0.75, 0.81]


def test_a_collapse_is_told_in_the_third_step_and_the_lack_of_signal_in_the_fifth() -> None:
    steps = [rollouts(reward, std=0.15, silent=0.0) for reward in BROKEN]
    steps += [rollouts(0.0, std=0.0, silent=1.0)] * 8
    assert fired(steps) == [(17, "the reward collapsed"), (19, "groups have no signal")]


def test_a_run_that_loses_what_it_could_at_the_start_has_collapsed_too() -> None:
    assert fired([rollouts(0.8)] * 10 + [rollouts(0.1)] * 10) == [(13, "the reward collapsed")]


@pytest.mark.parametrize("reward", [0.0, 1.0])  # too hard, too easy
def test_groups_that_never_had_a_signal_are_told_once_there_are_enough(reward: float) -> None:
    assert fired([rollouts(reward, std=0.0, silent=1.0, tasks=4)] * 40) == [(16, "groups have no signal")]


def test_single_rollouts_have_no_groups_to_judge() -> None:
    steps = [{name: value for name, value in rollouts(0.5).items() if name != "frac_reward_zero_std"}] * 20
    assert fired(steps) == []


def test_a_step_without_a_reward_changes_nothing() -> None:
    watch = Alerts()
    assert fired([{}, rollouts(math.nan), rollouts(0.5, tasks=0.0)], watch) == []
    assert watch == Alerts()


# -- engine and trainer ------------------------------------------------------------------------------------------------


def test_an_engine_that_stops_to_take_weights_is_told_in_the_second_step() -> None:
    """The differences of a run of the tiny model whose engine said that it had taken weights, and had not."""
    steps = [trained(7e-8)] * 9 + [trained(difference) for difference in (0.109, 0.222, 0.314, 0.466)]
    assert fired(steps) == [(11, "the log-probability difference jumped")]


def test_one_high_difference_is_no_jump() -> None:
    steps = ([trained(0.01)] * 10 + [trained(0.5)]) * 5
    assert fired(steps) == []


def test_older_weights_differ_more_without_an_alert() -> None:
    """Weights are synced every third step."""
    steps = [trained(difference, lag) for _ in range(20) for lag, difference in enumerate((1e-6, 0.2, 0.4))]
    assert fired(steps) == []


def test_engine_and_trainer_that_disagree_from_the_beginning_are_told_at_once() -> None:
    assert fired([trained(3.6)] * 3) == [(1, "engine and trainer disagree")]


def test_old_weights_are_told() -> None:
    """As explorer.sync_interval=100 has them."""
    assert fired([trained(0.1, lag) for lag in range(20)]) == [(9, "rollouts are stale")]


# -- the learning rate -------------------------------------------------------------------------------------------------


def test_a_schedule_that_is_at_zero_before_the_end_is_told() -> None:
    rates = [0.0, 1e-5, 1e-5, 0.0, 0.0, 0.0]
    assert fired([trained(0.0, lr=rate) for rate in rates]) == [(5, "the learning rate is 0")]


def test_a_step_that_trained_nothing_does_not_count() -> None:
    assert fired([trained(0.0, lr=0.0), {}, {}, trained(0.0)]) == []


# -- a resumed run -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [0, 3, 16, 17, 18, 20])
def test_a_resumed_run_goes_on_as_if_nothing_had_happened(stop: int) -> None:
    steps: list[Any] = [rollouts(reward, std=0.15, silent=0.0) | trained(1e-6) for reward in BROKEN]
    steps += [rollouts(0.0, std=0.0, silent=1.0) | trained(0.3, lr=0.0)] * 8
    before, resumed = Alerts(), Alerts()
    first = fired(steps[:stop], before)
    resumed.load_state_dict(before.state_dict())
    later = [(number + stop, title) for number, title in fired(steps[stop:], resumed)]
    assert first + later == fired(steps)
    assert len(first + later) == 4


def test_a_checkpoint_of_a_version_with_other_fields_is_resumed() -> None:
    before, resumed = Alerts(), Alerts()
    fired([rollouts(0.5) | trained(0.01)] * 8, before)
    state = before.state_dict()
    state["of a later version"] = 1
    del state["was_high"]
    state["rewards"]["of a later version"] = 1
    del state["rewards"]["best_variance"]
    resumed.load_state_dict(state)
    assert (resumed.rewards.best, resumed.rewards.best_variance) == (before.rewards.best, 0.0)
    assert resumed.state_dict().keys() == before.state_dict().keys()
    assert fired([rollouts(0.5) | trained(0.01)] * 8, resumed) == []
    Alerts().load_state_dict({})
