"""Log-probabilities of given tokens from hidden states, never with the logits of a whole batch in memory."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

# Fewer tokens a chunk save memory; more save passes over the head's gradient, which every chunk adds to.
CHUNK_TOKENS = 512


@dataclass(frozen=True)
class Head:
    """A language-model head: logits = softcap(projection(hidden)) * scale.

    Attributes:
        projection: the output embeddings.
        softcap: logits become softcap * tanh(logits / softcap) (Gemma); None: as they are.
        scale: factor on the logits (Cohere: logit_scale, Granite: 1 / logits_scaling, Falcon H1: lm_head_multiplier).
    """

    projection: nn.Module
    softcap: float | None = None
    scale: float = 1.0

    @classmethod
    def of(cls, model: nn.Module) -> "Head":
        """The head of a Hugging Face causal language model, with what its config says is done to the logits.

        Names of other meaning elsewhere are not looked for: `forward.logprob_function` finds out whether this is right.
        """
        config: Any = model.config.get_text_config()  # type: ignore[union-attr,operator]
        scale = getattr(config, "logit_scale", None) or getattr(config, "lm_head_multiplier", None)
        scale = scale or 1.0 / (getattr(config, "logits_scaling", None) or 1.0)
        softcap = getattr(config, "final_logit_softcapping", None) or getattr(config, "logits_soft_cap", None)
        return cls(model.get_output_embeddings(), softcap, float(scale))  # type: ignore[operator]

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [n, vocabulary] of hidden states [n, hidden]: in float32 where anything is done to them."""
        logits = self._project(hidden)
        if self.softcap:
            logits = self.softcap * torch.tanh(logits.float() / self.softcap)
        return logits.float() * self.scale if self.scale != 1.0 else logits

    def _project(self, hidden: Tensor) -> Tensor:
        plain = type(self.projection) is nn.Linear and self.projection.bias is None
        if plain and hidden.device.type == "cpu" and not torch.is_autocast_enabled("cpu"):
            return _Projection.apply(hidden, self.projection.weight)
        return self.projection(hidden)


class _Projection(Function):
    """hidden @ weight.T, whose gradient of the weight lies in memory as the weight does.

    Autograd's lies transposed, and adding that to a float32 gradient took a sixth of a training step on the CPU.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        return hidden @ weight.T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        hidden, weight = ctx.saved_tensors
        wants_hidden, wants_weight = ctx.needs_input_grad
        return grads[0] @ weight if wants_hidden else None, grads[0].T @ hidden if wants_weight else None


def token_logprobs(head: Head, hidden: Tensor, targets: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """Natural log-probability of each target under softmax(logits / temperature), and that distribution's entropy.

    Runs in chunks of 512 tokens, whose logits are computed again in the backward pass.

    Args:
        head: the model's head.
        hidden: hidden state at the position *before* each target [n, hidden].
        targets: token ids, int64 [n].
        temperature: sampling temperature of each target's rollout, float32 [n].

    Returns:
        Log-probabilities and entropies (in nats), float32 [n], both differentiable.
    """
    if len(targets) == 0:
        return hidden.sum(-1).float(), hidden.new_zeros(0, dtype=torch.float32)  # empty, yet part of the graph
    parts = []
    for part in zip(*(tensor.split(CHUNK_TOKENS) for tensor in (hidden, targets, temperature)), strict=True):
        if torch.is_grad_enabled():
            parts.append(checkpoint(_chunk, head, *part, use_reentrant=False, preserve_rng_state=False))
        else:
            parts.append(_chunk(head, *part))
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def _chunk(head: Head, hidden: Tensor, targets: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    return _LogSoftmax.apply(head.logits(hidden), targets, temperature)


class _LogSoftmax(Function):
    """log p(target) and entropy of p = softmax(logits / temperature), in float32.

    Written by hand because autograd makes five [n, vocabulary] tensors in the backward pass where two do: that was a
    third of the time of a training step of a small model with a large vocabulary.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(logits.device.type, enabled=False):  # it would round the entropy's sum
            log_p = (logits.float() / temperature[:, None]).log_softmax(-1)  # dividing bfloat16 by float32 is slow
            entropy = -torch.linalg.vecdot(log_p.exp(), log_p)
        ctx.save_for_backward(log_p, targets, temperature, entropy)
        ctx.set_materialize_grads(False)
        ctx.dtype = logits.dtype
        return log_p.gather(-1, targets[:, None]).squeeze(-1), entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None]:
        log_p, targets, temperature, entropy = ctx.saved_tensors
        if all(grad is None for grad in grads):
            return None, None, None
        # With z = logits / temperature: d log p_t / dz = onehot_t - p, and d entropy / dz = -p (log p + entropy).
        of_logprob, of_entropy = (torch.zeros_like(temperature) if g is None else g / temperature for g in grads)
        if grads[1] is None:
            grad = log_p.exp_().mul_(-of_logprob[:, None])  # in place: the saved tensor is read only once
        else:
            grad = -log_p.exp() * (of_logprob[:, None] + of_entropy[:, None] * (log_p + entropy[:, None]))
        grad.scatter_add_(-1, targets[:, None], of_logprob[:, None])
        return grad.to(ctx.dtype), None, None
