"""CISPO: REINFORCE with a clipped importance weight."""

from typing import Unpack

from torch import Tensor

from trinity_lightning.algorithm.policy_loss.aggregate import BatchTotals, aggregate, measured_tokens, token_share
from trinity_lightning.algorithm.policy_loss.ppo import check_clip_range
from trinity_lightning.algorithm.policy_loss.registry import log_ratio
from trinity_lightning.errors import ConfigError


def cispo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    action_mask: Tensor,
    advantages: Tensor,
    *,
    ref_logprobs: Tensor | None = None,
    num_computed_tokens: int | None = None,
    clip_range_low: float = 1.0,
    clip_range_high: float = 0.28,
    absolute_cap: float | None = None,
    loss_agg_mode: str = "token-mean",
    **totals: Unpack[BatchTotals],
) -> tuple[Tensor, dict[str, Tensor]]:
    """CISPO: -sg(clip(r, 1 - low, 1 + high)) A lp (MiniMax-M1, arXiv 2506.13585).

    Clipped tokens keep a gradient, unlike PPO's.

    Args:
        absolute_cap: clip the ratio to at most this instead, and not from below (ScaleRL, arXiv 2510.13786, uses 5.0).

    Returns:
        The loss, and pg_loss, ppo_kl as of `ppo`, and pg_clipfrac: share of trained tokens whose ratio is clipped.

    Raises:
        ConfigError: a range is negative, the cap is not above 0, or the mode is unknown.
    """
    check_clip_range(clip_range_low, clip_range_high)
    if absolute_cap is not None and not absolute_cap > 0:
        raise ConfigError(
            f"algorithm.policy_loss.args.absolute_cap must be above 0 (or null, for none), not {absolute_cap}."
        )
    log_r = log_ratio(logprobs, old_logprobs, action_mask).detach()
    ratio = log_r.exp()
    bounds = (1 - clip_range_low, 1 + clip_range_high) if absolute_cap is None else (0.0, absolute_cap)
    clipped = ratio.clamp(*bounds)
    loss = aggregate(-clipped * advantages * logprobs, action_mask, loss_agg_mode, **totals)
    n = measured_tokens(num_computed_tokens, totals)
    return loss, {
        "pg_loss": loss.detach(),
        "ppo_kl": -aggregate(log_r, action_mask, num_tokens=n),
        "pg_clipfrac": token_share(clipped != ratio, action_mask, n),
    }
