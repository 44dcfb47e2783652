"""Optimizers besides AdamW: that of moments in 8 bits, and any by its dotted path, tried before anything is loaded."""

import inspect
import io
import logging
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils._pytree import tree_leaves

from trinity_lightning.config.checks import check_arguments
from trinity_lightning.config.own_code import where
from trinity_lightning.config.registry import import_object
from trinity_lightning.config.training import ADAM, OptimizerConfig
from trinity_lightning.errors import ConfigError
from trinity_lightning.trainer.optim import learning_rate_schedule, optimizer_factory, parameters_of

logger = logging.getLogger(__name__)

# -- AdamW whose moments take 8 bits each (arXiv 2110.02861), by torchao: the extra `optim` ----------------------------

SIGNED = {"exp_avg": True, "exp_avg_sq": False}  # moments; torchao keeps those of fewer than 4,096 weights in float32


def adamw_8bit(parameters: Any, **settings: Any) -> Optimizer:
    """torchao's, whose state is plain tensors in a checkpoint: one is read before torchao is imported, or without it.

    A moment in 8 bits is saved as its codes and the scale of each block of them. The first step compiles an update
    for each shape of a parameter: seconds each, and a C++ compiler on a CPU.
    """
    from torchao.optim import AdamW8bit  # pyright: ignore[reportMissingImports]  # an extra

    warnings.filterwarnings("ignore", "OptimState8bit does not implement", UserWarning)  # torch's, of a cache
    optimizer = AdamW8bit(parameters, **settings)

    def announce(*_: Any) -> None:
        logger.info("optimizer.name=adamw_8bit: the first step compiles an update for each shape of a parameter")
        announced.remove()

    announced = optimizer.register_step_pre_hook(announce)
    optimizer.register_state_dict_post_hook(_to_plain)
    optimizer.register_load_state_dict_pre_hook(_from_plain)
    return optimizer


