"""Float32 masters of weights in 16 bits.

bfloat16 has 8 bits of precision: an update below 1/256 of a weight would be lost; in float16, with 11 bits, one below
1/2048. The optimizer therefore updates float32 copies, and the policy's weights are those copies, rounded.

A checkpoint's weights have 16 bits already. Copies that began with exactly these values would have to move by half a
rounding step before the policy changes: at a learning rate of 1e-5 a weight of 0.1 takes 25 steps, at 1e-6 it takes
250, in which the policy samples and learns as if nothing had been trained. Masters therefore begin anywhere within
the range that rounds to the weight, uniformly. The policy begins with the same weights, and in the mean over many
weights it moves by each update as the masters do.
"""

import copy
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class MasterWeights(Optimizer):
    """Runs any optimizer over float32 copies of the parameters, and rounds the result into them.

    Gradients are accumulated in float32 too (`Tensor.grad_dtype`), so summing micro-batches loses nothing. The learning
    rate and other settings are set on this optimizer's `param_groups`, as schedulers do.

    Args:
        params: the parameters, or groups of them.
        factory: makes the `inner` optimizer from the float32 parameters or groups.
        device: where the float32 copies lie; None: beside the weights.
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
            return nn.Parameter(master_of(weight.detach().to(device or weight.device)))

        masters = [{**group, "params": [master(weight) for weight in group["params"]]} for group in self.param_groups]
        self.inner = factory(masters)
        copy_settings(self.inner, self)
        self.defaults = self.inner.defaults  # schedules of momentum read them

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step of the inner optimizer and round its masters into the weights; returns the closure's result."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        copy_settings(self, self.inner)
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
        """Round the masters into the weights, all tensors of a device in one call."""
        torch._foreach_copy_(self.weights, self.masters)  # pyright: ignore[reportPrivateImportUsage]


# Bits that a float32 has beyond a number of 16 bits: there, and only there, masters differ from their weights.
FURTHER_BITS = {torch.bfloat16: 16, torch.float16: 13}
PIECE = 2**20 - 3  # numbers that differ in their offsets: a prime, so that rows of a matrix seldom begin with the same


def master_of(weight: Tensor) -> Tensor:
    """A float32 copy that begins somewhere within the range of numbers that are rounded to the weight.

    Float32 numbers of one sign are in the order of their bits as integers. The numbers that round to a weight are thus
    those whose bits are less than half a unit of its last bit away. The same weight gets the same copy on every device.
    Zeros stay, as numbers near them are hardly rounded; so do float32 weights.
    """
    master = weight.to(torch.float32, copy=True)  # in the same order in memory, without gaps
    if (further := FURTHER_BITS.get(weight.dtype)) is None:
        return master
    offsets = _offsets(further, weight.device)
    for numbers in master.as_strided((master.numel(),), (1,)).split(PIECE):
        numbers.view(torch.int32).add_(offsets[: len(numbers)].masked_fill(numbers == 0, 0))
    return master


@cache
def _offsets(further: int, device: torch.device) -> Tensor:
    """PIECE integers that leave a number within what rounds to it: drawn once and used for every weight."""
    half = 2 ** (further - 1)
    generator = torch.Generator().manual_seed(0)
    return torch.randint(1 - half, half, (PIECE,), generator=generator, dtype=torch.int32).to(device)


def are_rounded(groups: Iterable[dict[str, Any]]) -> bool:
    """True if some weights of these groups have too few bits to be trained without masters."""
    return any(weight.dtype in (torch.bfloat16, torch.float16) for group in groups for weight in group["params"])


# -- parameter groups of any optimizer ---------------------------------------------------------------------------------


def parameters_of(optimizer: Optimizer) -> list[Any]:
    """The parameters of all groups, in order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def settings_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """A copy of each parameter group without its parameters."""
    return [copy.deepcopy({k: v for k, v in group.items() if k != "params"}) for group in optimizer.param_groups]


def copy_settings(source: Optimizer, target: Optimizer) -> None:
    """Give each parameter group of `target` the settings of the same group of `source`."""
    for settings, group in zip(source.param_groups, target.param_groups, strict=True):
        group.update({key: value for key, value in settings.items() if key != "params"})
