"""The optimizer and its learning-rate schedule."""

import inspect
import io
import logging
import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils._pytree import tree_leaves

from trinity_lightning.common.hardware import name_vectors
from trinity_lightning.config.lightning_objects import check_arguments
from trinity_lightning.config.model import ADAM, OFFLOADED, OptimizerConfig
from trinity_lightning.config.own_code import where
from trinity_lightning.config.registry import PARTS, Registry, import_object
from trinity_lightning.errors import ConfigError, configured_at
from trinity_lightning.trainer.host import HostMasters
from trinity_lightning.trainer.masters import MasterWeights, are_rounded, parameters_of

OPTIMIZER: Registry[Callable[..., Optimizer]] = Registry("optimizer")
SCHEDULE: Registry[Callable[..., Any]] = Registry("schedule")

logger = logging.getLogger(__name__)

# Parameters that do not decay, by the last part of their names: down_proj_bias, mixer.A_log, mixer.D, ...
_EXEMPT = re.compile(r"(^|[._])bias$|(^|\.)(A_log|D)$")


def parameter_groups(model: nn.Module) -> list[dict[str, Any]]:
    """The trained parameters in two groups: matrices, which decay, and the others, which do not.

    The others are biases, norms and embeddings of any shape (a mixture of experts has a row of biases for each expert),
    a head that is tied to the embeddings, logarithms of state matrices (`A_log` of Mamba), and parameters that their
    model marks by `_no_weight_decay`, as the package mamba_ssm does.
    """
    holders = [
        module for module in model.modules() if isinstance(module, nn.Embedding) or "Norm" in type(module).__name__
    ]
    in_holders = {id(p) for holder in holders for p in holder.parameters(recurse=False)}
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            exempt = (
                id(parameter) in in_holders or _EXEMPT.search(name) or getattr(parameter, "_no_weight_decay", False)
            )
            (matrices if parameter.ndim >= 2 and not exempt else others).append(parameter)
    return [{"params": matrices}, {"params": others, "weight_decay": 0.0}]


def optimizer_factory(config: OptimizerConfig) -> Callable[[Any], Optimizer]:
    """A function that makes the configured optimizer; its `weight_decay` is for groups that set none themselves.

    Raises:
        ConfigError: there is no optimizer at that dotted path, or it does not take these arguments.
    """
    if config.name not in ADAM:
        return _users_factory(config)
    beta1, beta2 = config.betas
    settings = {"lr": config.lr, "betas": (beta1, beta2), "eps": config.eps, "weight_decay": config.weight_decay}
    return partial(OPTIMIZER.get(config.name), **settings)


def make_optimizer(groups: list[dict[str, Any]], factory: Callable[[Any], Optimizer], name: str) -> Optimizer:
    """Make the optimizer of these groups; if weights have 16 bits, it updates float32 masters of them.

    The optimizer adamw_offload has masters in the host's memory, whatever the dtype of the weights.
    """
    if name == OFFLOADED:
        return HostMasters(groups, factory)
    return MasterWeights(groups, factory) if are_rounded(groups) else factory(groups)


def adamw(parameters: Any, **settings: Any) -> Optimizer:
    """torch's AdamW over parameters or parameter groups."""
    return torch.optim.AdamW(parameters, fused=True, **settings)


# -- AdamW with moments in 8 bits --------------------------------------------------------------------------------------

# Moments, and True if they have a sign. (torchao keeps moments of fewer than 4,096 numbers in float32.)
SIGNED = {"exp_avg": True, "exp_avg_sq": False}


def adamw_8bit(parameters: Any, **settings: Any) -> Optimizer:
    """torchao's AdamW8bit, whose state is plain tensors in checkpoints: these are read without torchao.

    A moment in 8 bits is saved as its codes and the scale of each block of codes. The first step compiles an update for
    each shape of a parameter. This takes seconds a shape, and needs a C++ compiler on a CPU.
    """
    from torchao.optim import AdamW8bit  # pyright: ignore[reportMissingImports]  # an extra

    warnings.filterwarnings(
        "ignore", "OptimState8bit does not implement", UserWarning
    )  # a warning of torch about a cache
    optimizer = AdamW8bit(parameters, **settings)

    def announce(*_: Any) -> None:
        logger.info("optimizer.name=adamw_8bit: the first step compiles an update for each shape of a parameter")
        if optimizer.param_groups[0]["params"][0].device.type == "cpu":
            name_vectors()
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


