"""Gradients of the two largest matrices, embeddings and head, added up where they lie, without a copy of their size.

Autograd makes the gradient of a whole matrix for every micro-batch, twice where the head is tied to the embeddings,
adds the two, casts the sum to float32 and adds that: four passes over a matrix that may be a fifth of the model, and
as many copies of it. Instead the backward passes below write into `Tensor.grad`, by blocks of rows (the head) or in the
rows that occur (embeddings): gradient accumulation fusion, as Megatron-LM calls it. On a CPU only: elsewhere rows would
be added up in an order that changes. Hooks on these parameters (`Tensor.register_hook`,
`register_post_accumulate_grad_hook`) are not called for such gradients, and `torch.autograd.grad` does not return them.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

BLOCK_BYTES = 8 << 20  # of a block of the head's gradient, in float32


def lean_embeddings(model: Any) -> None:
    """Let the input embeddings of a Hugging Face model add up their gradient in place, if they are plain ones."""
    embeddings = model.get_input_embeddings()
    if type(embeddings) is nn.Embedding and not (embeddings.max_norm or embeddings.scale_grad_by_freq):
        embeddings.__class__ = LeanEmbedding


class LeanEmbedding(nn.Embedding):
    """Embeddings whose gradient is added up in place on a CPU."""

    def forward(self, input: Tensor) -> Tensor:
        """Vectors [..., width] of ids [...]."""
        if self.weight.device.type != "cpu":
            return super().forward(input)
        return _Lookup.apply(input, self.weight, self.padding_idx)


class _Lookup(Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, padding: int | None) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.weight, ctx.padding = weight, padding  # not saved: checkpointing would give back a copy, without its `grad`
        return nn.functional.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        (ids,), weight = ctx.saved_tensors, ctx.weight
        if ctx.needs_input_grad[1]:
            rows, vectors = ids.flatten(), grads[0].flatten(0, -2)
            if ctx.padding is not None:  # whose vector is not trained as an input
                rows, vectors = rows[rows != ctx.padding], vectors[rows != ctx.padding]
            total = gradient_of(weight)
            total.index_add_(0, rows, vectors.to(total.dtype))
        return None, None, None


class Projection(Function):
    """hidden @ weight.T, whose gradient of the weight is added up in place."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden)
        ctx.weight = weight  # as above
        return hidden @ weight.T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None]:
        (hidden,), weight = ctx.saved_tensors, ctx.weight
        wants_hidden, wants_weight = ctx.needs_input_grad
        if wants_weight:
            total = gradient_of(weight)
            rows = max(BLOCK_BYTES // (4 * weight.shape[1]), 1)
            for start in range(0, len(weight), rows):
                total[start : start + rows] += grads[0][:, start : start + rows].T @ hidden
        return grads[0] @ weight if wants_hidden else None, None


def gradient_of(weight: Tensor) -> Tensor:
    """What gradients of a parameter are added to, in the dtype that they are kept in; zeros at first."""
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight, dtype=weight.grad_dtype or weight.dtype)
    return weight.grad
