"""The entropy bonus."""

from typing import Unpack

from torch import Tensor

from trinity_lightning.algorithm.policy_loss.aggregate import BatchTotals, aggregate


def entropy_loss(
    entropies: Tensor,
    action_mask: Tensor,
    *,
    coefficient: float,
    loss_agg_mode: str = "token-mean",
    **totals: Unpack[BatchTotals],
) -> tuple[Tensor, dict[str, Tensor]]:
    """-coefficient * entropy, to be added to the policy loss; and the metric entropy: its mean over trained tokens.

    Args:
        entropies: of the policy's distribution at each response token, in nats [b, r].
        action_mask: which tokens are trained, bool [b, r].
        coefficient: weight of the bonus.
        loss_agg_mode: how the bonus is aggregated, see `aggregate`.

    Raises:
        ConfigError: unknown mode.
    """
    bonus = aggregate(entropies, action_mask, loss_agg_mode, **totals)
    mean = aggregate(entropies.detach(), action_mask, num_tokens=totals.get("num_tokens"))
    return -coefficient * bonus, {"entropy": mean}
