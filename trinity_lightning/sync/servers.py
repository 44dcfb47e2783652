"""Weights to vLLM servers without a file: over NCCL to other GPUs, by CUDA IPC within the GPU of the trainer."""

import asyncio
import base64
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from trinity_lightning.common.inference import InferenceModel
from trinity_lightning.common.threads import run_in_thread
from trinity_lightning.errors import ConfigError, RolloutError, WeightSyncError
from trinity_lightning.sync.stream import Shape, WeightStream, check_shapes

Server = Any  # a `VLLMServerEngine`, of a room that this one does not import


class Sender(ABC):
    """Sends weights to all engines at once."""

    @abstractmethod
    async def send(self, stream: WeightStream, version: int) -> None:
        """Give every engine these weights; a WeightSyncError: one did not take them, and may hold half of them."""

    def close(self) -> None:  # noqa: B027  # some have nothing to leave
        """Leave the engines; twice is allowed."""


class ToServers(Sender):
    """The trainer, which sends, and the servers, which were all started to be sent weights by `method`.

    One that died is started again before weights are sent. Those that do not fit touch no server.

    Args:
        models: the servers.
        device: where the trainer's weights are.

    Raises:
        ConfigError: an engine takes its weights in another way, or the trainer's weights are on a CPU.
    """

    method: ClassVar[str]

    def __init__(self, models: Sequence[InferenceModel], device: torch.device) -> None:
        if not models or any(getattr(model, "sync_method", None) != self.method for model in models):
            raise ConfigError(
                "weights are sent to servers that were started for it: engine=vllm_server with synchronizer="
                f"{self.method}. In this process weights go by memory, to other servers as a folder."
            )
        check_device(device, self.method)
        self._servers: list[Server] = list(models)
        self._device = device

    async def form(self, shapes: Mapping[str, Shape]) -> None:
        """Have every server run, and connect with it; a WeightSyncError: one does not join, or has other shapes."""
        await self.check(shapes)

    async def check(self, shapes: Mapping[str, Shape]) -> None:
        """Have every server run; a WeightSyncError if what is going to be sent does not fit them."""
        await asyncio.gather(*(server.load() for server in self._servers))
        for server in self._servers:
            check_shapes(shapes, server.weight_shapes)


def announcement(shapes: Mapping[str, Shape], dtype: torch.dtype) -> dict[str, Any]:
    """What vLLM's requests say of tensors that are sent in that dtype."""
    return {
        "names": list(shapes),
        "dtype_names": [str(dtype).removeprefix("torch.")] * len(shapes),
        "shapes": [list(shape) for shape in shapes.values()],
    }


def check_device(device: torch.device, method: str) -> None:
    """Refuse to send weights by that method if they are in no GPU's memory; a ConfigError."""
    if device.type != "cuda":
        raise ConfigError(
            f"synchronizer={method} sends from a GPU, and the policy is on {device}",
            key="synchronizer",
            fix="take synchronizer=checkpoint",
        )


# -- over NCCL ---------------------------------------------------------------------------------------------------------

END_SECONDS = 1.0  # for a server to say why, if the sender has only seen a connection end


