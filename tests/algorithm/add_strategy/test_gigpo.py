import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.strategies import INVALID, add, make, runs_of, scores

from trinity_lightning.common.experience import ExperienceError

STEP = st.tuples(st.one_of(st.none(), st.integers(-2, 2)), st.integers(0, 2))
RUN = st.tuples(st.lists(STEP, max_size=3), st.tuples(st.integers(-2, 2), st.integers(0, 2)))


def normed(values, std_norm=True, lone=False):
    values = np.asarray(values, dtype=float)
    if len(values) == 1:
        return values / (1 + 1e-6) if lone and std_norm else values * lone
    deviation = values - values.mean()
    return deviation / (values.std(ddof=1) + 1e-6) if std_norm else deviation


def oracle(runs, gamma, weight, std_norm):
    """One task's advantages, a list a run; float64, as section 4 of the paper has it."""
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
def test_scores_equal_numpy_whatever_the_order(tasks, gamma, std_norm, random):
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
def test_a_task_with_an_invalid_reward_anywhere_is_left_out(bad):
    exps = runs_of(0, [(bad, "a"), (1, "b")], [(0, "a")]) + runs_of(1, [(0, "a")], [(1, "a")])
    calls, metrics = add("gigpo", exps)
    assert {exp.eid.task for call in calls for exp in call} == {1}
    assert metrics[INVALID] == 1


def test_states_that_are_missing_or_cannot_be_compared_are_named():
    exps = runs_of(0, [(0, "a")], [(1, "a")])
    del exps[1].info["state"]
    with pytest.raises(ExperienceError, match=r"experience 1/0/1/0/\w+ has no info\['state'\].*state_key"):
        add("gigpo", exps)
    for value in (torch.ones(2), np.ones(2), object()):
        exps[1].info["state"] = [value]
        with pytest.raises(ExperienceError, match=r"experience 1/0/1/0/\w+: info\['state'\] must be text"):
            add("gigpo", exps)


def test_the_state_may_stand_under_another_key():
    exps = [make(0, run, run, info={"place": "a"}) for run in range(2)]
    _, metrics = add("gigpo", exps, state_key="place")
    assert metrics["group_advantages/repeated_state_ratio/mean"] == 1
