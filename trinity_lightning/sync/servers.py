"""The base of the senders of weights to vLLM servers without a file; they are found by name in SENDERS."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol, cast

import torch

from trinity_lightning.common.inference import InferenceModel
from trinity_lightning.config.registry import Registry
from trinity_lightning.errors import ConfigError
from trinity_lightning.sync.stream import Sender, Shape, check_shapes


class Server(Protocol):
    """The part of a `VLLMServerEngine` that senders use."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def weight_shapes(self) -> Mapping[str, Shape]: ...

    async def load(self) -> None:
        """Start the server, if it does not run."""
        ...

    async def workers(self) -> int:
        """Number of the server's processes that hold weights."""
        ...

    async def join_group(self, invitation: Mapping[str, Any]) -> None:
        """Have the workers join the group that the trainer invites to; ValueError or RolloutError: they did not."""
        ...

    async def receive_weights(
        self, updates: AsyncIterator[dict[str, Any]], version: int, resend: Callable[[], Awaitable[None]]
    ) -> None:
        """Take over weights part by part; see `VLLMServerEngine.receive_weights`."""
        ...


class ToServers(Sender):
    """Sends the trainer's weights to vLLM servers that were all started for this `method`.

    A server that died is started again before weights are sent. Weights that do not fit are sent to no server.

    Args:
        models: the servers.
        device: the device of the trainer's weights.

    Attributes:
        method: the sender's name in synchronizer.method.
        server_arguments: vLLM's arguments with which a server is started for the method.

    Raises:
        ConfigError: an engine takes its weights by another method, or the trainer's weights are on a CPU.
    """

    method: ClassVar[str]
    server_arguments: ClassVar[Mapping[str, Any]]

    def __init__(self, models: Sequence[InferenceModel], device: torch.device) -> None:
        if not models or any(getattr(model, "sync_method", None) != self.method for model in models):
            raise ConfigError(
                "weights are sent to servers that were started for it: engine=vllm_server with synchronizer="
                f"{self.method}. In this process weights go by memory, to other servers as a folder.",
                key="synchronizer",
            )
        check_device(device, self.method)
        self._servers = cast("list[Server]", list(models))
        self._device = device

    async def form(self, shapes: Mapping[str, Shape]) -> None:
        """Start every server and connect with it; WeightSyncError: a server does not join, or has other shapes."""
        await self.check(shapes)

    async def check(self, shapes: Mapping[str, Shape]) -> None:
        """Start every server that does not run; WeightSyncError: weights of these shapes do not fit a server."""
        await asyncio.gather(*(server.load() for server in self._servers))
        for server in self._servers:
            check_shapes(shapes, server.weight_shapes)


SENDERS: Registry[type[ToServers]] = Registry("weight sender")


def server_arguments(method: str) -> Mapping[str, Any]:
    """vLLM's arguments with which a server is started for a method of weight sync; none if it reads a folder."""
    return SENDERS.get(method).server_arguments if method in SENDERS else {}


def sender_to(models: Sequence[InferenceModel], device: torch.device) -> ToServers:
    """The sender for these engines, by the method of theirs; arguments and errors as in `ToServers`."""
    methods = (str(getattr(model, "sync_method", "")) for model in models)
    method = next((method for method in methods if method in SENDERS), "nccl")
    return SENDERS.get(method)(models, device)


def announcement(shapes: Mapping[str, Shape], dtype: torch.dtype) -> dict[str, Any]:
    """The description of tensors that are sent in a dtype, in the form of vLLM's requests."""
    return {
        "names": list(shapes),
        "dtype_names": [str(dtype).removeprefix("torch.")] * len(shapes),
        "shapes": [list(shape) for shape in shapes.values()],
    }


def check_device(device: torch.device, method: str) -> None:
    """Refuse to send weights by a method if they are not in a GPU's memory: ConfigError."""
    if device.type != "cuda":
        raise ConfigError(
            f"synchronizer={method} sends from a GPU, and the policy is on {device}",
            key="synchronizer",
            fix="take synchronizer=checkpoint",
        )
