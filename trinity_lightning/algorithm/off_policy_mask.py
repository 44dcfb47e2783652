"""Tokens that are left out of the loss: of bad responses that the policy no longer says."""

from torch import Tensor

from trinity_lightning.algorithm.policy_loss.policy_loss import log_ratio, token_share


def off_policy_mask(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    action_mask: Tensor,
    advantages: Tensor,
    *,
    threshold: float,
    num_tokens: int | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Which tokens are kept of sequences that the policy has moved away from; multiply the *advantages* by it.

    Tokens with A < 0 are left out where the sequence's mean of (rollout - present) log-probability, an estimate of
    KL(rollout || present), is above the threshold: what the policy no longer says need not be pushed down further
    (DeepSeek-V3.2, arXiv 2512.02556, equation 9). The totals that normalise the loss still count them.

    Args:
        logprobs: the present policy's [b, r].
        rollout_logprobs: those of the policy that sampled [b, r].
        action_mask: which tokens are trained, bool [b, r].
        advantages: A [b, r].
        threshold: in nats a token.
        num_tokens: trained tokens of the whole optimizer batch; None: of these tensors.

    Returns:
        1 and 0 [b, r], without gradient; and the metric off_policy_mask/frac, the share of trained tokens left out.
    """
    drift = -log_ratio(logprobs.detach(), rollout_logprobs, action_mask)
    mean = drift.sum(-1, keepdim=True) / action_mask.sum(-1, keepdim=True).clamp(min=1)
    left_out = (mean > threshold) & (advantages < 0)
    return (~left_out).to(advantages.dtype), {"off_policy_mask/frac": token_share(left_out, action_mask, num_tokens)}
