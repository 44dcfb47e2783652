"""Compiled layers (`model.compile`): torch.compile fuses the parts of a layer around its attention.

A pass takes the graphs that fit it, and builds them if there are none yet. So that there are few, all passes are made
alike (`passes.Compiled`): the number of tokens is all that differs between them.
"""

import logging
import os
import shutil
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from trinity_lightning.config.values import AUTO
from trinity_lightning.errors import ConfigError
from trinity_lightning.trainer import fused
from trinity_lightning.trainer.layers import plain_layers
from trinity_lightning.trainer.model import has_dropout, logprob_function, name_of, one_row_obstacle
from trinity_lightning.trainer.passes import Compiled, Passes

logger = logging.getLogger(__name__)

MOST_GRAPHS = 64  # graphs of a layer of any architecture, in both modes, for one row and for several


def compile_layers(setting: bool | str, passes: Passes, policy: Any, others: Sequence[Any]) -> Compiled | None:
    """Compile the layers as `model.compile` says; returns how rows go through them, None if they are not compiled.

    Args:
        setting: true, false, or auto, which compiles on a GPU where all passes of the model can be made alike.
        passes: settings of passes through the policy.
        policy: the model that is trained, on its device.
        others: the reference, and a critic's own model.
    """
    if setting is False or (setting == AUTO and passes.device.type != "cuda"):
        return None
    models = [policy, *others]
    if setting == AUTO and (obstacle := _obstacle(passes.device, models)):
        logger.warning("the policy's layers are not compiled (model.compile=auto): %s", obstacle)
        return None
    apart = next(filter(None, (_apart(model) for model in models)), None)
    if apart is not None and setting == AUTO:
        logger.warning("the policy's layers are not compiled (model.compile=auto): %s", apart)
        return None
    if apart is not None:
        logger.info("%s: one row and several are compiled apart.", apart)
    for model in models:
        compile_layers_of(model)
    return Compiled(one_row=apart is None, has_dropout=any(map(has_dropout, models)))


def _obstacle(device: torch.device, models: Sequence[Any]) -> str | None:
    """The reason why layers cannot be compiled on this GPU; None if they can be."""
    if any(hasattr(model, "shards") for model in models):
        return "they are in shards"
    for model in models:
        if not layers_of(model):
            return f"{name_of(model)} has no layers of transformers' own"
    return None if fused.is_usable(device) else "torch.compile does not work on this GPU"


def _apart(model: Any) -> str | None:
    obstacle = one_row_obstacle(model, logprob_function(model))
    return None if obstacle is None else f"{name_of(model)} {obstacle}"


def compile_layers_of(model: Any) -> None:
    """Let torch.compile compile every layer in place, for any number of rows and tokens; names of weights stay.

    Layers of one class share their graphs. `layers.attention` is in no graph: it compiles its own kernel. All
    parameters of the model and the first layer's input get gradients, or be it of no use, as those of the others do.
    """
    # torch counts all layers of a class as one function, and runs it uncompiled once it has 8 graphs, torch's limit.
    limits = torch._dynamo.config
    limits.recompile_limit = max(limits.recompile_limit, MOST_GRAPHS)
    plain_layers(model)
    if not (embeddings := model.get_input_embeddings()).weight.requires_grad:  # with adapters
        embeddings.register_forward_hook(lambda module, arguments, states: states.requires_grad_())
    for layer in layers_of(model):
        layer.compile(dynamic=True)


def check_compilable(model: Any) -> None:
    """Refuse a model that `compile_layers_of` finds no layers in, or a machine without a compiler; a ConfigError."""
    if not layers_of(model):
        raise ConfigError(
            f"model.compile=true: {name_of(model)} has no layers of transformers' own",
            key="model.compile",
            fix="set it to false",
        )
    compiler = os.environ.get("CXX", "g++")  # as torch's inductor finds it
    if model.device.type == "cpu" and shutil.which(compiler) is None:
        raise ConfigError(
            f"model.compile=true needs a C++ compiler, and there is no {compiler}",
            key="model.compile",
            fix="install it, or name yours in CXX",
        )


def layers_of(model: Any) -> list[nn.Module]:
    """The layers that transformers can checkpoint one at a time."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
