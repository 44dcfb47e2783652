"""Add strategies with another baseline than GRPO's mean over std: the group's rewards, a critic, or a teacher."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from trinity_lightning.algorithm.add_strategy import functional
from trinity_lightning.algorithm.add_strategy.add_strategy import (
    BufferWriter,
    GroupAdvantageStrategy,
    Groups,
    Metrics,
    TaskAdvantageStrategy,
    action_mask,
    response_values,
    split_valid,
)
from trinity_lightning.common.experience import Experience, group_by
from trinity_lightning.common.runs import Run, is_valid_reward, run_reward
from trinity_lightning.config.values import number


class BaselineAddStrategy(TaskAdvantageStrategy):
    """Base of strategies whose scores are `advantages`; reports reward_mean and reward_std.

    reward_std is the unbiased standard deviation, 0 in a group of one.
    """

    @classmethod
    def default_args(cls) -> dict[str, Any]:
        return {}

    def score(self, rewards: Tensor, groups: Tensor, runs: Sequence[Run]) -> tuple[Tensor, dict[str, Tensor]]:
        stats = functional.group_stats(rewards, groups)
        return self.advantages(rewards, groups, runs), {"reward_mean": stats.mean, "reward_std": stats.std}

    def advantages(self, rewards: Tensor, groups: Tensor, runs: Sequence[Run]) -> Tensor:
        """Scores [B] of rewards [B] in groups [B]: here the rewards themselves."""
        return rewards


class REINFORCEAddStrategy(BaselineAddStrategy):
    """REINFORCE: the reward itself, without a baseline (Williams 1992)."""


class RLOOAddStrategy(BaselineAddStrategy):
    """RLOO: the reward minus the mean of the group's other rewards (arXiv 2402.14740)."""

    def advantages(self, rewards: Tensor, groups: Tensor, runs: Sequence[Run]) -> Tensor:
        return functional.rloo_advantages(rewards, groups)


class DrGRPOAddStrategy(BaselineAddStrategy):
    """Dr. GRPO: the reward minus the group's mean (arXiv 2503.20783)."""

    def advantages(self, rewards: Tensor, groups: Tensor, runs: Sequence[Run]) -> Tensor:
        return functional.dr_grpo_advantages(rewards, groups)


class REINFORCEPlusPlusAddStrategy(BaselineAddStrategy):
    """REINFORCE++: r - mean of the group, whitened over all trained tokens of the step (arXiv 2501.03262)."""

    def advantages(self, rewards: Tensor, groups: Tensor, runs: Sequence[Run]) -> Tensor:
        num_tokens = torch.tensor([sum(int(action_mask(exp).count_nonzero()) for exp in run) for run in runs])
        return functional.reinforce_plus_plus_advantages(rewards, groups, num_tokens)


class ASYMREAddStrategy(BaselineAddStrategy):
    """AsymRE: r - (mean + baseline_shift) (arXiv 2506.20520); a group of one keeps its reward.

    Args:
        baseline_shift: added to the mean; below 0, good responses count for more than bad ones.
    """

    def __init__(self, writer: BufferWriter | None = None, baseline_shift: float = -0.1, **unknown: Any) -> None:
        super().__init__(writer, **unknown)
        self.baseline_shift = number("baseline_shift", baseline_shift)

    @classmethod
    def default_args(cls) -> dict[str, Any]:
        return {"baseline_shift": -0.1}

    def advantages(self, rewards: Tensor, groups: Tensor, runs: Sequence[Run]) -> Tensor:
        return functional.asymre_advantages(rewards, groups, self.baseline_shift)


class CriticAddStrategy(GroupAdvantageStrategy):
    """Sets no advantages: the trainer makes them of the rewards, by the values of a critic (`algorithm.critic`)."""

    @classmethod
    def default_args(cls) -> dict[str, Any]:
        return {}

    def group_experiences(self, exps: list[Experience]) -> Groups:
        return group_by(exps, "task")

    def calculate_group_advantage(self, group_id: str, exps: list[Experience]) -> tuple[list[Experience], Metrics]:
        """Remove advantages that the group may have; returns it, and its mean reward as a metric.

        Raises:
            ExperienceError: see `run_reward`.
        """
        for experience in exps:
            experience.advantages = experience.returns = None
        return exps, {"reward_mean": fmean(run_reward([experience]) for experience in exps)}


class OnPolicyDistillAddStrategy(GroupAdvantageStrategy):
    """kl_coef * (teacher_logprobs - logprobs) of each trained token: a teacher's opinion in place of a reward.

    Source: "On-Policy Distillation", Thinking Machines Lab, 2025. Experiences need no reward. A group is left out if a
    reward, or a log-probability of a trained token, is no finite number. The metric reverse_kl is the mean of
    logprobs - teacher_logprobs over a task's trained tokens: an estimate of KL(policy || teacher), in nats.

    Args:
        kl_coef: weight of the difference, above 0: below it, the policy would move away from the teacher.
    """

    def __init__(self, writer: BufferWriter | None = None, kl_coef: float = 1.0, **unknown: Any) -> None:
        super().__init__(writer, **unknown)
        self.kl_coef = number("kl_coef", kl_coef, above=0)

    @classmethod
    def default_args(cls) -> dict[str, Any]:
        return {"kl_coef": 1.0}

    def group_experiences(self, exps: list[Experience]) -> Groups:
        return group_by(exps, "task")

    def split_valid(self, groups: Groups) -> tuple[Groups, int]:
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
            # Chosen, not multiplied: tokens that are not trained may hold NaN.
            exp.advantages = torch.where(mask, scores, 0.0).float()
            exp.returns = exp.advantages.clone()
            total += float((student.double() - teacher.double())[mask].sum())
            tokens += int(mask.sum())
        return exps, {"reverse_kl": total / tokens} if tokens else {}


def _logprobs(exp: Experience) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the response under teacher and policy, each [response]."""
    use = "which on_policy_distill compares"
    return response_values(exp, "teacher_logprobs", use), response_values(exp, "logprobs", use)


def _is_valid(exp: Experience) -> bool:
    difference = functional.distillation_advantages(*_logprobs(exp))[action_mask(exp).bool()]
    return (exp.reward is None or is_valid_reward(exp.reward)) and bool(torch.isfinite(difference).all())
