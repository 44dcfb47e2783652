"""Filters by reward and by correctness."""

import logging
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.errors import refuses
from support.operators import make, rewards, run, step_of

from trinity_lightning.common.experience import ExperienceError, group_by

NAN, INF = float("nan"), float("inf")
STEPS = st.lists(
    st.lists(st.one_of(st.none(), st.sampled_from([NAN, 0.0, 0.3, 0.1 + 0.2, 1.0])), min_size=1, max_size=4), max_size=5
)


def test_reward_filter_keeps_what_reaches_the_threshold():
    exps = step_of([0.5, None, NAN, 0.49, 1.0, INF, -INF])
    passed, metrics = run("reward_filter", exps, threshold=0.5)
    assert rewards(passed) == [0.5, 1.0, INF]
    assert metrics == {"filtered_count": 4}
    assert rewards(run("reward_filter", step_of([-1, 0, 1]))[0]) == [0, 1]


def test_invalid_reward_filter():
    exps = step_of([0.5, None, NAN, INF, -INF, -2.0])
    passed, metrics = run("invalid_reward_filter", exps)
    assert rewards(passed) == [0.5, -2.0]
    assert metrics == {"filtered_count": 4}


def test_reward_std_filter_drops_what_does_not_differ():
    exps = step_of([0, 1], [1, 1, 1], [5], [0.1 + 0.2, 0.3], [None, 1], [0, NAN], [0, 2])
    passed, metrics = run("reward_std_filter", exps)
    assert list(group_by(passed, "task")) == ["1/0", "1/6"]
    assert metrics == {"filtered_count": 10}
    passed, _ = run("reward_std_filter", step_of([0, 1], [0, 2]), threshold=0.5)
    assert list(group_by(passed, "task")) == ["1/1"]


@settings(deadline=None)
@given(STEPS, st.sampled_from([0.0, 0.2]), st.randoms())
def test_reward_std_filter_equals_the_definition_whatever_the_order(groups, threshold, random):
    exps = step_of(*groups)
    random.shuffle(exps)
    passed, metrics = run("reward_std_filter", exps, threshold=threshold)
    good = {
        task
        for task, values in enumerate(groups)
        if len(values) > 1
        and all(v is not None and v == v for v in values)
        and statistics.pstdev([v for v in values if v is not None]) > max(threshold, 1e-9)
    }
    assert passed == [exp for exp in exps if exp.eid.task in good]
    assert metrics == {"filtered_count": len(exps) - len(passed)}


def graded(*groups, key="accuracy"):
    """Groups of metrics; None: the experience has no such metric, but a reward of 1."""
    return [
        make(task, i, 1.0, metrics={} if value is None else {key: value})
        for task, values in enumerate(groups)
        for i, value in enumerate(values)
    ]


def test_dynamic_sampling_keeps_groups_that_are_neither_right_nor_wrong():
    exps = graded([0.0, 1.0], [1.0, 1.0, 0.5], [0.0, 0.0], [0.0, None], [1.0])
    passed, metrics = run("dapo_dynamic_sampling", exps)
    assert list(group_by(passed, "task")) == ["1/0", "1/3"]
    assert metrics == {"filtered_count": 6, "dropped_all_correct": 4, "dropped_all_wrong": 2}


def test_dynamic_sampling_takes_another_metric_and_threshold():
    exps = graded([0.4, 0.6], [0.6, 0.7], key="f1")
    passed, metrics = run("dapo_dynamic_sampling", exps, metric_key="f1", correct_threshold=0.5)
    assert list(group_by(passed, "task")) == ["1/0"]
    assert metrics["dropped_all_correct"] == 2
    with refuses("operators.dapo_dynamic_sampling.args.correct_threshold"):
        run("dapo_dynamic_sampling", exps, correct_threshold=NAN)


def test_dynamic_sampling_without_anything_to_tell_by_is_an_error():
    exps = [make(0, 0), make(0, 1, None)]
    with pytest.raises(ExperienceError, match=r"experience 1/0/1/0/\w+ has neither metrics\['accuracy'\] nor a reward"):
        run("dapo_dynamic_sampling", exps)


def test_dynamic_sampling_leaves_out_values_that_are_no_finite_numbers(caplog):
    exps = step_of([0, NAN], [0, 1], [INF, 0])
    with caplog.at_level(logging.WARNING):
        passed, metrics = run("dapo_dynamic_sampling", exps)
    assert list(group_by(passed, "task")) == ["1/1"]
    assert metrics == {"filtered_count": 4, "dropped_all_correct": 0, "dropped_all_wrong": 0}
    assert "1/0, 1/2" in caplog.text
