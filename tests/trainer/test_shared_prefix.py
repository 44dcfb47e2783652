"""Shared prefixes: the attention against one dense mask, the training step against the padded layout."""

import copy
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_cases import batches
from policy_cases import make_policy

from trinity_lightning.common.config import Layout
from trinity_lightning.common.optimizer_batch import OptimizerBatch
from trinity_lightning.trainer.layout import cut, rows_to_train
from trinity_lightning.trainer.micro_batch import collate
from trinity_lightning.trainer.policy import PolicyModule
from trinity_lightning.trainer.shared_prefix import SHORT_TOKENS, CpuSharedPrefix, Segments

ragged = settings(deadline=None, max_examples=40)
HEADS, KEY_HEADS, SIZE, SCALE = 6, 2, 16, 0.3


@st.composite
def segments(draw):
    """A few prefixes, each with some rows, and rows of their own; lengths that do not fit one call."""
    lengths = st.integers(1, 12) | st.integers(60, 90)
    prefixes = draw(st.lists(lengths, max_size=3))
    members = [draw(st.integers(1, 4)) for _ in prefixes]
    alone = draw(st.integers(0 if prefixes else 1, 3))
    return Segments(
        prefixes, members, draw(st.lists(lengths, min_size=alone + sum(members), max_size=alone + sum(members)))
    )


def visible(layout: Segments) -> torch.Tensor:
    """Which token sees which, bool [T, T], written out by hand."""
    starts = layout.starts()
    mask = torch.zeros(starts[-1], starts[-1], dtype=torch.bool)
    for start, end in pairwise(starts):
        mask[start:end, start:end] = torch.ones(end - start, end - start, dtype=torch.bool).tril()
    row = len(layout.own) - sum(layout.members)
    for prefix, count in enumerate(layout.members):
        for _ in range(count):
            own = slice(*layout.own_starts()[row : row + 2])
            mask[own, starts[prefix] : starts[prefix + 1]] = True
            row += 1
    return mask


def states(tokens: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Queries, keys and values as transformers has them: [1, heads, T, D], heads beside each other in memory."""
    generator = torch.Generator().manual_seed(tokens)
    shapes = [(1, tokens, heads, SIZE) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    return [torch.randn(shape, generator=generator).to(dtype).transpose(1, 2).requires_grad_() for shape in shapes]


def attend(layout: Segments, inputs: list[torch.Tensor]) -> torch.Tensor:
    query, key, value = inputs
    return CpuSharedPrefix.of(layout)(query, key, value, SCALE)


def dense(layout: Segments, inputs: list[torch.Tensor]) -> torch.Tensor:
    query, key, value = inputs
    key, value = (each.repeat_interleave(HEADS // KEY_HEADS, 1) for each in (key, value))
    scores = (SCALE * query @ key.mT).masked_fill(~visible(layout), -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2)


def with_gradients(result: torch.Tensor, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    weights = torch.linspace(-1, 1, result.numel(), dtype=torch.float64).view(result.shape).to(result.dtype)
    return [result.detach(), *torch.autograd.grad((result * weights).sum(), inputs)]


@ragged
@given(segments())
def test_attention_and_its_gradients_are_those_of_a_dense_mask(layout):
    inputs = states(layout.starts()[-1], torch.float64)
    mine = with_gradients(attend(layout, inputs), inputs)
    for found, expected in zip(mine, with_gradients(dense(layout, inputs), inputs), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("length", [20, SHORT_TOKENS + 40])
def test_bfloat16_is_as_exact_as_its_rounding(length):
    layout = Segments([length, 9], [3, 2], [5, length, 3, 8, 11, 2])
    inputs = states(layout.starts()[-1], torch.bfloat16)
    exact = [each.detach().double().requires_grad_() for each in inputs]
    found = with_gradients(attend(layout, inputs), inputs)
    for mine, truth in zip(found, with_gradients(dense(layout, exact), exact), strict=True):
        assert mine.dtype == torch.bfloat16
        assert float((mine.double() - truth).norm() / truth.norm()) < (0.004 if length < SHORT_TOKENS else 0.012)


def test_padding_among_queries_cannot_overflow():
    layout = Segments([], [], [40, 1])
    inputs = states(41, torch.float32)
    with torch.no_grad():
        inputs[0][:, :, 0], inputs[1][:, :, 0] = -90.0, 90.0  # the first score is far below any other
    assert all(each.isfinite().all() for each in with_gradients(attend(layout, inputs), inputs))


# -- the training step -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def policy() -> PolicyModule:
    policy = make_policy(entropy_coef=0.1)
    policy.configure_model()
    return policy


def step(policy: PolicyModule, batch: OptimizerBatch, layout: Layout, budget: int) -> tuple[float, torch.Tensor]:
    """Loss and gradient of an optimizer batch, computed without a Trainer."""
    policy.policy.zero_grad()
    total = 0.0
    for part in cut(batch, rows_to_train(batch, skip_zero_advantage=False), budget, layout):
        micro = collate(batch, part, policy.device)
        logprobs, entropies = policy._logprobs(policy.policy, micro)
        loss, _ = policy.objective(logprobs, entropies, micro, batch, batch.num_tokens, batch.num_tokens)
        loss.backward()
        total += float(loss.detach())
    return total, torch.cat([p.grad.flatten().double() for p in policy.policy.parameters()])


@settings(deadline=None, max_examples=30)
@given(batches(), st.sampled_from([1, 20, 40, 10_000]), st.randoms())
def test_every_layout_budget_and_order_has_the_same_loss_and_gradient(policy, batch, budget, random):
    loss, gradient = step(policy, batch, Layout.padded, 10_000)
    shuffled = OptimizerBatch.of(random.sample(batch.experiences, len(batch.experiences)), explore_step=1)
    for each in (batch, shuffled):
        other_loss, other = step(policy, each, Layout.shared_prefix, budget)
        assert other_loss == pytest.approx(loss, rel=1e-6, abs=1e-6)
        assert float((other - gradient).norm()) <= 1e-5 * float(gradient.norm())


def column(policy: PolicyModule, batch: OptimizerBatch) -> list[torch.Tensor]:
    return policy._column(policy.policy, batch.experiences)


@pytest.fixture(scope="module")
def sharing() -> PolicyModule:
    policy = make_policy(layout=Layout.shared_prefix, max_tokens_per_micro_batch=10_000, entropy_coef=0.1)
    policy.configure_model()
    return policy


@settings(deadline=None, max_examples=30)
@given(batches(), st.data())
def test_neighbours_are_isolated(sharing, batch, data):
    row = data.draw(st.sampled_from(range(len(batch.experiences))))
    changed = copy.copy(batch.experiences[row])
    changed.tokens = changed.tokens.clone()
    changed.tokens[changed.prompt_length :] = 91 + torch.arange(changed.response_length) % 8
    before = column(sharing, batch)
    after = column(sharing, OptimizerBatch.of([*batch.experiences[:row], changed, *batch.experiences[row + 1 :]], 1))
    assert all(torch.equal(a, b) for i, (a, b) in enumerate(zip(before, after, strict=True)) if i != row)
