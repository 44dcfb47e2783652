"""On-policy distillation: a teacher's opinion of each token takes the place of a reward."""

from typing import Any

import torch
from torch import Tensor

from trinity_lightning.algorithm.add_strategy import functional
from trinity_lightning.algorithm.add_strategy.add_strategy import (
    GroupAdvantageStrategy,
    Groups,
    Metrics,
    action_mask,
    response_values,
    split_valid,
)
from trinity_lightning.common.experience import Experience, group_by
from trinity_lightning.common.runs import is_valid_reward
from trinity_lightning.common.writer import BufferWriter
from trinity_lightning.config.values import number


class OnPolicyDistillAddStrategy(GroupAdvantageStrategy):
    """kl_coef * (teacher_logprobs - logprobs) of each trained token.

    Source: "On-Policy Distillation", Thinking Machines Lab, 2025. Experiences need no reward, but one that is not a
    finite number leaves its group out, as does such a log-probability of a trained token. The metric reverse_kl is the
    mean of logprobs - teacher_logprobs over a task's trained tokens: an estimate of KL(policy || teacher), in nats.

    Args:
        writer: where the experiences go, one write a task.
        kl_coef: weight of the difference, above 0: below it, the policy would move away from the teacher.
    """

    def __init__(self, writer: BufferWriter, kl_coef: float = 1.0, **unknown: Any) -> None:
        super().__init__(writer, **unknown)
        self.kl_coef = number("kl_coef", kl_coef, above=0)

    @classmethod
    def default_args(cls) -> dict[str, Any]:
        return {"kl_coef": 1.0}

    def group_experiences(self, exps: list[Experience]) -> Groups:
        """The experiences of each task."""
        return group_by(exps, "task")

    def split_valid(self, groups: Groups) -> tuple[Groups, int]:
        """The groups without a reward or log-probability that is no finite number, and the number of the others."""
        return split_valid(groups, lambda exps: all(map(_is_valid, exps)), "reward or log-probability")

    def calculate_group_advantage(self, group_id: str, exps: list[Experience]) -> tuple[list[Experience], Metrics]:
        """Set the advantages of one task's experiences.

        Raises:
            ExperienceError: an experience lacks logprobs or teacher_logprobs, or they do not fit its action mask.
        """
        total, tokens = 0.0, 0
        for exp in exps:
            mask, (teacher, student) = action_mask(exp).bool(), _logprobs(exp)
            scores = functional.distillation_advantages(teacher, student, self.kl_coef)
            # Chosen, not multiplied: what stands at tokens that are not trained does not matter.
            exp.advantages = torch.where(mask, scores, 0.0).float()
            exp.returns = exp.advantages.clone()
            total += float((student.double() - teacher.double())[mask].sum())
            tokens += int(mask.sum())
        return exps, {"reverse_kl": total / tokens} if tokens else {}


def _logprobs(exp: Experience) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the response under teacher and policy, each [response]."""
    teacher, student = (
        response_values(exp, name, "which on_policy_distill compares") for name in ("teacher_logprobs", "logprobs")
    )
    return teacher, student


def _is_valid(exp: Experience) -> bool:
    difference = functional.distillation_advantages(*_logprobs(exp))[action_mask(exp).bool()]
    return (exp.reward is None or is_valid_reward(exp.reward)) and bool(torch.isfinite(difference).all())
