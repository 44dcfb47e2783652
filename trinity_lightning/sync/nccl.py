"""Weights from the trainer's GPU to those of servers over NCCL: no folder has to be shared."""

import asyncio
import base64
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from trinity_lightning.common.inference import InferenceModel
from trinity_lightning.common.threads import run_in_thread
from trinity_lightning.errors import RolloutError, WeightSyncError
from trinity_lightning.sync.servers import Server, announcement, check_device, servers_of
from trinity_lightning.sync.stream import Shape, WeightStream, check_shapes


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
        """Wait until all workers have joined; `close` does not wake it.

        Raises:
            RuntimeError: NCCL refuses, or `close` was called meanwhile.
        """
        from vllm.distributed.weight_transfer.nccl_common import uid_init_process_group

        with torch.cuda.device(self.device):
            communicator = uid_init_process_group(self._id, 0, self._world_size, self.device)
        if communicator.disabled:  # it would broadcast nothing, and say nothing
            raise RuntimeError("vLLM does not use NCCL in the trainer's process (VLLM_DISABLE_PYNCCL)")
        self._communicator = communicator
        if self._closed:
            self.close()
            raise RuntimeError("the group was closed")

    def broadcast(self, tensor: Tensor) -> None:
        """Send a contiguous tensor of `device`; `flush` waits for its end.

        Raises:
            RuntimeError: NCCL failed, or `close` was called.
        """
        communicator = self._communicator
        if communicator is None:
            raise RuntimeError("the group was closed")
        with torch.cuda.device(self.device):
            communicator.broadcast(tensor, src=0, stream=torch.cuda.current_stream())

    def flush(self) -> None:
        """Wait until all that was broadcast has been received."""
        torch.cuda.synchronize(self.device)

    def close(self) -> None:
        """Leave the group; what is under way fails. Takes up to 5 s. Twice is allowed."""
        self._closed = True
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            communicator.destroy()


END_SECONDS = 1.0  # for a server to say why, if the sender has only seen a connection end


class WeightGroup:
    """The trainer, which sends, and every worker of some vLLM servers, which receive.

    It follows vLLM's weight-transfer requests: a server is sent the list of what will come, each tensor is broadcast
    once for all servers in the engine's dtype, and loaded as it arrives.

    A server that is started again has lost its connection. It is sent its weights through a group of its own, while the
    others go on generating, and the next `send` forms the group of all again.

    Args:
        models: the servers.
        device: where the trainer's weights are.
        held: gives the weights that the servers were last sent, for one that is started again.

    Raises:
        ConfigError: an engine takes its weights in another way, or NCCL would have to send from a CPU.
    """

    def __init__(
        self, models: Sequence[InferenceModel], device: torch.device, held: Callable[[], WeightStream]
    ) -> None:
        self._servers = servers_of(models, "nccl")
        check_device(device, "nccl")
        self._device = device
        self._held = held
        self._group: NCCLGroup | None = None
        self._broken = False
        self._lock = asyncio.Lock()  # one group at a time is formed

    async def form(self, shapes: Mapping[str, Shape]) -> None:
        """Have every worker of every server join.

        Args:
            shapes: of what is going to be sent.

        Raises:
            WeightSyncError: the weights do not fit the servers, or a server did not join.
        """
        for server in self._servers:
            await server.load()
            check_shapes(shapes, server.weight_shapes)
        self._group = await self._joined_by(self._servers)

    async def send(self, stream: WeightStream, version: int) -> None:
        """Give every server these weights; one that died is started again first.

        Raises:
            WeightSyncError: they do not fit, and no server was touched; or a server failed, and the group is broken.
        """
        if self._broken:
            raise WeightSyncError("the group of trainer and servers broke in an earlier weight sync.")
        await asyncio.gather(*(server.load() for server in self._servers))
        for server in self._servers:
            check_shapes(stream.shapes, server.weight_shapes)
        async with self._lock:
            if self._group is None:
                self._group = await self._joined_by(self._servers)
            try:
                await self._deliver(self._group, self._servers, stream, version)
            except BaseException:  # cancelled, too: a group in which some have received less is of no use
                self._broken = True
                self.close()
                raise

    async def _send_again(self, server: Server, version: int) -> None:
        """Give a server that was started again the weights that it had."""
        async with self._lock:
            await run_in_thread(self.close)  # NCCL may take seconds
            group = await self._joined_by([server])
            try:
                await self._deliver(group, [server], self._held(), version)
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
        receiving = [
            server.receive_weights(
                _once(announcement(stream.shapes, server.dtype)), version, partial(self._send_again, server, version)
            )
            for server in servers
        ]
        try:
            await _together(run_in_thread(lambda: _broadcast(group, stream, servers[0].dtype)), receiving)
        except (WeightSyncError, RuntimeError, OSError) as error:
            raise WeightSyncError(
                f"the weights did not reach every server, and one may hold half of them: {error}. Restart the "
                "servers of engine.urls."
            ) from error

    def close(self) -> None:
        """Leave the group; twice is allowed."""
        group, self._group = self._group, None
        if group is not None:
            group.close()


async def _once(update: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    yield update


def _broadcast(group: NCCLGroup, stream: WeightStream, dtype: torch.dtype) -> None:
    for _, tensor in stream:
        group.broadcast(tensor.to(group.device, dtype).contiguous())
    group.flush()


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
