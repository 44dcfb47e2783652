"""The language-model head: log-probabilities and entropies of tokens, and gradients added up in place."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

from trinity_lightning.common.model_config import BLOCK_BYTES, CHUNK_BYTES, GPU_BLOCK_BYTES, GPU_CHUNK_BYTES
from trinity_lightning.trainer import fused

# -- gradients of embeddings and head, added up in place ---------------------------------------------------------------
# Autograd would make the gradient of a whole matrix for every micro-batch, and pass over it four times. These backward
# passes write into `Tensor.grad` instead: by blocks of rows (the head), or in the rows that occur (embeddings). They do
# so on a CPU only, since elsewhere the order of the sums would change. Hooks on these parameters are not called for
# such gradients, and `torch.autograd.grad` does not return them.

GRADIENT_BLOCK_BYTES = 8 << 20  # one block of the head's gradient, in float32


def lean_embeddings(model: Any) -> None:
    """Let the input embeddings of a Hugging Face model add up their gradient in place, if they are plain embeddings."""
    embeddings = model.get_input_embeddings()
    if type(embeddings) is nn.Embedding and not (embeddings.max_norm or embeddings.scale_grad_by_freq):
        embeddings.__class__ = LeanEmbedding


class LeanEmbedding(nn.Embedding):
    """Embeddings whose gradient is added up in place on a CPU."""

    def forward(self, input: Tensor) -> Tensor:
        if self.weight.device.type != "cpu":
            return super().forward(input)
        return _Lookup.apply(input, self.weight, self.padding_idx)


class _Lookup(Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, padding: int | None) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.weight, ctx.padding = weight, padding  # not saved: checkpointing would return a copy without its `grad`
        return nn.functional.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        (ids,), weight = ctx.saved_tensors, ctx.weight
        if ctx.needs_input_grad[1]:
            rows, vectors = ids.flatten(), grads[0].flatten(0, -2)
            if ctx.padding is not None:  # this vector is not trained as an input
                rows, vectors = rows[rows != ctx.padding], vectors[rows != ctx.padding]
            total = gradient_of(weight)
            total.index_add_(0, rows, vectors.to(total.dtype))
        return None, None, None


class Projection(Function):
    """hidden @ weight.T; the gradient of the weight is added up in place."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden if weight.requires_grad else None)
        ctx.weight = weight  # not saved, as in `_Lookup`
        return hidden @ weight.T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None]:
        (hidden,), weight = ctx.saved_tensors, ctx.weight
        wants_hidden, wants_weight = ctx.needs_input_grad
        if wants_weight:
            total = gradient_of(weight)
            rows = max(GRADIENT_BLOCK_BYTES // (4 * weight.shape[1]), 1)
            for start in range(0, len(weight), rows):
                total[start : start + rows] += grads[0][:, start : start + rows].T @ hidden
        return grads[0] @ weight if wants_hidden else None, None


def gradient_of(weight: Tensor) -> Tensor:
    """The sum of a parameter's gradients so far, in the dtype that they are kept in; zeros at first."""
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight, dtype=weight.grad_dtype or weight.dtype)
    return weight.grad


