"""trainer.precision=bf16-true: weights in bfloat16, and nothing else."""

from typing import Any

import torch
from lightning.pytorch.plugins.precision import Precision

from trinity_lightning.config.training import HALF
from trinity_lightning.errors import ConfigError


class BFloat16Weights(Precision):
    """Leaves everything as it is, under the name that was asked for: another fit of the same Trainer asks again."""

    precision = HALF


def hold_weights(strategy: Any, loaded: torch.dtype | str | None) -> None:
    """Replace Lightning's own precision plugin of that name, for weights that are or will be loaded in bfloat16.

    It would round buffers too (of rotary embeddings: positions would be off), and the experiences, and losses would be
    computed in bfloat16.

    Raises:
        ConfigError: they are loaded in another dtype, `loaded`.
    """
    if loaded not in (None, torch.bfloat16):
        raise ConfigError("trainer.precision=bf16-true: the model is loaded in float32 already, give dtype=bf16.")
    strategy.precision_plugin = BFloat16Weights()
