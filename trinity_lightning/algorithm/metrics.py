"""How metrics of micro-batches become metrics of the optimizer batch.

Every metric that a loss, a KL or a correction of this package returns is a detached 0-d tensor, normalised by the
totals of the whole optimizer batch (see `policy_loss.aggregate`). So metrics *add* over micro-batches and ranks. The
one exception is known by its name: a key that ends in `/max` is combined by the maximum.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor


def combine_metrics(micro_batches: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Metrics of the optimizer batch: the maximum of keys that end in `/max`, the sum of all others."""
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
