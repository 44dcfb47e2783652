"""Rules of optimizers other than plain AdamW, schedules that may not fit the run, several steps, and the KL penalty."""

import importlib.util

from trinity_lightning.config.training import ADAM, BETAS, EPS, KLConfig, OptimizerConfig
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


def check_optimizer(optimizer: OptimizerConfig) -> None:
    """Refuse an optimizer whose package is missing, and settings of another; a ConfigError."""
    name, args = optimizer.name, optimizer.args
    if name in ADAM and args:
        raise ConfigError(f"optimizer.args are of your own optimizer: {name} has betas, eps and weight_decay.")
    if name not in ADAM and (list(optimizer.betas), optimizer.eps) != (BETAS, EPS):
        raise ConfigError(f"optimizer.betas and eps are of {', '.join(ADAM)}: {name} has optimizer.args.")
    if taken := sorted({"lr", "weight_decay"} & args.keys()):
        raise ConfigError(f"optimizer.args has {taken[0]}: set optimizer.{taken[0]}.")
    if name == "adamw_8bit" and importlib.util.find_spec("torchao") is None:
        raise ConfigError("optimizer.name=adamw_8bit needs torchao: pip install 'trinity-lightning[optim]'.")


def check_dealt(optimizer_steps: int, prompts: int) -> None:
    """Refuse more optimizer steps than an explore step has prompts; a ConfigError."""
    if optimizer_steps > prompts:
        raise ConfigError(
            f"algorithm.optimizer_steps ({optimizer_steps}) is more than explorer.batch_size "
            f"({prompts}), and the rollouts of a prompt stay together: give fewer."
        )


def check_kl(kl: KLConfig) -> None:
    """Refuse a weight of no penalty; a ConfigError."""
    if kl.name == "none" and kl.coef > 0:
        raise ConfigError(
            f"algorithm.kl.coef is {kl.coef}, and algorithm.kl.name=none has no penalty to weigh: choose k3, or "
            "set algorithm.kl.coef=0."
        )


def check_weighed(kl: KLConfig) -> None:
    """Refuse an estimate without a weight, of a run: a checkpoint may hold one; a ConfigError."""
    if kl.name != "none" and kl.coef == 0:
        raise ConfigError(
            f"algorithm.kl.name={kl.name} has no effect without algorithm.kl.coef: set that, or leave it out."
        )
