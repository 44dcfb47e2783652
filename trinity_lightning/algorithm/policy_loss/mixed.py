"""MIX: reinforcement learning on rollouts and supervised learning on an expert's data, in one loss."""

from collections.abc import Mapping
from typing import Any, Unpack

from torch import Tensor

from trinity_lightning.algorithm.policy_loss.likelihood import sft
from trinity_lightning.algorithm.policy_loss.policy_loss import BatchTotals, accepted, create_policy_loss
from trinity_lightning.config.values import number
from trinity_lightning.errors import ConfigError


def mix(
    logprobs: Tensor,
    old_logprobs: Tensor,
    action_mask: Tensor,
    advantages: Tensor,
    *,
    ref_logprobs: Tensor | None = None,
    num_computed_tokens: int | None = None,
    expert_mask: Tensor | None = None,
    num_expert_tokens: int | None = None,
    num_expert_sequences: int | None = None,
    mu: float = 0.1,
    usual: str = "ppo",
    usual_args: Mapping[str, Any] | None = None,
    loss_agg_mode: str | None = None,
    **totals: Unpack[BatchTotals],
) -> tuple[Tensor, dict[str, Tensor]]:
    """MIX: (1 - mu) usual policy loss of the rollouts + mu SFT loss of the expert's (Trinity-RFT, arXiv 2505.17826).

    Each term is normalised by its own tokens and sequences, of the whole optimizer batch: mu is the weight of the
    expert data however many there are, and an optimizer batch without any takes (1 - mu) times the usual step.
    "seq-mean-token-sum-norm" divides both by the longest response of all, a constant of the run.
    Tensors are [b, r]; see `PolicyLossFn` for arguments not named here.

    Args:
        expert_mask: which rows are an expert's, bool [b]; None: none is.
        num_expert_tokens, num_expert_sequences: how many of `num_tokens` and `num_sequences` are theirs; None: of the
            tensors at hand.
        mu: weight of the expert data, from 0 to 1.
        usual: name of the loss of the rollouts, or the dotted path of your own.
        usual_args: its arguments, such as clip_range_high.
        loss_agg_mode: of both terms, see `aggregate`; None: of each term its own loss's. `usual_args` may have another
            one for the rollouts.

    Returns:
        The loss; the metrics of the usual loss, of the rollouts and before the weighting; and `sft_loss`, the expert's
        term before the weighting.

    Raises:
        ConfigError: mu is out of range, the usual loss is this one, or as the usual loss says.
        ValueError, TypeError: an unknown loss, or an argument that it does not have.
    """
    number("algorithm.policy_loss.args.mu", mu, least=0, most=1)
    if usual == "mix":
        raise ConfigError("algorithm.policy_loss.args.usual is mix: give the loss of the rollouts, such as ppo.")
    aggregation: dict[str, Any] = {} if loss_agg_mode is None else {"loss_agg_mode": loss_agg_mode}
    usual_fn = create_policy_loss(usual, **(aggregation | dict(usual_args or {})))
    mask = action_mask.bool()
    expert = mask.new_zeros(len(mask)) if expert_mask is None else expert_mask.bool()
    parts = _totals(mask, expert, num_expert_tokens, num_expert_sequences, totals)
    # An expert's rows are always computed.
    computed = None if num_computed_tokens is None else num_computed_tokens - (parts[1].get("num_tokens") or 0)
    extras = accepted(usual_fn, {"ref_logprobs": ref_logprobs, "num_computed_tokens": computed})
    usual_loss, metrics = usual_fn(logprobs, old_logprobs, mask & ~expert[:, None], advantages, **parts[0], **extras)
    expert_loss, _ = sft(logprobs, old_logprobs, mask & expert[:, None], advantages, **aggregation, **parts[1])
    return (1 - mu) * usual_loss + mu * expert_loss, metrics | {"sft_loss": expert_loss.detach()}


def _totals(
    mask: Tensor, expert: Tensor, expert_tokens: int | None, expert_sequences: int | None, totals: BatchTotals
) -> tuple[BatchTotals, BatchTotals]:
    """Totals of the rollouts and of the expert's data, those not given counted in the tensors at hand."""
    tokens, sequences = totals.get("num_tokens"), totals.get("num_sequences")
    tokens = int(mask.sum()) if tokens is None else tokens
    sequences = len(mask) if sequences is None else sequences
    expert_tokens = int(mask[expert].sum()) if expert_tokens is None else expert_tokens
    expert_sequences = int(expert.sum()) if expert_sequences is None else expert_sequences
    longest = totals.get("max_response_length")
    rollouts = BatchTotals(
        num_tokens=tokens - expert_tokens, num_sequences=sequences - expert_sequences, max_response_length=longest
    )
    experts = BatchTotals(num_tokens=expert_tokens, num_sequences=expert_sequences, max_response_length=longest)
    return rollouts, experts
