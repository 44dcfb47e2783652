"""Strategies for runs of several steps: step-wise GRPO, and GiGPO."""

import asyncio
import logging

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.strategies import INVALID, add, advantages, make, runs_of, scores

from trinity_lightning.algorithm.add_strategy import StepWiseGRPOStrategy, group_by
from trinity_lightning.algorithm.add_strategy.add_strategy import ListWriter
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
            of_run = [exp for exp in exps if (exp.eid.task, exp.eid.run) == (task, run)]
            score = expected[run] / (len(steps) if step_norm else 1)
            assert scores(of_run) == pytest.approx([score] * len(steps), abs=1e-5)


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
    by_run, metrics = strategy.calculate_group_advantage({run_id: exps[-1] for run_id, exps in runs.items()})
    assert by_run == {"1/0/0": pytest.approx(-0.707106, abs=1e-5), "1/0/1": pytest.approx(0.707106, abs=1e-5)}
    assert metrics == {"reward_mean": 0.5, "reward_std": pytest.approx(0.707106, abs=1e-5)}
    assert strategy.broadcast_advantages(runs, by_run) is runs
    assert scores(runs["1/0/0"]) == pytest.approx([-0.353553] * 2, abs=1e-5)
    with pytest.raises(ExperienceError, match="1/0/0, 1/0/1"):
        strategy.calculate_group_advantage({"1/0/0": make(0, 0, None), "1/0/1": make(0, 1, 1.0)})


def test_a_lone_run_has_mean_0_and_standard_deviation_1():
    strategy = StepWiseGRPOStrategy(ListWriter())
    by_run, metrics = strategy.calculate_group_advantage({"run": make(0, 0, 7.0)})
    assert by_run == {"run": pytest.approx(6.999993, abs=1e-6)}
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
    long = runs_of(0, [0.0, 0.0], [1.0, 1.0]) + runs_of(1, [0.0, 0.0], [3.0, 3.0])
    plain = runs_of(0, [0.0], [1.0]) + runs_of(1, [0.0], [3.0])
    add("step_wise_grpo", long, std_level="batch")
    add("grpo", plain, std_level="batch")
    assert scores(long) == pytest.approx([score for score in scores(plain) for _ in (0, 1)])


def test_experiences_whose_run_is_not_known_are_runs_of_their_own():
    """A workflow of one's own sets no run: their steps are equal, and the steps of one run would differ."""
    exps, plain = ([make(0, 0, reward) for reward in (0.0, 1.0, 0.0, 1.0)] for _ in range(2))
    calls, metrics = add(NAME, exps)
    add("grpo", plain)
    assert [len(call) for call in calls] == [1] * 4
    assert scores(exps) == pytest.approx(scores(plain))
    assert metrics["group_advantages/reward_mean/mean"] == 0.5


def test_runs_that_are_known_stay_runs_beside_unknown_ones():
    known, unknown = runs_of(0, [None, 1.0]), [make(0, 1, 0.0), make(0, 1, 0.5)]
    calls, _ = add(NAME, known + unknown)
    assert [len(call) for call in calls] == [2, 1, 1]
    assert scores(known + unknown) == pytest.approx([1, 1, -1, 0], abs=1e-5)


# -- GiGPO -------------------------------------------------------------------------------------------------------------


STEP = st.tuples(st.one_of(st.none(), st.integers(-2, 2)), st.integers(0, 2))
RUN = st.tuples(st.lists(STEP, max_size=3), st.tuples(st.integers(-2, 2), st.integers(0, 2)))


def normed(values, std_norm=True, lone=False):
    values = np.asarray(values, dtype=float)
    if len(values) == 1:
        return values / (1 + 1e-6) if lone and std_norm else values * lone
    deviation = values - values.mean()
    return deviation / (values.std(ddof=1) + 1e-6) if std_norm else deviation


def oracle(runs, gamma, weight, std_norm):
    """One task's advantages, all runs in a row; float64, by section 4 of the paper."""
    totals = [sum(reward or 0 for reward, _ in run) for run in runs]
    of_runs = normed(totals, std_norm, lone=True)
    returns = [
        [sum(gamma ** (k - t) * (run[k][0] or 0) for k in range(t, len(run))) for t in range(len(run))] for run in runs
    ]
    out = [[of_runs[i]] * len(run) for i, run in enumerate(runs)]
    for state in {state for run in runs for _, state in run}:
        places = [(i, t) for i, run in enumerate(runs) for t, step in enumerate(run) if step[1] == state]
        for (i, t), value in zip(places, normed([returns[i][t] for i, t in places], std_norm), strict=True):
            out[i][t] += weight * value
    return [value for run in out for value in run]


