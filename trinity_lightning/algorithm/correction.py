"""Compares the policy that sampled with the one that trains, and corrects for their difference.

Responses are sampled by the inference engine, whose numerics (and sometimes weights) are not the trainer's. The
functions take per-token tensors [b, r] of one micro-batch, and return metrics that combine by `combine_metrics`.
Throughout:

- `old_logprobs` are the trainer's log-probabilities before the step's first update;
- `rollout_logprobs` are the engine's;
- `action_mask` is True for trained tokens;
- `num_tokens` are the trained tokens of the whole optimizer batch; None: they are counted in these tensors.
"""

from torch import Tensor

from trinity_lightning.algorithm.policy_loss.policy_loss import MAX_LOG_RATIO, aggregate, log_ratio, peak, token_share
from trinity_lightning.config.algorithm import CORRECTION_LEVELS, CORRECTION_MODES
from trinity_lightning.config.values import one_of
from trinity_lightning.errors import ConfigError


def logprob_difference(
    old_logprobs: Tensor, rollout_logprobs: Tensor, action_mask: Tensor, *, num_tokens: int | None = None
) -> dict[str, Tensor]:
    """Metrics logprob_diff/mean and logprob_diff/max: |old - rollout| over the trained tokens."""
    difference = (old_logprobs.detach() - rollout_logprobs).abs().masked_fill(~action_mask.bool(), 0.0)
    return {
        "logprob_diff/mean": aggregate(difference, action_mask, num_tokens=num_tokens),
        "logprob_diff/max": peak(difference),
    }


def rollout_correction(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    action_mask: Tensor,
    *,
    level: str = "token",
    mode: str = "truncate",
    min_weight: float = 0.0,
    max_weight: float = 2.0,
    num_tokens: int | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Truncated or masked importance weights w = exp(old - rollout), to multiply the policy loss by.

    Multiply the *advantages* by them: policy losses are linear in the advantages for weights of at least 0. A loss that
    ignores the advantages is not corrected. (Yao et al., "Your efficient RL framework secretly brings you off-policy RL
    training", 2025.)

    Args:
        level: "token": each token has its own weight; "sequence": all tokens have the product over the sequence.
        mode: "truncate": clamp weights to [min_weight, max_weight]; "mask": set those outside to 0.
        min_weight, max_weight: the bounds.

    Returns:
        Weights without gradient, 0 outside the mask [b, r]; and metrics over trained tokens: is_weight/mean and
        is_weight/max after truncation or masking, and is_weight/clipfrac, the share outside the bounds.

    Raises:
        ConfigError: unknown level or mode, or not 0 <= min_weight <= max_weight.
    """
    one_of("algorithm.rollout_correction.level", level, CORRECTION_LEVELS)
    one_of("algorithm.rollout_correction.mode", mode, CORRECTION_MODES)
    if not 0 <= min_weight <= max_weight:
        raise ConfigError(
            f"bounds of rollout correction must be 0 <= min <= max, not {min_weight} and {max_weight}.",
            key="algorithm.rollout_correction.low",
        )
    log_w = log_ratio(old_logprobs.detach(), rollout_logprobs, action_mask)
    if level == "sequence":
        log_w = log_w.sum(-1, keepdim=True).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).expand_as(log_w)
    raw = log_w.exp()
    outside = (raw < min_weight) | (raw > max_weight)
    weights = raw.clamp(min_weight, max_weight) if mode == "truncate" else raw.masked_fill(outside, 0.0)
    weights = weights.masked_fill(~action_mask.bool(), 0.0)
    return weights, {
        "is_weight/mean": aggregate(weights, action_mask, num_tokens=num_tokens),
        "is_weight/max": peak(weights),
        "is_weight/clipfrac": token_share(outside, action_mask, num_tokens),
    }


def off_policy_mask(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    action_mask: Tensor,
    advantages: Tensor,
    *,
    threshold: float,
    num_tokens: int | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """A mask that leaves out bad tokens of sequences that the policy has moved away from; multiply *advantages* by it.

    Tokens with A < 0 are left out where the sequence's mean of (rollout - present) log-probability, an estimate of
    KL(rollout || present), is above the threshold: a response that the policy no longer gives need not be pushed down
    further (DeepSeek-V3.2, arXiv 2512.02556, equation 9). The totals that normalise the loss still count them.

    Args:
        logprobs, advantages: see `PolicyLossFn` [b, r].
        threshold: in nats a token.

    Returns:
        1 for tokens that stay and 0 for the others [b, r], without gradient; and the metric off_policy_mask/frac, the
        share of trained tokens that are left out.
    """
    drift = -log_ratio(logprobs.detach(), rollout_logprobs, action_mask)
    mean = drift.sum(-1, keepdim=True) / action_mask.sum(-1, keepdim=True).clamp(min=1)
    left_out = (mean > threshold) & (advantages < 0)
    return (~left_out).to(advantages.dtype), {"off_policy_mask/frac": token_share(left_out, action_mask, num_tokens)}
