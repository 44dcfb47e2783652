"""The difference of engine and trainer, and importance weights for it, on a small batch worked out by hand."""

import numpy as np
import pytest
import torch
from support.errors import refuses

from trinity_lightning.algorithm.correction import logprob_difference, rollout_correction
from trinity_lightning.algorithm.policy_loss.policy_loss import combine_metrics

MASK = torch.tensor([[True, True, False], [True, True, True], [False, False, False]])
ROLLOUT = torch.zeros(3, 3)
# Ratios 0.5, 3 (and one that is not trained); 1, 1.5, 1.5; a row without a trained token.
OLD = torch.log(torch.tensor([[0.5, 3.0, 9.0], [1.0, 1.5, 1.5], [9.0, 9.0, 9.0]]))


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ({}, [[0.5, 2.0, 0], [1.0, 1.5, 1.5]]),
        ({"min_weight": 0.8, "max_weight": 1.2}, [[0.8, 1.2, 0], [1.0, 1.2, 1.2]]),
        ({"mode": "mask"}, [[0.5, 0.0, 0], [1.0, 1.5, 1.5]]),
        ({"mode": "mask", "min_weight": 0.8}, [[0.0, 0.0, 0], [1.0, 1.5, 1.5]]),
        ({"level": "sequence"}, [[1.5, 1.5, 0], [2.0, 2.0, 2.0]]),
        ({"level": "sequence", "mode": "mask"}, [[1.5, 1.5, 0], [0.0, 0.0, 0.0]]),
        ({"level": "sequence", "max_weight": 9.0}, [[1.5, 1.5, 0], [2.25, 2.25, 2.25]]),
    ],
)
def test_weights(args, expected):
    weights, metrics = rollout_correction(OLD, ROLLOUT, MASK, **args)
    expected = np.array([*expected, [0, 0, 0]])
    np.testing.assert_allclose(weights.numpy(), expected, rtol=1e-6)
    assert metrics["is_weight/mean"].item() == pytest.approx(expected[MASK.numpy()].mean())
    assert metrics["is_weight/max"].item() == pytest.approx(expected.max())


def test_clipfrac_is_the_share_of_trained_tokens_out_of_bounds():
    assert rollout_correction(OLD, ROLLOUT, MASK)[1]["is_weight/clipfrac"].item() == pytest.approx(1 / 5)
    metrics = rollout_correction(OLD, ROLLOUT, MASK, level="sequence", mode="mask")[1]
    assert metrics["is_weight/clipfrac"].item() == pytest.approx(3 / 5)


def test_logprob_difference():
    metrics = logprob_difference(OLD, ROLLOUT, MASK)
    expected = np.abs(np.log([0.5, 3.0, 1.0, 1.5, 1.5]))
    assert metrics["logprob_diff/mean"].item() == pytest.approx(expected.mean(), rel=1e-6)
    assert metrics["logprob_diff/max"].item() == pytest.approx(expected.max(), rel=1e-6)


def test_metrics_combine_over_micro_batches():
    for fn in (logprob_difference, lambda *args, **kw: rollout_correction(*args, **kw)[1]):
        whole = fn(OLD, ROLLOUT, MASK)
        parts = [fn(OLD[r], ROLLOUT[r], MASK[r], num_tokens=5) for r in ([0], [2, 1], [])]
        combined = combine_metrics(parts)
        assert combined.keys() == whole.keys()
        for name, value in whole.items():
            torch.testing.assert_close(combined[name], value)


def test_weights_carry_no_gradient_and_stay_finite():
    old = torch.tensor([[0.0, -1e4, float("nan")]], requires_grad=True)
    mask = torch.tensor([[True, True, False]])
    for level in ("token", "sequence"):
        weights, metrics = rollout_correction(old, torch.tensor([[-1e4, 0.0, 0.0]]), mask, level=level)
        assert not weights.requires_grad
        assert torch.isfinite(weights).all()
        assert all(torch.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize(
    ("args", "key"),
    [
        ({"level": "tokens"}, "level"),
        ({"mode": "clip"}, "mode"),
        ({"min_weight": 3.0}, "low"),
        ({"min_weight": -1.0}, "low"),
    ],
)
def test_wrong_arguments_are_refused(args, key):
    with refuses(f"algorithm.rollout_correction.{key}"):
        rollout_correction(OLD, ROLLOUT, MASK, **args)
