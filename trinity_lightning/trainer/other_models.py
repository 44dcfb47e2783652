"""Models that compute in another way: logits by their own forward pass, compiled layers, weights held in bfloat16."""

import inspect
import logging
import os
import shutil
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.plugins.precision import Precision
from torch import nn

from trinity_lightning.config.trainer import HALF
from trinity_lightning.errors import ConfigError, ModelLoadError
from trinity_lightning.trainer.layout import LogprobFn
from trinity_lightning.trainer.model import logprobs_by_forward, name_of

logger = logging.getLogger(__name__)

# -- logits that are not a head's of the base model's states -----------------------------------------------------------


def by_own_forward_pass(model: Any, agrees: Callable[[LogprobFn], bool]) -> LogprobFn:
    """`logprobs_by_forward`, if that agrees with the model's own logits.

    Raises:
        ModelLoadError: it does not, or the model's forward pass computes all logits or none.
    """
    if "logits_to_keep" in inspect.signature(model.forward).parameters and agrees(logprobs_by_forward):
        logger.info("%s: logits by its own forward pass, which takes more memory than a head.", name_of(model))
        return logprobs_by_forward
    raise ModelLoadError(
        f"{name_of(model)} cannot be trained: its logits are not those of its base model and output embeddings, and "
        "its forward pass has no logits_to_keep. Use one whose class follows transformers' causal language models."
    )


# -- model.compile: layers compiled by torch.compile -------------------------------------------------------------------

MOST_GRAPHS = 64  # of a compiled layer: by layout, mode, gradients or not, and one row or several


def compile_layers_of(model: Any) -> None:
    """Let torch.compile compile every layer in place, for any number of rows and tokens; names of weights stay.

    Layers of one kind share their graphs, of what is around `attention`, which compiles what it can itself.
    """
    # All layers of a kind count as one function, and what runs beyond torch's limit of 8 graphs runs without them.
    limits = torch._dynamo.config
    limits.recompile_limit = max(limits.recompile_limit, MOST_GRAPHS)
    for layer in layers_of(model):
        layer.compile(dynamic=True)


def check_compilable(model: Any) -> None:
    """ConfigError for a model that `compile_layers_of` finds nothing in, or whose graphs no compiler could build."""
    if not layers_of(model):
        raise ConfigError(
            f"model.compile=true: {name_of(model)} has no layers of transformers' own. Set it to false.",
            key="model.compile",
        )
    compiler = os.environ.get("CXX", "g++")  # as torch's inductor finds it
    if model.device.type == "cpu" and shutil.which(compiler) is None:
        raise ConfigError(
            f"model.compile=true needs a C++ compiler, and there is no {compiler}",
            key="model.compile",
            fix="install it, or name yours in CXX",
        )


def layers_of(model: Any) -> list[nn.Module]:
    """What transformers can checkpoint one at a time."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [each for each in model.modules() if isinstance(each, GradientCheckpointingLayer)]


# -- trainer.precision=bf16-true: weights in bfloat16, and nothing else ------------------------------------------------


class BFloat16Weights(Precision):
    """Leaves everything as it is, under the name that was asked for: another fit of the same Trainer asks again."""

    precision = HALF


def hold_weights(strategy: Any, loaded: torch.dtype | str | None) -> None:
    """Replace Lightning's own precision plugin of that name, for weights that are or will be loaded in bfloat16.

    It would round buffers (of rotary embeddings: positions would be off), experiences and losses too.

    Raises:
        ConfigError: they are loaded in another dtype, `loaded`.
    """
    if loaded not in (None, torch.bfloat16):
        raise ConfigError(
            "trainer.precision=bf16-true: the model is loaded in float32 already, give dtype=bf16.",
            key="trainer.precision",
        )
    strategy.precision_plugin = BFloat16Weights()
