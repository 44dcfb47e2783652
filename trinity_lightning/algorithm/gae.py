"""Advantages and returns by GAE, from the values of a critic and rewards; and the critic's loss.

A trajectory is one experience, also of several turns. Its steps are the tokens of its action mask. The tokens between
them, which an environment or a user wrote, take no time. It ends with its last trained token.
"""

import torch
from torch import Tensor


def gae(
    values: Tensor, rewards: Tensor, action_mask: Tensor, gamma: float = 1.0, lam: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimates (Schulman et al. 2016, arXiv 1506.02438, equation 16) and returns.

    With t' the trained token after t: delta_t = r_t + gamma V_t' - V_t, A_t = delta_t + gamma lam A_t', and the return
    is A_t + V_t. After the last trained token V and A are 0.

    Args:
        values: V of the state that predicts each token [b, r].
        rewards: r of each token [b, r].
        action_mask: True for trained tokens, bool [b, r]; values and rewards of the others are ignored, also NaN.
        gamma: discount of a trained token.
        lam: how far advantages look beyond the next value: 0 not at all, 1 to the end.

    Returns:
        Advantages and returns, float32 [b, r], 0 outside the mask; computed in float64.
    """
    mask = action_mask.bool()
    values, rewards = (tensor.double().masked_fill(~mask, 0.0) for tensor in (values, rewards))
    advantages = torch.zeros_like(values)
    next_value = next_advantage = values.new_zeros(len(values))  # of the trained token after t
    for t in reversed(range(values.shape[1])):
        is_step = mask[:, t]
        advantage = rewards[:, t] + gamma * next_value - values[:, t] + gamma * lam * next_advantage
        advantages[:, t] = advantage.masked_fill(~is_step, 0.0)
        next_advantage = torch.where(is_step, advantage, next_advantage)
        next_value = torch.where(is_step, values[:, t], next_value)
    return advantages.float(), (advantages + values).float()


def whitened(advantages: Tensor, action_mask: Tensor) -> Tensor:
    """Advantages [b, r] minus their mean over the mask, divided by their standard deviation; 0 outside the mask."""
    mask = action_mask.bool()
    trained = advantages[mask].double()
    if len(trained) == 0:
        return torch.zeros_like(advantages)
    scaled = (trained - trained.mean()) / (trained.var(correction=0) + 1e-8).sqrt()
    return torch.zeros_like(advantages).masked_scatter(mask, scaled.to(advantages.dtype))


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    action_mask: Tensor,
    *,
    clip_range: float | None = 0.2,
    num_tokens: int | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Mean over tokens of max((V - R)^2, (V_clipped - R)^2) / 2, V_clipped within the range of the old value.

    The clipped value loss of PPO's implementation (github.com/openai/baselines, ppo2), as RLHF took it over.

    Args:
        values: V, with gradient [b, r].
        old_values: values before the step's first update [b, r].
        returns: R [b, r].
        action_mask: True for trained tokens, bool [b, r].
        clip_range: how far V may move from the old value; None: V is not clipped.
        num_tokens: trained tokens of the whole optimizer batch; None: they are counted in these tensors.

    Returns:
        The loss, and metrics: value_loss, and clipfrac, the share of tokens that the clipped term decides.
    """
    mask = action_mask.bool()
    values, old_values, returns = (tensor.masked_fill(~mask, 0.0) for tensor in (values, old_values, returns))
    count = max(int(mask.sum()) if num_tokens is None else num_tokens, 1)
    errors = (values - returns).square()
    clipped = torch.zeros_like(mask)
    if clip_range is not None:
        near = old_values + (values - old_values).clamp(-clip_range, clip_range)
        bounded = (near - returns).square()
        clipped, errors = bounded > errors, torch.maximum(errors, bounded)
    loss = 0.5 * errors.sum() / count
    return loss, {"value_loss": loss.detach(), "clipfrac": clipped.sum() / count}


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """1 - Var(R - V) / Var(R) over trained tokens [n]: 1 is perfect, 0 no better than a constant, or R is constant."""
    if len(returns) == 0 or (spread := returns.double().var(correction=0)) == 0:
        return 0.0
    return float(1 - (returns - values).double().var(correction=0) / spread)
