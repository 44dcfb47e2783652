"""The server's end of weights that come over TCP: a weight-transfer backend of vLLM, for servers without a GPU.

Imported by vLLM's workers (`--worker-extension-cls`), never by the trainer.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine, NCCLWeightTransferUpdateInfo

from trinity_lightning.common.tcp_group import TCPReceiver


@dataclass
class TCPInitInfo(WeightTransferInitInfo):
    """A sender's invitation; see `TCPGroup`."""

    address: str
    port: int
    token: str = field(repr=False)


class TCPTransferEngine(NCCLWeightTransferEngine):
    """vLLM's dense weight transfer, with TCP in NCCL's place: the same requests, the same way of loading."""

    init_info_cls: Any = TCPInitInfo
    _receiver: TCPReceiver | None = None

    def init_transfer_engine(self, init_info: Any) -> None:
        """Accept an invitation."""
        self._receiver = TCPReceiver(init_info.address, init_info.port, init_info.token)

    def receive_weights(self, update_info: NCCLWeightTransferUpdateInfo) -> None:
        """One tensor at a time: there are never two copies of the model."""
        if self._receiver is None:
            raise RuntimeError("there is no connection to the trainer: init_weight_transfer_engine comes first")
        load: Any = self.model.load_weights
        for name, dtype, shape in zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True):
            weight = torch.empty(shape, dtype=getattr(torch, dtype))
            self._receiver.receive(weight)
            load([(name, weight.to(self.device))])

    def shutdown(self) -> None:
        """End the connection."""
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.close()


class Registered:
    """A worker extension that adds nothing: being imported, it has registered the backend."""


WeightTransferEngineFactory.register_engine("tcp", TCPTransferEngine)
