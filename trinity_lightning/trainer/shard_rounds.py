"""How torch's `fully_shard` gathers weights and adds up gradients here: each time in a round of `common.ranks`."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import AllgatherOptions, ReduceScatterOptions  # pyright: ignore

from trinity_lightning.common.ranks import Ranks


class Mesh(DeviceMesh):
    """The ranks, by a process group that torch's own list of them does not have (see `ddp.join`)."""

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        super().__init__(device.type, torch.arange(ranks.size), _init_backend=False, _rank=ranks.rank)
        self._ranks_group = ranks.group

    def get_group(self, mesh_dim: int | str | None = None) -> Any:
        """The group of all ranks."""
        return self._ranks_group


class Gather:
    """How `fully_shard` gathers weights: each time in a round, so that a rank that failed is not waited for."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for what is received."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> None:
        """Fill the output with the inputs of all ranks."""
        self._ranks.send(group._allgather_base, output_tensor, input_tensor, AllgatherOptions(), "a layer's weights")


class Scatter(Gather):
    """How `fully_shard` adds up gradients."""

    def __call__(  # type: ignore[override]
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """Fill the output with this rank's share of the sum of the inputs, which are not read again."""
        if input_tensor.device.type == "cpu":  # gloo would send the whole sum as well, and not say how far it is
            self._ranks.add_up([input_tensor], "a layer's gradient")
            output_tensor.copy_(input_tensor.chunk(self._ranks.size)[self._ranks.rank])
        else:
            scatter, sums = group._reduce_scatter_base, ReduceScatterOptions()
            self._ranks.send(scatter, output_tensor, input_tensor, sums, "a layer's gradient")
