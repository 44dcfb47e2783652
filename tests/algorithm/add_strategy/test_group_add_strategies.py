import asyncio
import copy
import logging
import time

import pytest
import torch
from support.strategies import INVALID, ONE_WRITE_A_TASK, add, advantages, scores, step_of

from trinity_lightning.algorithm.add_strategy import (
    ADD_STRATEGY,
    AddStrategy,
    GroupAdvantageStrategy,
    GRPOAddStrategy,
    group_by,
)
from trinity_lightning.algorithm.add_strategy.add_strategy import ListWriter
from trinity_lightning.algorithm.add_strategy.baseline_add_strategies import BaselineAddStrategy
from trinity_lightning.common.experience import EID, Experience, ExperienceError

# Strategies that score rewards within a task; on_policy_distill needs none, and with a critic the trainer scores them.
GRPO_LIKE = [
    name
    for name in ADD_STRATEGY
    if issubclass(ADD_STRATEGY.get(name), GroupAdvantageStrategy) and name not in ("on_policy_distill", "critic")
]
BY_REWARD = [name for name in ADD_STRATEGY if name != "on_policy_distill"]


@pytest.mark.parametrize(
    ("name", "args", "rewards", "expected"),
    [
        ("grpo", {}, [0, 1, 2, 3], [-1.161894, -0.387298, 0.387298, 1.161894]),
        ("grpo", {}, [7], [6.999993]),
        ("opmd", {}, [0, 1, 2, 3], [-1.5, -0.5, 0.5, 1.5]),
        ("opmd", {"opmd_baseline": "logavgexp"}, [0, 1, 2, 3], [-2.053895, -1.053895, -0.053895, 0.946105]),
        ("opmd", {"opmd_baseline": "logavgexp", "tau": 0.5}, [0, 3], [-2.654665, 0.345335]),
        ("opmd", {}, [7], [7]),
        ("rloo", {}, [0, 1, 2, 3], [-2, -2 / 3, 2 / 3, 2]),
        ("reinforce", {}, [0, 1, 2, 3], [0, 1, 2, 3]),
        ("dr_grpo", {}, [0, 1, 2, 3], [-1.5, -0.5, 0.5, 1.5]),
        ("dr_grpo", {}, [7], [7]),
        ("asymre", {}, [0, 1, 2, 3], [-1.4, -0.4, 0.6, 1.6]),
        ("asymre", {"baseline_shift": 0.5}, [0, 1], [-1, 0]),
        ("asymre", {}, [2, 2], [0.1, 0.1]),
        ("asymre", {}, [7], [7]),
    ],
)
def test_scores(name, args, rewards, expected):
    (group,), _ = add(name, step_of(rewards), **args)
    assert scores(group) == pytest.approx(expected, abs=1e-6)


def test_opmd_logavgexp_tau_half():
    (group,), _ = add("opmd", step_of([0, 1, 2, 3]), opmd_baseline="logavgexp", tau=0.5)
    assert scores(group) == pytest.approx([-2.379392, -1.379392, -0.379392, 0.620608], abs=1e-6)


@pytest.mark.parametrize("name", [name for name in GRPO_LIKE if name != "asymre"])
def test_advantages_live_on_trained_tokens_and_returns_are_a_copy(name):
    exps = step_of([-1, 0, 1])
    add(name, exps)
    scale = advantages(exps[-1])[0].item()
    assert scale > 0
    for exp in exps:
        assert exp.returns is not None
        assert exp.reward is not None
        assert advantages(exp).dtype == torch.float32
        assert advantages(exp).tolist() == [exp.reward * scale, 0.0, exp.reward * scale]
        assert torch.equal(exp.returns, advantages(exp))
        assert exp.returns.data_ptr() != advantages(exp).data_ptr()


@pytest.mark.parametrize("name", ONE_WRITE_A_TASK)
def test_one_write_a_group_in_order_of_appearance(name):
    calls, metrics = add(name, step_of([0, 1], [2, 5, 1], [3, 0]))
    assert [{exp.eid.tid for exp in call} for call in calls] == [{"1/0"}, {"1/1"}, {"1/2"}]
    assert [len(call) for call in calls] == [2, 3, 2]
    assert metrics[INVALID] == 0


