"""Sends weights to vLLM servers on the trainer's own GPU, by CUDA IPC: nothing leaves the GPU.

The trainer writes weights into memory that a server maps, one bucket after another. In vLLM's own requests the handle
of that memory is a pickle, which servers read only with VLLM_ALLOW_INSECURE_SERIALIZATION=1. Here the handle is JSON,
which `sync/ipc_worker.py` reads: the arguments of torch's `rebuild_cuda_tensor` for a tensor of bytes.
"""

import base64
import inspect
import math
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from trinity_lightning.common.threads import run_in_thread
from trinity_lightning.errors import RolloutError, WeightSyncError
from trinity_lightning.sync.servers import Server, ToServers, announcement
from trinity_lightning.sync.stream import Shape, WeightStream

BACKEND = "trinity_ipc"  # vLLM's name for the receiving end
WORKER = "trinity_lightning.sync.ipc_worker.Extension"
BUCKET_BYTES = 256 << 20


class SharedMemory(ToServers):
    """Sends weights to vLLM servers on the trainer's GPU; `WeightGroup` sends to other GPUs.

    A server is sent one bucket after another, each when it has loaded the previous one.
    """

    method = "ipc"
    server_arguments: ClassVar[Mapping[str, Any]] = {
        "weight_transfer_config": {"backend": BACKEND},
        "worker_extension_cls": WORKER,
    }

    async def send(self, stream: WeightStream, version: int) -> None:
        await self.check(stream.shapes)
        for server in self._servers:
            await self._deliver(server, stream, version)

    async def _deliver(self, server: Server, stream: WeightStream, version: int) -> None:
        parts = buckets(stream.shapes, server.dtype.itemsize, BUCKET_BYTES)
        largest = max(sum(math.prod(stream.shapes[name]) for name in names) for names in parts)
        try:
            buffer = SharedBuffer(largest * server.dtype.itemsize, self._device)
            try:
                updates = _updates(buffer, parts, stream, server.dtype)
                await server.receive_weights(updates, version, resend=partial(self._deliver, server, stream, version))
            finally:
                buffer.free()
        except (WeightSyncError, RolloutError, RuntimeError, OSError) as error:
            raise WeightSyncError(
                f"a server on the trainer's GPU did not take the weights over (synchronizer.method=ipc): {error}. "
                "synchronizer=checkpoint does not share memory of the GPU."
            ) from error


async def _updates(
    buffer: "SharedBuffer", parts: Sequence[Sequence[str]], stream: WeightStream, dtype: torch.dtype
) -> AsyncIterator[dict[str, Any]]:
    """Fill the buffer with one bucket after another, and yield vLLM's IPCWeightTransferUpdateInfo of each.

    The handles in it are JSON (`handle_as_json`).
    """
    tensors = iter(stream)
    for names in parts:
        sizes = await run_in_thread(partial(buffer.fill, (next(tensors)[1] for _ in names), dtype))
        update = announcement({name: stream.shapes[name] for name in names}, dtype)
        yield update | {"ipc_handles": buffer.handles, "tensor_sizes": sizes}


def buckets(shapes: Mapping[str, Shape], width: int, most: int) -> list[list[str]]:
    """The names in their order, cut into lists whose tensors take at most `most` bytes together.

    A larger tensor has a list of its own. `width` is the number of bytes of an element.
    """
    lists: list[list[str]] = []
    filled = 0
    for name, shape in shapes.items():
        size = math.prod(shape) * width
        if not lists or filled + size > most:
            lists.append([])
            filled = 0
        lists[-1].append(name)
        filled += size
    return lists


class SharedBuffer:
    """GPU memory of `size` bytes that one server maps; RuntimeError: there is no room, or it cannot be shared."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._device = device
        self._memory = torch.empty(size, dtype=torch.uint8, device=device)
        with torch.cuda.device(device):
            _, arguments = reductions.reduce_tensor(self._memory)
        gpu = str(torch.cuda.get_device_properties(device).uuid)
        self.handles = {gpu: handle_as_json(arguments)}

    def fill(self, tensors: Iterable[Tensor], dtype: torch.dtype) -> list[int]:
        """Write tensors one after another in a dtype, and return the bytes of each once all are written."""
        sizes: list[int] = []
        with torch.cuda.device(self._device):
            for tensor in tensors:
                start, size = sum(sizes), tensor.numel() * dtype.itemsize
                self._memory[start : start + size].view(dtype).view(tensor.shape).copy_(tensor)
                sizes.append(size)
            torch.cuda.synchronize(self._device)  # the server reads it on a stream of its own
        return sizes

    def free(self) -> None:
        """Free the memory, once the server does not use it any more."""
        del self._memory
        torch.cuda.ipc_collect()


# -- the handle of a tensor of bytes that fills its storage, as JSON ---------------------------------------------------


_ARGUMENTS = tuple(inspect.signature(reductions.rebuild_cuda_tensor).parameters)
_BYTES = ("storage_handle", "ref_counter_handle", "event_handle")
_NUMBERS = ("storage_size_bytes", "storage_offset_bytes", "ref_counter_offset", "event_sync_required")


def handle_as_json(arguments: Sequence[Any]) -> dict[str, Any]:
    """The handle for a request, made of the arguments that torch's `reduce_tensor` returns."""
    named = dict(zip(_ARGUMENTS, arguments, strict=True))
    handles = {name: base64.b64encode(named[name]).decode() for name in _BYTES}
    return handles | {name: int(named[name]) for name in _NUMBERS}


def rebuild_arguments(handle: Mapping[str, Any]) -> tuple[Any, ...]:
    """The arguments for torch's `rebuild_cuda_tensor`; vLLM sets `storage_device` to the receiver's."""
    named = {
        "tensor_cls": Tensor,
        "tensor_size": (int(handle["storage_size_bytes"]),),
        "tensor_stride": (1,),
        "tensor_offset": 0,
        "storage_cls": torch.storage.TypedStorage,
        "dtype": torch.uint8,
        "storage_device": 0,
        "requires_grad": False,
        **{name: base64.b64decode(handle[name], validate=True) for name in _BYTES},
        **{name: int(handle[name]) for name in _NUMBERS},
    }
    return tuple(named[name] for name in _ARGUMENTS)
