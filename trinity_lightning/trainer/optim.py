"""The optimizer and its schedule, and float32 masters of bfloat16 weights."""

import copy
import inspect
import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trinity_lightning.config.own_code import where
from trinity_lightning.config.registry import PARTS, Registry
from trinity_lightning.config.training import ADAM, OFFLOADED, OptimizerConfig
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
        from trinity_lightning.trainer.other_optimizers import own_factory

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
    from trinity_lightning.trainer.other_optimizers import try_out

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
            f"optimizer.lr_scheduler={name} cannot be made of these args: {reason}{where(error)}."
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
        raise ConfigError(f"optimizer.lr_scheduler={name} has no warm-up: set optimizer.warmup_steps=0.")
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
