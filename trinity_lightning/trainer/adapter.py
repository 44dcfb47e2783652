"""Low-rank adapters by peft (LoRA, arXiv 2106.09685): a layer computes W x + s B A x, and only A and B are trained.

peft is an extra, and takes a second to import: only `Adapter` imports it.
"""

import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from trinity_lightning.config.model import ALL_LINEAR, LoRAConfig, ModelConfig, settled_alpha
from trinity_lightning.config.models import is_picture_model, resolve_model
from trinity_lightning.config.values import unknown_name
from trinity_lightning.errors import ConfigError
from trinity_lightning.sync.proof import DRILL_SEED, noise, perturbed_tensors
from trinity_lightning.sync.stream import Shape, WeightStream, skeleton
from trinity_lightning.trainer.checkpoint import check_lora

NAME = "default"  # peft's name of the only adapter
_TRAINED = re.compile(rf"\.lora_[AB]\.{NAME}\.weight$")  # names of a model's parameters that belong to adapters


class Adapter:
    """Adapters of a Hugging Face model, which is changed in place: it keeps its class, and has them as `model.adapter`.

    A is random and B is zero at first, so the model computes the same. Both have the dtype of the weight they adapt.

    Args:
        model: the model.
        config: the settings of the adapters.
        base: the model's name or folder, for people who load the adapters.

    Raises:
        ConfigError: a target is no linear layer of the model, or is its head.
    """

    def __init__(self, model: Any, config: LoRAConfig, base: str) -> None:
        from peft import LoraConfig, inject_adapter_in_model
        from peft.tuners.lora import LoraLayer

        self._model, self._config = model, config
        self._peft = LoraConfig(
            r=config.r or 0,  # peft refuses 0
            lora_alpha=settled_alpha(config),
            lora_dropout=config.dropout,
            use_rslora=config.rslora,
            target_modules=_targets(model, config.targets),
            fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),  # layers of GPT-2
            task_type="CAUSAL_LM",
            base_model_name_or_path=base,
        )
        inject_adapter_in_model(self._peft, model, NAME)
        layers: dict[str, Any] = {name: m for name, m in model.named_modules() if isinstance(m, LoraLayer)}
        self._layers = {f"{name}.weight": layer for name, layer in layers.items()}
        names = [name for name, _ in model.named_parameters(remove_duplicate=False) if not _TRAINED.search(name)]
        self._frozen = {name.replace(".base_layer.", "."): name for name in names}
        model.adapter = self

    # -- merged weights -----------------------------------------------------------------------------------------------

    def parameters(self) -> dict[str, Tensor]:
        """The frozen parameters by their names without adapters; a tied one by each of its names."""
        shards, model = self._shards, self._model
        present = dict(model.named_parameters(remove_duplicate=False)) if shards is None else shards.parameters()
        return {name: present[adapted_name] for name, adapted_name in self._frozen.items()}

    @property
    def _shards(self) -> Any:
        """The model's `fsdp.Shards`; None if the model is whole."""
        return getattr(self._model, "shards", None)

    def _read(self, name: str) -> Tensor:
        return self._model.get_parameter(name).detach() if self._shards is None else self._shards.whole(name)

    @torch.no_grad()
    def whole(self, name: str) -> Tensor:
        """The weight of that name; W + s B A where it has an adapter, summed in float32 and rounded to W's dtype.

        W itself never changes: to add and subtract in bfloat16 would let it drift.
        """
        base, layer = self._read(self._frozen[name]), self._layers.get(name)
        if layer is None:
            return base
        stem = name.removesuffix(".weight")
        a, b = (self._read(f"{stem}.lora_{factor}.{NAME}.weight").float() for factor in "AB")
        product = b @ a
        product = product.T if layer.fan_in_fan_out else product
        return product.mul_(layer.scaling[NAME]).add_(base).to(base.dtype)

    def merged(self) -> dict[str, Tensor]:
        """All weights on the host, for a model without adapters; tied weights are one tensor."""
        frozen, merged = self.parameters(), dict[int, Tensor]()
        for name, weight in frozen.items():
            if id(weight) not in merged:
                merged[id(weight)] = self.whole(name).cpu()
        return {name: merged[id(weight)] for name, weight in frozen.items()}

    def alone(self) -> WeightStream:
        """A stream of A and s B of each layer, for an engine with the frozen weights; not for a model in shards."""
        factors: dict[str, tuple[Tensor, float]] = {}
        for name, layer in self._layers.items():
            stem = name.removesuffix(".weight")
            factors[f"{stem}.lora_A.weight"] = layer.lora_A[NAME].weight, 1.0
            factors[f"{stem}.lora_B.weight"] = layer.lora_B[NAME].weight, layer.scaling[NAME]
        shapes: dict[str, Shape] = {name: tuple(weight.shape) for name, (weight, _) in factors.items()}
        return WeightStream(
            shapes,
            lambda: ((name, weight.detach() * scale) for name, (weight, scale) in factors.items()),
            self._model.device,
        )

    # -- without adapters, and with perturbed ones --------------------------------------------------------------------

    @contextmanager
    def off(self) -> Iterator[None]:
        """Set B to zero meanwhile: the model is then what it was before training.

        (peft's own switch would make torch.compile build other graphs, which round differently.)
        """
        with self._restored() as before:
            for _, b, _ in before:
                b.zero_()
            yield

    @contextmanager
    def perturbed(self) -> Iterator[Callable[[float], None]]:
        """Perturb the adapters and the frozen weights, as `sync.proof.perturbed` does a model."""
        if self._shards is not None:
            with self._shards.perturbed() as perturb:
                yield perturb
            return
        frozen = dict.fromkeys(self.parameters().values())
        with perturbed_tensors(frozen) as perturb_frozen, self.perturbed_alone() as perturb_adapters:

            def perturb(scale: float) -> None:
                perturb_frozen(scale)
                perturb_adapters(scale)

            yield perturb

    @contextmanager
    def perturbed_alone(self) -> Iterator[Callable[[float], None]]:
        """Perturb the adapters alone: noise in B changes W + s B A about as much as noise in W would."""
        with self._restored() as before:

            def perturb(scale: float) -> None:
                generator = torch.Generator(self._model.device).manual_seed(DRILL_SEED)
                for layer, b, original in before:
                    a = layer.lora_A[NAME].weight
                    product = layer.scaling[NAME] * math.sqrt(len(a)) * _size(a)  # its size if B had size 1
                    size = _size(layer.get_base_layer().weight) / product
                    b.copy_(original).add_(noise(b.shape, generator, scale, size).to(b.dtype))

            yield perturb

    @contextmanager
    def _restored(self) -> Iterator[list[tuple[Any, Tensor, Tensor]]]:
        """Every layer, this process's share of its B, and a copy of that share, which is put back at the end."""
        reshard = (lambda: None) if self._shards is None else self._shards.reshard
        with torch.no_grad():
            reshard()
            shares = [(layer, _local(layer.lora_B[NAME].weight)) for layer in self._layers.values()]
            before = [(layer, b, b.clone()) for layer, b in shares]
            try:
                yield before
            finally:
                reshard()
                for _, b, original in before:
                    b.copy_(original)

    # -- saving -------------------------------------------------------------------------------------------------------

    @cached_property
    def base(self) -> str:
        """Hash of the frozen weights."""
        digest = xxhash.xxh3_128()
        for name, adapted_name in self._frozen.items():
            digest.update(name.encode())
            digest.update(self._read(adapted_name).cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def leave_base_out(self, checkpoint: dict[str, Any]) -> None:
        """Keep only the adapters in a PolicyModule's checkpoint, and a hash of the weights they belong to."""
        weights = checkpoint["state_dict"]
        if not weights:  # the policy is in shards, and this is another rank than 0
            return
        checkpoint["state_dict"] = {name: weight for name, weight in weights.items() if _TRAINED.search(name)}
        checkpoint["adapter"] = {"lora": asdict(self._config), "base": self.base}

    def save(self, folder: Path) -> None:
        """Write the adapters in peft's format."""
        self._peft.save_pretrained(str(folder))
        tensors = {
            f"base_model.model.{name.replace(f'.{NAME}.', '.')}": self._read(name).cpu().contiguous()
            for name, _ in self._model.named_parameters()
            if _TRAINED.search(name)
        }
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def shapes_alone(config: ModelConfig) -> dict[str, Shape]:
    """Shapes of `Adapter.alone` for this model, without loading its weights; raises as `Adapter` does."""
    with torch.random.fork_rng(devices=[]):  # peft draws A on the host: the policy's A must not change by it
        return dict(Adapter(skeleton(str(resolve_model(config.name))), config.lora, config.name).alone().shapes)


def check_adapter(config: ModelConfig) -> None:
    """Refuse targets that the model lacks, or a rank above the rank of all weights; loads no weights. A ConfigError."""
    model = skeleton(str(resolve_model(config.name)))
    targets = {*_targets(model, config.lora.targets)}
    adapted = [module for name, module in _adaptable(model) if targets & {name, name.rpartition(".")[2]}]
    most = max(min(module.weight.shape) for module in adapted)  # type: ignore[union-attr]
    if (config.lora.r or 0) > most:
        raise ConfigError(
            f"model.lora.r is {config.lora.r}, and no layer's weight has a rank above {most}",
            key="model.lora.r",
            fix="give less",
        )


def put_base_in(checkpoint: dict[str, Any], module: Any) -> None:
    """Give a checkpoint of adapters alone the frozen weights of the PolicyModule that will load it.

    Raises:
        ConfigError: one of the two has no adapters, or the adapters have other settings or belong to other weights.
    """
    check_lora(checkpoint, module.lora)
    if checkpoint["adapter"]["base"] != module.adapter.base:
        raise ConfigError(
            "the adapters of the checkpoint belong to other weights than these",
            key="model.name",
            fix="give the model.name that its run has",
        )
    frozen = {name: weight for name, weight in module.state_dict().items() if not _TRAINED.search(name)}
    checkpoint["state_dict"] = frozen | checkpoint["state_dict"]


def _targets(model: Any, asked: str | list[str]) -> list[str]:
    """Names of the linear layers to adapt, as peft takes them: their last parts; of a picture model their whole names.

    Layers of a picture model's vision tower may have the same last parts, and get no adapters.

    Raises:
        ConfigError: there is no such layer.
    """
    present = [name for name, _ in _adaptable(model)]
    last_parts = {name.rpartition(".")[2] for name in present}
    for name in [] if asked == ALL_LINEAR else asked:
        if name not in last_parts:
            raise ConfigError(unknown_name("model.lora.targets", name, last_parts), key="model.lora.targets")
    chosen = last_parts if asked == ALL_LINEAR else {*asked}
    if is_picture_model(model.config):
        return [name for name in present if name.rpartition(".")[2] in chosen]
    return sorted(chosen)


def _adaptable(model: Any) -> list[tuple[str, nn.Module]]:
    """The linear layers of the model's language part, without its head, by name."""
    head = model.get_output_embeddings()
    language = {*model.get_decoder().modules()} if is_picture_model(model.config) else None
    return [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, Conv1D)) and module is not head and (language is None or module in language)
    ]


def _local(parameter: Any) -> Tensor:
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def _size(weight: Tensor) -> Tensor:
    """Root mean square of a weight."""
    return torch.linalg.vector_norm(weight, dtype=torch.float32) / math.sqrt(weight.numel())
