"""Add strategies for runs of several steps: an experience a step, and what a run was worth for all of them."""

from abc import abstractmethod
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch

from trinity_lightning.algorithm.add_strategy import functional
from trinity_lightning.algorithm.add_strategy.add_strategy import (
    INVALID_GROUP_COUNT,
    AddStrategy,
    Groups,
    Metrics,
    by_group,
    reject_dpo,
    reward_metrics,
    set_advantages,
    split_valid,
)
from trinity_lightning.common.experience import Experience, ExperienceError, group_by
from trinity_lightning.common.runs import last_step, raw_reward
from trinity_lightning.common.spread import spread_of_each
from trinity_lightning.common.writer import BufferWriter
from trinity_lightning.config.values import flag, number, one_of


class RunAdvantageStrategy(AddStrategy):
    """An add strategy that groups by task and then by run, and writes one run at a time.

    Here each experience is weighed as a step of its run, whatever rewards the other steps have.

    A task of which a reward that matters is no finite number is left out, logged, and counted in
    `group_advantages/invalid_group_count`.
    """

    @abstractmethod
    def weigh_tasks(self, tasks: list[Groups]) -> list[Metrics]:
        """Set `advantages` and `returns` [response] of the runs, by id, of every task: each task's metrics."""

    def rewarded(self, runs: Groups) -> list[Experience]:
        """The experiences of a task whose rewards must be finite numbers: the last step of every run."""
        return [last_step(exps) for exps in runs.values()]

    def kept_tasks(self, tasks: list[Groups]) -> list[bool]:
        """Which tasks to write: all of them, unless a strategy says otherwise."""
        return [True] * len(tasks)

    async def add(  # pyright: ignore[reportIncompatibleMethodOverride]  # `exps` is the name its users know
        self, exps: list[Experience], step: int
    ) -> tuple[int, Metrics]:
        """Weigh and write the experiences, one write a run; see `AddStrategy.add`."""
        if not exps:
            return 0, {}
        reject_dpo(exps)
        tasks = {task: group_by(group, "run") for task, group in group_by(exps, "task").items()}
        valid, invalid = split_valid({task: self.rewarded(runs) for task, runs in tasks.items()})
        weighed = [tasks[task] for task in valid]
        metrics = self.weigh_tasks(weighed) if weighed else []
        written = 0
        for runs, keep in zip(weighed, self.kept_tasks(weighed), strict=True):
            for run in runs.values() if keep else ():
                await self.writer.write_async(run)
                written += len(run)
        counts = {INVALID_GROUP_COUNT: float(invalid)} | self._filtered(len(exps), written)
        return written, spread_of_each(metrics, "group_advantages") | counts


class StepWiseGRPOStrategy(RunAdvantageStrategy):
    """GRPO over the rewards of the runs' last steps; every step of a run gets its run's score (as in rLLM).

    The last step is the one with the greatest `eid.step`. Rewards of other steps do not count, and may be missing.

    Args:
        epsilon: added to the standard deviation.
        enable_step_norm: divide the score by the number of the run's steps, for long runs to weigh no more than short.
        std_level, std_threshold: as `grpo`, of the rewards of the runs' last steps.
    """

    def __init__(
        self,
        writer: BufferWriter,
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
        if split_valid({"runs": list(exps.values())})[1]:
            raise ExperienceError(f"runs {', '.join(exps)}: every reward must be a finite number.")
        scores, metrics = self._score([exps])
        return scores[0], metrics[0]

    def broadcast_advantages(self, run_exps: Groups, scores: dict[str, float]) -> Groups:
        """Set `advantages` and `returns` of every step of each run from its score, both by run id: the runs."""
        for run_id, exps in run_exps.items():
            score = scores[run_id] / len(exps) if self.enable_step_norm else scores[run_id]
            set_advantages(exps, [score] * len(exps))
        return run_exps

    def weigh_tasks(self, tasks: list[Groups]) -> list[Metrics]:
        """All tasks at once, unless a subclass defines `calculate_group_advantage` itself."""
        last_steps = [{run_id: last_step(exps) for run_id, exps in runs.items()} for runs in tasks]
        if type(self).calculate_group_advantage is StepWiseGRPOStrategy.calculate_group_advantage:
            scores, metrics = self._score(last_steps)
        else:
            weighed = [self.calculate_group_advantage(exps) for exps in last_steps]
            scores, metrics = [score for score, _ in weighed], [metric for _, metric in weighed]
        for runs, of_runs in zip(tasks, scores, strict=True):
            self.broadcast_advantages(runs, of_runs)
        return metrics

    def kept_tasks(self, tasks: list[Groups]) -> list[bool]:
        """Those whose runs' rewards before operators have a standard deviation above the threshold, if there is one."""
        if self.std_threshold is None or not tasks:
            return super().kept_tasks(tasks)
        rewards, groups = _rewards([[last_step(exps) for exps in runs.values()] for runs in tasks], raw_reward)
        return functional.std_above(rewards, groups, self.std_threshold).tolist()

    def _score(self, tasks: list[dict[str, Experience]]) -> tuple[list[dict[str, float]], list[Metrics]]:
        rewards, groups = _rewards([list(exps.values()) for exps in tasks])
        scores = iter(functional.grpo_advantages(rewards, groups, self.epsilon, self.std_level).tolist())
        metrics = by_group(reward_metrics(rewards, groups), len(tasks))
        return [{run_id: next(scores) for run_id in exps} for exps in tasks], metrics


def _rewards(
    tasks: list[list[Experience]], reward: Callable[[Experience], float | None] = attrgetter("reward")
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rewards of experiences, float64 [B], and the position of the task of each, int64 [B]."""
    rewards = torch.tensor([reward(exp) for exps in tasks for exp in exps], dtype=torch.float64)
    return rewards, torch.repeat_interleave(torch.tensor([len(exps) for exps in tasks]))
