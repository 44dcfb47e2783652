"""What `auto` stands for among the dtypes of a run, settled once at its start and recorded with its configuration."""

from pathlib import Path

import torch
from omegaconf import DictConfig

from trinity_lightning.common.product_speed import faster_dtype
from trinity_lightning.config.engines import EngineDtype, capabilities_of
from trinity_lightning.config.training import HALF, WeightDtype, compute_dtype, weight_dtype
from trinity_lightning.errors import ConfigError
from trinity_lightning.sync.stream import checkpoint_weights


def settle_dtypes(config: DictConfig, checkpoint: str | Path | None) -> None:
    """Set `model.dtype` and `engine.dtype` where they are `auto`.

    Weights are held as the checkpoint has them; without one, in the dtype that is faster here. The engine computes in
    what the trainer computes in, which is bfloat16 under mixed precision too; engine=transformers has no dtype of its
    own.

    Args:
        config: a validated configuration, which is changed.
        checkpoint: what the run resumes from, or what is evaluated.
    """
    trainer = config.trainer or {}
    precision = trainer.get("precision")
    if config.model.dtype is WeightDtype.auto:
        config.model.dtype = _dtype_of(checkpoint) if checkpoint else faster_dtype(trainer.get("accelerator", "auto"))
    config.model.dtype = weight_dtype(config.model.dtype, precision)
    if config.engine.dtype is EngineDtype.auto and not capabilities_of(config.engine.name).shares_weights:
        config.engine.dtype = EngineDtype(compute_dtype(config.model.dtype, precision).value)


def check_resumed_dtype(config: DictConfig, checkpoint: str | Path) -> None:
    """Refuse to go on with weights in another dtype than the checkpoint's: its optimizer state belongs to that.

    Args:
        config: a configuration whose dtypes are settled.
        checkpoint: what the run resumes from.

    Raises:
        ConfigError: another dtype.
    """
    asked, held = config.model.dtype.value, _dtype_of(checkpoint).value
    if asked != held:
        raise ConfigError(
            f"model.dtype is {asked} (trainer.precision={HALF} means bf16), and the weights of the checkpoint "
            f"'{checkpoint}' are {held}: a resumed run keeps its own, so leave model.dtype and that precision out."
        )


def _dtype_of(checkpoint: str | Path) -> WeightDtype:
    """How the run that wrote a checkpoint held its weights; of bfloat16 models some layers stay in float32."""
    _, weights = checkpoint_weights(checkpoint)
    rounded = any(tensor.dtype == torch.bfloat16 for _, tensor in weights)
    return WeightDtype.bf16 if rounded else WeightDtype.fp32
