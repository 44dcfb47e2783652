"""GiGPO: steps are compared with other steps from the same state, besides runs with other runs of the same task."""

import math
from collections.abc import Hashable
from itertools import accumulate
from typing import Any

import torch

from trinity_lightning.algorithm.add_strategy import functional
from trinity_lightning.algorithm.add_strategy.add_strategy import (
    Groups,
    Metrics,
    by_group,
    reward_metrics,
    set_advantages,
)
from trinity_lightning.algorithm.add_strategy.step_wise_add_strategy import RunAdvantageStrategy
from trinity_lightning.common.experience import Experience, ExperienceError
from trinity_lightning.common.writer import BufferWriter
from trinity_lightning.config.values import flag, number, text


class GiGPOAddStrategy(RunAdvantageStrategy):
    """Group-in-group policy optimization (arXiv 2505.10978): A = A_episode + step_weight * A_step.

    The reward of an experience is that of its step; a step before the last may have none, which counts as 0. An
    episode's return is the sum of its rewards. A step's return R_t = r_t + gamma * R_(t+1) is compared with those of
    all steps of the task, in any run, that were taken from the same state.

    Metrics of a task: reward_mean and reward_std of its episodes' returns, and repeated_state_ratio, the share of steps
    whose state was met more than once: at 0 this is step-wise GRPO.

    Args:
        writer: where the experiences go, one write a run.
        epsilon: added to the standard deviations.
        step_weight: weight of A_step.
        gamma: discount of later rewards in a step's return, from 0 to 1.
        std_norm: divide by the standard deviations; else only subtract the means.
        state_key: entry of `Experience.info` that holds the state before the step: text, numbers, lists or dicts.
    """

    def __init__(
        self,
        writer: BufferWriter,
        epsilon: float = 1e-6,
        step_weight: float = 1.0,
        gamma: float = 0.95,
        std_norm: bool = True,
        state_key: str = "state",
        **unknown: Any,
    ) -> None:
        super().__init__(writer, **unknown)
        self.epsilon = number("epsilon", epsilon, least=0)
        self.step_weight = number("step_weight", step_weight)
        self.gamma = number("gamma", gamma, least=0, most=1)
        self.std_norm = flag("std_norm", std_norm)
        self.state_key = text("state_key", state_key)

    @classmethod
    def default_args(cls) -> dict[str, Any]:
        return {"epsilon": 1e-6, "step_weight": 1.0, "gamma": 0.95, "std_norm": True, "state_key": "state"}

    def rewarded(self, runs: Groups) -> list[Experience]:
        """The last step of every run, and every other step that has a reward."""
        others = [exp for exps in runs.values() for exp in exps if exp.reward is not None]
        return [*super().rewarded(runs), *others]

    def weigh_tasks(self, tasks: list[Groups]) -> list[Metrics]:
        """All steps of all tasks at once.

        Raises:
            ExperienceError: an experience has no state in its info, or one that cannot be compared.
        """
        episodes = [sorted(exps, key=lambda exp: exp.eid.step) for runs in tasks for exps in runs.values()]
        task_of = torch.repeat_interleave(torch.tensor([len(runs) for runs in tasks]))
        steps = [exp for exps in episodes for exp in exps]
        episode_of = torch.repeat_interleave(torch.tensor([len(exps) for exps in episodes]))
        episode_returns = torch.tensor([math.fsum(map(_reward, exps)) for exps in episodes], dtype=torch.float64)
        step_returns = [value for exps in episodes for value in self._step_returns(exps)]
        task_of_step = task_of[episode_of]
        states = self._states(steps, task_of_step.tolist())
        scores = functional.gigpo_advantages(
            episode_returns,
            task_of,
            torch.tensor(step_returns, dtype=torch.float64),
            episode_of,
            states,
            epsilon=self.epsilon,
            step_weight=self.step_weight,
            std_norm=self.std_norm,
        )
        set_advantages(steps, scores.tolist())
        repeated = (states.bincount() > 1)[states].double()
        ratio = functional.group_stats(repeated, task_of_step).mean
        metrics = reward_metrics(episode_returns, task_of) | {"repeated_state_ratio": ratio}
        return by_group(metrics, len(tasks))

    def _step_returns(self, exps: list[Experience]) -> list[float]:
        """Discounted sum of the rewards from each step of an episode on."""
        backwards = accumulate(map(_reward, reversed(exps)), lambda later, reward: reward + self.gamma * later)
        return list(backwards)[::-1]

    def _states(self, steps: list[Experience], tasks: list[int]) -> torch.Tensor:
        """Position of each step's state among those of the explore step; states of different tasks differ. [S]."""
        positions: dict[Hashable, int] = {}
        return torch.tensor(
            [
                positions.setdefault((task, self._state(exp)), len(positions))
                for exp, task in zip(steps, tasks, strict=True)
            ]
        )

    def _state(self, exp: Experience) -> Hashable:
        if self.state_key not in exp.info:
            raise ExperienceError(
                f"experience {exp.eid} has no info['{self.state_key}']: gigpo needs the state before each step. "
                "Let the workflow set it, or name another entry as state_key."
            )
        try:
            return _hashable(exp.info[self.state_key])
        except TypeError as error:
            raise ExperienceError(
                f"experience {exp.eid}: info['{self.state_key}'] must be text, numbers, lists or dicts: {error}."
            ) from error


def _reward(exp: Experience) -> float:
    return 0.0 if exp.reward is None else exp.reward


def _hashable(value: Any) -> Hashable:
    """A key that is equal for equal values. TypeError: a value that is compared by its identity, or not hashable."""
    if isinstance(value, list | tuple):
        return tuple(map(_hashable, value))
    if isinstance(value, dict):
        return frozenset((key, _hashable(item)) for key, item in value.items())
    by_identity = type(value).__hash__ in (object.__hash__, None) or isinstance(value, torch.Tensor)
    if value is not None and by_identity:
        raise TypeError(f"{type(value).__name__} has no value to compare")
    return value
