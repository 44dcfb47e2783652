"""What every way of sending weights to vLLM servers needs: the servers, and the announcement of tensors."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from trinity_lightning.common.inference import InferenceModel
from trinity_lightning.errors import ConfigError
from trinity_lightning.sync.stream import Shape, WeightStream

if TYPE_CHECKING:
    from trinity_lightning.sync.ipc import SharedMemory
    from trinity_lightning.sync.nccl import WeightGroup


class Server(Protocol):
    """A vLLM server that can be sent weights, as `VLLMServerEngine` is one."""

    sync_method: str

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def weight_shapes(self) -> dict[str, Shape]: ...

    async def load(self) -> None: ...

    async def workers(self) -> int: ...

    async def join_group(self, invitation: Mapping[str, Any]) -> None: ...

    async def receive_weights(
        self, updates: AsyncIterator[dict[str, Any]], version: int, again: Callable[[], Awaitable[None]]
    ) -> None: ...


def group_of(
    models: Sequence[InferenceModel], device: torch.device, held: Callable[[], WeightStream]
) -> "WeightGroup | SharedMemory":
    """What sends weights to these engines without a file; arguments and errors as of `WeightGroup`, `SharedMemory`."""
    if any(getattr(model, "sync_method", None) == "ipc" for model in models):
        from trinity_lightning.sync.ipc import SharedMemory as Group
    else:
        from trinity_lightning.sync.nccl import WeightGroup as Group
    return Group(models, device, held)


def servers_of(models: Sequence[InferenceModel], method: str) -> list[Server]:
    """The servers, which were all started to be sent weights by that method; a ConfigError if one was not."""
    servers: list[Any] = [model for model in models if getattr(model, "sync_method", None) == method]
    if not servers or len(servers) < len(models):
        raise ConfigError(
            f"weights are sent to servers that were started for it: engine=vllm_server with synchronizer={method}. In "
            "this process weights go by memory, to other servers as a folder."
        )
    return servers


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
            f"synchronizer={method} sends from a GPU, and the policy is on {device}: take synchronizer=checkpoint."
        )
