"""Losses without a ratio: SFT, REINFORCE and OPMD."""

from typing import Unpack

from torch import Tensor

from trinity_lightning.algorithm.policy_loss.policy_loss import BatchTotals, aggregate
from trinity_lightning.config.values import number


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


def opmd(
    logprobs: Tensor,
    old_logprobs: Tensor,
    action_mask: Tensor,
    advantages: Tensor,
    *,
    ref_logprobs: Tensor | None = None,
    tau: float = 1.0,
    loss_agg_mode: str = "token-mean",
    **totals: Unpack[BatchTotals],
) -> tuple[Tensor, dict[str, Tensor]]:
    """OPMD, its simple form: -A lp / (1 + tau) (Trinity-RFT, arXiv 2505.17826). The only metric is pg_loss.

    Raises:
        ConfigError: tau is negative or infinite, or the mode is unknown.
    """
    number("algorithm.policy_loss.args.tau", tau, least=0)
    loss = aggregate(-advantages * logprobs / (1 + tau), action_mask, loss_agg_mode, **totals)
    return loss, {"pg_loss": loss.detach()}
