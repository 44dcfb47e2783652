"""How well the policy does on each task."""

import statistics
from typing import Any

from trinity_lightning.buffer.operators.experience_operator import SELECTOR_METRIC, ExperienceOperatorV1
from trinity_lightning.common.experience import Experience, ExperienceError
from trinity_lightning.common.rewards import is_valid_reward
from trinity_lightning.common.runs import last_step, raw_reward, runs_of


class PassRateCalculator(ExperienceOperatorV1):
    """Mean reward of each task of the taskset, by `info["task_index"]` {taskset_id, index}.

    The rewards are those before operators. Only measured here: the explorer itself reports them to a taskset in the
    order `by_difficulty`, of all rollouts and before any operator has filtered them. For a selector of your own the
    rates of the last step are in `ExperiencePipeline.selector_metric`.

    A run of several steps counts once, with its last step's reward. Rewards that are no finite numbers do not count; a
    task that has no other is not reported.
    """

    async def process(self, exps: list[Experience]) -> tuple[list[Experience], dict[str, Any]]:
        """All experiences.

        Metrics: `selector_metric`, {taskset_id: {"indices": [...], "values": [...]}}, which is no number and is not
        logged; `selection/pass_rate/{mean,min,max}` over tasks, `selection/task_count`, and
        `selection/skipped_count`, the experiences without a valid reward.

        Raises:
            ExperienceError: an experience has no info["task_index"], or a misshapen one.
        """
        rewards: dict[Any, dict[Any, list[float]]] = {}
        skipped = 0
        for exp in map(last_step, runs_of(exps)):
            taskset, index = _task_index(exp)
            reward = raw_reward(exp)
            if reward is None or not is_valid_reward(reward):
                skipped += 1
                continue
            rewards.setdefault(taskset, {}).setdefault(index, []).append(reward)
        selector = {
            taskset: {"indices": list(tasks), "values": [statistics.fmean(values) for values in tasks.values()]}
            for taskset, tasks in rewards.items()
        }
        rates = [value for tasks in selector.values() for value in tasks["values"]]
        metrics: dict[str, Any] = {
            SELECTOR_METRIC: selector,
            "selection/task_count": len(rates),
            "selection/skipped_count": skipped,
        }
        if rates:
            metrics |= {
                "selection/pass_rate/mean": statistics.fmean(rates),
                "selection/pass_rate/min": min(rates),
                "selection/pass_rate/max": max(rates),
            }
        return exps, metrics


def _task_index(exp: Experience) -> tuple[Any, Any]:
    found = exp.info.get("task_index")
    if not isinstance(found, dict) or not {"taskset_id", "index"} <= found.keys():
        raise ExperienceError(
            f"experience {exp.eid}: info['task_index'] must be {{taskset_id, index}} for pass_rate_calculator, not "
            f"{found!r:.80}. Tasksets of this library give it; a workflow of your own has to pass it on."
        )
    return found["taskset_id"], found["index"]
