"""The KL estimates against numpy, and their gradients at any ratio."""

import numpy as np
import pytest
import torch

from trinity_lightning.algorithm.kl import KL_FN, kl_loss
from trinity_lightning.algorithm.policy_loss.policy_loss import combine_metrics
from trinity_lightning.errors import ConfigError

ORACLES = {
    "none": lambda lp, ref, old: 0 * lp,
    "k1": lambda lp, ref, old: lp - ref,
    "k2": lambda lp, ref, old: (lp - ref) ** 2 / 2,
    "k3": lambda lp, ref, old: np.exp(ref - lp) - (ref - lp) - 1,
    "low_var_kl": lambda lp, ref, old: np.clip(np.exp(ref - lp) - (ref - lp) - 1, -10, 10),
    "abs": lambda lp, ref, old: np.abs(lp - ref),
    "corrected_k3": lambda lp, ref, old: (np.exp(ref - lp) - (ref - lp) - 1) * np.clip(np.exp(lp - old), 0, 2),
}


def tensors(b=4, r=6):
    g = torch.Generator().manual_seed(0)
    lp, ref, old = (torch.randn(b, r, generator=g, dtype=torch.float64) for _ in range(3))
    mask = torch.arange(r) < torch.tensor([[0], [2], [6], [3]])
    return lp, ref, old, mask


@pytest.mark.parametrize("name", list(KL_FN))
def test_estimates_equal_numpy(name):
    lp, ref, old, _ = tensors()
    expected = ORACLES[name](lp.numpy(), ref.numpy(), old.numpy())
    np.testing.assert_allclose(KL_FN.get(name)(lp, ref, old).numpy(), expected, atol=1e-12)


def test_estimates_of_equal_policies_are_zero():
    lp = tensors()[0]
    assert not any(KL_FN.get(name)(lp, lp, lp).any() for name in KL_FN)


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_unbiased_estimates_average_to_the_kl(name):
    g = torch.Generator().manual_seed(1)
    policy, reference = torch.randn(2, 8, generator=g, dtype=torch.float64).log_softmax(-1)
    kl = (policy.exp() * (policy - reference)).sum()
    estimates = KL_FN.get(name)(policy, reference, policy)  # for every token of the vocabulary
    torch.testing.assert_close((policy.exp() * estimates).sum(), kl)


def test_corrected_k3_has_the_gradient_of_the_kl():
    logits = torch.tensor([0.3, -0.2, 1.1], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.1, 0.5, -0.4], dtype=torch.float64).log_softmax(-1)
    policy = logits.log_softmax(-1)
    (expected,) = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), logits)
    policy = logits.log_softmax(-1)
    old = policy.detach()
    (grad,) = torch.autograd.grad((old.exp() * KL_FN.get("corrected_k3")(policy, reference, old)).sum(), logits)
    torch.testing.assert_close(grad, expected)


def test_low_var_kl_is_bounded():
    lp, ref = torch.tensor([-1e4, 0.0]), torch.tensor([0.0, -1e4])
    assert KL_FN.get("low_var_kl")(lp, ref, lp).tolist() == [10.0, 10.0]


@pytest.mark.parametrize("difference", [99.0, -99.0, 200.0, -200.0, 1e4, -1e4])
@pytest.mark.parametrize("moved", ["ref", "old", "both"])
@pytest.mark.parametrize("name", list(KL_FN))
def test_estimates_and_their_gradients_are_finite_at_any_ratio(name, moved, difference):
    """In float32, where exp overflows above 88."""
    policy = torch.full((1, 2), -1.0, requires_grad=True)
    base = policy.detach()
    ref, old = base + difference * (moved != "old"), base - difference * (moved != "ref")
    kl, metrics = kl_loss(name, policy, ref, old, torch.ones(1, 2, dtype=torch.bool), coefficient=0.5)
    assert torch.isfinite(kl)
    assert torch.isfinite(metrics["kl_loss"])
    if kl.requires_grad:
        kl.backward()
        assert policy.grad is not None
        assert torch.isfinite(policy.grad).all()


@pytest.mark.parametrize("name", list(KL_FN))
def test_kl_loss_adds_over_micro_batches_and_ignores_what_is_masked(name):
    lp, ref, old, mask = tensors()
    totals = {"num_tokens": int(mask.sum()), "num_sequences": 4, "max_response_length": 6}
    args = {"coefficient": 0.5, **totals}
    loss, metrics = kl_loss(name, lp, ref, old, mask, **args)
    expected = ORACLES[name](lp.numpy(), ref.numpy(), old.numpy())[mask.numpy()].mean()
    assert loss.item() == pytest.approx(0.5 * expected)
    assert metrics["kl_loss"].item() == pytest.approx(expected)
    leaf = lp.masked_fill(~mask, float("nan")).requires_grad_()
    parts = [kl_loss(name, leaf[rows], ref[rows], old[rows], mask[rows], **args) for rows in ([2, 0], [3, 1])]
    total = torch.stack([part for part, _ in parts]).sum()
    torch.testing.assert_close(total, loss)
    torch.testing.assert_close(combine_metrics(m for _, m in parts)["kl_loss"], metrics["kl_loss"])
    if name != "none":
        total.backward()
        assert leaf.grad is not None
        assert torch.isfinite(leaf.grad).all()
        assert not leaf.grad[~mask].any()


def test_an_unknown_estimate_is_refused_with_the_known_names():
    lp, ref, old, mask = tensors()
    with pytest.raises(ConfigError, match="low_var_kl"):
        kl_loss("k4", lp, ref, old, mask, coefficient=1.0)