class NCCLGroup:
    """The sending end, rank 0, of a group that vLLM's workers join.

    The group's id goes to the servers in their invitations: a store, vLLM's other way, would unpickle what anybody has
    written there. NCCL itself connects over the network interface that it chooses (NCCL_SOCKET_IFNAME).

    Args:
        receivers: how many workers there will be, each on a GPU of its own.
        device: the GPU to send from.

    Raises:
        RuntimeError, OSError: there is no NCCL.
    """

    def __init__(self, receivers: int, device: torch.device) -> None:
        from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

        self.device = device
        self._world_size = 1 + receivers
        self._id = bytes(NCCLLibrary().ncclGetUniqueId().internal)
        self._invited = 0
        self._communicator: Any = None
        self._closed = False

    def invitation(self, workers: int) -> dict[str, str | int]:
        """What the next server, with that many workers, has to know: vLLM's NCCLWeightTransferInitInfo."""
        rank_offset = 1 + self._invited
        self._invited += workers
        name = base64.b64encode(self._id).decode()
        return {"nccl_unique_id_b64": name, "rank_offset": rank_offset, "world_size": self._world_size}

    def open(self) -> None:
        """Wait until all workers have joined, which `close` does not end; RuntimeError: NCCL refuses, or was closed."""
        from vllm.distributed.weight_transfer.nccl_common import uid_init_process_group

        with torch.cuda.device(self.device):
            communicator = uid_init_process_group(self._id, 0, self._world_size, self.device)
        if communicator.disabled:  # it would broadcast nothing, and say nothing
            raise RuntimeError("vLLM does not use NCCL in the trainer's process (VLLM_DISABLE_PYNCCL)")
        self._communicator = communicator
        if self._closed:
            self.close()
            raise RuntimeError("the group was closed")

    def send(self, stream: WeightStream, dtype: torch.dtype) -> None:
        """Have every worker receive each tensor, in that dtype; RuntimeError: NCCL failed, or was closed."""
        for _, tensor in stream:
            if (communicator := self._communicator) is None:
                raise RuntimeError("the group was closed")
            with torch.cuda.device(self.device):
                sent = tensor.to(self.device, dtype).contiguous()
                communicator.broadcast(sent, src=0, stream=torch.cuda.current_stream())
        torch.cuda.synchronize(self.device)

    def close(self) -> None:
        """Leave the group; what is under way fails. Takes up to 5 s. Twice is allowed."""
        self._closed = True
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            communicator.destroy()


class WeightGroup(ToServers):
    """The trainer, which sends, and every worker of some vLLM servers, which receive; made as a `ToServers`.

    It follows vLLM's weight-transfer requests: a server is sent the list of what will come, each tensor is broadcast
    once for all servers in the engine's dtype, and loaded as it arrives.

    A server that is started again has lost its connection. It is sent its weights through a group of its own, while the
    others go on generating, and the next `send` forms the group of all again.
    """

    method = "nccl"

    def __init__(self, models: Sequence[InferenceModel], device: torch.device) -> None:
        super().__init__(models, device)
        self._group: NCCLGroup | None = None
        self._broken = False
        self._lock = asyncio.Lock()  # one group at a time is formed

    async def form(self, shapes: Mapping[str, Shape]) -> None:
        await self.check(shapes)
        self._group = await self._joined_by(self._servers)

    async def send(self, stream: WeightStream, version: int) -> None:
        if self._broken:
            raise WeightSyncError("the group of trainer and servers broke in an earlier weight sync.")
        await self.check(stream.shapes)
        async with self._lock:
            if self._group is None:
                self._group = await self._joined_by(self._servers)
            try:
                await self._deliver(self._group, self._servers, stream, version)
            except BaseException:  # cancelled, too: a group in which some have received less is of no use
                self._broken = True
                self.close()
                raise

    async def _send_again(self, server: Server, stream: WeightStream, version: int) -> None:
        """Give a server that was started again the weights that it had."""
        async with self._lock:
            await run_in_thread(self.close)  # NCCL may take seconds
            group = await self._joined_by([server])
            try:
                await self._deliver(group, [server], stream, version)
            finally:
                group.close()

    async def _joined_by(self, servers: Sequence[Server]) -> NCCLGroup:
        """A group that every worker of these servers has joined; WeightSyncError if one did not."""
        try:
            workers = [await server.workers() for server in servers]
            group = NCCLGroup(sum(workers), self._device)
            joining = [server.join_group(group.invitation(n)) for server, n in zip(servers, workers, strict=True)]
            try:
                await _together(run_in_thread(group.open), joining)
            except BaseException:
                group.close()
                raise
        except (RolloutError, RuntimeError, OSError, ValueError) as error:
            raise WeightSyncError(
                f"the trainer and its servers formed no group: {error}. Do their machines reach each other over the "
                "interface that NCCL_SOCKET_IFNAME names, and was one of engine.urls started with VLLM_SERVER_DEV_MODE"
                "=1 and --weight-transfer-config? synchronizer=checkpoint needs no group."
            ) from error
        return group

    async def _deliver(self, group: NCCLGroup, servers: Sequence[Server], stream: WeightStream, version: int) -> None:
        dtype = servers[0].dtype
        update = announcement(stream.shapes, dtype)
        receiving = [
            server.receive_weights(_once(update), version, partial(self._send_again, server, stream, version))
            for server in servers
        ]
        try:
            await _together(run_in_thread(lambda: group.send(stream, dtype)), receiving)
        except (WeightSyncError, RuntimeError, OSError) as error:
            raise WeightSyncError(
                f"the weights did not reach every server, and one may hold half of them: {error}. Restart the "
                "servers of engine.urls."
            ) from error

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()


