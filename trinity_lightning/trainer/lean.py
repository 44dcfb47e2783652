"""Replaces norms and feed-forward parts by ones that keep less for the backward pass on a CPU, and compute the same."""

import copy
import inspect
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.functional import silu

from trinity_lightning.trainer.layers import HALF

CHECKED_ROWS = 4


def lean_layers(model: nn.Module) -> None:
    """Let norms and gated feed-forward parts keep less for the backward pass, in place.

    A module changes if it has the parts of a kind below, and if its results on random weights stay the same to the bit.
    """
    tried: dict[tuple[type, ...], bool] = {}
    for module in list(model.modules()):
        original = type(module)
        for kind in (LeanNorm, LeanFeedForward):
            if kind.has_parts_of(module):
                key = kind, original, type(getattr(module, "act_fn", None))
                if key not in tried:
                    tried[key] = _computes_the_same(kind, module)
                if tried[key]:
                    module.__class__ = _lean(kind, original)


def plain_layers(model: nn.Module) -> None:
    """Undo `lean_layers`, in place: torch.compile decides itself what it keeps."""
    for module in model.modules():
        if isinstance(module, LeanNorm | LeanFeedForward):
            module.__class__ = type(module).__mro__[2]  # as `_lean` lists them


@cache
def _lean(kind: type, original: type) -> type:
    """The class of a lean module: `kind` first, then the module's own class."""
    return type(f"Lean{original.__name__}", (kind, original), {})


@torch.no_grad()
def _computes_the_same(kind: type, module: nn.Module) -> bool:
    """True if a copy of the module with random weights has the same results as a lean one."""
    if len(inspect.signature(module.forward).parameters) != 1:
        return False
    tried = copy.deepcopy(module)
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        # The device is named: Lightning makes models on a GPU with the GPU as torch's default.
        return torch.randn(*shape, generator=generator, device="cpu")

    for parameter in tried.parameters():
        parameter.copy_(drawn(*parameter.shape))
    first = next(tried.parameters())
    states = drawn(CHECKED_ROWS, first.shape[-1]).to(first)
    expected = tried(states)
    tried.__class__ = _lean(kind, type(module))
    return torch.equal(tried(states), expected)


class LeanNorm(nn.Module):
    """A root-mean-square norm that keeps only its input, not copies of it in float32 and normalised."""

    weight: nn.Parameter
    variance_epsilon: float

    @classmethod
    def has_parts_of(cls, module: nn.Module) -> bool:
        return hasattr(module, "variance_epsilon") and [name for name, _ in module.named_parameters()] == ["weight"]

    def forward(self, hidden_states: Tensor) -> Tensor:
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
        normalised, grad = states.float().mul_(scale), grads[0].float()
        products = grad * normalised
        weight_grad = products.flatten(0, -2).sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        # With n = x s and s = (mean x^2 + epsilon)^(-1/2): d/dx = s (d/dn - n mean(n d/dn)).
        mean = (products @ weight.float()).div_(-grad.shape[-1])
        grad = grad.mul_(weight).addcmul_(normalised, mean[..., None])
        return grad.mul_(scale).to(states.dtype), weight_grad, None


class LeanFeedForward(nn.Module):
    """down(silu(gate(x)) * up(x)), which keeps gate(x) and up(x); the product too if `down` has adapters or hooks."""

    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module

    @classmethod
    def has_parts_of(cls, module: nn.Module) -> bool:
        return [name for name, _ in module.named_children()] == ["gate_proj", "up_proj", "down_proj", "act_fn"]

    def forward(self, x: Tensor) -> Tensor:
        if not _is_rounded_on_cpu(x):
            return super().forward(x)
        gate, up, down = self.gate_proj(x), self.up_proj(x), self.down_proj
        if type(down) is nn.Linear and down.bias is None and not (down._forward_hooks or down._forward_pre_hooks):
            return _GatedSilu.apply(gate, up, down.weight)
        return down(_GatedSilu.apply(gate, up, None))


class _GatedSilu(Function):
    """silu(gate) * up; given the weight of a linear layer, the product with it, without keeping that layer's input."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor | None) -> Tensor:
        ctx.save_for_backward(gate, up, weight)
        states = silu(gate).mul_(up)
        return states if weight is None else states @ weight.T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        (gate, up, weight), grad, weight_grad = ctx.saved_tensors, grads[0], None
        activated = silu(gate)
        if ctx.needs_input_grad[2]:
            # Copied when transposed: with AMX the product takes two thirds longer on the view.
            weight_grad = grad.flatten(0, -2).T.contiguous() @ (activated * up).flatten(0, -2)
        grad = grad if weight is None else grad @ weight
        return torch.ops.aten.silu_backward(grad * up, gate), activated.mul_(grad), weight_grad


def _is_rounded_on_cpu(states: Tensor) -> bool:
    """True for 16 bits on a CPU: float32 would gain less, and mixed precision chooses dtypes itself."""
    return states.device.type == "cpu" and states.dtype in HALF and not torch.is_autocast_enabled("cpu")
