"""From values per token to the loss of an optimizer batch, the same however the batch is cut into micro-batches."""

from collections.abc import Iterable, Mapping
from typing import TypedDict

import torch
from torch import Tensor

from trinity_lightning.config.training import LOSS_AGG_MODES
from trinity_lightning.config.values import unknown_name
from trinity_lightning.errors import ConfigError


class BatchTotals(TypedDict, total=False):
    """Totals of the *whole optimizer batch*, on all ranks; None or left out: of the tensors at hand.

    Keys:
        num_tokens: trained tokens, N.
        num_sequences: sequences, B; those without a trained token count.
        max_response_length: longest response that the run allows, in tokens, R: a constant, so that the length of one
            response does not weigh the others (Dr. GRPO).
    """

    num_tokens: int | None
    num_sequences: int | None
    max_response_length: int | None


def aggregate(
    values: Tensor,
    action_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    *,
    num_tokens: int | None = None,
    num_sequences: int | None = None,
    max_response_length: int | None = None,
) -> Tensor:
    """One number of `values` [b, r], those outside the mask ignored whatever they are.

    With t the values, m the mask and T_i the trained tokens of sequence i:

    - "token-mean": sum(t m) / N (DAPO, arXiv 2503.14476);
    - "seq-mean-token-mean": sum_i (sum(t m) / T_i) / B (GRPO, arXiv 2402.03300);
    - "seq-mean-token-sum": sum(t m) / B;
    - "seq-mean-token-sum-norm": sum(t m) / (B R) (Dr. GRPO, arXiv 2503.20783).

    The results of the micro-batches of an optimizer batch, each called with the totals of the whole, *add up* to the
    result of the whole. Without a trained token it is 0.

    Args:
        values: [b, r].
        action_mask: which tokens are trained, bool (or 0 and 1) [b, r].
        loss_agg_mode: one of the four above.
        num_tokens: N; see `BatchTotals`.
        num_sequences: B.
        max_response_length: R.

    Raises:
        ConfigError: unknown mode.
    """
    mask = action_mask.bool()
    values = values.masked_fill(~mask, 0.0)
    sequences = max(mask.shape[0] if num_sequences is None else num_sequences, 1)
    if loss_agg_mode == "token-mean":
        return values.sum() / (mask.sum().clamp(min=1) if num_tokens is None else max(num_tokens, 1))
    if loss_agg_mode == "seq-mean-token-mean":
        return (values.sum(-1) / mask.sum(-1).clamp(min=1)).sum() / sequences
    if loss_agg_mode == "seq-mean-token-sum":
        return values.sum() / sequences
    if loss_agg_mode == "seq-mean-token-sum-norm":
        longest = mask.shape[1] if max_response_length is None else max_response_length
        return values.sum() / (sequences * max(longest, 1))
    raise ConfigError(unknown_name("loss_agg_mode", loss_agg_mode, LOSS_AGG_MODES))


def measured_tokens(num_computed_tokens: int | None, totals: BatchTotals) -> int | None:
    """What measurements are normalised by: the tokens that were computed, or, if that is not given, all."""
    return num_computed_tokens or totals.get("num_tokens")


def token_share(condition: Tensor, action_mask: Tensor, num_tokens: int | None = None) -> Tensor:
    """Share of the optimizer batch's trained tokens for which `condition` [b, r] holds; adds over micro-batches."""
    return aggregate(condition.float(), action_mask, num_tokens=num_tokens)


def combine_metrics(micro_batches: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Metrics of the optimizer batch: the maximum of keys that end in `/max`, the sum of all others.

    Every metric of losses, KL and corrections is a detached 0-d tensor, normalised by the totals of the whole optimizer
    batch: so metrics *add* over micro-batches and ranks, but for a maximum, which is known by its name.
    """
    combined: dict[str, Tensor] = {}
    for metrics in micro_batches:
        for name, value in metrics.items():
            if name not in combined:
                combined[name] = value
            elif name.endswith("/max"):
                combined[name] = torch.maximum(combined[name], value)
            else:
                combined[name] = combined[name] + value
    return combined
