"""GAE and the value loss against plain code: float64 numpy, token by token, and torch."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trinity_lightning.algorithm.gae import explained_variance, gae, value_loss, whitened

SHARES = st.sampled_from([0.0, 0.3, 0.95, 1.0])


@st.composite
def ragged(draw) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values, rewards and masks with holes; values and rewards outside the masks are NaN."""
    rows, width, seed = draw(st.integers(1, 5)), draw(st.integers(1, 12)), draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(rows, width, generator=generator) < draw(st.floats(0.1, 1.0))
    values, rewards = (torch.randn(rows, width, generator=generator).masked_fill(~mask, float("nan")) for _ in range(2))
    return values, rewards, mask


def oracle(values, rewards, mask, gamma, lam):
    """Equation 16 of arXiv 1506.02438 as a sum over later tokens, for the trained tokens of each row alone."""
    advantages = np.zeros(values.shape)
    for row in range(len(values)):
        (places,) = np.nonzero(mask[row])
        v = np.append(values[row][places], 0.0)
        deltas = [rewards[row][place] + gamma * v[i + 1] - v[i] for i, place in enumerate(places)]
        for i, place in enumerate(places):
            advantages[row, place] = sum((gamma * lam) ** (j - i) * deltas[j] for j in range(i, len(places)))
    return advantages


@settings(deadline=None, max_examples=100)
@given(ragged(), SHARES, SHARES)
def test_gae_equals_the_sum_over_later_tokens(case, gamma, lam):
    values, rewards, mask = case
    advantages, returns = gae(values, rewards, mask, gamma, lam)
    expected = oracle(values.double().numpy(), rewards.double().numpy(), mask.numpy(), gamma, lam)
    np.testing.assert_allclose(advantages.numpy(), expected, rtol=1e-5, atol=1e-5)
    inside = np.where(mask, expected + values.double().numpy(), 0.0)
    np.testing.assert_allclose(returns.numpy(), inside, rtol=1e-5, atol=1e-5)


@settings(deadline=None, max_examples=50)
@given(ragged())
def test_without_discount_the_return_is_the_reward_to_go(case):
    values, rewards, mask = case
    to_go = rewards.masked_fill(~mask, 0.0).flip(-1).cumsum(-1).flip(-1) * mask
    torch.testing.assert_close(gae(values, rewards, mask)[1], to_go, rtol=1e-5, atol=1e-5)


@settings(deadline=None, max_examples=50)
@given(ragged())
def test_whitened_advantages_have_mean_0_and_deviation_1(case):
    _, advantages, mask = case
    white = whitened(advantages, mask)
    assert not white[~mask].any()
    trained = advantages[mask].double().numpy()
    if len(trained):
        expected = (trained - trained.mean()) / np.sqrt(trained.var() + 1e-8)
        np.testing.assert_allclose(white[mask].numpy(), expected, rtol=1e-4, atol=1e-4)


@settings(deadline=None, max_examples=50)
@given(ragged(), st.sampled_from([None, 0.2, 1.0]), st.integers(1, 100))
def test_the_value_loss_and_its_gradient_equal_plain_ones(case, clip_range, total):
    old, returns, mask = case
    values = (torch.nan_to_num(old) + 0.5 * torch.nan_to_num(returns)).requires_grad_()
    loss, metrics = value_loss(values, old, returns, mask, clip_range=clip_range, num_tokens=total)
    (gradient,) = torch.autograd.grad(loss, values)
    plain = torch.zeros(())
    for row, place in mask.nonzero().tolist():
        v, o, r = values[row, place], old[row, place], returns[row, place]
        terms = [(v - r) ** 2]
        if clip_range is not None:
            terms.append((torch.maximum(torch.minimum(v, o + clip_range), o - clip_range) - r) ** 2)
        plain = plain + torch.stack(terms).max() / 2
    torch.testing.assert_close(loss, plain / total)
    if mask.any():
        (expected,) = torch.autograd.grad(plain / total, values)
        torch.testing.assert_close(gradient, expected)
    assert metrics["value_loss"] == loss.detach()


def test_explained_variance():
    returns = torch.tensor([0.0, 1.0, 2.0, 3.0])
    assert explained_variance(returns + 5, returns) == pytest.approx(1)
    assert explained_variance(torch.zeros(4), returns) == pytest.approx(0)
    assert explained_variance(-returns, returns) == pytest.approx(-3)
    assert explained_variance(returns, torch.ones(4)) == 0
