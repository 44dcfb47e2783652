"""Micro-batches for the tests of policy losses."""

import torch
from torch import Tensor


def batch(seed: int = 0, b: int = 5, r: int = 7, spread: float = 0.5) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Float64 logprobs, old logprobs, mask, advantages; row 0 has no trained token, row 1 a hole."""
    g = torch.Generator().manual_seed(seed)
    logprobs = -torch.rand(b, r, generator=g, dtype=torch.float64)
    old = logprobs + spread * torch.randn(b, r, generator=g, dtype=torch.float64)
    mask = torch.arange(r) < torch.randint(2, r + 1, (b, 1), generator=g)
    mask[0] = False
    mask[1, 0] = False
    return logprobs, old, mask, torch.randn(b, r, generator=g, dtype=torch.float64)


def totals_of(mask: Tensor) -> dict[str, int]:
    """The numbers of the whole optimizer batch that the trainer gives a loss."""
    return {"num_tokens": int(mask.sum()), "num_sequences": len(mask), "max_response_length": mask.shape[1]}


def with_gradient(fn, logprobs, *tensors, **arguments) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """A policy loss, its gradient with respect to the log-probabilities, and its metrics."""
    leaf = logprobs.clone().requires_grad_()
    loss, metrics = fn(leaf, *tensors, **arguments)
    (gradient,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), gradient, metrics
