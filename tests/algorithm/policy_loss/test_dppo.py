"""DPPO against plain Python, token by token; test_policy_loss.py has the tests of all losses."""

import math

import numpy as np
import pytest
import torch
from support.errors import refuses
from support.losses import batch, with_gradient

from trinity_lightning.algorithm.policy_loss import create_policy_loss


def distance(divergence, lp, old):
    p, q = math.exp(lp), math.exp(old)
    if divergence == "tv":
        return abs(p - q)
    return q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))


def left_out(divergence, threshold, lp, old, a):
    return distance(divergence, lp, old) > threshold and (lp - old) * a > 0


@pytest.mark.parametrize(("divergence", "threshold"), [("tv", 0.1), ("kl", 0.03)])
def test_a_token_that_leaves_the_trust_region_has_no_gradient(divergence, threshold):
    logprobs, old, mask, advantages = batch(b=30, r=9)
    old = old.clamp(max=-1e-3)
    fn = create_policy_loss("dppo", divergence=divergence, threshold=threshold)
    loss, gradient, metrics = with_gradient(fn, logprobs, old, mask, advantages)
    expected, counts = np.zeros(mask.shape), {"low": 0, "high": 0}
    for i, j in zip(*np.nonzero(mask.numpy()), strict=True):
        lp, q, a = (tensor[i, j].item() for tensor in (logprobs, old, advantages))
        if left_out(divergence, threshold, lp, q, a):
            counts["high" if a > 0 else "low"] += 1
        else:
            expected[i, j] = -math.exp(lp - q) * a
    n = int(mask.sum())
    assert loss.item() == pytest.approx(expected.sum() / n, rel=1e-12)
    np.testing.assert_allclose(gradient, expected / n, rtol=1e-12)
    assert metrics["pg_clipfrac_low"].item() == pytest.approx(counts["low"] / n)
    assert metrics["pg_clipfrac_high"].item() == pytest.approx(counts["high"] / n)
    assert metrics["pg_clipfrac"].item() == pytest.approx(sum(counts.values()) / n)
    assert min(counts.values()) > 0


def test_a_rare_token_may_change_by_a_large_ratio():
    """The ratio is 5 for both; PPO clips both, DPPO the one that moved the distribution."""
    old = torch.tensor([[0.001, 0.15]]).log()
    logprobs, ones = old + math.log(5), torch.ones(1, 2)
    _, gradient, _ = with_gradient(create_policy_loss("dppo"), logprobs, old, ones.bool(), ones)
    assert gradient.tolist() == [[pytest.approx(-2.5), 0.0]]


@pytest.mark.parametrize("divergence", ["tv", "kl"])
def test_certain_tokens_stay_finite(divergence):
    logprobs, old = torch.tensor([[0.0, 0.0, -1.0]]), torch.tensor([[0.0, -1.0, 0.0]])
    fn = create_policy_loss("dppo", divergence=divergence)
    loss, gradient, metrics = with_gradient(fn, logprobs, old, torch.ones(1, 3).bool(), torch.ones(1, 3))
    assert all(value.isfinite().all() for value in (loss, gradient, *metrics.values()))
    assert gradient[0, 1] == 0


@pytest.mark.parametrize(("argument", "value"), [("divergence", "js"), ("threshold", 0.0), ("threshold", 2.0)])
def test_wrong_arguments_are_refused(argument, value):
    with refuses(f"algorithm.policy_loss.args.{argument}"):
        create_policy_loss("dppo", **{argument: value})(*batch())
