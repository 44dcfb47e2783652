"""GSPO: PPO's objective on the ratio of whole sequences."""

from typing import Unpack

import torch
from torch import Tensor

from trinity_lightning.algorithm.policy_loss.aggregate import BatchTotals, aggregate, measured_tokens
from trinity_lightning.algorithm.policy_loss.ppo import check_clip_range, clipped_shares
from trinity_lightning.algorithm.policy_loss.registry import log_ratio


def gspo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    action_mask: Tensor,
    advantages: Tensor,
    *,
    ref_logprobs: Tensor | None = None,
    num_computed_tokens: int | None = None,
    clip_range_low: float = 3e-4,
    clip_range_high: float = 4e-4,
    loss_agg_mode: str = "seq-mean-token-mean",
    **totals: Unpack[BatchTotals],
) -> tuple[Tensor, dict[str, Tensor]]:
    """GSPO, token form: PPO's objective on the sequence's ratio s = exp(mean of lp - old) (arXiv 2507.18071).

    The mean is over trained tokens; token t of sequence i takes sg(s_i) exp(lp_t - sg(lp_t)), which has the value of
    s_i and a gradient of its own, so that advantages may differ between tokens.

    Returns:
        The loss, and pg_loss, ppo_kl, pg_clipfrac, pg_clipfrac_low, pg_clipfrac_high as of `ppo`.

    Raises:
        ConfigError: a range is negative, or the mode is unknown.
    """
    check_clip_range(clip_range_low, clip_range_high)
    mask = action_mask.bool()
    log_r = log_ratio(logprobs, old_logprobs, mask)
    log_s = log_r.detach().sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    own = logprobs.masked_fill(~mask, 0.0)
    ratio = (log_s + own - own.detach()).exp()
    clipped = ratio.clamp(1 - clip_range_low, 1 + clip_range_high)
    loss_token = torch.maximum(-advantages * ratio, -advantages * clipped)
    loss = aggregate(loss_token, mask, loss_agg_mode, **totals)

    n = measured_tokens(num_computed_tokens, totals)
    return loss, {
        "pg_loss": loss.detach(),
        "ppo_kl": -aggregate(log_r.detach(), mask, num_tokens=n),
        **clipped_shares(ratio, advantages, mask, clip_range_low, clip_range_high, n),
    }
