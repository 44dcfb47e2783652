"""What a policy loss is and depends on, found out by trying it on four tokens."""

from typing import Any

import torch
from torch import Tensor

from trinity_lightning.algorithm.policy_loss.policy_loss import PolicyLossFn, accepted


def has_gradient_without_advantage(loss_fn: PolicyLossFn) -> bool:
    """Whether tokens of advantage 0 are trained nevertheless (as in supervised fine-tuning), found out by trying."""
    return bool(tried(loss_fn, advantage=0.0, moved=0.5)[1].any())


def is_weighed(loss_fn: PolicyLossFn) -> bool:
    """Whether a weight of an advantage is one of the token's loss, which is proportional to it, or ignores it."""
    for sign in (1.0, -1.0):
        (loss, _), (double, _) = (tried(loss_fn, sign * scale, moved=0.1) for scale in (1.0, 2.0))
        if not (torch.allclose(double, 2 * loss) or torch.equal(double, loss)):
            return False
    return True


def tried(loss_fn: PolicyLossFn, advantage: float, moved: float = 0.0, apart: float = 0.3) -> tuple[Tensor, Tensor]:
    """Loss and gradient of four tokens; see `call`."""
    (loss, _), logprobs = call(loss_fn, advantage, moved, apart)
    (gradient,) = torch.autograd.grad(loss, logprobs, allow_unused=True)
    return loss.detach(), torch.zeros(2, 2) if gradient is None else gradient


def call(
    loss_fn: PolicyLossFn, advantage: float, moved: float = 0.0, apart: float = 0.3
) -> tuple[tuple[Tensor, dict[str, Tensor]], Tensor]:
    """What a loss returns of four tokens, so far from old policy and reference; and their log-probabilities."""
    logprobs = torch.tensor([[-1.0, -2.0], [-3.0, -0.5]], requires_grad=True)
    old, mask = logprobs.detach() - moved, torch.ones(2, 2, dtype=torch.bool)
    ref = logprobs.detach() - apart  # whatever `moved` is: a loss may depend on it, and have no ratio
    teacher = logprobs.detach() - 0.3
    extras = {"ref_logprobs": ref, "num_computed_tokens": 4, "expert_mask": torch.zeros(2, dtype=torch.bool)}
    extras |= {"num_expert_tokens": 0, "num_expert_sequences": 0, "pairs": torch.tensor([[0, 1]])}
    extras |= {"top_k_logprobs": torch.stack([logprobs, logprobs - 1], -1)}
    extras |= {"teacher_top_k_logprobs": torch.stack([teacher, teacher - 2], -1)}
    totals: dict[str, Any] = {"num_tokens": 4, "num_sequences": 2, "max_response_length": 2}
    advantages = torch.full((2, 2), advantage)
    return loss_fn(logprobs, old, mask, advantages, **totals, **accepted(loss_fn, extras)), logprobs
