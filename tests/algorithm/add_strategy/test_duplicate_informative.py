from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.strategies import INVALID, add, make, step_of

from trinity_lightning.common.experience import group_by

NAME = "duplicate_informative"


def content(exp):
    return exp.eid.run, exp.eid.step, exp.reward


def test_numbers_to_meet():
    (written,), metrics = add(NAME, step_of([0, 1], [1, 0], [0.5, 0.5]))
    assert len(written) == 6
    assert (metrics["filtered_count"], metrics["duplicated_count"]) == (2, 2)
    (written,), metrics = add(NAME, step_of(*[[0, 1, 0, 1, 0]] * 2, *[[1.0] * 5] * 4))
    assert len(written) == 30
    assert (metrics["filtered_count"], metrics["duplicated_count"]) == (20, 20)


def test_nothing_informative_writes_nothing():
    calls, metrics = add(NAME, step_of([1, 1], [0.1 + 0.2, 0.3], [4]))
    assert calls == []
    assert (metrics["filtered_count"], metrics["duplicated_count"], metrics[INVALID]) == (5, 0, 0)
    assert metrics["add_strategy_time"] >= 0


GROUPS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=4), min_size=1, max_size=6)


@settings(deadline=None)
@given(GROUPS, st.integers(0, 3), st.booleans())
def test_whole_groups_are_copied_evenly_up_to_the_count_that_came(groups, seed, text_tasks):
    exps = step_of(*groups)
    if text_tasks:
        for exp in exps:
            exp.eid.task = f"task{exp.eid.task}"
    informative = {tid: group for tid, group in group_by(exps, "task").items() if len({e.reward for e in group}) > 1}
    calls, metrics = add(NAME, exps, seed=seed)
    if not informative:
        assert calls == []
        return
    (written,) = calls
    largest = max(map(len, informative.values()))
    assert len(exps) <= len(written) < len(exps) + largest
    originals = [exp for group in informative.values() for exp in group]
    assert all(a is b for a, b in zip(written, originals, strict=False))
    copies = group_by(written[len(originals) :], "task")
    assert not set(copies) & {exp.eid.tid for exp in exps}
    wanted = Counter(tuple(map(content, group)) for group in informative.values())
    copied = Counter(tuple(map(content, group)) for group in copies.values())
    assert set(copied) <= set(wanted)
    # Groups that look alike cannot be told apart: their copies count together.
    rounds = len(copies) // len(informative)
    for kind, number in wanted.items():
        assert rounds * number <= copied[kind] <= (rounds + 1) * number
    assert len({exp.eid.uid for exp in written}) == len(written)
    assert {type(exp.eid.task) for exp in written} == {str if text_tasks else int}
    assert metrics["duplicated_count"] == len(written) - len(originals)


def test_the_choice_is_a_function_of_seed_and_step():
    def copied(seed, step):
        (written,), _ = add(NAME, step_of(*[[0, task] for task in range(1, 9)], [1, 1], [1, 1]), step, seed=seed)
        return [exp.reward for exp in written[16:]]

    assert copied(0, 1) == copied(0, 1)
    assert len({tuple(copied(seed, step)) for seed in range(4) for step in range(4)}) > 4


def test_copies_have_identities_of_their_own_that_repeat_with_the_seed():
    def suffixes():
        exps = step_of([0, 1], [1, 1], [2, 2])
        for exp in exps:
            exp.eid.suffix = "abc"
        return [exp.eid.suffix for exp in add(NAME, exps)[0][0]]

    assert suffixes() == suffixes()
    assert len(set(suffixes())) == 5


def test_fresh_tasks_avoid_those_that_look_alike():
    exps = [make(task, run, run) for task in (0, "1", "a", "a-copy-1") for run in range(2)]
    exps += [make("b", run, 0.0) for run in range(12)]
    (written,), _ = add(NAME, exps)
    tids = [exp.eid.tid for exp in written]
    assert len(written) == 20
    assert len(set(tids)) == 10
    assert all(tids.count(tid) == 2 for tid in tids)


def test_a_copy_is_not_given_the_number_of_a_task_that_was_left_out():
    """An operator may have dropped some between those that came."""
    exps = step_of([0, 1], [1, 1])
    for exp in exps:
        exp.eid.task = 5 if exp.eid.task == 0 else 7
    (written,), _ = add(NAME, exps)
    assert sorted({exp.eid.task for exp in written}) == [5, 8]


def test_entries_added_to_a_copy_are_not_the_original_s():
    exps = step_of([0, 1], [1, 1])
    (written,), _ = add(NAME, exps)
    for exp in written[2:]:
        exp.info["new"] = exp.metrics["new"] = 1.0
        exp.advantages = torch.ones(3)
    assert all("new" not in exp.info and "new" not in exp.metrics and exp.advantages is None for exp in exps)


def test_input_left_out_as_invalid_is_made_up_for_too():
    (written,), metrics = add(NAME, step_of([0, 1], [None, 1], [float("nan"), 2]))
    assert len(written) == 6
    assert all(exp.reward in (0, 1) for exp in written)
    assert (metrics["filtered_count"], metrics[INVALID]) == (4, 2)


def test_the_threshold_is_that_of_the_population_variance():
    (written,), _ = add(NAME, step_of([0, 1], [0, 2]), variance_threshold=0.25)
    assert [exp.reward for exp in written] == [0, 2, 0, 2]


@pytest.mark.parametrize("step", range(3))
def test_nothing_to_make_up_for_copies_nothing(step):
    exps = step_of([0, 1], [1, 0])
    (written,), metrics = add(NAME, exps, step)
    assert [exp.eid.tid for exp in written] == ["1/0", "1/0", "1/1", "1/1"]
    assert metrics["duplicated_count"] == 0
