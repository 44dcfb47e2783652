"""NCCL's part of a weight sync over plain connections of this machine, for trainer and servers without a GPU.

Everything else is the real thing: the requests, this package's group, and the backend of vLLM that
receives. A whole run:

    python -m support.nccl_stand_in +recipe=one_step_off_policy synchronizer=nccl
"""

import ctypes
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

TESTS = Path(__file__).resolve().parents[1]
JOIN_SECONDS = 60.0
_listening: dict[int, socket.socket] = {}  # the trainer's, by the port that a group's id says


class Library:
    """The functions of vLLM's wrapper of NCCL that are called."""

    def ncclGetUniqueId(self) -> Any:  # noqa: N802
        from vllm.distributed.device_communicators.pynccl_wrapper import ncclUniqueId

        listener = socket.create_server(("127.0.0.1", 0))
        listener.settimeout(JOIN_SECONDS)
        port = listener.getsockname()[1]
        _listening[port] = listener
        return ncclUniqueId((ctypes.c_byte * 128)(*port.to_bytes(128, "big", signed=True)))


class Communicator:
    """A member of a group, which has connections to those that it sends to or receives from."""

    disabled = False
    sends = False

    def __init__(self, connections: Sequence[socket.socket]) -> None:
        self._connections = connections
        for connection in connections:
            connection.settimeout(None)

    def broadcast(self, tensor: Tensor, src: int, stream: Any = None) -> None:
        """Send the tensor, in the trainer; fill it, in a worker."""
        data = memoryview(tensor.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        if self.sends:
            for connection in self._connections:
                connection.sendall(data)
            return
        while data:
            count = self._connections[0].recv_into(data)
            if count == 0:
                raise ConnectionError("the trainer has left the group")
            data = data[count:]

    def destroy(self) -> None:
        """Leave the group; whoever waits for the others in it, here and there, gets an OSError."""
        for connection in self._connections:
            with suppress(OSError):  # it was not connected any more
                connection.shutdown(socket.SHUT_RDWR)  # `close` alone wakes no thread that waits in it
            connection.close()


class Sender(Communicator):
    """Rank 0."""

    sends = True


def join(unique_id: bytes, rank: int, world_size: int, device: Any = None) -> Communicator:
    """Wait until all are there, as rank 0; join it, as another."""
    port = int.from_bytes(unique_id, "big", signed=True)
    if rank > 0:
        return Communicator([socket.create_connection(("127.0.0.1", port), JOIN_SECONDS)])
    with _listening.pop(port) as listener:
        return Sender([listener.accept()[0] for _ in range(1, world_size)])


def install(patch: Callable[[Any, str, Any], None] = setattr) -> None:
    """Put this in NCCL's place, in the trainer or a worker."""
    from vllm.distributed.device_communicators import pynccl_wrapper
    from vllm.distributed.weight_transfer import nccl_common

    patch(pynccl_wrapper, "NCCLLibrary", Library)
    patch(nccl_common, "uid_init_process_group", join)
    patch(torch.cuda, "device", lambda device: nullcontext())
    patch(torch.cuda, "current_stream", lambda device=None: None)
    patch(torch.cuda, "synchronize", lambda device=None: None)
    patch(torch.accelerator, "current_device_index", lambda: 0)


def install_in_trainer(patch: Callable[[Any, str, Any], None] = setattr) -> None:
    """Put this in NCCL's place, in this process and in servers that are started here."""
    from trinity_lightning.explorer.models.vllm_server import VLLMServerEngine
    from trinity_lightning.sync import servers as weight_servers

    install(patch)
    flags, environment = VLLMServerEngine._flags, VLLMServerEngine._environment
    path = os.pathsep.join([str(TESTS), *filter(None, [os.getenv("PYTHONPATH")])])
    extension = ["--worker-extension-cls", "support.nccl_stand_in_worker.Extension"]

    def flags_with_extension(self: VLLMServerEngine, model: str) -> list[str]:
        return [*flags(self, model), *(extension if self.sync_method == "nccl" else [])]

    patch(VLLMServerEngine, "_flags", flags_with_extension)
    patch(VLLMServerEngine, "_environment", lambda self, flags: environment(self, flags) | {"PYTHONPATH": path})
    patch(weight_servers, "check_device", lambda device, method: None)


if __name__ == "__main__":
    import pytest

    from trinity_lightning import train
    from trinity_lightning.config import servers

    patch = pytest.MonkeyPatch().setattr  # which refuses a name that is not there
    install_in_trainer(patch)
    patch(servers, "_check_gpu_to_gpu", lambda *_: None)
    train.main()
