"""CorrectBias: GRPO that favours unlikely responses, against the policy's bias towards likely ones."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trinity_lightning.algorithm.add_strategy import functional
from trinity_lightning.algorithm.add_strategy.add_strategy import (
    BufferWriter,
    GRPOAddStrategy,
    action_mask,
    response_values,
)
from trinity_lightning.common.experience import ExperienceError
from trinity_lightning.common.runs import Run
from trinity_lightning.config.values import number


class CorrectBiasAddStrategy(GRPOAddStrategy):
    """GRPO on r' = r * (1 - rank / n * rank_penalty) (unlikeliness reward, arXiv 2506.02355).

    Within a task, the run with the lowest mean log-probability of its trained tokens (of all its tokens, if none is
    trained) has rank 0; equal ones share their average rank. The metrics are reward_mean and reward_std of r'.

    Args:
        epsilon: added to the standard deviation.
        rank_penalty: share of its reward that the likeliest response of a large group loses.
    """

    def __init__(
        self, writer: BufferWriter | None = None, epsilon: float = 1e-6, rank_penalty: float = 0.25, **unknown: Any
    ) -> None:
        self._refuse(unknown)
        super().__init__(writer, epsilon)
        self.rank_penalty = number("rank_penalty", rank_penalty, least=0)

    @classmethod
    def default_args(cls) -> dict[str, Any]:
        return {"epsilon": 1e-6, "rank_penalty": 0.25}

    def score(self, rewards: Tensor, groups: Tensor, runs: Sequence[Run]) -> tuple[Tensor, dict[str, Tensor]]:
        """GRPO's scores of the penalised rewards; see `TaskAdvantageStrategy.score`.

        Raises:
            ExperienceError: an experience in a group of several has no log-probabilities, or their mean is no finite
                number.
        """
        lone = (groups.bincount() == 1)[groups].tolist()
        # A lone run has rank 0 in any case, and needs no log-probabilities.
        likelihoods = [0.0 if alone else _mean_logprob(run) for run, alone in zip(runs, lone, strict=True)]
        penalised = functional.rank_penalised_rewards(
            rewards, groups, torch.tensor(likelihoods, dtype=torch.float64), self.rank_penalty
        )
        return super().score(penalised, groups, runs)


def _mean_logprob(run: Run) -> float:
    use = "by which correct_bias ranks its group"
    logprobs = torch.cat([response_values(exp, "logprobs", use).double() for exp in run])
    mask = torch.cat([action_mask(exp).bool() for exp in run])
    if mask.any():
        logprobs = logprobs[mask]
    mean = logprobs.mean()
    if not torch.isfinite(mean):
        raise ExperienceError(
            f"experience {run[-1].eid}: the mean of its {len(logprobs)} logprobs is {mean.item()}; correct_bias "
            "needs a finite number to rank it by."
        )
    return mean.item()
