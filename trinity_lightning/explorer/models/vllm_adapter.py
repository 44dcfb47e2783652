"""vLLM engines that compute with low-rank adapters themselves, next to the weights that they have loaded.

They are sent no weights, because vLLM's CPU build computes with wrong adapters after it has loaded weights again. They
are told which layers are adapted. Otherwise vLLM would prepare the head for an adapter too, and with such a head its
CPU build cannot compute the log-probabilities of prompts, which probes ask for.
"""

import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from safetensors.torch import save_file

from trinity_lightning.config.engines import EngineConfig
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
_TENSORS, _CONFIG = "adapter_model.safetensors", "adapter_config.json"  # peft's names


def adapter_engines(config: TrainConfig, folder: Path, shapes: Mapping[str, Shape]) -> list[Engine]:
    """The engines of a run that sends them adapters of these shapes; `config.engine.name` is vllm or vllm_server."""
    if config.engine.name == "vllm":
        return [VLLMAdapterEngine(config.model.name, config.engine, shapes)]
    return [*VLLMAdapterServerEngine.of_run(config, folder, shapes=shapes)]


class VLLMAdapterEngine(VLLMEngine):
    """A `VLLMEngine` that is sent the policy's adapters (`trainer.adapter.Adapter.alone`), never its weights.

    Args:
        shapes: names and shapes of all tensors that will be sent: A [rank, input] and s B [output, rank] of each layer.

    Raises:
        ConfigError: (at the first use) vLLM does not support adapters for a model of this kind.
    """

    def __init__(self, model: str, config: EngineConfig, shapes: Mapping[str, Shape]) -> None:
        self._shapes = dict(shapes)
        super().__init__(model, _with_room(config, shapes))

    @property
    def weight_shapes(self) -> dict[str, Shape]:
        return self._shapes

    def _load(self) -> None:
        with _naming_unsupported(self._model):
            super()._load()

    def _packed_weights(self) -> None:
        return None

    def _is_sent_everything(self) -> bool:
        return False

    def _load_weights(self, stream: WeightStream) -> None:
        """Load the adapters in place of the previous ones; requests use them from now on."""
        from vllm.lora.request import LoRARequest

        tensors = {name: tensor.to("cpu").contiguous() for name, tensor in stream}
        with TemporaryDirectory() as folder:
            save_file(tensors, Path(folder) / _TENSORS)
            _describe(Path(folder), self._shapes)
            self._engine.add_lora(LoRARequest(_NAME, _ID, folder, load_inplace=True))
        self._adapter = LoRARequest(_NAME, _ID, folder)  # it is loaded, so that its files are not read again


class VLLMAdapterServerEngine(VLLMServerEngine):
    """A `VLLMServerEngine` that is sent adapters as a folder; it answers no requests before the first ones.

    Args:
        model, config, others: as for a VLLMServerEngine whose server is started here.
        shapes: as for a VLLMAdapterEngine, whose errors it raises, too.
    """

    def __init__(self, model: str, config: EngineConfig, *, shapes: Mapping[str, Shape], **others: Any) -> None:
        self._shapes = dict(shapes)
        self._has_adapters = False  # True if the server has some
        super().__init__(model, _with_room(config, shapes), **others)

    @property
    def weight_shapes(self) -> dict[str, Shape]:
        return self._shapes

    async def _load(self) -> None:
        with _naming_unsupported(self._model, self._log):
            await super()._load()

    def _environment(self, flags: Collection[str]) -> dict[str, str]:
        return super()._environment(flags) | {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}

    async def _check_model(self, client: ServerClient) -> None:
        await super()._check_model(client)
        self._model_id, self._has_adapters = _NAME, False  # a server that is started again has none

    async def _reload(self, folder: Path, version: int) -> None:
        """Have the server compute with the adapters of a folder.

        The previous adapters are unloaded first. If they were replaced in place, vLLM would read the folder again at
        each step of decoding.
        """
        if not (folder / _TENSORS).exists():  # else another server of the run has renamed it
            _describe(folder, self._shapes)
            (folder / WEIGHTS).rename(folder / _TENSORS)
        name = {"lora_name": _NAME}
        if self._has_adapters:
            self._has_adapters = False
            await self._change("/v1/unload_lora_adapter", name)
        await self._change("/v1/load_lora_adapter", {**name, "lora_path": str(folder)})
        self._has_adapters = True
        await self._changed(version)


@contextmanager
def _naming_unsupported(model: str, log: Path | None = None) -> Iterator[None]:
    """Raise a ConfigError that names the model if vLLM's error, or its server's log, says that it takes no adapters."""
    try:
        yield
    except ModelLoadError as error:
        logged = log.read_text(errors="replace") if log is not None and log.exists() else ""
        if "does not support LoRA" not in f"{error}{logged}":
            raise
        message = f"vLLM has no adapters for models such as '{model}'"
        raise ConfigError(message, key="synchronizer.lora", fix=MERGE) from error


def _with_room(config: EngineConfig, shapes: Mapping[str, Shape]) -> EngineConfig:
    """The engine's section with vLLM's arguments for adapters of these shapes."""
    rank, layers = _rank_and_layers(shapes)
    return replace(
        config, args={**config.args, **dict(zip(LORA_ARGUMENTS, (True, room_for(rank), layers), strict=True))}
    )


def _describe(folder: Path, shapes: Mapping[str, Shape]) -> None:
    """Write the description that vLLM reads beside the tensors. Their scale is 1: they hold s B."""
    rank, layers = _rank_and_layers(shapes)
    config = {"peft_type": "LORA", "target_modules": layers, "r": rank, "lora_alpha": rank}
    (folder / _CONFIG).write_text(json.dumps(config))


def _rank_and_layers(shapes: Mapping[str, Shape]) -> tuple[int, list[str]]:
    """The adapters' rank, and the names of the layers that have one, such as q_proj."""
    rank = next(shape[0] for name, shape in shapes.items() if name.endswith(".lora_A.weight"))
    return rank, sorted({name.split(".lora_")[0].rpartition(".")[2] for name in shapes})
