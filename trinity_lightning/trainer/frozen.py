"""Parameters that are not trained (`model.freeze`): which patterns select which names, and what a run says of them."""

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from trinity_lightning.common.words import listed
from trinity_lightning.config.model import ModelConfig, check_patterns
from trinity_lightning.config.models import resolve_model
from trinity_lightning.errors import ConfigError
from trinity_lightning.sync.stream import skeleton
from trinity_lightning.trainer.adapter import Adapter

_ADAPTED = re.compile(r"\.base_layer\b|\.lora_[AB]\.\w+")  # peft's additions to the name of a weight
MOST_LISTED = 12  # names in a message


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Train no parameter of the model that a pattern selects; a tied one by any of its names, an adapter by its weight.

    Raises:
        ConfigError: a pattern selects nothing, or nothing is left to train.
    """
    check_patterns(patterns)
    named = list(model.named_parameters(remove_duplicate=False))
    for pattern in patterns:
        words = _words(pattern)
        selected = [parameter for name, parameter in named if words.search(_ADAPTED.sub("", name))]
        if not selected:
            raise ConfigError(
                f"model.freeze has {pattern!r}, which is in no name of the model's parameters",
                key="model.freeze",
                fix=f"give words of the names, which begin with {listed(list(_parts(model)), MOST_LISTED)}",
            )
        for parameter in selected:
            parameter.requires_grad_(False)
    if patterns and not any(parameter.requires_grad for _, parameter in named):
        raise ConfigError("model.freeze leaves nothing to train", key="model.freeze", fix="give fewer patterns")


def _words(pattern: str) -> re.Pattern[str]:
    """A pattern of `model.freeze` as an expression that is found in the names it selects: whole words of them."""
    text = ".*".join(map(re.escape, pattern.split("*")))
    return re.compile(rf"(?<![^\W_]){text}(?![^\W_])")


def _parts(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """The parameters by the large parts of the model that they belong to: `model.layers`, `lm_head`."""
    parts: dict[str, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        parts.setdefault(".".join(name.split(".")[:-1][:2]), []).append(parameter)
    return parts


# -- before the weights are loaded -------------------------------------------------------------------------------------


def trained_skeleton(config: ModelConfig) -> Any:
    """The model without weights, with its adapters and frozen parameters; errors as in `Adapter` and `freeze`."""
    model = skeleton(str(resolve_model(config.name)))
    if config.lora.r is not None:
        with torch.random.fork_rng(devices=[]):  # adapters draw random weights; the policy's draws must not change
            Adapter(model, config.lora, config.name)
    freeze(model, config.freeze)
    return model


def trained_weights(config: ModelConfig) -> str:
    """The number of weights that are trained, which are frozen, and which layers have adapters, in words."""
    model = trained_skeleton(config)
    sizes = {
        trained: sum(p.numel() for p in model.parameters() if p.requires_grad is trained) for trained in (True, False)
    }
    words = [f"{_millions(sizes[True])} of {_millions(sum(sizes.values()))} weights"]
    if config.lora.r is not None:
        adapted = [name.split(".lora_A")[0] for name, _ in model.named_parameters() if ".lora_A." in name]
        kinds = sorted({name.rpartition(".")[2] for name in adapted})
        words.append(f"adapters of rank {config.lora.r} in {len(adapted)} layers: {', '.join(kinds)}")
    trained = {
        part: {parameter.requires_grad for parameter in parameters} for part, parameters in _parts(model).items()
    }
    for label, states in (("frozen", {False}), ("partly frozen", {False, True})):
        if names := [part for part, of_part in trained.items() if of_part == states]:
            words.append(f"{label}: {', '.join(names)}")
    return "; ".join(words)


def _millions(count: int) -> str:
    return f"{count / 1e6:.3g} million"
