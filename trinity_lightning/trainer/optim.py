"""The optimizer and its schedule, and float32 masters of bfloat16 weights."""

import copy
import inspect
import io
import logging
import re
import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils._pytree import tree_leaves

from trinity_lightning.config.lightning_objects import check_arguments
from trinity_lightning.config.model import ADAM, OFFLOADED, OptimizerConfig
from trinity_lightning.config.own_code import where
from trinity_lightning.config.registry import PARTS, Registry, import_object
from trinity_lightning.errors import ConfigError

OPTIMIZER: Registry[Callable[..., Optimizer]] = Registry("optimizer")
SCHEDULE: Registry[Callable[..., Any]] = Registry("schedule")

# Parameters that do not decay by the last part of their names: down_proj_bias, mixer.A_log, mixer.D, ...
_EXEMPT = re.compile(r"(^|[._])bias$|(^|\.)(A_log|D)$")


def parameter_groups(model: nn.Module) -> list[dict[str, Any]]:
    """The trained parameters: matrices, which weight decay is for; and, without any, biases, norms and embeddings.

    A head that is tied to the embeddings is one of them; biases and norms are whatever their shape (a mixture of
    experts has a row of biases for each). Nor do logarithms of state matrices decay (`A_log` of Mamba), and parameters
    that their model marks by `_no_weight_decay`, as those of the package mamba_ssm do.
    """
    holders = [each for each in model.modules() if isinstance(each, nn.Embedding) or "Norm" in type(each).__name__]
    exempt_holders = {id(p) for each in holders for p in each.parameters(recurse=False)}
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            exempt = (
                id(parameter) in exempt_holders or _EXEMPT.search(name) or getattr(parameter, "_no_weight_decay", False)
            )
            (matrices if parameter.ndim >= 2 and not exempt else others).append(parameter)
    return [{"params": matrices}, {"params": others, "weight_decay": 0.0}]


def adamw(parameters: Any, **settings: Any) -> Optimizer:
    """torch's AdamW over parameters or parameter groups."""
    return torch.optim.AdamW(parameters, fused=True, **settings)


def optimizer_factory(config: OptimizerConfig) -> Callable[[Any], Optimizer]:
    """What makes the optimizer of that name; `weight_decay` is that of groups without one of their own.

    Raises:
        ConfigError: there is none at that dotted path, or it does not take these arguments.
    """
    if config.name not in ADAM:
        return own_factory(config)
    beta1, beta2 = config.betas
    settings = {"lr": config.lr, "betas": (beta1, beta2), "eps": config.eps, "weight_decay": config.weight_decay}
    return partial(OPTIMIZER.get(config.name), **settings)


def make_optimizer(groups: list[dict[str, Any]], factory: Callable[[Any], Optimizer], name: str) -> Optimizer:
    """The factory's optimizer of the groups: over float32 masters where weights are rounded.

    With the name adamw_offload it is over masters in the host's memory, whatever the weights are.
    """
    if name == OFFLOADED:
        from trinity_lightning.trainer.host import HostMasters

        return HostMasters(groups, factory)
    return MasterWeights(groups, factory) if are_rounded(groups) else factory(groups)


def are_rounded(groups: Iterable[dict[str, Any]]) -> bool:
    """Whether some weights of these groups have too few bits to be trained without masters."""
    return any(each.dtype in (torch.bfloat16, torch.float16) for group in groups for each in group["params"])


def check_optimizer(config: OptimizerConfig, alone: bool = True) -> None:
    """Try out a user-defined optimizer or schedule on a few small tensors, before anything is loaded.

    Args:
        config: the optimizer and its schedule.
        alone: whether nothing is trained at another learning rate, as a critic is.

    Raises:
        ConfigError: there is none, or it does not take these arguments; the optimizer needs more than gradients, or
            does not resume from a checkpoint bit for bit; the schedule needs more than the number of steps.
    """
    if config.name in ADAM and config.lr_scheduler.name in PARTS["schedule"] and not config.lr_scheduler.args:
        return

    try_out(config, alone)


def learning_rate_schedule(optimizer: Optimizer, config: OptimizerConfig) -> Any:
    """The schedule of that name, stepped once an optimizer step.

    Raises:
        ConfigError: there is no such schedule, or it does not take these arguments, or no warm-up.
        ValueError: one that needs `total_steps`, and there is none.
    """
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
    """The schedule's name, and all that it is made of beside the optimizer; raises as `learning_rate_schedule` does."""
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


def settings_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """A copy of all that each parameter group has besides its parameters."""
    return [copy.deepcopy({k: v for k, v in group.items() if k != "params"}) for group in optimizer.param_groups]


