"""A policy that goes on from a checkpoint: what of the checkpoint does not fit it, and its learning rates."""

import re
from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from trinity_lightning.config.training import OptimizerConfig
from trinity_lightning.errors import ConfigError
from trinity_lightning.trainer.optim import peak_learning_rates


def misfit(error: RuntimeError, model: str) -> ConfigError:
    """What torch's error says of weights that are not those of `model`, or of its critic, in a sentence."""
    first = " ".join(str(error).splitlines()[1].split())
    of_critic = re.search(r'(: "| for )critic\.', first)
    what, fix = ("algorithm.critic", "algorithm.critic") if of_critic else (f"model '{model}'", "model")
    return ConfigError(f"the checkpoint's weights do not fit {what}: {first} Give the {fix} that the checkpoint is of.")


def check_resumed(checkpoint: Mapping[str, Any], config: OptimizerConfig) -> None:
    """Refuse a checkpoint of another optimizer, or of a version that let all parameters decay; a ConfigError."""
    optimizers = checkpoint.get("optimizer_states", [])  # none where only weights were saved
    if any(len(each["param_groups"]) == 1 for each in optimizers):
        raise ConfigError(
            "the checkpoint is of a version in which norms, biases and embeddings decayed too, as one parameter "
            "group: its optimizer cannot go on here. Finish that run with its version, or begin a new one."
        )
    before = checkpoint["hyper_parameters"]["optimizer"].get("name", "adamw")  # earlier versions had that alone
    if optimizers and before != config.name:
        raise ConfigError(f"optimizer.name is {config.name}, and the checkpoint's optimizer is {before}: choose that.")


def change_learning_rates(optimizer: Optimizer, schedule: Any, configured: list[Any]) -> None:
    """Give an optimizer that goes on from a checkpoint its configured peak learning rates, by group.

    The schedule goes on from the step where it is.

    Raises:
        ConfigError: the schedule is not a factor that follows from the step.
    """
    if not isinstance(schedule, LambdaLR):
        raise ConfigError(
            f"the checkpoint's peak learning rates are {peak_learning_rates(optimizer)}, yours {configured}, and a "
            f"{type(schedule).__name__} cannot change them on its way: give those of the checkpoint."
        )
    schedule.base_lrs = list(configured)
    for group, peak, factor in zip(optimizer.param_groups, configured, schedule.lr_lambdas, strict=True):
        group["initial_lr"], group["lr"] = peak, peak * factor(schedule.last_epoch)
