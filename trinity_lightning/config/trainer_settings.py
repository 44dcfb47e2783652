"""Rules of settings of Lightning's Trainer; imported by runs that have others than those of trainer=auto."""

from collections.abc import Mapping
from typing import Any

from trinity_lightning.config.engines import gpu_count
from trinity_lightning.config.schema import TrainConfig
from trinity_lightning.config.training import SHARDS, check_trainer_settings, strategy_of, trains_together
from trinity_lightning.config.values import AUTO, number, one_of, whole_number
from trinity_lightning.errors import ConfigError

ACCELERATORS = (AUTO, "cpu", "gpu", "cuda")

_SET_BY_THE_RUN = "is set by the run itself: use the groups `callbacks` and `logger`"
_SHORTER = "would end or thin out the run's training, which `steps` counts: set steps, and leave it out"
_EVALUATION = "is about Lightning's validation, which a run has none of: set explorer.eval_interval and eval_tasksets"
# Settings of Lightning's Trainer that a run does not have: it would train on less than it says, and say nothing.
NOT_OF_A_RUN = {
    **dict.fromkeys(("callbacks", "logger", "plugins", "enable_checkpointing", "barebones"), _SET_BY_THE_RUN),
    **dict.fromkeys(("max_steps", "min_steps", "min_epochs", "fast_dev_run"), _SHORTER),
    **dict.fromkeys(("limit_train_batches", "overfit_batches"), _SHORTER),
    "max_time": "would end the run within an explore step: stop it by SIGINT, as `timeout --signal=INT 8h COMMAND` "
    "does, and it saves what it has done",
    **dict.fromkeys(("val_check_interval", "check_val_every_n_epoch"), _EVALUATION),
    **dict.fromkeys(("limit_val_batches", "limit_test_batches", "limit_predict_batches"), _EVALUATION),
}


def check_trainer(run: TrainConfig, settings: Mapping[str, Any]) -> None:
    """Refuse settings of `lightning.Trainer` that a run does not have, or that do not go together with its others.

    Raises:
        ConfigError: names the setting and the fix.
    """
    _check_settings(settings, run.steps)
    if strategy_of(settings) == SHARDS:
        from trinity_lightning.config.processes import check_shards

        check_shards(run, settings)


def _check_settings(settings: Mapping[str, Any], steps: int) -> None:
    """Refuse settings of `lightning.Trainer` that a run of so many steps does not have, or takes no such value of.

    Raises:
        ConfigError: names the setting and the fix.
    """
    for key, reason in NOT_OF_A_RUN.items():
        if settings.get(key) is not None:
            raise ConfigError(f"trainer.{key} {reason}.")
    if (epochs := settings.get("max_epochs")) != steps:
        raise ConfigError(
            f"trainer.max_epochs is {epochs} and steps is {steps}, both the number of explore steps: set steps alone."
        )
    one_of("trainer.accelerator", settings.get("accelerator", AUTO), ACCELERATORS)
    devices = str(settings.get("devices", AUTO))
    if devices not in (AUTO, "-1") and not (devices.isdigit() and int(devices) > 0):
        raise ConfigError(
            f"trainer.devices is {devices}: give how many train, or auto; CUDA_VISIBLE_DEVICES chooses which they are."
        )
    whole_number("trainer.num_nodes", settings.get("num_nodes", 1), least=1)
    check_trainer_settings(settings)
    if trains_together(settings):
        number("trainer.strategy.timeout", settings["strategy"].get("timeout", 1), above=0)


def check_devices(settings: Mapping[str, Any]) -> None:
    """Refuse devices that this machine does not have; a ConfigError."""
    if settings.get("accelerator") in ("gpu", "cuda") and not gpu_count():
        raise ConfigError(
            f"trainer.accelerator is {settings['accelerator']}, and this process sees no GPU: set trainer=cpu, or auto."
        )
    if trains_together(settings):
        from trinity_lightning.config.processes import check_processes_here

        check_processes_here(settings)


def refuse_devices(settings: Mapping[str, Any]) -> None:
    """Refuse several devices that nothing joins, and strategies that would not; a ConfigError."""
    strategy = settings.get("strategy") or AUTO
    if strategy != AUTO:
        name = strategy.get("_target_") if isinstance(strategy, Mapping) else strategy
        raise ConfigError(f"trainer.strategy={name} is not supported: leave it out, or choose trainer=ddp or fsdp2.")
    for key, one in (("num_nodes", 1), ("devices", "1")):
        if (given := settings.get(key, 1)) not in (1, one):
            raise ConfigError(f"trainer.{key} is {given}: for several devices choose trainer=ddp or trainer=fsdp2.")
