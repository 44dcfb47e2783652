"""Supervised fine-tuning."""

from typing import Unpack

from torch import Tensor

from trinity_lightning.algorithm.policy_loss.aggregate import BatchTotals, aggregate


def sft(
    logprobs: Tensor,
    old_logprobs: Tensor,
    action_mask: Tensor,
    advantages: Tensor,
    *,
    ref_logprobs: Tensor | None = None,
    loss_agg_mode: str = "token-mean",
    **totals: Unpack[BatchTotals],
) -> tuple[Tensor, dict[str, Tensor]]:
    """Supervised fine-tuning: -lp, whatever the advantages. The only metric is pg_loss. ConfigError: unknown mode."""
    loss = aggregate(-logprobs, action_mask, loss_agg_mode, **totals)
    return loss, {"pg_loss": loss.detach()}
