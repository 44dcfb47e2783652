"""Low-rank adapters by peft (LoRA, arXiv 2106.09685): a layer computes W x + s B A x, and only A and B are trained."""

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
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from trinity_lightning.config.training import ALL_LINEAR, LoRAConfig
from trinity_lightning.config.values import unknown_name
from trinity_lightning.errors import ConfigError
from trinity_lightning.sync.proof import DRILL_SEED, noise, perturbed_tensors

NAME = "default"  # peft's, of the only adapter
_TRAINED = re.compile(rf"\.lora_[AB]\.{NAME}\.weight$")  # the parameters of adapters among those of a model


class Adapter:
    """The adapters of a Hugging Face model, which is changed in place: it keeps its class, and has them as `adapter`.

    A is random, and B zero at first: the model computes what it did. Both have the dtype of the weight that they adapt.

    Args:
        model: whose weights are frozen.
        config: with a rank.
        base: name or folder of the model, for people who load the adapters.

    Raises:
        ConfigError: a target is no linear layer of the model, or is its head.
    """

    def __init__(self, model: Any, config: LoRAConfig, base: str) -> None:
        self._model, self._config = model, config
        self._peft = LoraConfig(
            r=config.r or 0,  # which peft refuses
            lora_alpha=config.settled_alpha,
            lora_dropout=config.dropout,
            use_rslora=config.rslora,
            target_modules=_targets(model, config.targets),
            fan_in_fan_out=any(isinstance(each, Conv1D) for each in model.modules()),  # layers of GPT-2
            task_type="CAUSAL_LM",
            base_model_name_or_path=base,
        )
        inject_adapter_in_model(self._peft, model, NAME)
        layers: dict[str, Any] = {name: each for name, each in model.named_modules() if isinstance(each, LoraLayer)}
        self._layers = {f"{name}.weight": layer for name, layer in layers.items()}
        named = model.named_parameters(remove_duplicate=False)
        self._frozen = {name.replace(".base_layer.", "."): each for name, each in named if not _TRAINED.search(name)}
        model.adapter = self

    # -- merged weights -----------------------------------------------------------------------------------------------

    def parameters(self) -> dict[str, nn.Parameter]:
        """The frozen parameters, by the names that they have without adapters; a tied one by each of its own."""
        return self._frozen

    @torch.no_grad()
    def whole(self, name: str) -> Tensor:
        """The weight of that name, W + s B A where it has an adapter: summed in float32, then rounded as W is.

        W itself is never changed: added and subtracted again, in bfloat16, it would drift.
        """
        layer = self._layers.get(name)
        if layer is None:
            return self._frozen[name].detach()
        base = layer.get_base_layer().weight
        product = layer.lora_B[NAME].weight.float() @ layer.lora_A[NAME].weight.float()
        product = product.T if layer.fan_in_fan_out else product
        return product.mul_(layer.scaling[NAME]).add_(base).to(base.dtype)

    def merged(self) -> dict[str, Tensor]:
        """All weights, for a model without adapters."""
        return {name: self.whole(name) for name in self._frozen}

    # -- without adapters, and with others ----------------------------------------------------------------------------

    @contextmanager
    def off(self) -> Iterator[None]:
        """The model as it was before it was trained: B is zero meanwhile.

        peft's own switch would make torch.compile build other graphs, which round otherwise: the first estimate of a
        KL penalty would not be 0.
        """
        with self._restored() as before:
            for layer, _ in before:
                layer.lora_B[NAME].weight.zero_()
            yield

    @contextmanager
    def perturbed(self) -> Iterator[Callable[[float], None]]:
        """As `sync.proof.perturbed`; noise in B, zero at first, changes W + s B A about as much as that in W."""
        with perturbed_tensors(dict.fromkeys(self._frozen.values())) as perturb_frozen, self._restored() as before:

            def perturb(scale: float) -> None:
                perturb_frozen(scale)
                generator = torch.Generator(self._model.device).manual_seed(DRILL_SEED)
                for layer, original in before:
                    a, b = layer.lora_A[NAME].weight, layer.lora_B[NAME].weight
                    of_product = layer.scaling[NAME] * math.sqrt(len(a)) * _size(a)  # were B of size 1
                    size = _size(layer.get_base_layer().weight) / of_product
                    b.copy_(original).add_(noise(b.shape, generator, scale, size).to(b.dtype))

            yield perturb

    @contextmanager
    def _restored(self) -> Iterator[list[tuple[Any, Tensor]]]:
        """Every layer and its B, which is as before at the end."""
        with torch.no_grad():
            before = [(layer, layer.lora_B[NAME].weight.clone()) for layer in self._layers.values()]
            try:
                yield before
            finally:
                for layer, original in before:
                    layer.lora_B[NAME].weight.copy_(original)

    # -- saving -------------------------------------------------------------------------------------------------------

    @cached_property
    def base(self) -> str:
        """A hash of the frozen weights."""
        digest = xxhash.xxh3_128()
        for name, parameter in self._frozen.items():
            digest.update(name.encode())
            digest.update(parameter.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
        return digest.hexdigest()

    def leave_base_out(self, checkpoint: dict[str, Any]) -> None:
        """Of the weights in a PolicyModule's checkpoint keep the adapters, and which weights they belong to."""
        weights = checkpoint["state_dict"]
        checkpoint["state_dict"] = {name: each for name, each in weights.items() if _TRAINED.search(name)}
        checkpoint["adapter"] = {"lora": asdict(self._config), "base": self.base}

    def save(self, folder: Path) -> None:
        """Write the adapters as peft does."""
        self._peft.save_pretrained(str(folder))
        tensors = {
            f"base_model.model.{name.replace(f'.{NAME}.', '.')}": parameter.detach().cpu().contiguous()
            for name, parameter in self._model.named_parameters()
            if _TRAINED.search(name)
        }
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def put_base_in(checkpoint: dict[str, Any], module: Any) -> None:
    """Give a checkpoint that was left with adapters alone the frozen weights of a PolicyModule, which is to load it.

    Raises:
        ConfigError: one of the two has no adapters, they have other settings, or they belong to other weights.
    """
    saved, lora = checkpoint.get("adapter"), asdict(module.lora)
    if saved is None:
        raise ConfigError("the checkpoint has the weights of a whole model, and no adapters: leave model.lora out.")
    for key, value in saved["lora"].items():
        if lora[key] != value:
            raise ConfigError(f"model.lora.{key} is {lora[key]}, and that of the checkpoint {value}: give that.")
    if saved["base"] != module.adapter.base:
        raise ConfigError(
            "the adapters of the checkpoint belong to other weights than these: give the model.name that its run has."
        )
    frozen = {name: each for name, each in module.state_dict().items() if not _TRAINED.search(name)}
    checkpoint["state_dict"] = frozen | checkpoint["state_dict"]


def _targets(model: Any, asked: str | list[str]) -> list[str]:
    """Names of the linear layers to adapt, without what stands before their last part.

    Raises:
        ConfigError: there is no such layer.
    """
    head = model.get_output_embeddings()
    linear = [
        name for name, each in model.named_modules() if isinstance(each, (nn.Linear, Conv1D)) and each is not head
    ]
    present = {name.rpartition(".")[2] for name in linear}
    for name in [] if asked == ALL_LINEAR else asked:
        if name not in present:
            raise ConfigError(unknown_name("model.lora.targets", name, present))
    return sorted(present if asked == ALL_LINEAR else asked)


def _size(weight: Tensor) -> Tensor:
    """Root mean square."""
    return torch.linalg.vector_norm(weight, dtype=torch.float32) / math.sqrt(weight.numel())
