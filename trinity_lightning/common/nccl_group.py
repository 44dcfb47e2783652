"""Tensors from one GPU to those of other processes over NCCL, apart from torch's global process group."""

from typing import Any

import torch
from torch import Tensor


class NCCLGroup:
    """The sending end, rank 0, of a group that vLLM's workers join.

    Args:
        address: of this process, as the workers see it; it listens there.
        port: where it listens.
        receivers: how many workers there will be, each on a GPU of its own.
        device: the GPU to send from.
    """

    def __init__(self, address: str, port: int, receivers: int, device: torch.device) -> None:
        self.device = device
        self._endpoint = {"master_address": address, "master_port": port, "world_size": 1 + receivers}
        self._invited = 0
        self._communicator: Any = None

    def invitation(self, workers: int) -> dict[str, str | int]:
        """What the next server, with that many workers, has to know: vLLM's NCCLWeightTransferInitInfo."""
        rank_offset = 1 + self._invited
        self._invited += workers
        return {**self._endpoint, "rank_offset": rank_offset}

    def open(self) -> None:
        """Wait until all workers have joined.

        Raises:
            RuntimeError: they have not in time, or NCCL is not there.
        """
        from vllm.distributed.weight_transfer.nccl_common import trainer_init

        with torch.cuda.device(self.device):
            self._communicator = trainer_init(self._endpoint)
        if self._communicator.disabled:  # it would broadcast nothing, and say nothing
            raise RuntimeError("vLLM found no NCCL library in the trainer's process")

    def broadcast(self, tensor: Tensor) -> None:
        """Send a contiguous tensor of `device`; `flush` waits for its end."""
        with torch.cuda.device(self.device):
            self._communicator.broadcast(tensor, src=0, stream=torch.cuda.current_stream())

    def flush(self) -> None:
        """Wait until all that was broadcast has been received."""
        torch.cuda.synchronize(self.device)

    def close(self) -> None:
        """Leave the group; what is under way fails. Twice is allowed."""
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            communicator.destroy()