# -- an optimizer of the user's own ------------------------------------------------------------------------------------


def _users_factory(config: OptimizerConfig) -> Callable[[Any], Optimizer]:
    """A function that makes the user's optimizer, at the dotted path `config.name`, from parameters or groups.

    Raises:
        ConfigError: there is no such optimizer, or it does not take these arguments.
    """
    with configured_at("optimizer.name"):
        make: Any = import_object(config.name)
    if isinstance(make, type):
        if not issubclass(make, Optimizer):
            raise ConfigError(f"optimizer.name={config.name} is no torch.optim.Optimizer.", key="optimizer.name")
        check_arguments("optimizer.args", make, config.args)
    settings = {"lr": config.lr, "weight_decay": config.weight_decay}
    try:
        signature = inspect.signature(make)
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())
        if config.weight_decay == 0 and "weight_decay" not in signature.parameters and not takes_any:
            del settings["weight_decay"]  # the optimizer never decays; one with **kwargs may do so by default
        signature.bind([], **settings, **config.args)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"optimizer.name={config.name} cannot be made with these arguments: {error}.", key="optimizer.name"
        ) from error
    if takes_any and config.weight_decay == 0 and "weight_decay" not in signature.parameters:
        return partial(_without_decay, make, lr=config.lr, **config.args)
    return partial(make, **settings, **config.args)


def _without_decay(make: Callable[..., Optimizer], groups: Any, **settings: Any) -> Optimizer:
    """Call a factory that takes any keyword with weight_decay=0, else it may decay by default.

    A factory that refuses weight_decay is called without it.
    """
    try:
        return make(groups, weight_decay=0.0, **settings)
    except TypeError as error:
        if "weight_decay" not in str(error):
            raise
        return make(groups, **settings)


def check_optimizer(config: OptimizerConfig, alone: bool = True) -> None:
    """Try out an optimizer or schedule of the user's own on two small tensors, before anything is loaded.

    Warns of a learning rate of 0.

    Args:
        config: the optimizer and its schedule.
        alone: nothing else is trained at a learning rate of its own, such as a critic.

    Raises:
        ConfigError: the optimizer or schedule does not exist, or does not take these arguments; the optimizer needs
            more than gradients, or its state cannot be saved and loaded; the schedule needs more than the number of
            steps, or never has a learning rate above 0.
    """
    if config.lr == 0 and "." not in config.lr_scheduler.name:  # a named one scales it
        logger.warning("optimizer.lr is 0: the policy's weights do not change.")
    if config.name in ADAM and config.lr_scheduler.name in PARTS["schedule"] and not config.lr_scheduler.args:
        return
    make = optimizer_factory(config)
    try:
        if config.name not in ADAM:
            _try_steps(make)
        optimizer = make(_small_groups())
    except Exception as error:  # whatever the user's code raises
        of_args = f" of optimizer.args={config.args}" if config.args else ""
        raise ConfigError(
            f"optimizer.name={config.name}{of_args} cannot train a policy: {error}{where(error)}", key="optimizer.name"
        ) from error
    schedule = learning_rate_schedule(optimizer, replace(config, total_steps=config.total_steps or 1))
    if isinstance(schedule, ReduceLROnPlateau) or not hasattr(schedule, "step"):
        raise ConfigError(
            f"optimizer.lr_scheduler={config.lr_scheduler.name} is no schedule of steps alone",
            key="optimizer.lr_scheduler",
            fix="choose a class of torch.optim.lr_scheduler that is",
        )
    # Built-in schedules multiply lr, so that an lr of 0 means 0; a user's own may set another learning rate.
    zero_meant = config.lr == 0 and not (alone and "." in config.lr_scheduler.name)
    if config.total_steps and not zero_meant and not _ever_learns(schedule, config.total_steps):
        fix = "change its args" if config.lr > 0 else "give optimizer.lr, a number above 0"
        raise ConfigError(
            f"optimizer.lr_scheduler={config.lr_scheduler.name} gives the learning rate 0 at all {config.total_steps} "
            "steps, and nothing would be trained",
            key="optimizer.lr_scheduler",
            fix=fix,
        )


