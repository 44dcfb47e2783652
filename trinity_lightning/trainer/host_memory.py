"""Masters and moments of an optimizer in the host's memory, while somebody else needs the device's."""

import torch
from torch import Tensor
from torch.optim import Optimizer

from trinity_lightning.trainer.master_weights import MasterWeights, is_moment


class HostMemory:
    """Moves what an optimizer keeps of each parameter to the host and back, bit for bit.

    The tensors stay the objects that they are, so that nobody who holds one notices; no step may be taken meanwhile.
    A checkpoint that is written meanwhile is the same.

    Args:
        optimizer: `MasterWeights`, or a plain one, which has moments alone.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._buffers: list[Tensor] = []  # of one stay and the next: to pin memory takes longer than to fill it
        self._device: torch.device | None = None  # where they came from, while they are away

    def leave(self) -> None:
        """Move to the host; what is there already stays."""
        tensors = _kept(self._optimizer)
        if self._device is not None or not tensors:
            return
        self._device = tensors[0].device
        for i, tensor in enumerate(tensors):
            if i == len(self._buffers) or self._buffers[i].shape != tensor.shape:
                self._buffers[i:] = [torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)]
            self._buffers[i].copy_(tensor.detach(), non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.synchronize()  # before the sources of the copies are freed
        for tensor, buffer in zip(tensors, self._buffers, strict=False):
            tensor.data = buffer

    def come_back(self) -> None:
        """Move to the device again, those of a checkpoint that was loaded meanwhile too."""
        device, self._device = self._device, None
        if device is None:
            return
        for tensor in [*_kept(self._optimizer), *_counts(self._optimizer)]:
            tensor.data = tensor.detach().to(device, non_blocking=True, copy=True)


def _kept(optimizer: Optimizer) -> list[Tensor]:
    """Tensors as large as a parameter; counts of steps stay where they are."""
    if isinstance(optimizer, MasterWeights):
        return [*optimizer.masters, *optimizer.moments]
    return [value for state in optimizer.state.values() for value in state.values() if is_moment(value)]


def _counts(optimizer: Optimizer) -> list[Tensor]:
    """Counts of steps that belong on their parameter's device: a checkpoint is loaded to where that is meanwhile.

    torch keeps those of other optimizers on the host ("special device hosting for step" in `torch.optim.Optimizer`).
    """
    plain = optimizer.inner if isinstance(optimizer, MasterWeights) else optimizer
    return [
        value
        for group in plain.param_groups
        if group.get("fused") or group.get("capturable")
        for parameter in group["params"]
        for value in plain.state.get(parameter, {}).values()
        if isinstance(value, Tensor) and not is_moment(value)
    ]
