"""The policy's weights in a checkpoint."""

from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from torch import Tensor

from trinity_lightning.common.checkpoints import contents, whole
from trinity_lightning.errors import ConfigError
from trinity_lightning.sync.stream import WeightStream

_POLICY = "model."  # PolicyModule.model


def checkpoint_weights(path: str | Path) -> tuple[int, WeightStream]:
    """The explore step that a checkpoint was written after, and the policy's weights in it, by its parameters' names.

    Raises:
        ConfigError: not a checkpoint of a training run.
    """
    step, saved = saved_weights(path)
    weights = whole(path, {"state_dict": saved})["state_dict"]
    return step, WeightStream.of((name.removeprefix(_POLICY), tensor) for name, tensor in weights.items())


def saved_weights(path: str | Path) -> tuple[int, dict[str, Tensor]]:
    """The step, and the weights by the checkpoint's names as `common.checkpoints.contents` has them: not read yet.

    Raises:
        ConfigError: not a checkpoint of a training run.
    """
    try:
        checkpoint = contents(path)
        step = _explore_step(checkpoint)
        weights = {name: each for name, each in checkpoint["state_dict"].items() if name.startswith(_POLICY)}
    except (OSError, RuntimeError, ValueError, LookupError, TypeError, AttributeError, UnpicklingError) as error:
        raise ConfigError(f"'{path}' is no checkpoint of a training run: {type(error).__name__}: {error}") from error
    return step, weights


def _explore_step(checkpoint: dict[str, Any]) -> int:
    # Not the explorer's, which may be ahead; and not "epoch", which is counted up only after a checkpoint at its end.
    return int(checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"]["processed"])