def _to_plain(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    return _converted(state_dict, lambda _, v: {"codes": v.codes, "scale": v.scale} if hasattr(v, "codes") else v)


def _from_plain(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    return _converted(state_dict, lambda name, v: _moment(v, SIGNED[name]) if isinstance(v, dict) else v)


def _converted(state_dict: dict[str, Any], convert: Callable[[str, Any], Any]) -> dict[str, Any]:
    state = {
        position: {name: convert(name, value) for name, value in values.items()}
        for position, values in state_dict["state"].items()
    }
    return {**state_dict, "state": state}


def _moment(plain: dict[str, Tensor], signed: bool) -> Tensor:
    from torchao.optim.subclass_8bit import OptimState8bit  # pyright: ignore[reportMissingImports]

    codes, scale = plain["codes"], plain["scale"]
    moment = OptimState8bit.zeros(codes.shape, signed, codes.numel() // scale.numel(), codes.device)
    moment.codes.copy_(codes)
    moment.scale.copy_(scale)
    return moment


# -- by its dotted path, a schedule too --------------------------------------------------------------------------------

TRIED_LR = 1e-3  # whatever is configured: with 0 no step would be taken


def own_factory(config: OptimizerConfig) -> Callable[[Any], Optimizer]:
    """What makes the optimizer at that dotted path, of parameters or groups.

    Raises:
        ConfigError: there is none, or it does not take these arguments.
    """
    make: Any = import_object(config.name)
    if isinstance(make, type):
        if not issubclass(make, Optimizer):
            raise ConfigError(f"optimizer.name={config.name} is no torch.optim.Optimizer.")
        check_arguments("optimizer.args", make, config.args)
    settings = {"lr": config.lr, "weight_decay": config.weight_decay}
    try:
        signature = inspect.signature(make)
        takes_any = any(each.kind is each.VAR_KEYWORD for each in signature.parameters.values())
        if config.weight_decay == 0 and "weight_decay" not in signature.parameters and not takes_any:
            del settings["weight_decay"]  # it has none; one that takes any keyword may decay by default
        signature.bind([], **settings, **config.args)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"optimizer.name={config.name} cannot be made with these arguments: {error}.") from error
    if takes_any and config.weight_decay == 0 and "weight_decay" not in signature.parameters:
        return partial(_without_decay, make, lr=config.lr, **config.args)
    return partial(make, **settings, **config.args)


def _without_decay(make: Callable[..., Optimizer], groups: Any, **settings: Any) -> Optimizer:
    """Of what takes any keyword: it may decay by default if it is not told, or hand on to what has no decay."""
    try:
        return make(groups, weight_decay=0.0, **settings)
    except TypeError as error:
        if "weight_decay" not in str(error):
            raise
        return make(groups, **settings)


def try_out(config: OptimizerConfig, alone: bool) -> None:
    """Refuse what cannot train: see `optim.check_optimizer`."""
    make = optimizer_factory(config)
    try:
        if config.name not in ADAM and not _resumes(optimizer_factory(replace(config, lr=TRIED_LR))):
            raise ConfigError("resumed from a checkpoint, its next step is not the same bit for bit.")
        optimizer = make(_groups())
    except Exception as error:  # whatever the user's code raises
        of_args = f" of optimizer.args={config.args}" if config.args else ""
        raise ConfigError(
            f"optimizer.name={config.name}{of_args} cannot train a policy: {error}{where(error)}"
        ) from error
    schedule = learning_rate_schedule(optimizer, replace(config, total_steps=config.total_steps or 1))
    if isinstance(schedule, ReduceLROnPlateau) or not hasattr(schedule, "step"):
        raise ConfigError(
            f"optimizer.lr_scheduler={config.lr_scheduler.name} is no schedule of steps alone: choose a class of "
            "torch.optim.lr_scheduler that is."
        )
    meant = config.lr == 0 and not (alone and "." in config.lr_scheduler.name)  # named schedules scale it
    if config.total_steps and not meant and not _ever_learns(schedule, config.total_steps):
        fix = "change its args" if config.lr > 0 else "give optimizer.lr, a number above 0"
        raise ConfigError(
            f"optimizer.lr_scheduler={config.lr_scheduler.name} gives the learning rate 0 at all {config.total_steps} "
            f"steps, and nothing would be trained: {fix}."
        )


def _ever_learns(schedule: Any, steps: int) -> bool:
    """Whether some group has a learning rate above 0 at one of so many steps."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Detected call of", category=UserWarning)
        for _ in range(steps):
            if any(group["lr"] > 0 for group in schedule.optimizer.param_groups):
                return True
            schedule.step()
    return False


def _groups() -> list[dict[str, Any]]:
    """As `parameter_groups` has them; the matrix is large enough for quantized moments."""
    matrix, vector = torch.linspace(-1, 1, 4096).view(64, 64), torch.linspace(-1, 1, 64)
    return [{"params": [nn.Parameter(matrix)]}, {"params": [nn.Parameter(vector)], "weight_decay": 0.0}]


def _resumes(make: Callable[[Any], Optimizer]) -> bool:
    """Whether an optimizer that resumes from a checkpoint takes the same step as one that was not interrupted.

    Raises:
        ConfigError: it is none, or its state has tensors that are not plain, which no checkpoint can hold.
    """
    optimizer, resumed = make(_groups()), make(_groups())
    if not isinstance(optimizer, Optimizer):
        raise ConfigError("it makes no torch.optim.Optimizer.")
    for step in range(2):
        _step(optimizer, step)
    state = optimizer.state_dict()
    if any(isinstance(each, Tensor) and type(each) is not Tensor for each in tree_leaves(state)):
        raise ConfigError("its state has tensors of its own kind, which a checkpoint does not hold.")
    torch.save(state, file := io.BytesIO())
    file.seek(0)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    for own, other in zip(parameters_of(resumed), parameters_of(optimizer), strict=True):
        own.data.copy_(other.data)
    for each in (optimizer, resumed):
        _step(each, 2)
    pairs = zip(parameters_of(optimizer), parameters_of(resumed), strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


def _step(optimizer: Any, number: int) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(number)
        for parameter in parameters_of(optimizer):
            parameter.grad = torch.randn(parameter.shape)
        optimizer.step()  # as `MasterWeights` does
        optimizer.step(closure=lambda: None)  # as Lightning does
