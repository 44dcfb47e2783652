"""Tensors from one process to others over Gloo, apart from torch's global process group."""

import socket
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroupGloo, TCPStore  # pyright: ignore[reportPrivateImportUsage]

LIMIT = timedelta(minutes=5)  # of the making of a group, and of each broadcast


class GlooGroup:
    """Processes that are sent tensors by the one of rank 0.

    Args:
        address: of rank 0, as the others see it; it listens there and nowhere else.
        port: where rank 0 listens.
        rank: this process's; 0 sends.
        world_size: how many processes there are.

    Raises:
        RuntimeError: the group was not formed in time.
        OSError: rank 0 cannot listen there.
    """

    device = torch.device("cpu")

    def __init__(self, address: str, port: int, rank: int, world_size: int) -> None:
        # A socket of its own: the store would listen on every interface.
        listening = socket.create_server((address, port)).detach() if rank == 0 else None
        self._store = TCPStore(
            address, port, world_size, is_master=rank == 0, timeout=LIMIT, master_listen_fd=listening
        )
        gloo: Any = ProcessGroupGloo  # torch's stubs lack most of it
        options = gloo._Options()
        options._timeout = LIMIT
        own = address if rank == 0 else _address_towards(address, port)
        options._devices = [gloo.create_device(hostname=own)]
        self._group = gloo(self._store, rank, world_size, options)

    def broadcast(self, tensor: Tensor) -> None:
        """Rank 0 sends this contiguous CPU tensor, the others receive into it.

        Raises:
            RuntimeError: another process has left or ended, or did not take part in time; or this one has left.
        """
        group = self._group
        if group is None:
            raise RuntimeError("this process has left the group")
        group.broadcast(tensor, 0).wait()

    def flush(self) -> None:
        """Nothing is under way: `broadcast` waits."""

    def close(self) -> None:
        """Leave the group; a broadcast under way in another thread fails. Twice is allowed."""
        group, self._group = self._group, None  # with the last reference go the connections: the others see it
        if group is not None:
            group.abort()


def _address_towards(address: str, port: int) -> str:
    """This machine's own address on the way there."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # connecting sends nothing
        probe.connect((address, port))
        return probe.getsockname()[0]
