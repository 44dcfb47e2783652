"""The server's end of weights that come over Gloo: a weight-transfer backend of vLLM, for servers without a GPU.

Imported by vLLM's workers (`--worker-extension-cls`), never by the trainer.
"""

from typing import Any

import torch
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine, NCCLWeightTransferUpdateInfo

from trinity_lightning.common.gloo_group import GlooGroup


class GlooTransferEngine(NCCLWeightTransferEngine):
    """vLLM's dense weight transfer, with Gloo in NCCL's place: the same requests, the same way of loading."""

    _group: GlooGroup | None = None

    def init_transfer_engine(self, init_info: NCCLWeightTransferInitInfo) -> None:
        """Join the group of the trainer and all workers."""
        address, port = init_info.master_address, init_info.master_port
        if address is None or port is None:
            raise ValueError("Gloo needs a master_address and a master_port")
        self.shutdown()
        parallel = self.parallel_config
        rank = init_info.rank_offset + parallel.data_parallel_index * parallel.world_size + parallel.rank
        self._group = GlooGroup(address, port, rank, init_info.world_size)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive what is announced, and load it."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: NCCLWeightTransferUpdateInfo) -> None:
        """One tensor at a time: there are never two copies of the model."""
        if self._group is None:
            raise RuntimeError("the workers have not joined a process group: init_weight_transfer_engine comes first")
        load: Any = self.model.load_weights
        for name, dtype, shape in zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True):
            weight = torch.empty(shape, dtype=getattr(torch, dtype))
            self._group.broadcast(weight)
            load([(name, weight.to(self.device))])

    def shutdown(self) -> None:
        """Leave the group."""
        group, self._group = self._group, None
        if group is not None:
            group.close()


class Registered:
    """A worker extension that adds nothing: being imported, it has registered the backend."""


WeightTransferEngineFactory.register_engine("gloo", GlooTransferEngine)
