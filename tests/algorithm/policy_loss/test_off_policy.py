"""TOPR, AsymRE, sPPO and REC against plain Python, token by token; test_policy_loss.py has the tests of all losses."""

import math

import numpy as np
import pytest
import torch
from support.errors import refuses
from support.losses import batch, with_gradient

from trinity_lightning.algorithm.policy_loss import create_policy_loss

RANGE = {"epsilon_low": 0.1, "epsilon_high": 0.3}
EPSILONS = {"none": {}, "one-side": RANGE, "two-side": RANGE}
EPSILONS["ring"] = {**RANGE, "epsilon_low_prime": 0.5, "epsilon_high_prime": 1.0}


def per_token(fn, mask, *values):
    """The mean of fn(logprob, old logprob, advantage) over the trained tokens."""
    arrays = [tensor.numpy() for tensor in values]
    results = [fn(*(array[place] for array in arrays)) for place in zip(*np.nonzero(mask.numpy()), strict=True)]
    return sum(results) / len(results)


def numeric_gradient(fn, mask, logprobs, old, advantages):
    """Gradient of the mean token loss w x lp by lp, where `fn` gives each token's w."""
    gradient = np.zeros(mask.shape)
    for i, j in zip(*np.nonzero(mask.numpy()), strict=True):
        gradient[i, j] = fn(*(tensor[i, j].item() for tensor in (logprobs, old, advantages)))
    return gradient / int(mask.sum())


def topr_weight(lp, old, a, threshold=0.0):
    return min(math.exp(lp - old), 1.0) if a <= threshold else 1.0


def counts(mode, lp, old, a):
    r = math.exp(lp - old)
    two_side = 0.9 <= r <= 1.3
    one_side = r <= 1.3 if a > 0 else r >= 0.9
    ring = two_side or (a > 0 and r <= 0.5) or (a < 0 and r >= 2.0)
    return {"none": True, "two-side": two_side, "one-side": one_side, "ring": ring}[mode]


def sppo_counts(lp, old):
    return 1 / 1.3 <= math.exp(lp - old) <= 1.3


@pytest.mark.parametrize("threshold", [0.0, 0.7])
def test_topr_weighs_what_is_bad_by_its_ratio(threshold):
    logprobs, old, mask, advantages = batch(b=30, r=9)
    fn = create_policy_loss("topr", advantage_threshold=threshold)
    loss, gradient, metrics = with_gradient(fn, logprobs, old, mask, advantages)
    weighed = lambda lp, old, a: -topr_weight(lp, old, a, threshold) * a  # noqa: E731
    expected = per_token(lambda lp, old, a: weighed(lp, old, a) * lp, mask, logprobs, old, advantages)
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    np.testing.assert_allclose(gradient, numeric_gradient(weighed, mask, logprobs, old, advantages), rtol=1e-12)
    cut = ((advantages <= threshold) & (logprobs > old))[mask].double().mean()
    assert metrics["pg_clipfrac"].item() == pytest.approx(cut.item())
    assert 0 < cut < 1


def test_topr_of_whole_sequences():
    logprobs, old, mask, _ = batch(b=30, r=9, spread=0.1)
    advantages = torch.linspace(-1, 1, 30, dtype=torch.float64)[:, None].expand(30, 9)
    _, gradient, _ = with_gradient(create_policy_loss("topr", level="sequence"), logprobs, old, mask, advantages)
    ratio = ((logprobs - old) * mask).sum(-1).exp()
    weight = torch.where(advantages[:, 0] <= 0, ratio.clamp(max=1.0), 1.0)
    torch.testing.assert_close(gradient, -weight[:, None] * advantages * mask / mask.sum())


def test_asymre_shifts_the_baseline():
    logprobs, old, mask, advantages = batch()
    loss, _ = create_policy_loss("asymre")(logprobs, old, mask, advantages)
    shifted, _ = create_policy_loss("reinforce")(logprobs, old, mask, advantages + 0.1)
    assert loss.item() == pytest.approx(shifted.item(), rel=1e-12)
    unshifted, _ = create_policy_loss("asymre", baseline_shift=0.0)(logprobs, old, mask, advantages)
    assert unshifted.item() == create_policy_loss("reinforce")(logprobs, old, mask, advantages)[0].item()


