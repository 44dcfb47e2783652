"""Sends weights to vLLM servers over NCCL, from the trainer's GPU to other GPUs."""

import asyncio
import base64
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch

from trinity_lightning.common.inference import InferenceModel
from trinity_lightning.common.threads import run_in_thread
from trinity_lightning.errors import RolloutError, WeightSyncError
from trinity_lightning.sync.servers import Server, ToServers, announcement
from trinity_lightning.sync.stream import Shape, WeightStream

END_SECONDS = 1.0  # time for a server to report its failure, after the sender saw a connection end


class WeightGroup(ToServers):
    """The group of the trainer, which sends, and all workers of some vLLM servers, which receive.

    It follows vLLM's requests for weight transfer: a server is sent the list of tensors; then each tensor is broadcast
    once for all servers, in the engine's dtype, and loaded as it arrives.

    A server that is started again has lost its connection. It is sent its weights through a separate group, while the
    other servers go on generating, and the next `send` forms the group of all servers again.
    """

    method = "nccl"
    server_arguments: ClassVar[Mapping[str, Any]] = {"weight_transfer_config": {"backend": "nccl"}}

    def __init__(self, models: Sequence[InferenceModel], device: torch.device) -> None:
        super().__init__(models, device)
        self._group: NCCLGroup | None = None
        self._broken = False
        self._lock = asyncio.Lock()  # groups are formed one at a time

    async def form(self, shapes: Mapping[str, Shape]) -> None:
        await super().form(shapes)
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
            except BaseException:  # also if cancelled: a group in which some have received less is of no use
                self._broken = True
                self.close()
                raise

    async def _send_again(self, server: Server, stream: WeightStream, version: int) -> None:
        """Give a server that was started again the weights that it had."""
        async with self._lock:
            await run_in_thread(self.close)  # in a thread, because NCCL may take seconds
            group = await self._joined_by([server])
            try:
                await self._deliver(group, [server], stream, version)
            finally:
                group.close()

    async def _joined_by(self, servers: Sequence[Server]) -> "NCCLGroup":
        """A group that every worker of these servers has joined; WeightSyncError: a worker did not join."""
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

    async def _deliver(self, group: "NCCLGroup", servers: Sequence[Server], stream: WeightStream, version: int) -> None:
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
    """Wait until all coroutines are done. If one fails, raise its error at once: the others would wait for it.

    A receiver's error is raised rather than the sender's, which only saw that a connection ended.
    """
    sender = asyncio.ensure_future(sending)
    receivers = [asyncio.ensure_future(receiver) for receiver in receiving]
    everyone = [*receivers, sender]
    try:
        _, pending = await asyncio.wait(everyone, return_when=asyncio.FIRST_EXCEPTION)
        if pending:
            await asyncio.wait(pending, timeout=END_SECONDS)
    finally:
        for future in everyone:
            future.cancel()
    errors = [future.exception() for future in everyone if future.done() and not future.cancelled()]
    for error in errors:
        if error is not None:
            raise error


class NCCLGroup:
    """The sending end, rank 0, of a group that vLLM's workers join.

    The servers get the group's id in their invitations. vLLM's other way, a store, would unpickle data that anybody can
    write there. NCCL itself connects over the network interface that it chooses (NCCL_SOCKET_IFNAME).

    Args:
        receivers: number of workers that will join, each on a GPU of its own.
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
        """The fields of vLLM's NCCLWeightTransferInitInfo for the next server, which has that many workers."""
        rank_offset = 1 + self._invited
        self._invited += workers
        name = base64.b64encode(self._id).decode()
        return {"nccl_unique_id_b64": name, "rank_offset": rank_offset, "world_size": self._world_size}

    def open(self) -> None:
        """Wait until all workers have joined; `close` does not end the wait.

        Raises:
            RuntimeError: NCCL refuses, or the group was closed.
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

    def send(self, stream: WeightStream, dtype: torch.dtype) -> None:
        """Broadcast each tensor in a dtype to every worker; RuntimeError: NCCL failed, or the group was closed."""
        for _, tensor in stream:
            if (communicator := self._communicator) is None:
                raise RuntimeError("the group was closed")
            with torch.cuda.device(self.device):
                sent = tensor.to(self.device, dtype).contiguous()
                communicator.broadcast(sent, src=0, stream=torch.cuda.current_stream())
        torch.cuda.synchronize(self.device)

    def close(self) -> None:
        """Leave the group; a broadcast under way fails. Takes up to 5 s. Calling it twice is allowed."""
        self._closed = True
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            communicator.destroy()
