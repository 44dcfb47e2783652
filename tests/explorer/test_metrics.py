"""Statistics of an evaluation, against the definition (every subset of a task's rollouts), and of an explore step."""

import itertools
import statistics
from typing import Any

import pytest

from trinity_lightning.common.experience import EID, Experience
from trinity_lightning.explorer.metrics import (
    evaluation_metrics,
    expected_best,
    experience_metrics,
    pass_rates,
    rollout_metrics,
    subset_sizes,
    valid_rewards,
)


def rollout(task: int, run: int, reward: float | None, step: Any = 0, **metrics: Any) -> Experience:
    eid = EID(batch="1/held", task=task, run=run, step=step)
    return Experience(eid=eid, tokens=[1, 2], prompt_length=1, reward=reward, metrics=metrics)


def tasks(*rewards: list[float]) -> list[Experience]:
    return [rollout(task, run, value) for task, its in enumerate(rewards) for run, value in enumerate(its)]


@pytest.mark.parametrize("m", [1, 2, 3, 5, 6])
def test_the_best_of_m_is_the_mean_over_all_draws_of_m(m: int) -> None:
    values = [0.3, -1.0, 2.5, 0.3, 7.0, 0.0]
    assert expected_best(values, m) == pytest.approx(statistics.fmean(map(max, itertools.combinations(values, m))))


def test_fewer_rollouts_than_a_draw_are_all_drawn() -> None:
    assert expected_best([1.0, 3.0], 4) == 3.0


def test_draws_double_up_to_the_number_of_rollouts() -> None:
    assert [subset_sizes(k) for k in (1, 2, 3, 4, 6, 8)] == [[1], [2], [2, 3], [2, 4], [2, 4, 6], [2, 4, 8]]


def test_statistics_of_the_reward_are_means_over_tasks() -> None:
    rewards = [[1.0, 0.0, 0.5, 0.0], [0.25, 0.25, 0.25, 0.25]]
    metrics = evaluation_metrics("held", tasks(*rewards))
    assert list(metrics) == [
        f"eval/held/{name}"
        for name in ("mean@4", "std@4", "best@2", "best@4", "worst@2", "worst@4", "pass@2", "pass@4")
    ]
    assert metrics["eval/held/mean@4"] == 0.3125
    assert metrics["eval/held/std@4"] == pytest.approx(statistics.pstdev(rewards[0]) / 2)
    draws = list(itertools.combinations(rewards[0], 2))
    assert metrics["eval/held/best@2"] == pytest.approx((statistics.fmean(map(max, draws)) + 0.25) / 2)
    assert metrics["eval/held/worst@2"] == pytest.approx((statistics.fmean(map(min, draws)) + 0.25) / 2)
    assert (metrics["eval/held/best@4"], metrics["eval/held/worst@4"]) == (0.625, 0.125)
    assert metrics["eval/held/pass@2"] == pytest.approx(statistics.fmean(max(draw) >= 1 for draw in draws) / 2)
    assert metrics["eval/held/pass@4"] == 0.5


def test_every_metric_has_its_own() -> None:
    right = [True, False]
    metrics = evaluation_metrics("held", [rollout(0, run, 1.0, accuracy=value) for run, value in enumerate(right)])
    of_accuracy = {name: value for name, value in metrics.items() if "accuracy" in name}
    assert of_accuracy == {
        "eval/held/accuracy/mean@2": 0.5,
        "eval/held/accuracy/std@2": 0.5,
        "eval/held/accuracy/best@2": 1.0,
        "eval/held/accuracy/worst@2": 0.0,
    }


def test_one_rollout_has_no_spread() -> None:
    metrics = evaluation_metrics("held", [rollout(0, 0, 0.5, accuracy=1.0)])
    of_reward = {"eval/held/mean@1": 0.5, "eval/held/best@1": 0.5, "eval/held/worst@1": 0.5, "eval/held/pass@1": 0.0}
    assert metrics == of_reward | {"eval/held/accuracy/mean@1": 1.0}


