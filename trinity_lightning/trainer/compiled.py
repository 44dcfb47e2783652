"""model.compile: layers of a Hugging Face model compiled by torch.compile."""

import os
import shutil
from typing import Any

import torch
from torch import nn

from trinity_lightning.errors import ConfigError
from trinity_lightning.trainer.model import name_of

MOST_GRAPHS = 64  # of a compiled layer: by layout, mode, gradients or not, and one row or several


def compile_layers_of(model: Any) -> None:
    """Let torch.compile compile every layer in place, for any number of rows and tokens; names of weights stay.

    Layers of one kind share their graphs, of what is around attention: norms, projections, rotary embeddings and MLP.
    `attention` runs between them, and compiles what it can itself (FlexAttention, on a GPU).
    """
    # All layers of a kind count as one function, and what runs beyond torch's limit of 8 graphs runs without them.
    limits = torch._dynamo.config
    limits.recompile_limit = max(limits.recompile_limit, MOST_GRAPHS)
    for layer in layers_of(model):
        layer.compile(dynamic=True)


def check_compilable(model: Any) -> None:
    """Refuse a model that `compile_layers_of` would find nothing in, or whose graphs no compiler could build.

    Raises:
        ConfigError: says which.
    """
    if not layers_of(model):
        raise ConfigError(f"model.compile=true: {name_of(model)} has no layers of transformers' own. Set it to false.")
    compiler = os.environ.get("CXX", "g++")  # as torch's inductor finds it
    if model.device.type == "cpu" and shutil.which(compiler) is None:
        raise ConfigError(
            f"model.compile=true needs a C++ compiler, and there is no {compiler}: install it, or name yours in CXX."
        )


def layers_of(model: Any) -> list[nn.Module]:
    """What transformers can checkpoint one at a time."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [each for each in model.modules() if isinstance(each, GradientCheckpointingLayer)]
