"""The receiving end of `sync/ipc.py`, in the workers of a vLLM server, which import it with `Extension`."""

from typing import Any

from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine, IPCWeightTransferUpdateInfo

from trinity_lightning.sync.ipc import BACKEND, rebuild_arguments


class Receiver(IPCWeightTransferEngine):
    """vLLM's engine for packed tensors, but it reads handles from JSON instead of a pickle."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.packed = True

    def parse_update_info(self, update_dict: dict[str, Any]) -> IPCWeightTransferUpdateInfo:
        """The contents of a request, as vLLM names them."""
        handles = {gpu: rebuild_arguments(handle) for gpu, handle in update_dict["ipc_handles"].items()}
        return super().parse_update_info({**update_dict, "ipc_handles": handles})


WeightTransferEngineFactory.register_engine(BACKEND, Receiver)


class Extension:
    """Adds nothing to vLLM's worker."""
