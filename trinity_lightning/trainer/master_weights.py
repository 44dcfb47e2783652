"""Float32 master weights for a policy that computes in bfloat16.

bfloat16 has 8 bits of precision: an update below 1/256 of a weight would be lost. The optimizer therefore updates
float32 copies, and the policy's weights are those copies rounded.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class MasterWeights(Optimizer):
    """Runs any optimizer over float32 copies of the parameters, and rounds the result into them.

    Gradients are accumulated in float32 too (`Tensor.grad_dtype`), so that summing micro-batches loses nothing.
    Learning rate and the like are set on this optimizer's `param_groups`, as schedulers do.

    Args:
        params: parameters, or parameter groups.
        factory: makes the inner optimizer of the float32 parameters or groups.

    Attributes:
        inner: that optimizer.
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
