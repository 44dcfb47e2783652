"""Learning rate schedules that do not fit the run."""

from trinity_lightning.config.training import OptimizerConfig
from trinity_lightning.errors import ConfigError

ENDING = ("cosine", "linear")  # polynomial stays at its lr_end from there on


def check_schedule(optimizer: OptimizerConfig, steps: int) -> None:
    """Refuse a schedule that ends before the run's optimizer steps do, or never reaches its peak; a ConfigError."""
    schedule, horizon = optimizer.lr_scheduler.name, optimizer.total_steps or steps
    if schedule in ENDING and horizon < steps:
        raise ConfigError(
            f"optimizer.total_steps is {horizon}, and optimizer.lr_scheduler={schedule} ends there; the run takes "
            f"{steps} optimizer steps: give at least as many, or leave it out."
        )
    if optimizer.warmup_steps >= horizon:
        raise ConfigError(
            f"optimizer.warmup_steps is {optimizer.warmup_steps}, and there are {horizon} optimizer steps: the "
            "learning rate would not reach optimizer.lr. Give fewer, or optimizer.total_steps of a longer run."
        )
