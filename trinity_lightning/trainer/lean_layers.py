"""Layers of transformers that keep less for the backward pass on a CPU, and compute the same."""

import copy
import inspect
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.functional import silu

CHECKED_ROWS = 4


def lean_layers(model: nn.Module) -> None:
    """Let the norms and gated feed-forward parts of the kinds that are known here keep less, each in its place.

    Of a kind are layers with the same parts that, tried on random weights, have the same results to the bit.
    """
    tried: dict[tuple[type, ...], bool] = {}
    for module in list(model.modules()):
        original = type(module)
        for kind in (LeanNorm, LeanFeedForward):
            if kind.has_parts_of(module):
                alike = kind, original, type(getattr(module, "act_fn", None))
                if alike not in tried:
                    tried[alike] = _computes_the_same(kind, module)
                if tried[alike]:
                    module.__class__ = _lean(kind, original)


@cache
def _lean(kind: type, original: type) -> type:
    return type(f"Lean{original.__name__}", (kind, original), {})


@torch.no_grad()
def _computes_the_same(kind: type, module: nn.Module) -> bool:
    if len(inspect.signature(module.forward).parameters) != 1:
        return False
    tried = copy.deepcopy(module)
    generator = torch.Generator().manual_seed(0)
    for parameter in tried.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
    width = next(tried.parameters()).shape[-1]
    states = torch.randn(CHECKED_ROWS, width, generator=generator).to(next(tried.parameters()))
    expected = tried(states)
    tried.__class__ = _lean(kind, type(module))
    return torch.equal(tried(states), expected)


class LeanNorm(nn.Module):
    """A root-mean-square norm that keeps its input as it is, instead of in float32 and normalised too."""

    weight: nn.Parameter
    variance_epsilon: float

    @classmethod
    def has_parts_of(cls, module: nn.Module) -> bool:
        """Whether it may be one."""
        return hasattr(module, "variance_epsilon") and [name for name, _ in module.named_parameters()] == ["weight"]

    def forward(self, hidden_states: Tensor) -> Tensor:
        """States [..., width] of the same shape."""
        if not _is_rounded_on_cpu(hidden_states) or self.weight.dtype != hidden_states.dtype:
            return super().forward(hidden_states)
        return _Norm.apply(hidden_states, self.weight, self.variance_epsilon)


class _Norm(Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        exact = states.float()
        scale = torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + epsilon)
        ctx.save_for_backward(states, weight, scale)
        return exact.mul_(scale).to(states.dtype).mul_(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        states, weight, scale = ctx.saved_tensors
        normalised = states.float().mul_(scale)
        of_weight = None
        if ctx.needs_input_grad[1]:
            of_weight = (grads[0] * normalised.to(states.dtype)).flatten(0, -2).sum(0)
        # With n = x s and s = (mean x^2 + epsilon)^(-1/2): d/dx = s (d/dn - n mean(n d/dn)).
        grad = (grads[0] * weight).float()
        mean = torch.linalg.vecdot(grad, normalised).div_(-grad.shape[-1])
        return grad.addcmul_(normalised, mean[..., None]).mul_(scale).to(states.dtype), of_weight, None


class LeanFeedForward(nn.Module):
    """down(silu(gate(x)) * up(x)) keeping gate(x), up(x); their product if `down` is an adapter's or has hooks."""

    parts: ClassVar = ["gate_proj", "up_proj", "down_proj", "act_fn"]
    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module

    @classmethod
    def has_parts_of(cls, module: nn.Module) -> bool:
        """Whether it may be one."""
        return [name for name, _ in module.named_children()] == cls.parts

    def forward(self, x: Tensor) -> Tensor:
        """States [..., width] of the same shape."""
        if not _is_rounded_on_cpu(x):
            return super().forward(x)
        gate, up, down = self.gate_proj(x), self.up_proj(x), self.down_proj
        if type(down) is nn.Linear and down.bias is None and not (down._forward_hooks or down._forward_pre_hooks):
            return _GatedSilu.apply(gate, up, down.weight)
        return down(_GatedSilu.apply(gate, up, None))


class _GatedSilu(Function):
    """silu(gate) * up; with the weight of a linear layer, times that, which then has no input to keep."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor | None) -> Tensor:
        ctx.save_for_backward(gate, up, weight)
        states = silu(gate).mul_(up)
        return states if weight is None else states @ weight.T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        (gate, up, weight), grad, of_weight = ctx.saved_tensors, grads[0], None
        activated = silu(gate)
        if ctx.needs_input_grad[2]:
            of_weight = grad.flatten(0, -2).T @ (activated * up).flatten(0, -2)
        grad = grad if weight is None else grad @ weight
        return torch.ops.aten.silu_backward(grad * up, gate), activated.mul_(grad), of_weight


def _is_rounded_on_cpu(states: Tensor) -> bool:
    """Float32 would gain less, and under mixed precision operations choose their dtypes themselves."""
    return states.device.type == "cpu" and states.dtype == torch.bfloat16 and not torch.is_autocast_enabled("cpu")
