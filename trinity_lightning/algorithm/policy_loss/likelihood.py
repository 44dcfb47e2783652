"""Losses without a ratio: SFT, REINFORCE, OPMD, and distillation over what a teacher finds likeliest."""

from typing import Unpack

import torch
from torch import Tensor

from trinity_lightning.algorithm.policy_loss.policy_loss import BatchTotals, aggregate
from trinity_lightning.config.values import number, one_of

DIRECTIONS = ("reverse", "forward")
# Least mass of the rest: what float32 leaves of 1 less the other probabilities is rounding below it.
LEAST_REST = 1e-6


def sft(
    logprobs: Tensor,
    old_logprobs: Tensor,
    action_mask: Tensor,
    advantages: Tensor,
    *,
    ref_logprobs: Tensor | None = None,
    loss_agg_mode: str = "token-mean",
    **totals: Unpack[BatchTotals],
) -> tuple[Tensor, dict[str, Tensor]]:
    """Supervised fine-tuning: -lp, whatever the advantages. The only metric is pg_loss. ConfigError: unknown mode."""
    loss = aggregate(-logprobs, action_mask, loss_agg_mode, **totals)
    return loss, {"pg_loss": loss.detach()}


def reinforce(
    logprobs: Tensor,
    old_logprobs: Tensor,
    action_mask: Tensor,
    advantages: Tensor,
    *,
    ref_logprobs: Tensor | None = None,
    loss_agg_mode: str = "token-mean",
    **totals: Unpack[BatchTotals],
) -> tuple[Tensor, dict[str, Tensor]]:
    """REINFORCE: -A lp (Williams 1992). The only metric is pg_loss. ConfigError: unknown mode."""
    loss = aggregate(-advantages * logprobs, action_mask, loss_agg_mode, **totals)
    return loss, {"pg_loss": loss.detach()}


def opmd(
    logprobs: Tensor,
    old_logprobs: Tensor,
    action_mask: Tensor,
    advantages: Tensor,
    *,
    ref_logprobs: Tensor | None = None,
    tau: float = 1.0,
    loss_agg_mode: str = "token-mean",
    **totals: Unpack[BatchTotals],
) -> tuple[Tensor, dict[str, Tensor]]:
    """OPMD, its simple form: -A lp / (1 + tau) (Trinity-RFT, arXiv 2505.17826). The only metric is pg_loss.

    Raises:
        ConfigError: tau is negative or infinite, or the mode is unknown.
    """
    number("algorithm.policy_loss.args.tau", tau, least=0)
    loss = aggregate(-advantages * logprobs / (1 + tau), action_mask, loss_agg_mode, **totals)
    return loss, {"pg_loss": loss.detach()}


def teacher_kl(
    logprobs: Tensor,
    old_logprobs: Tensor,
    action_mask: Tensor,
    advantages: Tensor,
    *,
    teacher_top_k_logprobs: Tensor,
    top_k_logprobs: Tensor,
    ref_logprobs: Tensor | None = None,
    direction: str = "reverse",
    loss_agg_mode: str = "token-mean",
    **totals: Unpack[BatchTotals],
) -> tuple[Tensor, dict[str, Tensor]]:
    """KL of policy and teacher over the teacher's top k and the rest: reverse sum p log(p/q), forward sum q log(q/p).

    p is the policy and q the teacher, at every token of the responses; the sum is over the teacher's k likeliest tokens
    and, as one more, all others together: p_rest = 1 - sum p, q_rest = 1 - sum q. It is at most the KL over the whole
    vocabulary (what is added up cannot tell more), and is that KL if k is its size; without the rest, a policy would
    lose nothing by moving its mass out of the top k. Reverse and forward KL on the policy's own responses: GKD (arXiv
    2306.13649); the rest as one more token: arXiv 2503.16870. Advantages are ignored.

    Args:
        teacher_top_k_logprobs: log q of those tokens [b, r, k].
        top_k_logprobs: log p of the same tokens, with gradient [b, r, k].
        direction: "reverse", which the policy can lower by leaving out what the teacher would not say; or "forward",
            by covering all that it might.
        loss_agg_mode: see `aggregate`.

    Returns:
        The loss; the only metric is pg_loss, the loss: the KL in nats.

    Raises:
        ConfigError: unknown direction or mode.
    """
    one_of("algorithm.policy_loss.args.direction", direction, DIRECTIONS)
    policy, teacher = with_rest(top_k_logprobs), with_rest(teacher_top_k_logprobs)
    first, second = (policy, teacher) if direction == "reverse" else (teacher, policy)
    divergence = (first.exp() * (first - second)).sum(-1)
    loss = aggregate(divergence, action_mask, loss_agg_mode, **totals)
    return loss, {"pg_loss": loss.detach()}


def with_rest(logprobs: Tensor) -> Tensor:
    """Log-probabilities of some tokens [..., k], and of all others together [..., k + 1]."""
    rest = 1 - logprobs.exp().sum(-1, keepdim=True)
    return torch.cat([logprobs, rest.clamp(min=LEAST_REST).log()], -1)
