"""Tensors from one GPU to those of other processes over NCCL, apart from torch's global process group."""

import torch
from torch import Tensor


class NCCLGroup:
    """The sending end, rank 0, of a group that vLLM's workers join.

    Args:
        address: of this process, as the workers see it; it listens there.
        port: where it listens.
        world_size: how many processes there are, this one included; each on a GPU of its own.
        device: the GPU to send from.

    Raises:
        RuntimeError: NCCL is not there, or the group was not formed.
    """

    def __init__(self, address: str, port: int, world_size: int, device: torch.device) -> None:
        from vllm.distributed.weight_transfer.nccl_common import trainer_init

        self.device = device
        with torch.cuda.device(device):
            endpoint = {"master_address": address, "master_port": port, "world_size": world_size}
            self._communicator = trainer_init(endpoint)
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
        """Leave the group; what is under way fails."""
        self._communicator.destroy()
