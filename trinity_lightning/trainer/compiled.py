"""Compiled layers (`model.compile`): torch.compile fuses the parts of a layer around its attention.

A pass takes the graphs that fit it, and builds them if there are none yet. So that there are few, all passes are made
alike (`passes.Compiled`): the number of tokens is all that differs between them.
"""

import logging
import os
import shutil
from typing import Any

import torch
from torch import Tensor

from trinity_lightning.common.hardware import name_vectors
from trinity_lightning.config.models import is_picture_model
from trinity_lightning.config.values import AUTO
from trinity_lightning.errors import ConfigError
from trinity_lightning.trainer import fused
from trinity_lightning.trainer.head import Head
from trinity_lightning.trainer.lean import plain_layers
from trinity_lightning.trainer.model import has_dropout, layers_of, logprob_function, name_of, one_row_obstacle
from trinity_lightning.trainer.passes import Compiled, LogprobFn, Passes

logger = logging.getLogger(__name__)

MOST_GRAPHS = 64  # graphs of a layer of any architecture, in both modes, for one row and for several


def compile_layers(setting: bool | str, passes: Passes, policy: Any, reference: Any, critic: Any) -> Compiled | None:
    """Compile the layers as `model.compile` says; returns how rows go through them, None if they are not compiled.

    Args:
        setting: true, false, or auto, which compiles on a GPU where all passes of the model can be made alike.
        passes: settings of passes through the policy.
        policy: the model that is trained, on its device.
        reference: the frozen model that it is compared with; None: there is none.
        critic: a critic's own model; None: there is none.
    """
    if setting is False or (setting == AUTO and passes.device.type != "cuda"):
        return None
    obstacle = _obstacle(passes.device, policy, critic) if setting == AUTO else None
    apart = None
    if obstacle is None:
        apart = _difference(policy, passes.function)
        if apart is None and critic is not None:
            apart = _difference(critic, logprob_function(critic))
    if setting == AUTO and (obstacle := obstacle or apart):
        logger.warning("the policy's layers are not compiled (model.compile=auto): %s", obstacle)
        return None
    if apart is not None:
        logger.info("%s: one row and several are compiled apart.", apart)
    drops = has_dropout(policy) or (critic is not None and has_dropout(critic))
    if reference is not None:  # shares the policy's graphs, or the first KL would not be 0
        reference.requires_grad_().train(not drops)
    for model in (policy, reference, critic):
        if model is not None:
            compile_layers_of(model)
    return Compiled(one_row=apart is None, has_dropout=drops)


def _obstacle(device: torch.device, policy: Any, critic: Any) -> str | None:
    """The reason why layers cannot be compiled on this GPU; None if they can be."""
    if hasattr(policy, "shards"):
        return "they are in shards"
    if is_picture_model(policy.config):
        return f"{name_of(policy)} reads pictures, and its tower would have a graph for each number of them"
    for model in (policy, critic):
        if model is not None and not layers_of(model):
            return f"{name_of(model)} has no layers of transformers' own"
    head = Head.of(policy)
    dtype = torch.float32 if head.softcap or head.scale != 1.0 else policy.dtype  # of the logits
    works = fused.is_usable(device, dtype, policy.config.get_text_config().vocab_size)
    return None if works else "torch.compile does not work on this GPU"


def _difference(model: Any, function: LogprobFn) -> str | None:
    """The reason why rows of the model cannot be one row; None if they can."""
    obstacle = one_row_obstacle(model, function)
    return None if obstacle is None else f"{name_of(model)} {obstacle}"


def compile_layers_of(model: Any) -> None:
    """Let torch.compile compile every layer in place, for any number of rows and tokens; names of weights stay.

    Layers of one class share their graphs. `layers.attention` is in no graph: it compiles its own kernel.
    """
    # torch counts all layers of a class as one function, and runs it uncompiled once it has 8 graphs, torch's limit.
    limits = torch._dynamo.config
    limits.recompile_limit = max(limits.recompile_limit, MOST_GRAPHS)
    if model.device.type == "cpu":
        name_vectors()
    plain_layers(model)
    embeddings = model.get_input_embeddings()
    if not any(parameter.requires_grad for parameter in embeddings.parameters()):
        embeddings.register_forward_hook(_with_gradient)
    for layer in layers_of(model):
        layer.compile(dynamic=True)


def _with_gradient(module: Any, arguments: Any, states: Tensor) -> None:
    """Let frozen embeddings have a gradient: with adapters the first layer would have other graphs than the rest."""
    if torch.is_grad_enabled():
        states.requires_grad_()


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