def test_the_worst_of_nothing_but_zeros_is_zero_without_a_sign() -> None:
    assert str(evaluation_metrics("held", [rollout(0, 0, 0.0)])["eval/held/worst@1"]) == "0.0"


def test_a_rollout_of_several_steps_counts_once() -> None:
    long = [rollout(0, 0, 1.0, step, tool_calls=2.0) for step in range(3)]
    metrics = evaluation_metrics("held", [*long, rollout(0, 1, 0.0, tool_calls=0.0)])
    assert metrics["eval/held/mean@2"] == 0.5
    assert metrics["eval/held/tool_calls/mean@2"] == 1.0


def test_a_rollout_of_several_steps_is_worth_what_training_takes_it_for() -> None:
    steps = [rollout(0, 0, reward, step) for step, reward in enumerate([0.0, 0.0, 1.0])]
    metrics = evaluation_metrics("held", steps)
    assert metrics["eval/held/mean@1"] == metrics["eval/held/pass@1"] == experience_metrics(steps)["reward/mean"] == 1.0


def test_lost_rollouts_and_values_that_are_no_numbers_are_left_out() -> None:
    lost = tasks([1.0, 0.0, 0.5], [0.25], [float("nan")])
    metrics = evaluation_metrics("held", lost)
    assert metrics["eval/held/mean@3"] == 0.375
    assert (metrics["eval/held/best@3"], metrics["eval/held/worst@3"]) == (0.625, 0.125)
    assert metrics["eval/held/pass@3"] == 0.5
    unrewarded = [rollout(0, 0, None, accuracy=float("inf")), rollout(0, 1, None, accuracy=1.0)]
    assert evaluation_metrics("held", unrewarded) == {"eval/held/accuracy/mean@1": 1.0}
    assert evaluation_metrics("held", []) == {}


# -- of an explore step ----------------------------------------------------------------------------------------------


def an_experience(task: int, reward: float | None, length: int = 2, **fields: Any) -> Experience:
    return Experience(eid=EID(batch=1, task=task), tokens=[1] * (3 + length), prompt_length=3, reward=reward, **fields)


def test_experience_metrics() -> None:
    metrics = experience_metrics(
        [
            an_experience(0, 1.0, 2, metrics={"reward/format": 1.0, "reward/verdict": "good"}),
            an_experience(0, 0.0, 4, truncate_status="response_truncated", metrics={"reward/format": 0.0}),
            an_experience(1, 0.5, 6, info={"model_version": 4}),
            an_experience(1, None, 4),
            an_experience(2, float("nan"), 4),
        ]
    )
    assert metrics["reward/mean"] == 0.5
    assert metrics["reward/std"] == pytest.approx((1 / 6) ** 0.5)
    assert metrics["frac_reward_zero_std"] == pytest.approx(2 / 3)
    assert metrics["reward/format/mean"] == 0.5
    assert "reward/verdict/mean" not in metrics  # it is no number
    assert metrics["response_length/clip_ratio"] == 0.2
    assert [metrics[f"response_length/{name}"] for name in ("mean", "max", "min")] == [4.0, 6.0, 2.0]
    assert metrics["prompt_length/mean"] == 3.0
    assert metrics["sample/model_version/mean"] == 0.8


def test_what_the_environment_wrote_is_no_length_and_no_throughput() -> None:
    turns = an_experience(0, 1.0, 5, action_mask=[True, True, False, False, True])
    metrics = rollout_metrics([], [turns, an_experience(0, 0.0, 2)], tasks=1, seconds=0.5)
    assert [metrics[f"response_length/{name}"] for name in ("mean", "max", "min")] == [2.5, 3.0, 2.0]
    assert metrics["rollout/tokens_per_second"] == 10.0


