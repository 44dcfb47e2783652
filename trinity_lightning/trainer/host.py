"""Masters and moments in the host's memory: always (`adamw_offload`), or while engines generate."""

import logging
import weakref
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from trinity_lightning.trainer.masters import MasterWeights, are_rounded, copy_settings

logger = logging.getLogger(__name__)

# -- memory of the host ------------------------------------------------------------------------------------------------

PORTABLE = 1  # cudaHostRegisterPortable: pinned for every GPU of the process
LINE = 64  # bytes of a cache line; a multiple of every dtype's size


class HostBlock:
    """Ordinary memory of exactly `size` bytes; if `pinned`, it is page-locked until the block is freed.

    torch's own pinned memory has the size of the next power of two, up to twice as much for each tensor
    (`ATen/core/CachingHostAllocator.h`). Memory that the driver registers keeps its size. torch does not know of copies
    from and to the block, so its holder must wait for them before freeing it.

    Attributes:
        bytes: the memory, uint8 [size].
    """

    def __init__(self, size: int, pinned: bool) -> None:
        self.bytes = torch.empty(size, dtype=torch.uint8)
        if not (pinned and size):
            return
        runtime: Any = torch.cuda.cudart()
        if code := int(runtime.cudaHostRegister(self.bytes.data_ptr(), size, PORTABLE)):
            logger.warning("%d bytes of the host could not be pinned (CUDA error %d): copies are slower.", size, code)
            return
        # The callback holds the tensor, so that its memory is not freed while it is registered.
        weakref.finalize(self, _unpin, self.bytes).atexit = False


def _unpin(block: Tensor) -> None:
    torch.cuda.synchronize()
    runtime: Any = torch.cuda.cudart()
    runtime.cudaHostUnregister(block.data_ptr())


