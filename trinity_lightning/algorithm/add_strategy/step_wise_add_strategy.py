"""Add strategies for runs of several steps: they compare runs, and `gigpo` compares single steps, too."""

import math
from abc import abstractmethod
from collections.abc import Hashable, Mapping
from itertools import accumulate, compress
from typing import Any

import torch

from trinity_lightning.algorithm.add_strategy import functional
from trinity_lightning.algorithm.add_strategy.add_strategy import (
    AddStrategy,
    BufferWriter,
    Groups,
    Metrics,
    by_group,
    check_returned,
    have_valid_rewards,
    index_of,
    reject_dpo,
    reward_metrics,
    set_advantages,
    split_valid,
)
from trinity_lightning.common.experience import Experience, ExperienceError, group_by
from trinity_lightning.common.runs import last_step, runs_of, spread_of_each
from trinity_lightning.config.values import flag, number, numbered, one_of, text


class RunAdvantageStrategy(AddStrategy):
    """An add strategy that groups by task and then by run (`runs_of`), and writes one run at a time.

    Each experience is weighed as a step of its run; the steps of a run may have different rewards. A task is left out,
    as by `GroupAdvantageStrategy`, if an experience that `rewarded` returns has a reward that is no finite number.
    """

    @abstractmethod
    def weigh_tasks(self, tasks: list[Groups]) -> list[Metrics]:
        """Set `advantages` and `returns` [response] of every task's runs, given by id; returns each task's metrics."""

    def rewarded(self, runs: Groups) -> list[Experience]:
        """The experiences of a task that must have a finite reward: the last step of every run."""
        return [last_step(exps) for exps in runs.values()]

    async def add(  # pyright: ignore[reportIncompatibleMethodOverride]  # `exps` is the name its users know
        self, exps: list[Experience], step: int
    ) -> tuple[int, Metrics]:
        if not exps:
            return 0, {}
        reject_dpo(exps)
        tasks = {task: _by_run(group) for task, group in group_by(exps, "task").items()}
        valid, invalid = split_valid({task: self.rewarded(runs) for task, runs in tasks.items()})
        weighed = [tasks[task] for task in valid]
        metrics = self.weigh_tasks(weighed) if weighed else []
        to_write = compress(weighed, self.kept_groups([list(runs.values()) for runs in weighed]))
        runs = (run for by_id in to_write for run in by_id.values())
        written, counts = await self.write_groups(runs, len(exps), invalid)
        return written, spread_of_each(metrics, "group_advantages") | counts


def _by_run(group: list[Experience]) -> Groups:
    """The runs of a task by id; ids that several runs share get a number."""
    runs = runs_of(group)
    return dict(zip(numbered([run[0].eid.rid for run in runs]), runs, strict=True))


