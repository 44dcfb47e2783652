"""Log-probabilities of given tokens from hidden states, without a [tokens, vocabulary] tensor in float32."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

CHUNK_TOKENS = 512


@dataclass(frozen=True)
class Head:
    """A language-model head: logits = softcap(hidden @ weight.T + bias) * scale.

    Attributes:
        projection: the output embeddings.
        softcap: logits become softcap * tanh(logits / softcap) (Gemma 2); None: as they are.
        scale: factor on the logits (Cohere: logit_scale, Granite: 1 / logits_scaling).
    """

    projection: nn.Module
    softcap: float | None = None
    scale: float = 1.0

    @classmethod
    def of(cls, model: nn.Module) -> "Head":
        """The head of a Hugging Face causal language model, with what its config says is done to the logits."""
        config = model.config
        scale = getattr(config, "logit_scale", None) or 1.0 / (getattr(config, "logits_scaling", None) or 1.0)
        return cls(model.get_output_embeddings(), getattr(config, "final_logit_softcapping", None), float(scale))

    def logits(self, hidden: Float[Tensor, "n hidden"]) -> Float[Tensor, "n vocabulary"]:
        """Float32 logits."""
        logits = self.projection(hidden).float()
        if self.softcap:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits * self.scale if self.scale != 1.0 else logits


def token_logprobs(
    head: Head,
    hidden: Float[Tensor, "n hidden"],
    targets: Int[Tensor, " n"],
    temperature: Float[Tensor, " n"],
    entropy_gradient: bool = False,
) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
    """Natural log-probability of each target under softmax(logits / temperature), and that distribution's entropy.

    Runs in chunks of 512 tokens whose logits are computed again in the backward pass.

    Args:
        head: the model's head.
        hidden: hidden state at the position *before* each target.
        targets: token ids.
        temperature: sampling temperature of each target's rollout.
        entropy_gradient: whether the entropies (in nats) carry a gradient.
    """
    if len(targets) == 0:
        return hidden.sum(-1).float(), hidden.new_zeros(0, dtype=torch.float32)  # empty, yet part of the graph
    parts = []
    for part in torch.arange(len(targets), device=targets.device).split(CHUNK_TOKENS):
        arguments = (head, hidden[part], targets[part], temperature[part], entropy_gradient)
        if torch.is_grad_enabled():
            parts.append(checkpoint(_chunk, *arguments, use_reentrant=False, preserve_rng_state=False))
        else:
            parts.append(_chunk(*arguments))
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def _chunk(
    head: Head, hidden: Tensor, targets: Tensor, temperature: Tensor, entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    logits = head.logits(hidden) / temperature[:, None]
    normaliser = logits.logsumexp(-1)
    logprob = logits.gather(-1, targets[:, None]).squeeze(-1) - normaliser
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropy = normaliser - (logits.softmax(-1) * logits).sum(-1)
    return logprob, entropy