def parameters_of(optimizer: Optimizer) -> list[Any]:
    """The parameters of all groups, in order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def hand_on_settings(source: Optimizer, target: Optimizer) -> None:
    """Give each group of the target what that of the source has besides its parameters."""
    for given, group in zip(source.param_groups, target.param_groups, strict=True):
        group.update({key: value for key, value in given.items() if key != "params"})


# -- float32 masters ---------------------------------------------------------------------------------------------------
# bfloat16 has 8 bits of precision: an update below 1/256 of a weight would be lost. The optimizer therefore updates
# float32 copies, and the policy's weights are those copies rounded.


class MasterWeights(Optimizer):
    """Runs any optimizer over float32 copies of the parameters, and rounds the result into them.

    Gradients are accumulated in float32 too (`Tensor.grad_dtype`), so that summing micro-batches loses nothing.
    Learning rate and the like are set on this optimizer's `param_groups`, as schedulers do.
    `factory` makes the `inner` optimizer, of the float32 parameters or groups, which are on `device`; None: on that of
    the weights.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        factory: Callable[[Any], Optimizer],
        device: torch.device | None = None,
    ) -> None:
        super().__init__(params, defaults={})
        for weight in self.weights:
            weight.grad_dtype = torch.float32

        def master(weight: Tensor) -> nn.Parameter:
            return nn.Parameter(weight.detach().to(device or weight.device, torch.float32, copy=True))

        masters = [{**group, "params": [master(each) for each in group["params"]]} for group in self.param_groups]
        self.inner = factory(masters)
        hand_on_settings(self.inner, self)
        self.defaults = self.inner.defaults  # which schedules of momentum look at

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of the inner optimizer, then the weights are its masters, rounded; what the closure returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        hand_on_settings(self, self.inner)
        self._hand_on_gradients()
        self.inner.step()
        for master in self.masters:
            master.grad = None
        self._round()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """The masters and the inner optimizer's state: tensors and plain containers only."""
        return {
            "state": {"inner": self.inner.state_dict(), "masters": [master.data for master in self.masters]},
            "param_groups": [{k: v for k, v in g.items() if k != "params"} for g in self.param_groups],
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore masters and inner state; the policy's weights become the masters, rounded."""
        self.inner.load_state_dict(state_dict["state"]["inner"])
        for master, saved in zip(self.masters, state_dict["state"]["masters"], strict=True):
            master.copy_(saved)
        self._round()
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update(saved)

    @property
    def masters(self) -> list[Tensor]:
        """The float32 copies, in the order of the parameters."""
        return parameters_of(self.inner)

    @property
    def weights(self) -> list[Tensor]:
        """The parameters, in the order of their masters."""
        return parameters_of(self)

    def _hand_on_gradients(self) -> None:
        for weight, master in zip(self.weights, self.masters, strict=True):
            master.grad = weight.grad

    def _round(self) -> None:
        """Make the weights their masters, rounded: all tensors of a device in one go."""
        torch._foreach_copy_(self.weights, self.masters)  # pyright: ignore[reportPrivateImportUsage]


logger = logging.getLogger(__name__)

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


TRIED_LR = 1e-3  # whatever is configured: with 0 no step would be taken


def own_factory(config: OptimizerConfig) -> Callable[[Any], Optimizer]:
    """What makes the optimizer at that dotted path, of parameters or groups.

    Raises:
        ConfigError: there is none, or it does not take these arguments.
    """
    make: Any = import_object(config.name)
    if isinstance(make, type):
        if not issubclass(make, Optimizer):
            raise ConfigError(f"optimizer.name={config.name} is no torch.optim.Optimizer.", key="optimizer.name")
        check_arguments("optimizer.args", make, config.args)
    settings = {"lr": config.lr, "weight_decay": config.weight_decay}
    try:
        signature = inspect.signature(make)
        takes_any = any(each.kind is each.VAR_KEYWORD for each in signature.parameters.values())
        if config.weight_decay == 0 and "weight_decay" not in signature.parameters and not takes_any:
            del settings["weight_decay"]  # it has none; one that takes any keyword may decay by default
        signature.bind([], **settings, **config.args)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"optimizer.name={config.name} cannot be made with these arguments: {error}.", key="optimizer.name"
        ) from error
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
            f"optimizer.name={config.name}{of_args} cannot train a policy: {error}{where(error)}", key="optimizer.name"
        ) from error
    schedule = learning_rate_schedule(optimizer, replace(config, total_steps=config.total_steps or 1))
    if isinstance(schedule, ReduceLROnPlateau) or not hasattr(schedule, "step"):
        raise ConfigError(
            f"optimizer.lr_scheduler={config.lr_scheduler.name} is no schedule of steps alone",
            key="optimizer.lr_scheduler",
            fix="choose a class of torch.optim.lr_scheduler that is",
        )
    meant = config.lr == 0 and not (alone and "." in config.lr_scheduler.name)  # named schedules scale it
    if config.total_steps and not meant and not _ever_learns(schedule, config.total_steps):
        fix = "change its args" if config.lr > 0 else "give optimizer.lr, a number above 0"
        raise ConfigError(
            f"optimizer.lr_scheduler={config.lr_scheduler.name} gives the learning rate 0 at all {config.total_steps} "
            f"steps, and nothing would be trained: {fix}.",
            key="optimizer.lr_scheduler",
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