class StepWiseGRPOStrategy(RunAdvantageStrategy):
    """GRPO over the rewards of the runs' last steps; every step of a run gets its run's score (as in rLLM).

    The last step is the one with the greatest `eid.step`. Rewards of other steps do not count, and may be missing.

    Args:
        epsilon: added to the standard deviation.
        enable_step_norm: divide the score by the number of the run's steps, so that long runs weigh no more than short.
        std_level, std_threshold: see `GRPOAddStrategy`; here they apply to the rewards of the last steps.
    """

    def __init__(
        self,
        writer: BufferWriter | None = None,
        epsilon: float = 1e-6,
        enable_step_norm: bool = False,
        std_level: str = "group",
        std_threshold: float | None = None,
        **unknown: Any,
    ) -> None:
        super().__init__(writer, **unknown)
        self.epsilon = number("epsilon", epsilon, least=0)
        self.enable_step_norm = flag("enable_step_norm", enable_step_norm)
        self.std_level = one_of("std_level", std_level, functional.STD_LEVELS)
        self.std_threshold = number("std_threshold", std_threshold, least=0, optional=True)

    @classmethod
    def default_args(cls) -> dict[str, Any]:
        return {"epsilon": 1e-6, "enable_step_norm": False}

    def calculate_group_advantage(self, exps: dict[str, Experience]) -> tuple[dict[str, float], Metrics]:
        """Scores of a task's runs, by run id, from their last steps; and the task's reward_mean and reward_std.

        Raises:
            ExperienceError: a reward is no finite number.
        """
        if not have_valid_rewards(list(exps.values())):
            raise ExperienceError(f"runs {', '.join(exps)}: every reward must be a finite number.")
        scores, metrics = self._score([exps])
        return scores[0], metrics[0]

    def broadcast_advantages(self, run_exps: Groups, scores: dict[str, float]) -> Groups:
        """Give every step of a run the run's score as `advantages` and `returns`; runs and scores are by run id."""
        for run_id, exps in run_exps.items():
            score = scores[run_id] / len(exps) if self.enable_step_norm else scores[run_id]
            set_advantages(exps, [score] * len(exps))
        return run_exps

    def weigh_tasks(self, tasks: list[Groups]) -> list[Metrics]:
        last_steps = [{run_id: last_step(exps) for run_id, exps in runs.items()} for runs in tasks]
        if type(self).calculate_group_advantage is StepWiseGRPOStrategy.calculate_group_advantage:
            scores, metrics = self._score(last_steps)
        else:
            weighed = [self.calculate_group_advantage(exps) for exps in last_steps]
            for returned in weighed:
                check_returned(self, "calculate_group_advantage", returned, Mapping, "scores by run, metrics by name")
            scores, metrics = [score for score, _ in weighed], [metric for _, metric in weighed]
        for runs, run_scores in zip(tasks, scores, strict=True):
            self.broadcast_advantages(runs, run_scores)
        return metrics

    def _score(self, tasks: list[dict[str, Experience]]) -> tuple[list[dict[str, float]], list[Metrics]]:
        rewards = torch.tensor([exp.reward for exps in tasks for exp in exps.values()], dtype=torch.float64)
        groups = index_of(tasks)
        scores = iter(functional.grpo_advantages(rewards, groups, self.epsilon, self.std_level).tolist())
        metrics = by_group(reward_metrics(rewards, groups), len(tasks))
        return [{run_id: next(scores) for run_id in exps} for exps in tasks], metrics


class GiGPOAddStrategy(RunAdvantageStrategy):
    """Group-in-group policy optimization (arXiv 2505.10978): A = A_episode + step_weight * A_step.

    An experience is a step of an episode, and has the step's reward; without one, a step before the last has reward 0.
    An episode's return is the sum of its rewards. A step's return is R_t = r_t + gamma * R_(t+1). It is compared with
    the returns of all steps of the task, in any run, that were taken from the same state. Metrics of a task:
    reward_mean and reward_std of its episodes' returns, and repeated_state_ratio, the share of steps whose state was
    met more than once. If that is 0, this is step-wise GRPO.

    Args:
        epsilon: added to the standard deviations.
        step_weight: weight of A_step.
        gamma: discount of later rewards in a step's return, from 0 to 1.
        std_norm: divide by the standard deviations; else only subtract the means.
        state_key: entry of `Experience.info` that holds the state before the step: text, numbers, lists or dicts.
    """

    def __init__(
        self,
        writer: BufferWriter | None = None,
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
        with_reward = [exp for exps in runs.values() for exp in exps if exp.reward is not None]
        return [*super().rewarded(runs), *with_reward]

    def weigh_tasks(self, tasks: list[Groups]) -> list[Metrics]:
        """Weigh all steps of all tasks at once.

        Raises:
            ExperienceError: an experience has no state in its info, or one that cannot be compared.
        """
        episodes = [sorted(exps, key=lambda exp: exp.eid.step) for runs in tasks for exps in runs.values()]
        task_of = index_of(tasks)
        steps = [exp for exps in episodes for exp in exps]
        episode_of = index_of(episodes)
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
        last_first = accumulate(map(_reward, reversed(exps)), lambda later, reward: reward + self.gamma * later)
        return list(last_first)[::-1]

    def _states(self, steps: list[Experience], tasks: list[int]) -> torch.Tensor:
        """Position of each step's state among the states of the explore step [S]; states of different tasks differ."""
        positions: dict[Hashable, int] = {}
        states = zip(tasks, map(self._state, steps), strict=True)
        return torch.tensor([positions.setdefault(state, len(positions)) for state in states])

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
    """A key that is equal for equal values. TypeError: a value is compared by its identity, or is not hashable."""
    if isinstance(value, list | tuple):
        return tuple(map(_hashable, value))
    if isinstance(value, dict):
        return frozenset((key, _hashable(item)) for key, item in value.items())
    by_identity = type(value).__hash__ in (object.__hash__, None) or isinstance(value, torch.Tensor)
    if value is not None and by_identity:
        raise TypeError(f"{type(value).__name__} has no value to compare")
    return value
