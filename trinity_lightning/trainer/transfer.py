"""Tensors on their way from the CPU to another device."""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

ALIGNMENT = 16  # bytes: of where a tensor begins in a buffer of several


def moved_together(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Tensors of the CPU, of any shapes and dtypes, on the device: one copy, out of pinned memory if it is a GPU.

    Nobody waits for it: what the device computes next comes after it.
    """
    ends = list(accumulate(-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors))
    packed = torch.empty(ends[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")

    def places(buffer: Tensor) -> list[Tensor]:
        return [
            buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for start, tensor in zip([0, *ends], tensors, strict=False)
        ]

    for place, tensor in zip(places(packed), tensors, strict=True):
        place.copy_(tensor)
    return places(packed.to(device, non_blocking=True))
