import asyncio
import logging

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.strategies import INVALID, ListWriter, add, advantages, make, runs_of, scores

from trinity_lightning.algorithm.add_strategy import StepWiseGRPOStrategy, group_by
from trinity_lightning.common.experience import ExperienceError

NAME = "step_wise_grpo"


def test_every_step_gets_the_score_of_its_run_s_last_reward():
    exps = runs_of(0, [9, 0], [1], [None, None, 2], [5, 3])
    calls, metrics = add(NAME, exps)
    expected = [-1.161894, -0.387298, 0.387298, 1.161894]
    assert [scores(call) for call in calls] == [
        pytest.approx([score] * len(call), abs=1e-6) for score, call in zip(expected, calls, strict=True)
    ]
    assert [{exp.eid.rid for exp in call} for call in calls] == [{f"1/0/{run}"} for run in range(4)]
    assert metrics["group_advantages/reward_mean/mean"] == 1.5
    assert metrics["group_advantages/reward_std/mean"] == pytest.approx(1.2909944487)


def test_advantages_live_on_trained_tokens_and_returns_are_a_copy():
    exps = runs_of(0, [0, 0], [1])
    add(NAME, exps)
    for exp in exps:
        assert advantages(exp).dtype == torch.float32
        assert advantages(exp)[1] == 0
        assert exp.returns is not None
        assert torch.equal(exp.returns, advantages(exp))
        assert exp.returns.data_ptr() != advantages(exp).data_ptr()


def test_step_norm_divides_by_the_run_s_number_of_steps():
    exps, plain = [runs_of(0, [0, 0, 0, 0], [1, 2]) for _ in range(2)]
    add(NAME, exps, enable_step_norm=True)
    add(NAME, plain)
    lengths = [4, 4, 4, 4, 2, 2]
    assert scores(exps) == pytest.approx([score / n for score, n in zip(scores(plain), lengths, strict=True)])


def test_the_last_step_is_the_greatest_not_the_last_in_the_list():
    exps = runs_of(0, [5, 5, 0], [5, 1])
    ordered = scores_after(exps)
    assert scores_after(exps[::-1])[::-1] == ordered
    assert ordered[0] < 0 < ordered[-1]


def scores_after(exps):
    add(NAME, exps)
    return scores(exps)


TASKS = st.lists(
    st.lists(st.lists(st.integers(-3, 3), min_size=1, max_size=4), min_size=1, max_size=5), min_size=1, max_size=4
)


@settings(deadline=None)
@given(TASKS, st.booleans(), st.randoms())
def test_scores_equal_numpy_whatever_the_order(tasks, step_norm, random):
    exps = [exp for task, runs in enumerate(tasks) for exp in runs_of(task, *runs)]
    random.shuffle(exps)
    calls, _ = add(NAME, exps, enable_step_norm=step_norm)
    assert sorted(exp.eid.uid for call in calls for exp in call) == sorted(exp.eid.uid for exp in exps)
    for task, runs in enumerate(tasks):
        last = np.array([float(run[-1]) for run in runs])
        deviation = last - last.mean()
        expected = last / (1 + 1e-6) if len(last) == 1 else deviation / (last.std(ddof=1) + 1e-6)
        for run, steps in enumerate(runs):
            own = [exp for exp in exps if (exp.eid.task, exp.eid.run) == (task, run)]
            score = expected[run] / (len(steps) if step_norm else 1)
            assert scores(own) == pytest.approx([score] * len(steps), abs=1e-5)


@pytest.mark.parametrize("bad", [None, float("nan"), float("inf")])
def test_a_task_with_an_invalid_last_reward_is_left_out(bad, caplog):
    exps = runs_of(0, [0], [1, 2]) + runs_of(1, [0, bad], [1]) + runs_of(2, [bad, 1], [0])
    with caplog.at_level(logging.WARNING):
        calls, metrics = add(NAME, exps)
    assert {exp.eid.task for call in calls for exp in call} == {0, 2}
    assert metrics[INVALID] == 1
    assert "1/1" in caplog.text


def test_the_parts_work_by_themselves():
    strategy = StepWiseGRPOStrategy(ListWriter(), enable_step_norm=True)
    runs = group_by(runs_of(0, [0, 0], [1]), "run")
    found, metrics = strategy.calculate_group_advantage({run_id: exps[-1] for run_id, exps in runs.items()})
    assert found == {"1/0/0": pytest.approx(-0.707106, abs=1e-5), "1/0/1": pytest.approx(0.707106, abs=1e-5)}
    assert metrics == {"reward_mean": 0.5, "reward_std": pytest.approx(0.707106, abs=1e-5)}
    assert strategy.broadcast_advantages(runs, found) is runs
    assert scores(runs["1/0/0"]) == pytest.approx([-0.353553] * 2, abs=1e-5)
    with pytest.raises(ExperienceError, match="runs 1/0/0, 1/0/1: every reward must be a finite number"):
        strategy.calculate_group_advantage({"1/0/0": make(0, 0, None), "1/0/1": make(0, 1, 1.0)})


def test_a_lone_run_has_mean_0_and_standard_deviation_1():
    strategy = StepWiseGRPOStrategy(ListWriter())
    found, metrics = strategy.calculate_group_advantage({"run": make(0, 0, 7.0)})
    assert found == {"run": pytest.approx(6.999993, abs=1e-6)}
    assert metrics == {"reward_mean": 0.0, "reward_std": 1.0}


def test_a_subclass_may_define_the_advantage_of_a_task_itself():
    class First(StepWiseGRPOStrategy):
        def calculate_group_advantage(self, exps):
            return {run_id: float(i) for i, run_id in enumerate(exps)}, {"runs": float(len(exps))}

    writer = ListWriter()
    exps = runs_of(0, [0, 0], [1])
    count, metrics = asyncio.run(First(writer).add(exps, 1))
    assert (count, scores(exps)) == (3, [0, 0, 1])
    assert metrics["group_advantages/runs/mean"] == 2


def test_groups_whose_runs_hardly_differ_are_left_out():
    exps = runs_of(0, [0.0, 0.5], [0.5]) + runs_of(1, [0.0], [1.0]) + runs_of(2, [1.0])
    calls, metrics = add("step_wise_grpo", exps, std_threshold=0.1)
    assert [exp.eid.task for call in calls for exp in call] == [1, 1]
    assert metrics["filtered_count"] == 4
    assert "filtered_count" not in add("step_wise_grpo", [make(0, 0, 0.0)])[1]


def test_the_standard_deviation_may_be_that_of_the_batch():
    ours = runs_of(0, [0.0, 0.0], [1.0, 1.0]) + runs_of(1, [0.0, 0.0], [3.0, 3.0])
    plain = runs_of(0, [0.0], [1.0]) + runs_of(1, [0.0], [3.0])
    add("step_wise_grpo", ours, std_level="batch")
    add("grpo", plain, std_level="batch")
    assert scores(ours) == pytest.approx([score for score in scores(plain) for _ in (0, 1)])