def _try_steps(make: Callable[[Any], Optimizer]) -> None:
    """Take steps as Lightning and `MasterWeights` do, then save and load the state; errors are raised as they come.

    It is left to the optimizer that its state has everything that later steps depend on (docs/architecture.md).
    """
    optimizer, resumed = make(_small_groups()), make(_small_groups())
    if not isinstance(optimizer, Optimizer):
        raise ConfigError("it makes no torch.optim.Optimizer.", key="optimizer.name")
    for parameter in parameters_of(optimizer):
        parameter.grad = torch.ones_like(parameter)
    with torch.random.fork_rng(devices=[]):  # trials draw nothing from the run's random state
        optimizer.step()
        optimizer.step(closure=lambda: None)  # pyright: ignore[reportCallIssue,reportArgumentType]
    state = optimizer.state_dict()
    if any(isinstance(leaf, Tensor) and type(leaf) is not Tensor for leaf in tree_leaves(state)):
        message = "its state has tensors of its own kind, which a checkpoint does not hold."
        raise ConfigError(message, key="optimizer.name")
    torch.save(state, file := io.BytesIO())
    file.seek(0)
    resumed.load_state_dict(torch.load(file, weights_only=True))


def _small_groups() -> list[dict[str, Any]]:
    """Groups as `parameter_groups` makes them; the matrix is large enough for quantized moments."""
    matrix, vector = torch.linspace(-1, 1, 4096).view(64, 64), torch.linspace(-1, 1, 64)
    return [{"params": [nn.Parameter(matrix)]}, {"params": [nn.Parameter(vector)], "weight_decay": 0.0}]


def _ever_learns(schedule: Any, steps: int) -> bool:
    """True if some group has a learning rate above 0 at one of the first `steps` steps."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Detected call of", category=UserWarning)
        for _ in range(steps):
            if any(group["lr"] > 0 for group in schedule.optimizer.param_groups):
                return True
            schedule.step()
    return False


# -- the learning-rate schedule ----------------------------------------------------------------------------------------


def learning_rate_schedule(optimizer: Optimizer, config: OptimizerConfig) -> Any:
    """Make the configured schedule, which takes one step for each optimizer step.

    Raises:
        ConfigError: there is no such schedule, or it does not take these arguments, or has no warm-up.
        ValueError: it needs `total_steps`, and there is none.
    """
    with configured_at("optimizer.lr_scheduler"):
        name, arguments = schedule_settings(config)
        schedule = cast("Callable[..., Any]", SCHEDULE.resolve(name))
    try:
        return schedule(optimizer, **arguments)
    except Exception as error:  # whatever the user's code raises
        reason = str(error).rstrip(".")
        raise ConfigError(
            f"optimizer.lr_scheduler={name} cannot be made of these args: {reason}{where(error)}.",
            key="optimizer.lr_scheduler",
        ) from error


def schedule_settings(config: OptimizerConfig) -> tuple[str, dict[str, Any]]:
    """The schedule's name and its arguments beside the optimizer; raises as `learning_rate_schedule` does."""
    name = config.lr_scheduler.name
    if name == "constant" and config.warmup_steps > 0:
        name = "constant_with_warmup"  # transformers would silently not warm up
    steps = {"num_warmup_steps": config.warmup_steps, "num_training_steps": config.total_steps}
    parameters = inspect.signature(cast("Callable[..., Any]", SCHEDULE.resolve(name))).parameters
    taken = {key: value for key, value in steps.items() if key in parameters}
    if None in taken.values():
        raise ValueError(f"optimizer.lr_scheduler={name} needs optimizer.total_steps.")
    if config.warmup_steps > 0 and "num_warmup_steps" not in taken:
        raise ConfigError(
            f"optimizer.lr_scheduler={name} has no warm-up",
            key="optimizer.lr_scheduler",
            fix="set optimizer.warmup_steps=0",
        )
    return name, {**taken, **config.lr_scheduler.args}


def peak_learning_rates(optimizer: Optimizer) -> list[Any]:
    """The learning rate that each group's schedule began with; None if the schedule is not one of torch's."""
    return [group.get("initial_lr") for group in optimizer.param_groups]
