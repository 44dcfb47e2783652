"""vLLM that computes with low-rank adapters itself, next to the weights that it has loaded."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from safetensors.torch import save_file

from trinity_lightning.config.adapters import RANKS, SET
from trinity_lightning.config.engines import EngineConfig
from trinity_lightning.explorer.models.vllm_engine import VLLMEngine
from trinity_lightning.sync.stream import Shape, WeightStream

_NAME, _ID = "policy", 1


class VLLMAdapterEngine(VLLMEngine):
    """A `VLLMEngine` that is sent the policy's adapters (`trainer.adapter.Adapter.alone`), never its weights.

    vLLM's CPU build computes with wrong adapters once its weights were loaded again. vLLM is given the names of the
    adapted layers: it would prepare the head for an adapter too, and with such a head its CPU build cannot compute the
    log-probabilities of prompts, which probes ask for.

    Args:
        model, config: as of a VLLMEngine.
        shapes: of all tensors that it is going to be sent: A [rank, input] and s B [output, rank] of each layer.
    """

    def __init__(self, model: str, config: EngineConfig, shapes: Mapping[str, Shape]) -> None:
        self._shapes = dict(shapes)
        self._rank = next(shape[0] for name, shape in shapes.items() if name.endswith(".lora_A.weight"))
        self._layers = sorted({name.split(".lora_")[0].rpartition(".")[2] for name in shapes})
        room = next(rank for rank in RANKS if rank >= self._rank)
        own = dict(zip(SET, (True, room, self._layers), strict=True))
        super().__init__(model, replace(config, args={**config.args, **own}))

    @property
    def weight_shapes(self) -> dict[str, Shape]:
        """Those of the adapters."""
        return self._shapes

    def _packed_weights(self) -> None:
        return None

    def _load_weights(self, stream: WeightStream) -> None:
        """Have the adapters in place of those before; requests carry them from now on."""
        from vllm.lora.request import LoRARequest

        tensors = {name: tensor.to("cpu").contiguous() for name, tensor in stream}
        scale_of_1 = {"r": self._rank, "lora_alpha": self._rank}
        config = {"peft_type": "LORA", "target_modules": self._layers, **scale_of_1}
        with TemporaryDirectory() as folder:
            save_file(tensors, Path(folder) / "adapter_model.safetensors")
            (Path(folder) / "adapter_config.json").write_text(json.dumps(config))
            self._engine.add_lora(LoRARequest(_NAME, _ID, folder, load_inplace=True))
        self._adapter = LoRARequest(_NAME, _ID, folder)  # which is loaded: its files are not read again
