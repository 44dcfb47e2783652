"""Estimates of the KL of policy and reference, and the penalty that they make.

With d = ref - lp, both log-probabilities of a token sampled from pi (Schulman, "Approximating KL divergence", 2020):
k1 = -d is unbiased and noisy, k2 = d^2 / 2 biased and calm, k3 = exp(d) - d - 1 unbiased and never negative.
Log-ratios are clamped to +-20 before any exp, so that values and gradients stay finite for any log-probabilities.
"""

from collections.abc import Callable
from typing import Unpack

import torch
from torch import Tensor

from trinity_lightning.algorithm.policy_loss.policy_loss import MAX_LOG_RATIO, BatchTotals, aggregate, trained
from trinity_lightning.config.registry import Registry

# From (logprobs, ref_logprobs, old_logprobs), each [b, r], to the estimate of each token [b, r].
KLFn = Callable[[Tensor, Tensor, Tensor], Tensor]
KL_FN: Registry[KLFn] = Registry("KL estimate")

MAX_LOW_VAR_KL = 10.0  # bound of the estimate low_var_kl
MAX_CORRECTION = 2.0  # bound of the importance ratio in corrected_k3


def none(logprobs: Tensor, ref_logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """0: no KL term."""
    return torch.zeros_like(logprobs)


def k1(logprobs: Tensor, ref_logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """lp - ref."""
    return logprobs - ref_logprobs


def k2(logprobs: Tensor, ref_logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """d^2 / 2."""
    return (ref_logprobs - logprobs).square() / 2


def k3(logprobs: Tensor, ref_logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """exp(d) - d - 1, with d clamped to +-20."""
    d = (ref_logprobs - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(d) - d


def low_var_kl(logprobs: Tensor, ref_logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """k3 clamped to +-10."""
    return k3(logprobs, ref_logprobs, old_logprobs).clamp(-MAX_LOW_VAR_KL, MAX_LOW_VAR_KL)


def absolute(logprobs: Tensor, ref_logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """|d|."""
    return (ref_logprobs - logprobs).abs()


def corrected_k3(logprobs: Tensor, ref_logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """k3 times the importance ratio exp(lp - old), clamped to [0, 2].

    The tokens were sampled from pi_old. The ratio, through which the gradient flows too, turns the estimate and its
    gradient into the current policy's (DeepSeek-V3.2, arXiv 2512.02556).
    """
    log_r = (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_r.exp().clamp(0.0, MAX_CORRECTION)
    return ratio * k3(logprobs, ref_logprobs, old_logprobs)


def kl_loss(
    name: str,
    logprobs: Tensor,
    ref_logprobs: Tensor,
    old_logprobs: Tensor,
    action_mask: Tensor,
    *,
    coefficient: float,
    loss_agg_mode: str = "token-mean",
    **totals: Unpack[BatchTotals],
) -> tuple[Tensor, dict[str, Tensor]]:
    """coefficient * KL, to be added to the policy loss; and the metric kl_loss, the KL without its coefficient.

    Args:
        name: the estimate's name in `KL_FN`.
        logprobs, ref_logprobs, old_logprobs, action_mask: see `PolicyLossFn` [b, r].
        coefficient: weight of the KL.
        loss_agg_mode: see `aggregate`.

    Raises:
        ValueError: unknown estimate, or unknown mode.
    """
    per_token = KL_FN.get(name)(*(trained(t, action_mask) for t in (logprobs, ref_logprobs, old_logprobs)))
    kl = aggregate(per_token, action_mask, loss_agg_mode, **totals)
    return coefficient * kl, {"kl_loss": kl.detach()}
