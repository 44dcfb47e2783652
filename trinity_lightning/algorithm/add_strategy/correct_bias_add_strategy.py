"""CorrectBias: GRPO that rewards what the policy found unlikely, against its bias towards the already likely."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trinity_lightning.algorithm.add_strategy import functional
from trinity_lightning.algorithm.add_strategy.add_strategy import ADD_STRATEGY, GRPOAddStrategy
from trinity_lightning.algorithm.add_strategy.arguments import not_negative
from trinity_lightning.common.experience import Experience, ExperienceError
from trinity_lightning.common.writer import BufferWriter


@ADD_STRATEGY.register("correct_bias")
class CorrectBiasAddStrategy(GRPOAddStrategy):
    """GRPO on r' = r * (1 - rank / n * rank_penalty) (unlikeliness reward, arXiv 2506.02355).

    Within a task, rank 0 is the response with the lowest mean log-probability; equal ones share their average rank.
    The metrics reward_mean and reward_std are those of r'.

    Args:
        writer: where the experiences go.
        epsilon: added to the standard deviation.
        rank_penalty: share of its reward that the likeliest response of a large group loses.
    """

    def __init__(self, writer: BufferWriter, epsilon: float = 1e-6, rank_penalty: float = 0.25, **unknown: Any) -> None:
        self._refuse(unknown)
        super().__init__(writer, epsilon)
        self.rank_penalty = not_negative("rank_penalty", rank_penalty)

    @classmethod
    def default_args(cls) -> dict[str, Any]:
        return {"epsilon": 1e-6, "rank_penalty": 0.25}

    def score(self, rewards: Tensor, groups: Tensor, exps: Sequence[Experience]) -> tuple[Tensor, dict[str, Tensor]]:
        """GRPO's scores of the penalised rewards; see `TaskAdvantageStrategy.score`.

        Raises:
            ExperienceError: one of a group of several has no log-probabilities, or their mean is no finite number.
        """
        lone = (groups.bincount() == 1)[groups].tolist()
        # A lone response has rank 0 whatever its log-probabilities, and may do without them.
        likelihoods = [0.0 if alone else _mean_logprob(exp) for exp, alone in zip(exps, lone, strict=True)]
        penalised = functional.rank_penalised_rewards(
            rewards, groups, torch.tensor(likelihoods, dtype=torch.float64), self.rank_penalty
        )
        return super().score(penalised, groups, exps)


def _mean_logprob(exp: Experience) -> float:
    if exp.logprobs is None:
        raise ExperienceError(f"experience {exp.eid} has no logprobs, by which correct_bias ranks its group.")
    mean = exp.logprobs.double().mean()
    if not torch.isfinite(mean):
        raise ExperienceError(
            f"experience {exp.eid}: the mean of its {len(exp.logprobs)} logprobs is {mean.item()}; correct_bias "
            "needs a finite number to rank it by."
        )
    return mean.item()
