"""Cutting: nothing lost, nothing twice, within the budget, and prefixes shared as well as can be.

The tensors of a micro-batch hold the experiences' values, whichever way they lie.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.errors import refuses
from support.layouts import batches, experiences
from support.tiers import examples

from trinity_lightning.common.experience import Experience
from trinity_lightning.common.optimizer_batch import OptimizerBatch, trained_mask
from trinity_lightning.config.algorithm import AlgorithmConfig, Layout
from trinity_lightning.trainer.layout import (
    MOST_PROMPTS,
    MicroBatch,
    Part,
    better_layout,
    collate,
    computed_tokens,
    cut,
    cut_padded,
    cut_shared,
    moved,
    prefix_groups,
    rows_to_train,
)

CPU = torch.device("cpu")
ragged = settings(deadline=None, max_examples=examples(60))
layouts = pytest.mark.parametrize("layout", [Layout.padded, Layout.shared_prefix])


def rows_of(prompts, responses=None):
    responses = responses or [[50 + row] for row in range(len(prompts))]
    pairs = zip(prompts, responses, strict=True)
    return [Experience(tokens=p + r, prompt_length=len(p), advantages=[1.0] * len(r)) for p, r in pairs]


def group_rows(experiences, rows, max_tokens=10_000):
    return sorted((sorted(group.rows), group.prefix) for group in prefix_groups(experiences, rows, max_tokens))


# -- padded ------------------------------------------------------------------------------------------------------------


@ragged
@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(1, 120), st.data())
def test_padded_parts_deal_every_row_once_within_the_budget(lengths, budget, data):
    rows = data.draw(st.lists(st.sampled_from(range(len(lengths))), unique=True))
    parts = cut_padded(lengths, rows, budget)
    assert sorted(row for part in parts for row in part.rows) == sorted(rows)
    for part in parts:
        assert part.tokens == len(part.rows) * max(lengths[row] for row in part.rows)
        assert len(part.rows) == 1 or part.tokens <= budget


def test_padded_parts_fill_the_budget_longest_first():
    def rows(*arguments):
        return [list(part.rows) for part in cut_padded(*arguments)]

    assert rows([3, 9, 5, 4], range(4), 10) == [[1], [2, 3], [0]]
    assert rows([3, 9, 5, 4], [0, 3], 8) == [[3, 0]]
    assert rows([40], [0], 10) == [[0]]
    assert rows([3], [], 10) == []


# -- shared prefixes ---------------------------------------------------------------------------------------------------


@ragged
@given(batches(), st.integers(1, 80), st.data())
def test_shared_parts_deal_every_row_once_within_the_budget(batch, budget, data):
    rows = data.draw(st.lists(st.sampled_from(range(len(batch.experiences))), unique=True))
    parts = cut_shared(batch.experiences, rows, budget)
    assert sorted(row for part in parts for row in part.rows) == sorted(rows)
    for part in parts:
        assert part.rows == tuple(row for group in part.groups for row in group.rows)
        assert part.tokens <= budget or len(part.rows) == 1
        assert part.tokens == sum(group.tokens for group in part.groups)
        assert list(part.groups) == sorted(part.groups, key=lambda group: group.prefix > 0)
        for group in part.groups:
            members = [batch.experiences[row] for row in group.rows]
            assert group.tokens == group.prefix + sum(len(e.tokens) - group.prefix for e in members)
            assert (group.prefix == 0) == (len(members) == 1)
            for member in members:
                assert group.prefix <= member.prompt_length
                assert torch.equal(member.tokens[: group.prefix], members[0].tokens[: group.prefix])


def runs(rows):
    """All ways to deal the rows into runs of neighbours."""
    if not rows:
        yield []
    for end in range(1, len(rows) + 1):
        for rest in runs(rows[end:]):
            yield [rows[:end], *rest]


@settings(deadline=None, max_examples=40)
@given(st.lists(experiences(st.lists(st.integers(1, 2), max_size=4)), min_size=1, max_size=7))
def test_no_other_runs_of_sorted_prompts_compute_fewer_tokens(rows):
    prompts = sorted(row.tokens[: row.prompt_length].tolist() for row in rows)

    def saved(run):
        common = next((at for at, column in enumerate(zip(*run, strict=False)) if len(set(column)) > 1), None)
        return (min(map(len, run)) if common is None else common) * (len(run) - 1)

    most = max(sum(map(saved, split)) for split in runs(prompts))
    total = sum(len(row.tokens) for row in rows)
    assert total - sum(group.tokens for group in prefix_groups(rows, range(len(rows)), 10_000)) == most


def test_groups_are_those_of_the_prompts():
    system, one, two = [1, 2], [1, 2, 7, 8, 9], [1, 2, 5, 5, 5]
    assert group_rows(rows_of([one, two, one, two]), range(4)) == [([0, 2], 5), ([1, 3], 5)]
    assert group_rows(rows_of([one, two, one, two]), [0, 1, 2]) == [([0, 2], 5), ([1], 0)]
    assert group_rows(rows_of([one, two]), [0, 1]) == [([0, 1], 2)]  # a system prompt in common
    assert group_rows(rows_of([one, [3, 1], one, one]), range(4)) == [([0, 2, 3], 5), ([1], 0)]  # an expert's own
    assert group_rows(rows_of([system, [*system, 6, 6], one]), range(3)) == [([0, 1, 2], 2)]
    assert group_rows(rows_of([[*one, 1], [*one, 2], [*one, 1]]), range(3)) == [([0, 1, 2], 5)]  # not 6 for two
    assert group_rows(rows_of([one, one], [[5, 6], [5, 7]]), [0, 1]) == [([0, 1], 5)]  # responses are not looked at
    assert group_rows(rows_of([one, two]), [0, 1], 10) == [([0, 1], 2)]
    assert group_rows(rows_of([one, two]), [0, 1], 9) == [([0], 0), ([1], 0)]  # they would not fit together
    assert group_rows(rows_of([one, one]), [0, 1], 6) == [([0, 1], 5)]  # cut up later
    assert group_rows([], []) == []


def test_a_group_has_a_bounded_number_of_different_prompts():
    many = rows_of([[1, 2, 3, row] for row in range(10, 10 + 3 * MOST_PROMPTS)] + [[9]])
    groups = group_rows(many, range(len(many)))
    assert sorted((len(members), prefix) for members, prefix in groups) == [(1, 0), *[(MOST_PROMPTS, 3)] * 3]
    alike = rows_of([[1, 2, 3]] * (2 * MOST_PROMPTS))
    assert [(len(members), prefix) for members, prefix in group_rows(alike, range(len(alike)))] == [(len(alike), 3)]


def test_a_group_longer_than_the_budget_repeats_its_prefix():
    rows = rows_of([[1, 2, 3, 4]] * 5, [[5] * count for count in (3, 1, 2, 3, 9)])
    parts = cut_shared(rows, range(5), 10)
    assert [(part.rows, part.tokens) for part in parts] == [((4,), 13), ((0, 3), 10), ((2, 1), 7)]
    assert [group.prefix for part in parts for group in part.groups] == [0, 4, 4]
    assert [part.tokens for part in cut_shared(rows, range(5), 100)] == [22]


def test_small_groups_fill_a_micro_batch():
    prompts = [[row // 2] * 3 for row in range(8)]
    parts = cut_shared(rows_of(prompts), range(8), 10)
    assert [part.tokens for part in parts] == [10, 10]
    assert all(len(part.groups) == 2 for part in parts)


# -- which one ---------------------------------------------------------------------------------------------------------


@ragged
@given(batches(), st.integers(1, 80))
def test_auto_shares_if_that_saves_a_fifth(batch, budget):
    rows = range(len(batch.experiences))
    chosen = better_layout(batch, rows, budget)
    padded, shared, chosen = (
        cut(batch, rows, budget, layout) for layout in (Layout.padded, Layout.shared_prefix, chosen)
    )
    assert chosen == (shared if 5 * computed_tokens(shared) <= 4 * computed_tokens(padded) else padded)
    lengths = [len(e.tokens) for e in batch.experiences]
    assert computed_tokens(shared) <= sum(lengths) <= computed_tokens(padded)


def test_a_layout_goes_by_its_name():
    layout: Layout = "padded"  # type: ignore[assignment]
    assert AlgorithmConfig(layout=layout).layout is Layout.padded
    layout = "share_prefix"  # type: ignore[assignment]
    with refuses("algorithm.layout"):
        AlgorithmConfig(layout=layout)


# -- which rows --------------------------------------------------------------------------------------------------------


def test_rows_without_a_trained_token_or_without_advantage_are_left_out():
    def make(mask, advantages, prompt_length=1):
        tokens = list(range(1, prompt_length + len(mask) + 1))
        return Experience(tokens=tokens, prompt_length=prompt_length, action_mask=mask, advantages=advantages)

    batch = OptimizerBatch.of(
        [
            make([False, False], [1.0, 1.0]),
            make([True, True], [0.0, 0.0]),
            make([True, False], [0.0, 1.0]),  # its only advantage lies on a token that is not trained
            make([True], [1.0], prompt_length=0),  # its only trained token has nothing before it
            make([True, True], [0.0, -1.0]),
            make([True, True], None),
            make([True, True], [float("nan"), 0.0]),
        ],
        explore_step=1,
    )
    assert rows_to_train(batch, skip_zero_advantage=True) == [4, 5, 6]
    assert rows_to_train(batch, skip_zero_advantage=False) == [1, 2, 4, 5, 6]


def test_a_truncated_prompt_has_nothing_to_train():
    experience = Experience(
        tokens=[1, 2, 3], prompt_length=3, truncate_status="prompt_truncated", logprobs=[0.0], advantages=[1.0]
    )
    batch = OptimizerBatch.of([experience], explore_step=1)
    assert rows_to_train(batch, skip_zero_advantage=False) == []
    assert batch.num_tokens == 0


# -- the tensors of a micro-batch --------------------------------------------------------------------------------------


def whole(batch: OptimizerBatch, layout: Layout) -> tuple[Part, MicroBatch]:
    """All rows with a trained token, in one micro-batch."""
    (part,) = cut(batch, rows_to_train(batch, skip_zero_advantage=False), 10_000, layout)
    return part, collate(batch, part, CPU)


@layouts
@ragged
@given(batch=batches())
def test_each_trained_token_is_predicted_by_the_state_before_it(layout, batch):
    part, micro = whole(batch, layout)
    tokens = micro.inputs["input_ids"]
    positions = micro.inputs.get("position_ids", torch.arange(tokens.shape[1]).expand_as(tokens)).flatten()
    expected = []
    for order, row in enumerate(part.rows):
        experience = batch.experiences[row]
        for offset in trained_mask(experience).nonzero().flatten().tolist():
            at = experience.prompt_length + offset
            expected.append((order, int(experience.tokens[at]), int(experience.tokens[at - 1]), at - 1))
    before, where = tokens.flatten()[micro.states], positions[micro.states]
    predicted = zip(*(tensor.tolist() for tensor in (micro.rows, micro.targets, before, where)), strict=True)
    assert list(predicted) == expected
    assert tokens.numel() == part.tokens


@layouts
@ragged
@given(batch=batches())
def test_a_micro_batch_holds_what_the_experiences_hold(layout, batch):
    part, micro = whole(batch, layout)
    for order, experience in enumerate(batch.experiences[row] for row in part.rows):
        response = experience.response_length
        assert micro.columns["advantages"][order, :response].tolist() == experience.advantages.tolist()
        assert not micro.columns["advantages"][order, response:].any()
        assert not micro.action_mask[order, response:].any()
        assert bool(micro.sampled[order]) == (experience.logprobs is not None)
        if experience.logprobs is not None:
            assert micro.columns["logprobs"][order, :response].tolist() == experience.logprobs.tolist()
        assert float(micro.temperature[order]) == experience.info["temperature"]
        assert bool(micro.expert[order]) == experience.info["is_expert"]
        if layout is Layout.padded:
            length = len(experience.tokens)
            assert micro.inputs["input_ids"][order, :length].tolist() == experience.tokens.tolist()
            assert not micro.inputs["input_ids"][order, length:].any()
    assert batch.num_tokens == int(micro.action_mask.sum())
    assert batch.num_sequences == len(batch.experiences)


def test_a_prefix_is_computed_once():
    rows = [
        Experience(tokens=[*prompt, *response], prompt_length=len(prompt))
        for prompt, response in [([1, 2, 3], [4, 5]), ([9, 8], [7]), ([1, 2, 3], [6])]
    ]
    part, micro = whole(OptimizerBatch.of(rows, explore_step=1), Layout.shared_prefix)
    assert part.rows == (1, 0, 2)
    assert micro.inputs["input_ids"].tolist() == [[1, 2, 3, 9, 8, 7, 4, 5, 6]]
    assert micro.inputs["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 3, 4, 3]]
    assert micro.states.tolist() == [4, 2, 6, 2]


@layouts
def test_the_first_token_of_a_sequence_without_prompt_is_not_trained(layout):
    mask = torch.tensor([True, True, False])
    experience = Experience(tokens=[7, 8, 9], prompt_length=0, action_mask=mask, advantages=[1.0] * 3)
    batch = OptimizerBatch.of([experience], explore_step=1)
    assert batch.num_tokens == 1
    assert mask.tolist() == [True, True, False]  # it is the experience's own, and was only read
    _, micro = whole(batch, layout)
    assert (micro.states.tolist(), micro.targets.tolist()) == ([0], [8])


@layouts
def test_columns_go_with_their_rows(layout):
    pair = [Experience(tokens=[1, 2, 3], prompt_length=1), Experience(tokens=[1, 2, 3, 4], prompt_length=1)]
    batch = OptimizerBatch.of(pair, explore_step=1)
    batch.columns = {"old_logprobs": [torch.tensor([-1.0, -2.0]), torch.tensor([-3.0, -4.0, -5.0])]}
    part, micro = whole(batch, layout)
    expected = {0: [-1.0, -2.0, 0.0], 1: [-3.0, -4.0, -5.0]}
    assert micro.columns["old_logprobs"].tolist() == [expected[row] for row in part.rows]
    assert "advantages" not in micro.columns
    assert "logprobs" not in micro.columns


@layouts
@ragged
@given(batch=batches())
def test_one_copy_brings_all_of_it(layout, batch):
    _, micro = whole(batch, layout)
    copied = moved(micro, CPU)
    assert copied.rows.untyped_storage().data_ptr() == copied.expert.untyped_storage().data_ptr()
    assert copied.inputs.keys() == micro.inputs.keys()
    pairs = [(getattr(micro, name), getattr(copied, name)) for name in ("states", "targets", "rows", "action_mask")]
    pairs += [(getattr(micro, name), getattr(copied, name)) for name in ("sampled", "temperature", "expert")]
    pairs += [(micro.columns[name], copy) for name, copy in copied.columns.items()]
    pairs += [(micro.inputs[name], copy) for name, copy in copied.inputs.items()]
    for before, after in pairs:
        assert not isinstance(before, torch.Tensor) or (before.dtype == after.dtype and torch.equal(before, after))
    assert len(pairs) == 7 + len(micro.columns) + len(micro.inputs)