async def _once(update: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    yield update


async def _together(sending: Coroutine[Any, Any, None], receiving: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Wait until all are done; as soon as one fails, its error is raised: the others would wait for it.

    An error of a receiver goes before the sender's, which sees only that a connection ended.
    """
    sender = asyncio.ensure_future(sending)
    receivers = [asyncio.ensure_future(each) for each in receiving]
    every = [*receivers, sender]
    try:
        _, pending = await asyncio.wait(every, return_when=asyncio.FIRST_EXCEPTION)
        if pending:
            await asyncio.wait(pending, timeout=END_SECONDS)
    finally:
        for each in every:
            each.cancel()
    failed = [each.exception() for each in every if each.done() and not each.cancelled()]
    for error in failed:
        if error is not None:
            raise error


# -- within the trainer's GPU ------------------------------------------------------------------------------------------
# Weights are written into memory that the servers map, one bucket after another; nothing leaves the GPU. vLLM's own
# requests carry the handle of that memory as a pickle, which its servers read with VLLM_ALLOW_INSECURE_SERIALIZATION=1
# only. Here the same handle is JSON, the arguments of torch's `rebuild_cuda_tensor` for a tensor of bytes, and
# `sync/ipc_worker.py` reads it.

BACKEND = "trinity_ipc"  # what vLLM calls its receiving end
WORKER = "trinity_lightning.sync.ipc_worker.Extension"
BUCKET_BYTES = 256 << 20

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


def buckets(shapes: Mapping[str, Shape], width: int, most: int) -> list[list[str]]:
    """Names in their order, in lists whose tensors take at most `most` bytes together, or that have one larger tensor.

    `width` is the bytes of a number.
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
    """Memory of a GPU, of that many bytes, that one server maps; a RuntimeError: no room, or it cannot be shared."""

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


class SharedMemory(ToServers):
    """The trainer and vLLM servers on its GPU; see `WeightGroup`, which sends to other GPUs.

    A server is sent one bucket after another, each when it has loaded the one before.
    """

    method = "ipc"

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
                await server.receive_weights(updates, version, again=partial(self._deliver, server, stream, version))
            finally:
                buffer.free()
        except (WeightSyncError, RolloutError, RuntimeError, OSError) as error:
            raise WeightSyncError(
                f"a server on the trainer's GPU did not take the weights over (synchronizer.method=ipc): {error}. "
                "synchronizer=checkpoint does not share memory of the GPU."
            ) from error


async def _updates(
    buffer: SharedBuffer, parts: Sequence[Sequence[str]], stream: WeightStream, dtype: torch.dtype
) -> AsyncIterator[dict[str, Any]]:
    """What the server is sent of each bucket: vLLM's IPCWeightTransferUpdateInfo, but for the form of the handles."""
    tensors = iter(stream)
    for names in parts:
        sizes = await run_in_thread(partial(buffer.fill, (next(tensors)[1] for _ in names), dtype))
        said = announcement({name: stream.shapes[name] for name in names}, dtype)
        yield said | {"ipc_handles": buffer.handles, "tensor_sizes": sizes}


# -- either ------------------------------------------------------------------------------------------------------------


def group_of(models: Sequence[InferenceModel], device: torch.device) -> ToServers:
    """What sends weights to these engines without a file; arguments and errors as of `ToServers`."""
    shared = any(getattr(model, "sync_method", None) == "ipc" for model in models)
    return (SharedMemory if shared else WeightGroup)(models, device)
