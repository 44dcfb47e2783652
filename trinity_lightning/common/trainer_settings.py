"""Settings of Lightning's Trainer that a policy step has its own way for, and the precision it computes in."""

from collections.abc import Mapping
from typing import Any

from trinity_lightning.common.config import WeightDtype
from trinity_lightning.common.errors import ConfigError

# Each precision that a policy trains in, by Lightning's names of it.
FULL = (None, 32, "32", "32-true")
MIXED = ("bf16", "bf16-mixed")
HALF = "bf16-true"


def check_trainer_settings(settings: Mapping[str, Any]) -> None:
    """Refuse settings of `lightning.Trainer` under which a policy would not train, or not as they say.

    Args:
        settings: the Trainer's arguments by name; what is left out has Lightning's default.

    Raises:
        ConfigError: names the setting and the knob to use.
    """
    if settings.get("gradient_clip_val") or settings.get("gradient_clip_algorithm"):
        raise ConfigError(
            "trainer.gradient_clip_val: gradients are clipped by the policy, set algorithm.max_grad_norm."
        )
    if (batches := settings.get("accumulate_grad_batches", 1)) != 1:
        raise ConfigError(
            f"trainer.accumulate_grad_batches is {batches}: gradients are added up within an optimizer step, set "
            "algorithm.max_tokens_per_micro_batch, and algorithm.optimizer_steps for how many there are."
        )
    if (nodes := settings.get("num_nodes", 1)) != 1:
        raise ConfigError(f"trainer.num_nodes is {nodes}: the policy trains on one device of one machine, give 1.")
    if (devices := settings.get("devices", 1)) not in (1, "1"):
        raise ConfigError(f"trainer.devices is {devices}: the policy trains on one device, give 1.")
    if (precision := settings.get("precision")) not in (*FULL, *MIXED, HALF):
        raise ConfigError(
            f"trainer.precision is {precision}: give 32-true, bf16-mixed or bf16-true (16-bit float would "
            "need a gradient scaler)."
        )


def weight_dtype(dtype: WeightDtype, precision: object) -> WeightDtype:
    """How the weights are held: `precision` bf16-true is another name of model.dtype=bf16."""
    return WeightDtype.bf16 if precision == HALF else dtype


def compute_dtype(dtype: WeightDtype, precision: object) -> WeightDtype:
    """What a forward pass computes in: bfloat16 under mixed precision too, over float32 weights."""
    return WeightDtype.bf16 if precision in MIXED else weight_dtype(dtype, precision)