# -- the head ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Head:
    """A language-model head: logits = softcap(projection(hidden)) * scale.

    Attributes:
        projection: the output embeddings.
        softcap: logits become softcap * tanh(logits / softcap) (Gemma); None: as they are.
        scale: factor of the logits (Cohere: logit_scale, Granite: 1 / logits_scaling, Falcon H1: lm_head_multiplier).
    """

    projection: nn.Module
    softcap: float | None = None
    scale: float = 1.0

    @classmethod
    def of(cls, model: nn.Module) -> "Head":
        """The head of a Hugging Face causal language model, with the softcap and scale of its configuration.

        Their names may mean something else in another architecture: `model.logprob_function` verifies the result.
        """
        config: Any = model.config.get_text_config()  # type: ignore[union-attr,operator]
        scale = getattr(config, "logit_scale", None) or getattr(config, "lm_head_multiplier", None)
        scale = scale or 1.0 / (getattr(config, "logits_scaling", None) or 1.0)
        softcap = getattr(config, "final_logit_softcapping", None) or getattr(config, "logits_soft_cap", None)
        return cls(model.get_output_embeddings(), softcap, float(scale))  # type: ignore[operator]

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [n, vocabulary] of hidden states [n, hidden]; float32 if they are capped or scaled."""
        logits = self._project(hidden)
        if self.softcap:
            logits = self.softcap * torch.tanh(logits.float() / self.softcap)
        return logits.float() * self.scale if self.scale != 1.0 else logits

    def bytes_per_token(self, hidden: Tensor) -> int:
        vocabulary = getattr(self.projection, "out_features", hidden.shape[-1])
        return vocabulary * (4 if self.softcap or self.scale != 1.0 else hidden.element_size())

    def _project(self, hidden: Tensor) -> Tensor:
        plain = type(self.projection) is nn.Linear and self.projection.bias is None
        if plain and hidden.device.type == "cpu" and not torch.is_autocast_enabled("cpu"):
            return Projection.apply(hidden, self.projection.weight)
        return self.projection(hidden)


def token_logprobs(head: Head, hidden: Tensor, targets: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """Natural log-probability of each target under softmax(logits / temperature), and the entropy of that distribution.

    The logits of the first chunk of tokens are kept for the backward pass, which writes their gradient in their place.
    The logits of further chunks are computed again there.

    Args:
        hidden: hidden state at the position *before* each target [n, hidden].
        targets: token ids, int64 [n]; or several for each position [n, m].
        temperature: sampling temperature of each target's rollout, float32 [n].

    Returns:
        Log-probabilities, float32 of the targets' shape, and entropies (in nats), float32 [n], both differentiable.
    """
    if len(targets) == 0:
        return hidden.sum(-1).float(), hidden.new_zeros(0, dtype=torch.float32)  # empty, yet part of the graph
    chunk_bytes = CHUNK_BYTES if hidden.device.type == "cpu" else GPU_CHUNK_BYTES
    chunk = max(chunk_bytes // head.bytes_per_token(hidden), 1)
    parts = []
    for part in zip(*(tensor.split(chunk) for tensor in (hidden, targets, temperature)), strict=True):
        if parts and torch.is_grad_enabled():
            parts.append(checkpoint(_chunk, head, *part, use_reentrant=False, preserve_rng_state=False))
        else:
            parts.append(_chunk(head, *part))
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def _chunk(head: Head, hidden: Tensor, targets: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    reusable = type(head.projection) is nn.Linear  # another module may need its logits in its backward pass
    logprobs, entropy = _LogSoftmax.apply(head.logits(hidden), targets.view(len(targets), -1), temperature, reusable)
    return logprobs.view_as(targets), entropy


class _LogSoftmax(Function):
    """log p(target) [n, m] and entropy [n] of p = softmax(logits / temperature), in float32.

    Autograd makes five float32 tensors [n, vocabulary] in the backward pass. This makes none: it goes through logits
    by blocks of a few tokens, or on a GPU in one kernel, and writes the gradient in their place if they are `reusable`.
    (torch's `linear_cross_entropy` took 20 times as long on a CPU in bfloat16, and has no entropy.)
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, temperature: Tensor, reusable: bool
    ) -> tuple[Tensor, Tensor]:
        # A single row would have kernels of its own.
        ctx.fused = targets.shape[1] == 1 and len(logits) > 1
        ctx.fused = ctx.fused and fused.is_usable(logits.device, logits.dtype, logits.shape[1])
        statistics = fused.statistics if ctx.fused else _statistics
        logprobs, entropy, highest, log_sum = statistics(logits, targets, temperature)
        ctx.save_for_backward(logits, targets, temperature, entropy, highest, log_sum)
        ctx.set_materialize_grads(False)
        ctx.reusable = reusable
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None, None]:
        logits, targets, temperature, entropy, highest, log_sum = ctx.saved_tensors
        if all(grad is None for grad in grads):
            return None, None, None, None
        # With z = logits / temperature: d log p_t / dz = onehot_t - p, and d entropy / dz = -p (log p + entropy).
        target_grad = temperature.new_zeros(targets.shape) if grads[0] is None else grads[0] / temperature[:, None]
        entropy_grad = torch.zeros_like(temperature) if grads[1] is None else grads[1] / temperature
        if ctx.fused:
            result = logits if ctx.reusable else logits.clone()
            fused.write_gradient(result, targets, temperature, entropy, highest, log_sum, target_grad, entropy_grad)
            return result, None, None, None
        logprob_grad = target_grad.sum(-1)
        result = logits if ctx.reusable else torch.empty_like(logits)
        for block, scaled in _blocks(logits, temperature):
            log_p = scaled.sub_(highest[block, None]).sub_(log_sum[block, None])
            if grads[1] is None:
                grad = log_p.exp_().mul_(-logprob_grad[block, None])
            else:
                p_grad = log_p.add(entropy[block, None]).mul_(entropy_grad[block, None]).add_(logprob_grad[block, None])
                grad = log_p.exp_().mul_(p_grad.neg_())
            grad.scatter_add_(-1, targets[block], target_grad[block])
            result[block] = grad.to(result.dtype)
        return result, None, None, None


def _statistics(logits: Tensor, targets: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Same as `fused.statistics`, block by block."""
    entropy, highest, log_sum = (torch.empty_like(temperature) for _ in range(3))
    logprobs = temperature.new_empty(targets.shape)
    for block, scaled in _blocks(logits, temperature):
        highest[block] = scaled.amax(-1)
        shifted = scaled.sub_(highest[block, None])
        exps = shifted.exp()
        sums = exps.sum(-1)
        log_sum[block] = sums.log()
        logprobs[block] = shifted.gather(-1, targets[block]) - log_sum[block, None]
        entropy[block] = log_sum[block] - exps.mul_(shifted).sum(-1) / sums
    return logprobs, entropy, highest, log_sum


def _blocks(logits: Tensor, temperature: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Blocks of the logits [n, vocabulary]: a slice of rows, and a copy of logits / temperature in float32."""
    block_bytes = BLOCK_BYTES if logits.device.type == "cpu" else GPU_BLOCK_BYTES
    rows = max(block_bytes // (4 * logits.shape[-1]), 1)
    for start in range(0, len(logits), rows):
        block = slice(start, start + rows)
        copy = torch.empty_like(logits[block], dtype=torch.float32).copy_(logits[block])
        yield block, copy.mul_(temperature[block, None].reciprocal())  # takes half the time of a division
