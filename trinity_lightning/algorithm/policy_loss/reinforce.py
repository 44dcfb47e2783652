"""REINFORCE: the likelihood of what was done, by its advantage."""

from typing import Unpack

from torch import Tensor

from trinity_lightning.algorithm.policy_loss.aggregate import BatchTotals, aggregate


def reinforce(
    logprobs: Tensor,
    old_logprobs: Tensor,
    action_mask: Tensor,
    advantages: Tensor,
    *,
    ref_logprobs: Tensor | None = None,
    loss_agg_mode: str = "token-mean",
    **totals: Unpack[BatchTotals],
) -> tuple[Tensor, dict[str, Tensor]]:
    """REINFORCE: -A lp (Williams 1992). The only metric is pg_loss. ConfigError: unknown mode."""
    loss = aggregate(-advantages * logprobs, action_mask, loss_agg_mode, **totals)
    return loss, {"pg_loss": loss.detach()}
