"""A micro-batch on its way to a GPU."""

from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import accumulate

import torch
from torch import Tensor

from trinity_lightning.trainer.micro_batch import MicroBatch

ALIGNMENT = 16  # bytes: of where a tensor begins in a buffer of several


def moved(micro: MicroBatch, device: torch.device) -> MicroBatch:
    """The same with all of its tensors on the device."""
    own = {each.name: getattr(micro, each.name) for each in fields(micro)}
    fixed = {name: each for name, each in own.items() if isinstance(each, Tensor)}
    inputs = {name: each for name, each in micro.inputs.items() if isinstance(each, Tensor)}
    tensors = iter(_moved_together([*fixed.values(), *inputs.values(), *micro.columns.values()], device))
    fixed, inputs, columns = (dict(zip(each, tensors, strict=False)) for each in (fixed, inputs, micro.columns))
    return replace(micro, **fixed, inputs=micro.inputs | inputs, columns=columns)


def _moved_together(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
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
