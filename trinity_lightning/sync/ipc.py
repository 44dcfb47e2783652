"""Weights to servers on the trainer's own GPU: written into memory that they map (CUDA IPC), one bucket after another.

Nothing leaves the GPU. vLLM's own requests carry the handle of that memory as a pickle, which its servers read with
VLLM_ALLOW_INSECURE_SERIALIZATION=1 only. Here the same handle is JSON, and `sync/ipc_worker.py` reads it.
"""

import base64
import inspect
import math
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from trinity_lightning.common.inference import InferenceModel
from trinity_lightning.common.threads import run_in_thread
from trinity_lightning.errors import RolloutError, WeightSyncError
from trinity_lightning.sync.servers import Server, announcement, check_device, servers_of
from trinity_lightning.sync.stream import Shape, WeightStream, check_shapes

BACKEND = "trinity_ipc"  # what vLLM calls its receiving end
WORKER = "trinity_lightning.sync.ipc_worker.Extension"
BUCKET_BYTES = 256 << 20

# -- the handle of mapped memory: the arguments of torch's `rebuild_cuda_tensor`, for a tensor of bytes ----------------

_ARGUMENTS = tuple(inspect.signature(reductions.rebuild_cuda_tensor).parameters)
_BYTES = ("storage_handle", "ref_counter_handle", "event_handle")
_NUMBERS = ("storage_size_bytes", "storage_offset_bytes", "ref_counter_offset", "event_sync_required")


def handle_as_json(arguments: Sequence[Any]) -> dict[str, Any]:
    """What a request says of a tensor of bytes that fills its storage, by what torch's `reduce_tensor` says of it."""
    named = dict(zip(_ARGUMENTS, arguments, strict=True))
    handles = {name: base64.b64encode(named[name]).decode() for name in _BYTES}
    return handles | {name: int(named[name]) for name in _NUMBERS}


def rebuild_arguments(handle: Mapping[str, Any]) -> tuple[Any, ...]:
    """The reverse; vLLM sets `storage_device` to the receiver's."""
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


# -- the sending end ---------------------------------------------------------------------------------------------------


def buckets(shapes: Mapping[str, Shape], width: int, most: int) -> list[list[str]]:
    """Names in their order, in lists whose tensors take at most `most` bytes together, or that have one larger tensor.

    Args:
        shapes: of the tensors.
        width: bytes of a number.
        most: bytes.
    """
    found: list[list[str]] = []
    filled = 0
    for name, shape in shapes.items():
        size = math.prod(shape) * width
        if not found or filled + size > most:
            found.append([])
            filled = 0
        found[-1].append(name)
        filled += size
    return found


class SharedBuffer:
    """Memory of a GPU that one server maps.

    Args:
        size: bytes.
        device: the GPU.

    Raises:
        RuntimeError: there is no room, or it cannot be shared.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self._device = device
        self._memory = torch.empty(size, dtype=torch.uint8, device=device)
        with torch.cuda.device(device):
            _, arguments = reductions.reduce_tensor(self._memory)
        gpu = str(torch.cuda.get_device_properties(device).uuid)
        self.handles = {gpu: handle_as_json(arguments)}

    def fill(self, tensors: Iterable[Tensor], dtype: torch.dtype) -> list[int]:
        """Write tensors one after the other, in that dtype; bytes of each. They are there when this returns."""
        sizes: list[int] = []
        with torch.cuda.device(self._device):
            for tensor in tensors:
                start, size = sum(sizes), tensor.numel() * dtype.itemsize
                self._memory[start : start + size].view(dtype).view(tensor.shape).copy_(tensor)
                sizes.append(size)
            torch.cuda.synchronize(self._device)  # the server reads it on a stream of its own
        return sizes

    def free(self) -> None:
        """Give the memory back, once the server has let go of it."""
        del self._memory
        torch.cuda.ipc_collect()


class SharedMemory:
    """The trainer and vLLM servers on its GPU; see `WeightGroup`, which sends to other GPUs.

    A server is sent one bucket after another, each when it has loaded the one before.

    Args:
        models: the servers.
        device: where the trainer's weights are.
        held: gives the weights that the servers were last sent, for one that is started again.

    Raises:
        ConfigError: an engine takes its weights in another way, or the trainer's weights are on a CPU.
    """

    def __init__(
        self, models: Sequence[InferenceModel], device: torch.device, held: Callable[[], WeightStream]
    ) -> None:
        self._servers = servers_of(models, "ipc")
        check_device(device, "ipc")
        self._device = device
        self._held = held

    async def form(self, shapes: Mapping[str, Shape]) -> None:
        """Check what is going to be sent; a WeightSyncError if it does not fit the servers."""
        for server in self._servers:
            await server.load()
            check_shapes(shapes, server.weight_shapes)

    async def send(self, stream: WeightStream, version: int) -> None:
        """Give every server these weights; one that died is started again first.

        Raises:
            WeightSyncError: they do not fit, and no server was touched; or a server failed, and may hold half of them.
        """
        await self.form(stream.shapes)
        for server in self._servers:
            await self._deliver(server, stream, version)

    async def _send_again(self, server: Server, version: int) -> None:
        """Give a server that was started again the weights that it had."""
        await self._deliver(server, self._held(), version)

    async def _deliver(self, server: Server, stream: WeightStream, version: int) -> None:
        parts = buckets(stream.shapes, server.dtype.itemsize, BUCKET_BYTES)
        largest = max(sum(math.prod(stream.shapes[name]) for name in names) for names in parts)
        try:
            buffer = SharedBuffer(largest * server.dtype.itemsize, self._device)
            try:
                updates = _updates(buffer, parts, stream, server.dtype)
                await server.receive_weights(updates, version, again=partial(self._send_again, server, version))
            finally:
                buffer.free()
        except (WeightSyncError, RolloutError, RuntimeError, OSError) as error:
            raise WeightSyncError(
                f"a server on the trainer's GPU did not take the weights over (synchronizer.method=ipc): {error}. "
                "synchronizer=checkpoint does not share memory of the GPU."
            ) from error

    def close(self) -> None:
        """There is nothing to leave."""


async def _updates(
    buffer: SharedBuffer, parts: Sequence[Sequence[str]], stream: WeightStream, dtype: torch.dtype
) -> AsyncIterator[dict[str, Any]]:
    """What the server is sent of each bucket: vLLM's IPCWeightTransferUpdateInfo, but for the form of the handles."""
    tensors = iter(stream)
    for names in parts:
        sizes = await run_in_thread(partial(buffer.fill, (next(tensors)[1] for _ in names), dtype))
        said = announcement({name: stream.shapes[name] for name in names}, dtype)
        yield said | {"ipc_handles": buffer.handles, "tensor_sizes": sizes}
