"""vLLM that computes with low-rank adapters itself, next to the weights that it has loaded.

Its weights are never sent: once weights were loaded again, vLLM's CPU build computes with wrong adapters. It is told
which layers are adapted, because it would prepare the head for an adapter too, and with such a head its CPU build
cannot compute the log-probabilities of prompts, which probes ask for.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from safetensors.torch import save_file

from trinity_lightning.config.engine import EngineConfig
from trinity_lightning.config.model import LORA_ARGUMENTS, room_for
from trinity_lightning.config.run import TrainConfig
from trinity_lightning.config.servers import MERGE
from trinity_lightning.errors import ConfigError, ModelLoadError
from trinity_lightning.explorer.models.engine import Engine
from trinity_lightning.explorer.models.server import ServerClient
from trinity_lightning.explorer.models.vllm_engine import VLLMEngine
from trinity_lightning.explorer.models.vllm_server import VLLMServerEngine
from trinity_lightning.sync.files import WEIGHTS
from trinity_lightning.sync.stream import Shape, WeightStream

_NAME, _ID = "adapter", 1
_TENSORS, _CONFIG = "adapter_model.safetensors", "adapter_config.json"  # as peft names them


def adapter_engines(config: TrainConfig, folder: Path, shapes: Mapping[str, Shape]) -> list[Engine]:
    """The engines of a run, which are sent adapters of these shapes; `config.engine.name` is vllm or vllm_server."""
    if config.engine.name == "vllm":
        return [VLLMAdapterEngine(config.model.name, config.engine, shapes)]
    return [*VLLMAdapterServerEngine.of_run(config, folder, shapes=shapes)]


class VLLMAdapterEngine(VLLMEngine):
    """A `VLLMEngine` that is sent the policy's adapters (`trainer.adapter.Adapter.alone`), never its weights.

    Args:
        shapes: of all tensors that it is going to be sent: A [rank, input] and s B [output, rank] of each layer.

    Raises:
        ConfigError: (at the first use) vLLM has no adapters for a model of this kind.
    """

    def __init__(self, model: str, config: EngineConfig, shapes: Mapping[str, Shape]) -> None:
        self._shapes = dict(shapes)
        super().__init__(model, _with_room(config, shapes))

    @property
    def weight_shapes(self) -> dict[str, Shape]:
        return self._shapes

    def _load(self) -> None:
        with _refused_by_name(self._model):
            super()._load()

    def _packed_weights(self) -> None:
        return None

    def _load_weights(self, stream: WeightStream) -> None:
        """Have the adapters in place of those before; requests carry them from now on."""
        from vllm.lora.request import LoRARequest

        tensors = {name: tensor.to("cpu").contiguous() for name, tensor in stream}
        with TemporaryDirectory() as folder:
            save_file(tensors, Path(folder) / _TENSORS)
            _describe(Path(folder), self._shapes)
            self._engine.add_lora(LoRARequest(_NAME, _ID, folder, load_inplace=True))
        self._adapter = LoRARequest(_NAME, _ID, folder)  # which is loaded: its files are not read again


class VLLMAdapterServerEngine(VLLMServerEngine):
    """A `VLLMServerEngine` that is sent adapters as a folder; before the first ones it answers nothing.

    Args:
        model, config, others: as of a VLLMServerEngine, of a server that is started here.
        shapes: as of a VLLMAdapterEngine, and so are errors.
    """

    def __init__(self, model: str, config: EngineConfig, *, shapes: Mapping[str, Shape], **others: Any) -> None:
        self._shapes = dict(shapes)
        self._holds = False  # whether the server has adapters
        super().__init__(model, _with_room(config, shapes), **others)

    @property
    def weight_shapes(self) -> dict[str, Shape]:
        return self._shapes

    async def _load(self) -> None:
        with _refused_by_name(self._model, self._log):
            await super()._load()

    def _environment(self) -> dict[str, str]:
        return super()._environment() | {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}

    async def _check_model(self, client: ServerClient) -> None:
        await super()._check_model(client)
        self._model_id, self._holds = _NAME, False  # one that is started again has none

    async def _reload(self, folder: Path, version: int) -> None:
        """Have the server compute with the adapters of a folder.

        The ones before are unloaded first: if they were replaced in place, vLLM would read the folder again at each
        step of its decoding.
        """
        if not (folder / _TENSORS).exists():  # another server of the run may have been here
            _describe(folder, self._shapes)
            (folder / WEIGHTS).rename(folder / _TENSORS)
        named = {"lora_name": _NAME}
        if self._holds:
            self._holds = False
            await self._change("/v1/unload_lora_adapter", named)
        await self._change("/v1/load_lora_adapter", {**named, "lora_path": str(folder)})
        self._holds = True
        await self._changed(version)


@contextmanager
def _refused_by_name(model: str, log: Path | None = None) -> Iterator[None]:
    """A ConfigError if vLLM has no adapters for the model, as its error or its server's log says."""
    try:
        yield
    except ModelLoadError as error:
        written = log.read_text(errors="replace") if log is not None and log.exists() else ""
        if "does not support LoRA" not in f"{error}{written}":
            raise
        raise ConfigError(f"vLLM has no adapters for models such as '{model}': {MERGE}.") from error


def _with_room(config: EngineConfig, shapes: Mapping[str, Shape]) -> EngineConfig:
    rank, layers = _rank_and_layers(shapes)
    return replace(
        config, args={**config.args, **dict(zip(LORA_ARGUMENTS, (True, room_for(rank), layers), strict=True))}
    )


def _describe(folder: Path, shapes: Mapping[str, Shape]) -> None:
    """Write what vLLM reads beside the tensors, which hold s B: their own scale is 1."""
    rank, layers = _rank_and_layers(shapes)
    config = {"peft_type": "LORA", "target_modules": layers, "r": rank, "lora_alpha": rank}
    (folder / _CONFIG).write_text(json.dumps(config))


def _rank_and_layers(shapes: Mapping[str, Shape]) -> tuple[int, list[str]]:
    rank = next(shape[0] for name, shape in shapes.items() if name.endswith(".lora_A.weight"))
    return rank, sorted({name.split(".lora_")[0].rpartition(".")[2] for name in shapes})