def test_sppo_counts_log_ratios_within_the_range():
    logprobs, old, mask, advantages = batch(b=30, r=9)
    loss, gradient, metrics = with_gradient(create_policy_loss("sppo"), logprobs, old, mask, advantages)
    weighed = lambda lp, old, a: -a * sppo_counts(lp, old)  # noqa: E731
    expected = per_token(lambda lp, old, a: weighed(lp, old, a) * (lp - old), mask, logprobs, old, advantages)
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    np.testing.assert_allclose(gradient, numeric_gradient(weighed, mask, logprobs, old, advantages), rtol=1e-12)
    outside = 1 - per_token(lambda lp, old: float(sppo_counts(lp, old)), mask, logprobs, old)
    assert metrics["pg_clipfrac"].item() == pytest.approx(outside)
    assert 0.1 < outside < 0.9


@pytest.mark.parametrize("mode", ["none", "one-side", "two-side", "ring"])
@pytest.mark.parametrize("weight", ["none", "importance_sampling", "advantage"])
def test_rec_s_masks_and_weights(mode, weight):
    logprobs, old, mask, advantages = batch(b=40, r=9, spread=0.8)
    temp = {"temp": 2.0} if weight == "advantage" else {}
    fn = create_policy_loss("rec", clip_mode=mode, weight=weight, **temp, **EPSILONS[mode])
    loss, gradient, metrics = with_gradient(fn, logprobs, old, mask, advantages)

    def weighed(lp, old, a):
        w = {"none": 1.0, "importance_sampling": math.exp(lp - old), "advantage": math.exp(a / 2.0)}[weight]
        return -w * a * counts(mode, lp, old, a)

    expected = per_token(lambda lp, old, a: weighed(lp, old, a) * lp, mask, logprobs, old, advantages)
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    np.testing.assert_allclose(gradient, numeric_gradient(weighed, mask, logprobs, old, advantages), rtol=1e-12)
    left_out = per_token(lambda lp, old, a: 1.0 - counts(mode, lp, old, a), mask, logprobs, old, advantages)
    assert metrics["pg_clipfrac"].item() == pytest.approx(left_out)


def test_rec_s_modes_differ_from_each_other():
    """On the tokens of the tests above, which could not tell equal ones apart."""
    shares = {}
    for mode in ("one-side", "two-side", "ring"):
        _, metrics = create_policy_loss("rec", clip_mode=mode, **EPSILONS[mode])(*batch(b=40, r=9, spread=0.8))
        shares[mode] = metrics["pg_clipfrac"].item()
    assert 0 < shares["one-side"] < shares["two-side"]
    assert 0 < shares["ring"] < shares["two-side"]


def test_rec_s_regularizers():
    logprobs, old, mask, advantages = batch()
    plain, _ = create_policy_loss("rec")(logprobs, old, mask, advantages)
    for name, term in (("k2", (logprobs - old).square()), ("forward-kl", -logprobs)):
        loss, _ = create_policy_loss("rec", regularizer=name, regularizer_coef=0.3)(logprobs, old, mask, advantages)
        assert (loss - plain).item() == pytest.approx(0.3 * term[mask].mean().item())


def test_rec_without_options_is_reinforce():
    tensors = batch()
    assert create_policy_loss("rec")(*tensors)[0] == create_policy_loss("reinforce")(*tensors)[0]


@pytest.mark.parametrize(
    ("name", "args", "key"),
    [
        ("topr", {"level": "tokens"}, "level"),
        ("topr", {"advantage_threshold": math.inf}, "advantage_threshold"),
        ("asymre", {"baseline_shift": math.nan}, "baseline_shift"),
        ("sppo", {"epsilon": 0.0}, "epsilon"),
        ("rec", {"clip_mode": "both"}, "clip_mode"),
        ("rec", {"weight": "sampling"}, "weight"),
        ("rec", {"regularizer": "k3"}, "regularizer"),
        ("rec", {"epsilon_low": 1.5}, "epsilon_low"),
        ("rec", {"temp": 0.0}, "temp"),
        ("rec", {"regularizer_coef": -1.0}, "regularizer_coef"),
        # Without effect, by another argument.
        ("rec", {"regularizer_coef": 0.1}, "regularizer_coef"),
        ("rec", {"regularizer": "k2"}, "regularizer"),
        ("rec", {"epsilon_low": 0.1}, "epsilon_low"),
        ("rec", {"epsilon_high": 0.1}, "epsilon_high"),
        ("rec", {"clip_mode": "two-side", "epsilon_high_prime": 3.0}, "epsilon_high_prime"),
        ("rec", {"temp": 2.0}, "temp"),
        ("rec", {"clip_mode": "ring", "epsilon_high": 3.0}, "epsilon_high_prime"),
        ("rec", {"clip_mode": "ring", "epsilon_low": 0.9}, "epsilon_low_prime"),
    ],
)
def test_wrong_arguments_are_refused(name, args, key):
    with refuses(f"algorithm.policy_loss.args.{key}"):
        create_policy_loss(name, **args)(*batch())
