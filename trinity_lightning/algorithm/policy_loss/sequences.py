"""Losses as means over sequences; that over tokens is in `policy_loss`."""

from torch import Tensor

from trinity_lightning.config.training import LOSS_AGG_MODES
from trinity_lightning.config.values import unknown_name
from trinity_lightning.errors import ConfigError


def mean_of_sequences(
    values: Tensor, mask: Tensor, loss_agg_mode: str, num_sequences: int | None, max_response_length: int | None
) -> Tensor:
    """One number of `values` [b, r], which are 0 outside the mask; modes, totals and errors as of `aggregate`."""
    sequences = max(mask.shape[0] if num_sequences is None else num_sequences, 1)
    if loss_agg_mode == "seq-mean-token-mean":
        return (values.sum(-1) / mask.sum(-1).clamp(min=1)).sum() / sequences
    if loss_agg_mode == "seq-mean-token-sum":
        return values.sum() / sequences
    if loss_agg_mode == "seq-mean-token-sum-norm":
        longest = mask.shape[1] if max_response_length is None else max_response_length
        return values.sum() / (sequences * max(longest, 1))
    raise ConfigError(unknown_name("loss_agg_mode", loss_agg_mode, LOSS_AGG_MODES))
