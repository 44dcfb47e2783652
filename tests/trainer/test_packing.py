"""Cutting and padding: nothing lost, nothing twice, and padding that nobody can see."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trinity_lightning.common.experience import Experience
from trinity_lightning.common.optimizer_batch import OptimizerBatch, trained_mask
from trinity_lightning.trainer.packing import collate, cut, padding_ratio, rows_to_train

CPU = torch.device("cpu")
ragged = settings(deadline=None, max_examples=60)


@st.composite
def experiences(draw):
    """One ragged experience: any prompt length (0 too), any mask, zero or missing advantages."""
    prompt, response = draw(st.integers(0, 6)), draw(st.integers(1, 8))
    mask = draw(st.lists(st.booleans(), min_size=response, max_size=response))
    tokens = draw(st.lists(st.integers(1, 90), min_size=prompt + response, max_size=prompt + response))
    return Experience(
        tokens=tokens,
        prompt_length=prompt,
        action_mask=mask,
        advantages=[draw(st.sampled_from([-1.0, 0.0, 2.0]))] * response,
        logprobs=draw(st.none() | st.just([-0.5] * response)),
        info={"temperature": draw(st.sampled_from([0.5, 1.0]))},
    )


batches = st.lists(experiences(), min_size=1, max_size=12).map(lambda e: OptimizerBatch.of(e, explore_step=1))


@ragged
@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(1, 120), st.data())
def test_cut_deals_every_row_once_within_the_budget(lengths, budget, data):
    rows = data.draw(st.lists(st.sampled_from(range(len(lengths))), unique=True))
    parts = cut(lengths, rows, budget)
    assert sorted(row for part in parts for row in part) == sorted(rows)
    for part in parts:
        assert len(part) == 1 or len(part) * max(lengths[row] for row in part) <= budget
    if parts:
        padded = sum(len(part) * max(lengths[row] for row in part) for part in parts)
        assert padding_ratio(lengths, parts) == padded / sum(lengths[row] for row in rows)


def test_cut_fills_the_budget_longest_first():
    assert cut([3, 9, 5, 4], range(4), 10) == [[1], [2, 3], [0]]
    assert cut([3, 9, 5, 4], [0, 3], 8) == [[3, 0]]
    assert cut([40], [0], 10) == [[0]]
    assert cut([3], [], 10) == []
    assert padding_ratio([3], []) == 0.0


@ragged
@given(batches)
def test_positions_point_at_the_state_before_each_trained_token(batch):
    rows = rows_to_train(batch, skip_zero_advantage=False)
    if not rows:
        return
    micro = collate(batch, rows, CPU)
    positions, targets, owners = micro.positions()
    expected = []
    for order, row in enumerate(rows):
        experience = batch.experiences[row]
        for offset in trained_mask(experience).nonzero().flatten().tolist():
            at = experience.prompt_length + offset
            expected.append((order * micro.tokens.shape[1] + at - 1, int(experience.tokens[at]), order))
    assert list(zip(positions.tolist(), targets.tolist(), owners.tolist(), strict=True)) == expected
    assert all(position % micro.tokens.shape[1] < micro.tokens.shape[1] - 1 for position in positions.tolist())


@ragged
@given(batches)
def test_collate_holds_what_the_experiences_hold(batch):
    rows = rows_to_train(batch, skip_zero_advantage=False)
    if not rows:
        return
    micro = collate(batch, rows, CPU)
    for order, experience in enumerate(batch.experiences[row] for row in rows):
        length, response = len(experience.tokens), experience.response_length
        assert micro.tokens[order, :length].tolist() == experience.tokens.tolist()
        assert not micro.tokens[order, length:].any()
        assert micro.columns["advantages"][order, :response].tolist() == experience.advantages.tolist()
        assert not micro.columns["advantages"][order, response:].any()
        assert not micro.action_mask[order, response:].any()
        assert bool(micro.sampled[order]) == (experience.logprobs is not None)
        if experience.logprobs is not None:
            assert micro.columns["logprobs"][order, :response].tolist() == experience.logprobs.tolist()
        assert float(micro.temperature[order]) == experience.info["temperature"]


@ragged
@given(batches)
def test_totals_count_what_collate_would_train(batch):
    rows = rows_to_train(batch, skip_zero_advantage=False)
    trained = int(collate(batch, rows, CPU).action_mask.sum()) if rows else 0
    assert batch.num_tokens == trained
    assert batch.num_sequences == len(batch.experiences)


def test_the_first_token_of_a_sequence_without_prompt_is_not_trained():
    mask = torch.tensor([True, True, False])
    experience = Experience(tokens=[7, 8, 9], prompt_length=0, action_mask=mask, advantages=[1.0] * 3)
    batch = OptimizerBatch.of([experience], explore_step=1)
    assert batch.num_tokens == 1
    assert mask.tolist() == [True, True, False]  # it is the experience's own, and was only read
    positions, targets, _ = collate(batch, [0], CPU).positions()
    assert (positions.tolist(), targets.tolist()) == ([0], [8])


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


def test_columns_go_with_their_rows():
    pair = [Experience(tokens=[1, 2, 3], prompt_length=1), Experience(tokens=[1, 2, 3, 4], prompt_length=1)]
    batch = OptimizerBatch.of(pair, explore_step=1)
    batch.columns = {"old_logprobs": [torch.tensor([-1.0, -2.0]), torch.tensor([-3.0, -4.0, -5.0])]}
    micro = collate(batch, [1, 0], CPU)
    assert micro.columns["old_logprobs"].tolist() == [[-3.0, -4.0, -5.0], [-1.0, -2.0, 0.0]]
    assert "advantages" not in micro.columns
    assert "logprobs" not in micro.columns
