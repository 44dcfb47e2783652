"""What an optimizer keeps of each parameter, and its stay in the host's memory while engines generate."""

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from trinity_lightning.trainer.optim import MasterWeights


class HostMemory:
    """Moves what an optimizer keeps of each parameter to the host and back, bit for bit.

    The tensors stay the same objects, for references to them to stay valid; no step may be taken meanwhile.
    A checkpoint that is written meanwhile is the same. A plain optimizer has moments alone, and no masters.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._buffers: list[Tensor] = []  # of one stay and the next: to pin memory takes longer than to fill it
        self._device: torch.device | None = None  # where they came from, while they are away

    def leave(self) -> None:
        """Move to the host; what is there already stays."""
        tensors = kept_of(self._optimizer)
        if self._device is not None or not tensors:
            return
        self._device = tensors[0].device
        for i, tensor in enumerate(tensors):
            if i == len(self._buffers) or self._buffers[i].shape != tensor.shape:
                self._buffers[i:] = [torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)]
            self._buffers[i].copy_(tensor.detach(), non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # before the sources of the copies are freed
        for tensor, buffer in zip(tensors, self._buffers, strict=False):
            tensor.data = buffer

    def come_back(self) -> None:
        """Move to the device again, those of a checkpoint that was loaded meanwhile too."""
        device, self._device = self._device, None
        if device is None:
            return
        for tensor in [*kept_of(self._optimizer), *_counts(self._optimizer)]:
            tensor.data = tensor.detach().to(device, non_blocking=True, copy=True)


def kept_of(optimizer: Optimizer) -> list[Tensor]:
    """Tensors as large as a parameter: masters, if it has them, and moments; counts of steps stay where they are."""
    masters = optimizer.masters if isinstance(optimizer, MasterWeights) else []
    return [*masters, *moments_of(optimizer)]


def moments_of(optimizer: Optimizer) -> list[Tensor]:
    """What it remembers of each parameter: of shards this process's, of quantized ones what they are made of."""
    states = _plain(optimizer).state.values()
    return [part for state in states for value in state.values() if _is_moment(value) for part in _made_of(value)]


def _plain(optimizer: Optimizer) -> Optimizer:
    return optimizer.inner if isinstance(optimizer, MasterWeights) else optimizer


def _is_moment(value: object) -> bool:
    """Whether a value of an optimizer's state is as large as its parameter: a count of steps has no dimension."""
    return isinstance(value, Tensor) and value.ndim > 0


def _made_of(tensor: Any) -> list[Tensor]:
    flatten = getattr(tensor, "__tensor_flatten__", None)  # of torch's wrapper subclasses
    return [tensor] if flatten is None else [getattr(tensor, name) for name in flatten()[0]]


def _counts(optimizer: Optimizer) -> list[Tensor]:
    """Counts of steps that belong on their parameter's device: a checkpoint is loaded to where that is meanwhile.

    torch keeps those of other optimizers on the host ("special device hosting for step" in `torch.optim.Optimizer`).
    """
    plain = _plain(optimizer)
    return [
        value
        for group in plain.param_groups
        if group.get("fused") or group.get("capturable")
        for parameter in group["params"]
        for value in plain.state.get(parameter, {}).values()
        if isinstance(value, Tensor) and not _is_moment(value)
    ]