def laid_out(tensors: Sequence[Tensor]) -> tuple[list[int], int]:
    """Offset of each tensor in one block, at the start of a cache line, and the block's size; in bytes."""
    sizes = [-(-tensor.numel() * tensor.element_size() // LINE) * LINE for tensor in tensors]
    *begins, size = accumulate(sizes, initial=0)
    return begins, size


# -- an optimizer that takes its steps on the host: `adamw_offload` ----------------------------------------------------


class HostMasters(MasterWeights):
    """Masters and moments on the host; the device holds the weights and, until the step, their float32 gradients.

    A step copies the clipped gradients to the host, waits for them once, and sends the new weights back in their own
    dtype. Both go through one buffer of 4 bytes a parameter, pinned if the device is a GPU. A checkpoint is the same as
    that of the optimizer on the device, where float32 weights have no masters.
    """

    def __init__(self, params: list[dict[str, Any]], factory: Callable[[Any], Optimizer]) -> None:
        super().__init__(params, factory, torch.device("cpu"))
        self._rounded = are_rounded(self.param_groups)
        sizes = [master.numel() for master in self.masters]
        self._block = HostBlock(4 * sum(sizes), pinned=any(weight.is_cuda for weight in self.weights))
        self._slots = self._block.bytes.view(torch.float32).split(sizes)

    def state_dict(self) -> dict[str, Any]:
        """Same as MasterWeights; with float32 weights, the inner optimizer's state and our settings."""
        if self._rounded:
            return super().state_dict()
        copy_settings(self, self.inner)
        return self.inner.state_dict()

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a `state_dict`; masters of float32 weights are copied from the weights, which are loaded already."""
        if self._rounded:
            super().load_state_dict(state_dict)
            return
        self.inner.load_state_dict(state_dict)
        copy_settings(self.inner, self)
        for weight, master in zip(self.weights, self.masters, strict=True):
            master.copy_(weight)

    def _hand_on_gradients(self) -> None:
        for weight, master, slot in zip(self.weights, self.masters, self._slots, strict=True):
            if weight.grad is not None:
                master.grad = slot.as_strided(master.shape, master.stride())
                master.grad.copy_(weight.grad, non_blocking=True)
        self._wait()

    def _round(self) -> None:
        """Send the rounded masters without waiting: the device's stream uses weights and gradients only afterwards."""
        for weight, master, slot in zip(self.weights, self.masters, self._slots, strict=True):
            rounded = slot.view(weight.dtype)[: weight.numel()].as_strided(weight.shape, weight.stride())
            weight.copy_(rounded.copy_(master), non_blocking=True)

    def _wait(self) -> None:
        device = self.weights[0].device
        if device.type == "cuda":
            torch.cuda.synchronize(device)


# -- moving an optimizer's state to the host while engines generate ----------------------------------------------------


class HostMemory:
    """Moves masters and moments of an optimizer to the host and back, bit for bit.

    The tensors stay the same objects. No step may be taken meanwhile; a checkpoint written meanwhile is the same.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._block = HostBlock(0, pinned=False)
        self._buffers: list[Tensor] = []  # reused at the next stay: pinning memory takes longer than filling it
        self._device: torch.device | None = None  # where the tensors came from, while they are away

    def leave(self) -> None:
        """Move the tensors to the host, unless they are there already."""
        tensors = states_of(self._optimizer)
        if self._device is not None or not tensors:
            return
        self._device = tensors[0].device
        if list(map(_layout, self._buffers)) != list(map(_layout, tensors)):
            self._make_room(tensors)
        for tensor, buffer in zip(tensors, self._buffers, strict=True):
            buffer.copy_(tensor.detach(), non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # before the sources of the copies are freed
        for tensor, buffer in zip(tensors, self._buffers, strict=True):
            tensor.data = buffer

    def _make_room(self, tensors: Sequence[Tensor]) -> None:
        """Lay out a buffer for each of the tensors in one block; the block before it is freed first."""
        begins, size = laid_out(tensors)
        self._buffers, self._block = [], HostBlock(0, pinned=False)
        self._block = HostBlock(size, pinned=any(tensor.is_cuda for tensor in tensors))
        for tensor, begin in zip(tensors, begins, strict=True):
            length = tensor.numel() * tensor.element_size()
            flat, (shape, dtype, stride) = self._block.bytes[begin : begin + length], _layout(tensor)
            self._buffers.append(flat.view(dtype).as_strided(shape, stride, flat.storage_offset() // dtype.itemsize))

    def come_back(self) -> None:
        """Move the tensors to the device again, also if a checkpoint was loaded meanwhile."""
        device, self._device = self._device, None
        if device is None:
            return
        for tensor in [*states_of(self._optimizer), *_counts(self._optimizer)]:
            tensor.data = tensor.detach().to(device, non_blocking=True, copy=True)


def _layout(tensor: Tensor) -> tuple[torch.Size, torch.dtype, tuple[int, ...]]:
    """Shape, dtype and strides that a copy of the tensor has."""
    return tensor.shape, tensor.dtype, torch.empty_like(tensor, device="meta").stride()


def states_of(optimizer: Optimizer) -> list[Tensor]:
    """An optimizer's tensors as large as a parameter: moments, and masters if it has them; no counts of steps."""
    masters = optimizer.masters if isinstance(optimizer, MasterWeights) else []
    return [*masters, *moments_of(optimizer)]


def moments_of(optimizer: Optimizer) -> list[Tensor]:
    """Moments of each parameter, or of this process's shard of it; the parts of a quantized moment."""
    states = _inner(optimizer).state.values()
    return [part for state in states for value in state.values() if _is_moment(value) for part in _parts_of(value)]


def _inner(optimizer: Optimizer) -> Optimizer:
    """The optimizer that holds the moments."""
    return optimizer.inner if isinstance(optimizer, MasterWeights) else optimizer


def _is_moment(value: object) -> bool:
    """True if a value of an optimizer's state is as large as its parameter: a count of steps has no dimension."""
    return isinstance(value, Tensor) and value.ndim > 0


def _parts_of(tensor: Any) -> list[Tensor]:
    flatten = getattr(tensor, "__tensor_flatten__", None)  # torch's wrapper subclasses have it
    return [tensor] if flatten is None else [getattr(tensor, name) for name in flatten()[0]]


def _counts(optimizer: Optimizer) -> list[Tensor]:
    """Counts of steps that belong on their parameter's device; a checkpoint loaded meanwhile put them on the host.

    torch keeps the counts of other optimizers on the host ("special device hosting for step" in
    `torch.optim.Optimizer`).
    """
    inner = _inner(optimizer)
    return [
        value
        for group in inner.param_groups
        if group.get("fused") or group.get("capturable")
        for parameter in group["params"]
        for value in inner.state.get(parameter, {}).values()
        if isinstance(value, Tensor) and not _is_moment(value)
    ]
