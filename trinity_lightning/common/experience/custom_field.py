"""A further column of the batch, taken from `Experience.info`."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class CustomField:
    """A number of every experience's `info` that becomes a tensor [B] of the batch.

    Attributes:
        source_field: key in `Experience.info`.
        destination_field: name in the batch.
        data_type: dtype in the batch.
    """

    source_field: str
    destination_field: str
    data_type: torch.dtype
