"""The optimizer: AdamW and its schedule, float32 masters of bfloat16 weights, and both in the host's memory."""

import inspect
import re
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trinity_lightning.config.registry import Registry
from trinity_lightning.config.training import OptimizerConfig

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


def adamw(parameters: Any, config: OptimizerConfig) -> Optimizer:
    """AdamW over parameters or parameter groups; `weight_decay` is that of groups without one of their own."""
    beta1, beta2 = config.betas
    return torch.optim.AdamW(
        parameters, config.lr, (beta1, beta2), config.eps, weight_decay=config.weight_decay, fused=True
    )


def learning_rate_schedule(optimizer: Optimizer, config: OptimizerConfig) -> Any:
    """The schedule of that name, stepped once an optimizer step.

    Raises:
        ValueError: an unknown name, or one that needs `total_steps`, and there is none.
    """
    name = config.lr_scheduler
    if name == "constant" and config.warmup_steps > 0:
        name = "constant_with_warmup"  # transformers would silently not warm up
    schedule = cast("Callable[..., Any]", SCHEDULE.resolve(name))
    steps = {"num_warmup_steps": config.warmup_steps, "num_training_steps": config.total_steps}
    taken = {key: value for key, value in steps.items() if key in inspect.signature(schedule).parameters}
    if None in taken.values():
        raise ValueError(f"optimizer.lr_scheduler={name} needs optimizer.total_steps.")
    return schedule(optimizer, **taken)


# -- float32 masters ---------------------------------------------------------------------------------------------------
# bfloat16 has 8 bits of precision: an update below 1/256 of a weight would be lost. The optimizer therefore updates
# float32 copies, and the policy's weights are those copies rounded.


class MasterWeights(Optimizer):
    """Runs any optimizer over float32 copies of the parameters, and rounds the result into them.

    Gradients are accumulated in float32 too (`Tensor.grad_dtype`), so that summing micro-batches loses nothing.
    Learning rate and the like are set on this optimizer's `param_groups`, as schedulers do.
    `factory` makes the `inner` optimizer, of the float32 parameters or groups.
    """

    def __init__(
        self, params: Iterable[nn.Parameter] | Iterable[dict[str, Any]], factory: Callable[[Any], Optimizer]
    ) -> None:
        super().__init__(params, defaults={})
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad_dtype = torch.float32
        masters = [
            {**group, "params": [nn.Parameter(p.detach().float().clone()) for p in group["params"]]}
            for group in self.param_groups
        ]
        self.inner = factory(masters)
        for group, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            group.update({key: value for key, value in inner.items() if key != "params"})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of the inner optimizer, then the weights are its masters, rounded; what the closure returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner.update({key: value for key, value in group.items() if key != "params"})
            for parameter, master in zip(group["params"], inner["params"], strict=True):
                master.grad = parameter.grad
        self.inner.step()
        for master in self.masters:
            master.grad = None
        self._round()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """The masters beside the inner optimizer's state: tensors and plain containers only."""
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
        return [master for group in self.inner.param_groups for master in group["params"]]

    @property
    def moments(self) -> list[Tensor]:
        """What the inner optimizer remembers of each parameter; nothing before the first step."""
        return [value for state in self.inner.state.values() for value in state.values() if is_moment(value)]

    def _round(self) -> None:
        """Make the weights their masters, rounded: all tensors of a device in one go."""
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        torch._foreach_copy_(parameters, self.masters)  # pyright: ignore[reportPrivateImportUsage]


def is_moment(value: object) -> bool:
    """Whether a value of an optimizer's state is as large as its parameter: a count of steps has no dimension."""
    return isinstance(value, Tensor) and value.ndim > 0


# -- in the host's memory ----------------------------------------------------------------------------------------------


class HostMemory:
    """Moves what an optimizer keeps of each parameter to the host and back, bit for bit.

    The tensors stay the objects that they are, so that nobody who holds one notices; no step may be taken meanwhile.
    A checkpoint that is written meanwhile is the same. A plain optimizer has moments alone, and no masters.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._buffers: list[Tensor] = []  # of one stay and the next: to pin memory takes longer than to fill it
        self._device: torch.device | None = None  # where they came from, while they are away

    def leave(self) -> None:
        """Move to the host; what is there already stays."""
        tensors = _kept(self._optimizer)
        if self._device is not None or not tensors:
            return
        self._device = tensors[0].device
        for i, tensor in enumerate(tensors):
            if i == len(self._buffers) or self._buffers[i].shape != tensor.shape:
                self._buffers[i:] = [torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)]
            self._buffers[i].copy_(tensor.detach(), non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # before the sources of the copies are freed
        for tensor, buffer in zip(tensors, self._buffers, strict=False):
            tensor.data = buffer

    def come_back(self) -> None:
        """Move to the device again, those of a checkpoint that was loaded meanwhile too."""
        device, self._device = self._device, None
        if device is None:
            return
        for tensor in [*_kept(self._optimizer), *_counts(self._optimizer)]:
            tensor.data = tensor.detach().to(device, non_blocking=True, copy=True)


def _kept(optimizer: Optimizer) -> list[Tensor]:
    """Tensors as large as a parameter; counts of steps stay where they are."""
    if isinstance(optimizer, MasterWeights):
        return [*optimizer.masters, *optimizer.moments]
    # Of a policy in shards, what this process has.
    return [getattr(v, "_local_tensor", v) for each in optimizer.state.values() for v in each.values() if is_moment(v)]


def _counts(optimizer: Optimizer) -> list[Tensor]:
    """Counts of steps that belong on their parameter's device: a checkpoint is loaded to where that is meanwhile.

    torch keeps those of other optimizers on the host ("special device hosting for step" in `torch.optim.Optimizer`).
    """
    plain = optimizer.inner if isinstance(optimizer, MasterWeights) else optimizer
    return [
        value
        for group in plain.param_groups
        if group.get("fused") or group.get("capturable")
        for parameter in group["params"]
        for value in plain.state.get(parameter, {}).values()
        if isinstance(value, Tensor) and not is_moment(value)
    ]
