"""DPO against its formulas in numpy, however the pairs are cut; wrong arguments are refused."""

import numpy as np
import pytest
import torch
from support.errors import refuses
from support.losses import with_gradient

from trinity_lightning.algorithm.policy_loss import create_policy_loss
from trinity_lightning.common.experience import ExperienceError

B, R = 8, 6


@pytest.fixture
def tensors():
    """Float64 logprobs, reference, mask with holes; margins beyond 1 on both sides."""
    generator = torch.Generator().manual_seed(0)
    logprobs = -2 * torch.rand(B, R, generator=generator, dtype=torch.float64)
    ref = logprobs + 3 * torch.randn(B, R, generator=generator, dtype=torch.float64)
    mask = torch.rand(B, R, generator=generator) < 0.7
    mask[:, 0] = True
    return logprobs, ref, mask


def dpo(logprobs, ref, mask, pairs=None, count=None, **arguments):
    loss_fn = create_policy_loss("dpo", **arguments)
    totals = {"num_sequences": count}
    return with_gradient(
        loss_fn, logprobs, logprobs, mask, torch.zeros_like(logprobs), ref_logprobs=ref, pairs=pairs, **totals
    )


def expected(logprobs, ref, mask, beta=0.1, loss_type="sigmoid", label_smoothing=0.0, reference_free=False):
    """The mean loss of the pairs, and dloss / dD of each, in numpy."""
    scores = ((logprobs - (0 if reference_free else ref)).numpy() * mask.numpy()).sum(1)
    if loss_type == "ipo":
        scores = scores / mask.numpy().sum(1)
    d = scores[0::2] - scores[1::2]
    if loss_type == "hinge":
        return np.maximum(0, 1 - beta * d).mean(), np.where(beta * d < 1, -beta, 0.0)
    if loss_type == "ipo":
        return ((d - 1 / (2 * beta)) ** 2).mean(), 2 * (d - 1 / (2 * beta))
    wrong, right = 1 / (1 + np.exp(beta * d)), 1 / (1 + np.exp(-beta * d))
    loss = -(1 - label_smoothing) * np.log(right) - label_smoothing * np.log(wrong)
    return loss.mean(), -(1 - label_smoothing) * beta * wrong + label_smoothing * beta * right


CASES = [
    {},
    {"beta": 0.7},
    {"label_smoothing": 0.2},
    {"loss_type": "hinge", "beta": 0.5},
    {"loss_type": "ipo"},
    {"reference_free": True, "beta": 0.3},
]


@pytest.mark.parametrize("arguments", CASES, ids=str)
def test_loss_and_gradient_are_those_of_the_formula(arguments, tensors):
    mask = tensors[2]
    loss, gradient, _ = dpo(*tensors, **arguments)
    value, slope = expected(*tensors, **arguments)
    assert loss == pytest.approx(value, rel=1e-12)
    share = 1 / mask.double().sum(1, keepdim=True) if arguments.get("loss_type") == "ipo" else torch.ones(B, 1)
    signed = np.stack([slope, -slope], 1).reshape(B, 1) / (B // 2)
    torch.testing.assert_close(gradient, torch.from_numpy(signed) * mask * share, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("arguments", CASES, ids=str)
def test_pairs_add_up_however_they_are_cut_and_ordered(arguments, tensors):
    loss, gradient, metrics = dpo(*tensors, **arguments)
    order = torch.tensor([5, 0, 1, 4, 7, 2, 6, 3])
    total, sums, parts = 0.0, {}, torch.zeros_like(gradient)
    for rows in (order[:4], order[4:]):
        pairs = rows.argsort().view(-1, 2)
        part, slope, part_metrics = dpo(*(tensor[rows] for tensor in tensors), pairs=pairs, count=B, **arguments)
        total, parts[rows] = total + part, slope
        sums = {name: sums.get(name, 0.0) + value for name, value in part_metrics.items()}
    torch.testing.assert_close(total, loss)
    torch.testing.assert_close(parts, gradient)
    torch.testing.assert_close(sums, metrics)


def test_metrics_are_means_over_pairs(tensors):
    logprobs, ref, mask = tensors
    _, _, metrics = dpo(*tensors, beta=0.2)
    rewards = (0.2 * (logprobs - ref) * mask).sum(1).view(-1, 2)
    assert metrics["rewards/chosen"] == pytest.approx(rewards[:, 0].mean())
    assert metrics["rewards/rejected"] == pytest.approx(rewards[:, 1].mean())
    assert metrics["rewards/margins"] == pytest.approx((rewards[:, 0] - rewards[:, 1]).mean())
    assert 0 < metrics["rewards/accuracies"] == (rewards[:, 0] > rewards[:, 1]).double().mean() < 1
    assert metrics["logps/chosen"] == pytest.approx(((logprobs * mask).sum(1)[0::2]).mean())


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        ({"label_smoothing": 0.5}, "label_smoothing"),
        ({"label_smoothing": -0.1}, "label_smoothing"),
        ({"label_smoothing": 0.1, "loss_type": "hinge"}, "label_smoothing"),
        ({"loss_type": "sigmiod"}, "loss_type"),
        ({"beta": 0.0}, "beta"),
    ],
)
def test_wrong_arguments_are_refused(arguments, key, tensors):
    with refuses(f"algorithm.policy_loss.args.{key}"):
        dpo(*tensors, **arguments)


def test_an_odd_number_of_rows_is_no_pairs(tensors):
    logprobs, ref, mask = (tensor[:3] for tensor in tensors)
    with pytest.raises(ExperienceError, match="3"):
        dpo(logprobs, ref, mask)
