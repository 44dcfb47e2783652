"""The tensors of a micro-batch are those of the experiences, whichever way they lie."""

import pytest
import torch
from hypothesis import given, settings
from support.layouts import batches
from support.tiers import examples

from trinity_lightning.common.experience import Experience
from trinity_lightning.common.optimizer_batch import OptimizerBatch, trained_mask
from trinity_lightning.config.training import Layout
from trinity_lightning.trainer.layout import Part, cut, rows_to_train
from trinity_lightning.trainer.micro_batch import MicroBatch, collate
from trinity_lightning.trainer.transfer import moved

CPU = torch.device("cpu")
ragged = settings(deadline=None, max_examples=examples(60))
layouts = pytest.mark.parametrize("layout", [Layout.padded, Layout.shared_prefix])


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
    found = zip(*(each.tolist() for each in (micro.rows, micro.targets, before, where)), strict=True)
    assert list(found) == expected
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
    pairs += [(micro.columns[name], each) for name, each in copied.columns.items()]
    pairs += [(micro.inputs[name], each) for name, each in copied.inputs.items()]
    for before, after in pairs:
        assert not isinstance(before, torch.Tensor) or (before.dtype == after.dtype and torch.equal(before, after))
    assert len(pairs) == 7 + len(micro.columns) + len(micro.inputs)