@pytest.mark.slow
@settings(deadline=None)
@given(
    st.lists(st.lists(RUN, min_size=1, max_size=4), min_size=1, max_size=3),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.booleans(),
    st.randoms(),
)
def test_gigpo_equals_numpy_whatever_the_order(tasks, gamma, std_norm, random):
    tasks = [[[*steps, last] for steps, last in runs] for runs in tasks]
    exps = [exp for task, runs in enumerate(tasks) for exp in runs_of(task, *runs)]
    shuffled = random.sample(exps, len(exps))
    add("gigpo", shuffled, gamma=gamma, step_weight=0.7, std_norm=std_norm)
    expected = [value for runs in tasks for value in oracle(runs, gamma, 0.7, std_norm)]
    assert scores(exps) == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_actions_from_the_same_state_are_weighed_apart():
    """Both runs succeed; the one that turned the right way at once is worth more at the state they share."""
    exps = runs_of(0, [(0, "hall"), (1, "door")], [(0, "hall"), (0, "cellar"), (1, "hall")])
    calls, metrics = add("gigpo", exps, gamma=0.5)
    assert [len(call) for call in calls] == [2, 3]
    fast, door, slow, cellar, back = scores(exps)
    assert slow < fast < back
    assert door == cellar == 0
    assert metrics["group_advantages/repeated_state_ratio/mean"] == pytest.approx(3 / 5)


def test_without_repeated_states_it_is_step_wise_grpo():
    exps, other = [runs_of(0, [(0, "a"), (1, "b")], [(None, "c"), (3, "d")], [(0, "e")]) for _ in range(2)]
    _, metrics = add("gigpo", exps)
    _, expected = add("step_wise_grpo", other)
    assert scores(exps) == pytest.approx(scores(other))
    assert metrics.items() >= expected.items()


def test_gigpo_takes_experiences_whose_run_is_not_known_for_runs_of_one_step():
    unknown, known = [make(0, 0, 0.0), make(0, 0, 1.0)], [make(0, 0, 0.0), make(0, 1, 1.0)]
    add("gigpo", unknown)
    add("gigpo", known)
    assert scores(unknown) == scores(known)


def test_the_same_state_of_another_task_is_another_state():
    exps = runs_of(0, [(0, "a")], [(1, "b")]) + runs_of(1, [(5, "a")], [(7, "b")])
    _, metrics = add("gigpo", exps)
    assert metrics["group_advantages/repeated_state_ratio/max"] == 0


@pytest.mark.parametrize(
    ("state", "same", "other"),
    [
        ([1, [2, "x"]], (1, (2, "x")), [1, [2, "y"]]),
        ({"a": 1, "b": [2]}, {"b": [2], "a": 1}, {"a": 1, "b": [3]}),
        (None, None, 0),
    ],
)
def test_states_are_compared_by_value(state, same, other):
    exps = runs_of(0, [(0, state)], [(1, same)], [(2, other)])
    _, metrics = add("gigpo", exps)
    assert metrics["group_advantages/repeated_state_ratio/mean"] == pytest.approx(2 / 3)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_gigpo_leaves_out_a_task_with_an_invalid_reward_anywhere(bad):
    exps = runs_of(0, [(bad, "a"), (1, "b")], [(0, "a")]) + runs_of(1, [(0, "a")], [(1, "a")])
    calls, metrics = add("gigpo", exps)
    assert {exp.eid.task for call in calls for exp in call} == {1}
    assert metrics[INVALID] == 1


def test_states_that_are_missing_or_cannot_be_compared_are_named():
    exps = runs_of(0, [(0, "a")], [(1, "a")])
    del exps[1].info["state"]
    with pytest.raises(ExperienceError, match=r"1/0/1/0/\w+ .*info\['state'\]"):
        add("gigpo", exps)
    for value in (torch.ones(2), np.ones(2), object()):
        exps[1].info["state"] = [value]
        with pytest.raises(ExperienceError, match=r"1/0/1/0/\w+.*info\['state'\]"):
            add("gigpo", exps)


def test_the_state_may_stand_under_another_key():
    exps = [make(0, run, run, info={"place": "a"}) for run in range(2)]
    _, metrics = add("gigpo", exps, state_key="place")
    assert metrics["group_advantages/repeated_state_ratio/mean"] == 1
