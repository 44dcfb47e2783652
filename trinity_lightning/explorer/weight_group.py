"""Weights from the trainer to servers without a file: no folder has to be shared."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from trinity_lightning.common.inference import InferenceModel
from trinity_lightning.common.nccl_group import NCCLGroup
from trinity_lightning.common.tcp_group import TCPGroup
from trinity_lightning.common.threads import run_in_thread
from trinity_lightning.common.weights import Shape, WeightStream, check_shapes
from trinity_lightning.errors import ConfigError, RolloutError, WeightSyncError
from trinity_lightning.explorer.models.vllm_server import VLLMServerEngine

Group = TCPGroup | NCCLGroup
Held = Callable[[], WeightStream]

END_SECONDS = 1.0  # for a server to say why, where the sender has only seen a connection end


class WeightGroup:
    """The trainer, which sends, and every worker of some vLLM servers, which receive.

    It follows vLLM's weight-transfer requests: a server is sent the list of what will come, each tensor is broadcast
    once for all servers in the engine's dtype, and loaded as it arrives.

    A server that is started again has lost its connection. It is sent its weights through a group of its own, while the
    others go on generating, and the next `send` forms the group of all again.
    """

    def __init__(self, servers: Sequence[VLLMServerEngine], meeting: "_Meeting", held: Held) -> None:
        self._servers = list(servers)
        self._meeting = meeting
        self._held = held
        self._group: Group | None = None
        self._broken = False
        self._lock = asyncio.Lock()  # one group at a time meets there

    @classmethod
    async def form(
        cls,
        models: Sequence[InferenceModel],
        address: str,
        port: int,
        device: torch.device,
        shapes: Mapping[str, Shape],
        held: Held,
    ) -> "WeightGroup":
        """Listen at an address, and have every worker of every server join.

        Args:
            models: the servers.
            address: this machine's, as the servers see it; NCCL finds its own.
            port: a free one.
            device: where the trainer's weights are.
            shapes: of what is going to be sent.
            held: gives the weights that the servers were last sent, for one that is started again.

        Raises:
            ConfigError: an engine takes its weights in another way, or NCCL would have to send from a CPU.
            WeightSyncError: the weights do not fit the servers, or a server did not join.
        """
        servers = _servers(models, device)
        for server in servers:
            await server.load()
            check_shapes(shapes, server.weight_shapes)
        formed = cls(servers, _Meeting(address, port, device), held)
        formed._group = await formed._meeting.join(servers)
        return formed

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
                self._group = await self._meeting.join(self._servers)
            try:
                await self._deliver(self._group, self._servers, stream, version)
            except BaseException:  # cancelled, too: a group in which some have received less is of no use
                self._broken = True
                self.close()
                raise

    async def _send_again(self, server: VLLMServerEngine, version: int) -> None:
        """Give a server that was started again the weights that it had."""
        async with self._lock:
            await run_in_thread(self.close)  # NCCL may take seconds
            group = await self._meeting.join([server])
            try:
                await self._deliver(group, [server], self._held(), version)
            finally:
                group.close()

    async def _deliver(
        self, group: Group, servers: Sequence[VLLMServerEngine], stream: WeightStream, version: int
    ) -> None:
        receiving = [
            server.receive_weights(stream.shapes, version, again=partial(self._send_again, server, version))
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


@dataclass(frozen=True)
class _Meeting:
    """Where trainer and servers meet."""

    address: str
    port: int
    device: torch.device

    async def join(self, servers: Sequence[VLLMServerEngine]) -> Group:
        """A group that every worker of these servers has joined; WeightSyncError if one did not."""
        try:
            workers = [await server.workers() for server in servers]
            group = self._group_of(servers[0].transfer, sum(workers))
            joining = [server.join_group(group.invitation(n)) for server, n in zip(servers, workers, strict=True)]
            try:
                await _together(run_in_thread(group.open), joining)
            except BaseException:
                group.close()
                raise
        except (RolloutError, RuntimeError, OSError, ValueError) as error:
            raise WeightSyncError(
                f"the trainer and its servers formed no group at {self.address}:{self.port}: {error}. Can every server "
                "reach that address (synchronizer.address), and was one of engine.urls started with "
                "VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config? synchronizer=checkpoint needs no group."
            ) from error
        return group

    def _group_of(self, transfer: str | None, workers: int) -> Group:
        if transfer == "nccl":
            return NCCLGroup(workers, self.device)
        return TCPGroup(self.address, self.port, workers)


def _servers(models: Sequence[InferenceModel], device: torch.device) -> list[VLLMServerEngine]:
    servers = [model for model in models if isinstance(model, VLLMServerEngine) and model.transfer is not None]
    if len(servers) < len(models) or len({server.transfer for server in servers}) != 1:
        raise ConfigError(
            "a group for weights needs servers that were started for it: engine=vllm_server with "
            "synchronizer=nccl or tcp. In this process weights go by memory, to other servers as a folder."
        )
    if servers[0].transfer == "nccl" and device.type != "cuda":
        raise ConfigError(f"synchronizer=nccl sends from a GPU, and the policy is on {device}: take tcp.")
    return servers


def _broadcast(group: Group, stream: WeightStream, dtype: torch.dtype) -> None:
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
