"""Masters and moments in the host's memory: `adamw_offload`, and the stay of any optimizer's while engines generate."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from trinity_lightning.trainer.optim import MasterWeights, are_rounded, hand_on_settings

# -- where the optimizer takes its steps: `adamw_offload` --------------------------------------------------------------


class HostMasters(MasterWeights):
    """Masters on the host; a device has of each parameter its weight and, until the step, its float32 gradient.

    A step copies the clipped gradients to the host, waits for them once, and sends the new weights back in their own
    dtype, both through one buffer of 4 bytes a parameter, which is pinned if the device is a GPU. A checkpoint is that
    of the same optimizer on the device: float32 weights are their masters, which it has none of.
    """

    def __init__(self, params: list[dict[str, Any]], factory: Callable[[Any], Optimizer]) -> None:
        super().__init__(params, factory, torch.device("cpu"))
        self._rounded = are_rounded(self.param_groups)
        sizes = [each.numel() for each in self.masters]
        # One tensor: torch makes each that is pinned as large as the next power of two.
        buffer = torch.empty(sum(sizes), dtype=torch.float32, pin_memory=any(each.is_cuda for each in self.weights))
        self._slots = buffer.split(sizes)

    def state_dict(self) -> dict[str, Any]:
        """That of `MasterWeights`; of float32 weights that of the inner optimizer, with the settings of this one."""
        if self._rounded:
            return super().state_dict()
        hand_on_settings(self, self.inner)
        return self.inner.state_dict()

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` has; the masters of float32 weights are those that are there."""
        if self._rounded:
            super().load_state_dict(state_dict)
            return
        self.inner.load_state_dict(state_dict)
        hand_on_settings(self.inner, self)
        for weight, master in zip(self.weights, self.masters, strict=True):
            master.copy_(weight)

    def _hand_on_gradients(self) -> None:
        for weight, master, slot in zip(self.weights, self.masters, self._slots, strict=True):
            if weight.grad is not None:
                master.grad = slot.as_strided(master.shape, master.stride())
                master.grad.copy_(weight.grad, non_blocking=True)
        self._wait()

    def _round(self) -> None:
        """Send the masters, rounded: on the stream before what computes with the weights, and before new gradients."""
        for weight, master, slot in zip(self.weights, self.masters, self._slots, strict=True):
            rounded = slot.view(weight.dtype)[: weight.numel()].as_strided(weight.shape, weight.stride())
            weight.copy_(rounded.copy_(master), non_blocking=True)

    def _wait(self) -> None:
        device = self.weights[0].device
        if device.type == "cuda":
            torch.cuda.synchronize(device)


# -- while engines generate --------------------------------------------------------------------------------------------


class HostMemory:
    """Moves what an optimizer keeps of each parameter to the host and back, bit for bit.

    The tensors stay the same objects; no step may be taken meanwhile, and a checkpoint written meanwhile is the same.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._buffers: list[Tensor] = []  # kept from one stay to the next: pinning memory takes longer than filling it
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
