"""Tensors from one GPU to those of other processes over NCCL, apart from torch's global process group."""

import base64
from typing import Any

import torch
from torch import Tensor


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