@pytest.mark.parametrize("name", [name for name in GRPO_LIKE if name != "reinforce_plus_plus"])
@pytest.mark.parametrize("rewards", [[[0, 1], [2, 5, 1], [4]], [[1, 1]]])
def test_groups_score_alike_one_by_one_and_together(name, rewards):
    together, alone = step_of(*rewards), step_of(*rewards)
    add(name, together)
    strategy = ADD_STRATEGY.get(name)(ListWriter())
    assert isinstance(strategy, GroupAdvantageStrategy)
    for group_id, group in strategy.group_experiences(alone).items():
        strategy.calculate_group_advantage(group_id, group)
    for a, b in zip(together, alone, strict=True):
        torch.testing.assert_close(advantages(a), advantages(b))


def test_metrics_of_grpo():
    _, metrics = add("grpo", step_of([0, 1, 2, 3], [1, 1], [5]))
    assert metrics == {
        "group_advantages/reward_mean/mean": pytest.approx((1.5 + 1 + 0) / 3),
        "group_advantages/reward_mean/max": 1.5,
        "group_advantages/reward_mean/min": 0.0,
        "group_advantages/reward_std/mean": pytest.approx((1.2909944487 + 0 + 1) / 3),
        "group_advantages/reward_std/max": pytest.approx(1.2909944487),
        "group_advantages/reward_std/min": 0.0,
        INVALID: 0.0,
    }


def test_metrics_of_opmd():
    _, metrics = add("opmd", step_of([0, 1, 2, 3], [5]))
    assert metrics["group_advantages/group_baseline/max"] == 1.5
    assert metrics["group_advantages/group_baseline/min"] == 0
    assert metrics["group_advantages/reward_mean/mean"] == 3.25


@pytest.mark.parametrize("name", BY_REWARD)
@pytest.mark.parametrize("bad", [None, float("nan"), float("inf"), -float("inf")])
def test_a_group_with_an_invalid_reward_is_left_out_counted_and_logged(name, bad, caplog):
    exps = step_of([0, 1], [0, bad], [3, 4])
    with caplog.at_level(logging.WARNING):
        calls, metrics = add(name, exps)
    assert {exp.eid.tid for call in calls for exp in call} >= {"1/0", "1/2"}
    assert not [exp for call in calls for exp in call if exp.eid.task == 1 or exp.reward not in (0, 1, 3, 4)]
    assert metrics[INVALID] == 1
    assert "1/1" in caplog.text
    assert all(exp.advantages is None for exp in exps if exp.eid.task == 1)


@pytest.mark.parametrize("name", ["grpo", "critic"])
def test_a_single_group_with_an_invalid_reward_is_refused(name):
    strategy = ADD_STRATEGY.get(name)(ListWriter())
    assert isinstance(strategy, GroupAdvantageStrategy)
    with pytest.raises(ExperienceError, match="1/0/1"):
        strategy.calculate_group_advantage("1/0", step_of([0, None]))


@pytest.mark.parametrize("name", BY_REWARD)
def test_nothing_valid_writes_nothing(name):
    calls, metrics = add(name, step_of([None, 1]))
    assert calls == []
    assert metrics[INVALID] == 1
    assert not any("reward_mean" in key for key in metrics)


@pytest.mark.parametrize("name", list(ADD_STRATEGY))
def test_empty_input(name):
    assert add(name, []) == ([], {})


@pytest.mark.parametrize("name", list(ADD_STRATEGY))
def test_dpo_pairs_are_refused_by_name(name):
    pair = Experience(eid=EID(batch=3, task=4), tokens=[1], chosen=[2], rejected=[3], reward=1.0)
    with pytest.raises(ExperienceError, match=r"3/4/0/0/\w+"):
        add(name, [*step_of([0, 1]), pair])


def test_an_invalid_group_does_not_move_the_batch_level_std():
    exps, clean = step_of([0, 1], [0, 4], [1000, float("nan")]), step_of([0, 1], [0, 4])
    add("grpo", exps, std_level="batch")
    add("grpo", clean, std_level="batch")
    assert scores([e for e in exps if e.eid.task != 2]) == scores(clean)
    std = torch.tensor([0.0, 1, 0, 4]).std().item()
    assert sorted(scores(clean)) == pytest.approx([-2 / std, -0.5 / std, 0.5 / std, 2 / std], abs=1e-5)