def test_a_run_of_several_steps_counts_once() -> None:
    """Five calls that failed and one that succeeded are two runs: a mean of 0.5 in one group, whose rewards differ."""
    steps = [(0, step, 0.0) for step in range(5)] + [(1, 0, 1.0)]
    experiences = [
        Experience(
            eid=EID(batch=1, task=0, run=run, step=step),
            tokens=[1, 2, 3],
            prompt_length=1,
            reward=reward,
            info={"task_index": {"taskset_id": "sums", "index": 7}},
        )
        for run, step, reward in steps
    ]
    metrics = experience_metrics(experiences)
    assert (metrics["reward/mean"], metrics["reward/std"], metrics["frac_reward_zero_std"]) == (0.5, 0.5, 0.0)
    assert valid_rewards(experiences) == {"1/0": [0.0, 1.0]}
    assert pass_rates(experiences) == {"sums": {7: (0.5, 2)}}
    assert "frac_reward_zero_std" not in experience_metrics(experiences[:5])  # one run is equal to nothing


def test_metrics_without_a_reward_have_no_mean() -> None:
    metrics = experience_metrics([an_experience(0, None), an_experience(0, None)])
    assert "reward/mean" not in metrics
    assert metrics["frac_reward_zero_std"] == 1.0


# -- what is solved ----------------------------------------------------------------------------------------------------


def scored(task: int, run: int, **components: float) -> Experience:
    """A rollout whose reward is the sum of these components."""
    metrics = {f"reward/{name}": value for name, value in components.items()}
    return rollout(task, run, sum(components.values()), **metrics)


PARTIAL = [scored(0, 0, right=0.6, short=0.5), scored(0, 1, right=0.0, short=0.5)]
SOLVED = [scored(1, 0, right=1.0, short=-2.0), scored(1, 1, right=0.0, short=1.5)]


def test_pass_at_k_counts_the_named_component() -> None:
    metrics = evaluation_metrics("held", [*PARTIAL, *SOLVED], {"right": 1.0})
    assert metrics["eval/held/pass@2"] == 0.5
    assert evaluation_metrics("held", [*PARTIAL, *SOLVED], {"right": 0.5, "short": 0.5})["eval/held/pass@2"] == 0.5
    assert evaluation_metrics("held", [*PARTIAL, *SOLVED], {"short": 0.5})["eval/held/pass@2"] == 1.0


def test_with_several_components_and_no_criterion_there_is_no_pass_at_k() -> None:
    metrics = evaluation_metrics("held", [*PARTIAL, *SOLVED])
    assert not [name for name in metrics if "pass@" in name]
    assert metrics["eval/held/mean@2"] == pytest.approx((0.8 + 0.25) / 2)


def test_a_weight_does_not_change_what_is_solved() -> None:
    halved = [rollout(0, 0, 0.5, **{"reward/math": 1.0}), rollout(0, 1, 0.0, **{"reward/math": 0.0})]
    doubled = [rollout(0, 0, 2.0, **{"reward/math": 1.0}), rollout(0, 1, 1.0, **{"reward/math": 0.5})]
    assert evaluation_metrics("held", halved)["eval/held/pass@2"] == 1.0
    assert evaluation_metrics("held", doubled[1:])["eval/held/pass@1"] == 0.0


def of_task(index: int, *experiences: Experience) -> list[Experience]:
    for experience in experiences:
        experience.info = {"task_index": {"taskset_id": "sums", "index": index}}
    return list(experiences)


def test_rates_for_the_order_by_difficulty_follow_the_criterion() -> None:
    tried = of_task(0, *PARTIAL) + of_task(1, *SOLVED)
    assert pass_rates(tried, {"right": 1.0})["sums"] == {0: (0.0, 2), 1: (0.5, 2)}
    assert pass_rates(tried)["sums"][0] == (pytest.approx(0.8), 2)  # nothing says what is solved: the mean reward


def test_the_only_component_counts_in_part_and_before_its_weight() -> None:
    tried = of_task(3, rollout(3, 0, 0.1, **{"reward/digits": 0.2}), rollout(3, 1, 0.4, **{"reward/digits": 0.8}))
    assert pass_rates(tried)["sums"] == {3: (0.5, 2)}
    assert pass_rates(tried, {"digits": 0.8})["sums"] == {3: (0.5, 2)}
    assert pass_rates(tried, {"digits": 0.2})["sums"] == {3: (1.0, 2)}
