"""SAPO: a soft gate in place of PPO's clip."""

from typing import Unpack

import torch
from torch import Tensor

from trinity_lightning.algorithm.policy_loss.aggregate import BatchTotals, aggregate, measured_tokens
from trinity_lightning.algorithm.policy_loss.registry import log_ratio
from trinity_lightning.config.values import number


def sapo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    action_mask: Tensor,
    advantages: Tensor,
    *,
    ref_logprobs: Tensor | None = None,
    num_computed_tokens: int | None = None,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
    loss_agg_mode: str = "seq-mean-token-mean",
    **totals: Unpack[BatchTotals],
) -> tuple[Tensor, dict[str, Tensor]]:
    """SAPO: -4/tau sigmoid(tau (r - 1)) A, a soft gate in place of the clip (arXiv 2511.20347).

    Args:
        tau_positive: temperature of tokens with A > 0.
        tau_negative: temperature of the others; higher fades faster.

    Returns:
        The loss, and pg_loss, ppo_kl as of `ppo`.

    Raises:
        ConfigError: a temperature is not above 0 or infinite, or the mode is unknown.
    """
    for name, tau in (("tau_positive", tau_positive), ("tau_negative", tau_negative)):
        number(name, tau, above=0)
    log_r = log_ratio(logprobs, old_logprobs, action_mask)
    tau = torch.full_like(advantages, tau_negative).masked_fill(advantages > 0, tau_positive)
    gate = torch.sigmoid(tau * (log_r.exp() - 1)) * 4 / tau
    loss = aggregate(-gate * advantages, action_mask, loss_agg_mode, **totals)
    ppo_kl = -aggregate(log_r.detach(), action_mask, num_tokens=measured_tokens(num_computed_tokens, totals))
    return loss, {"pg_loss": loss.detach(), "ppo_kl": ppo_kl}