def test_std_threshold_drops_groups_and_counts_experiences():
    calls, metrics = add("grpo", step_of([0, 1], [2, 2, 2], [0, 0.1], [9]), std_threshold=0.1)
    assert [call[0].eid.task for call in calls] == [0]
    assert metrics["filtered_count"] == 6
    assert metrics["group_advantages/reward_mean/max"] == 2
    _, metrics = add("grpo", step_of([2, 2]), std_threshold=0.0)
    assert metrics["filtered_count"] == 2
    assert "filtered_count" not in add("grpo", step_of([2, 2]))[1]


def test_reward_variance_keeps_what_differs_and_sets_nothing():
    exps = step_of([0, 1], [0.1 + 0.2, 0.3], [5], [0, 2])
    calls, metrics = add("reward_variance", exps)
    assert [call[0].eid.task for call in calls] == [0, 3]
    assert metrics["filtered_count"] == 3
    assert metrics["add_strategy_time"] >= 0
    assert all(exp.advantages is None for exp in exps)
    calls, _ = add("reward_variance", step_of([0, 1], [0, 2]), variance_threshold=0.25)
    assert [call[0].eid.task for call in calls] == [1]


def test_dapo_is_reward_variance_by_another_name():
    exps = step_of([0, 1], [1, 1], [0, 0], [0, 2], [None, 1])
    calls, metrics = add("dapo", exps, variance_threshold=0.1)
    same_calls, same_metrics = add("reward_variance", exps, variance_threshold=0.1)
    assert calls == same_calls
    del metrics["add_strategy_time"], same_metrics["add_strategy_time"]
    assert metrics == same_metrics


def test_reinforce_plus_plus_is_whitened_over_the_tokens_of_the_step():
    exps = step_of([0, 1], [0, 4])
    exps[0].action_mask = torch.tensor([True, True, True])
    add("reinforce_plus_plus", exps)
    tokens = torch.cat([advantages(exp)[exp.action_mask] for exp in exps])
    assert len(tokens) == 9
    assert tokens.mean().item() == pytest.approx(0, abs=1e-6)
    assert tokens.std().item() == pytest.approx(1, abs=1e-6)


def test_a_subclass_may_define_the_advantage_of_a_group_itself():
    class Halved(BaselineAddStrategy):
        def calculate_group_advantage(self, group_id, exps):
            exps, metrics = super().calculate_group_advantage(group_id, exps)
            for exp in exps:
                exp.advantages = advantages(exp) / 2
            return exps[:2], {"size": float(len(exps)), **metrics}

    writer = ListWriter()
    exps = step_of([0, 1, 2, 3], [0, 1])
    count, metrics = asyncio.run(Halved(writer).add(exps, 1))
    assert (count, [len(call) for call in writer.calls]) == (4, [2, 2])
    assert scores(exps) == [0, 0, 0.5, 0.5, 1, 1.5]
    assert metrics["group_advantages/size/mean"] == 3


def test_base_classes_are_abstract_and_group_by_is_re_exported():
    assert AddStrategy.__abstractmethods__ == {"add"}
    assert {"group_experiences", "calculate_group_advantage"} <= GroupAdvantageStrategy.__abstractmethods__
    assert list(group_by(step_of([0], [1]), "task")) == ["1/0", "1/1"]


def seconds_for(count):
    """Seconds of this process to weigh so many experiences, in groups of 8."""
    template = step_of([0.0])[0]
    exps = []
    for i in range(count):
        exp = copy.copy(template)
        exp.eid, exp.reward = EID(1, i // 8, i % 8, 0, "s"), float(i % 3)
        exps.append(exp)
    writer = ListWriter()
    start = time.process_time()
    written, _ = asyncio.run(GRPOAddStrategy(writer).add(exps, 1))
    seconds = time.process_time() - start
    assert written == count
    assert len(writer.calls) == count // 8
    return seconds


@pytest.mark.slow
def test_the_time_grows_with_the_step_and_not_with_its_square():
    seconds_for(64)  # the first call warms up
    assert seconds_for(32_768) < 30 * seconds_for(4_096)
