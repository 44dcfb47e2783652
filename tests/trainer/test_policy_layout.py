"""The training step in every layout: the same loss and gradient, and neighbours that cannot be told from each other."""

import copy

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
