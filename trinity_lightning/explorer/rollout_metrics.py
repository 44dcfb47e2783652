"""Numbers that describe an explore step."""

import statistics
from collections.abc import Iterable, Sequence

from trinity_lightning.common.experience import Experience, group_by
from trinity_lightning.common.rewards import equal_rewards, is_valid_reward
from trinity_lightning.common.runs import last_step, runs_of
from trinity_lightning.explorer.workflow_runner import Status


def spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """`<name>/mean`, `/max` and `/min`; nothing for no values."""
    if not values:
        return {}
    return {f"{name}/mean": statistics.fmean(values), f"{name}/max": max(values), f"{name}/min": min(values)}


def gathered(metrics: Iterable[dict[str, float]], prefix: str) -> dict[str, float]:
    """Several tasks' metrics as `<prefix>/<key>/{mean,max,min}`, each key over the tasks that have it."""
    columns: dict[str, list[float]] = {}
    for metric in metrics:
        for key, value in metric.items():
            columns.setdefault(key, []).append(float(value))
    return {name: value for key, values in columns.items() for name, value in spread(f"{prefix}/{key}", values).items()}


def valid_rewards(experiences: Sequence[Experience]) -> dict[str, list[float]]:
    """The rewards of each task's runs, without those that are no finite number; of several steps the last one's."""
    return {
        task: [e.reward for e in map(last_step, runs_of(group)) if e.reward is not None and is_valid_reward(e.reward)]
        for task, group in group_by(experiences, "task").items()
    }


def pass_rates(experiences: Sequence[Experience]) -> dict[str, dict[int, tuple[float, int]]]:
    """By taskset and index of the task (`info["task_index"]`), the mean of its runs' valid rewards and their number."""
    rewards: dict[str, dict[int, list[float]]] = {}
    for experience in map(last_step, runs_of(experiences)):
        origin = experience.info.get("task_index")
        if origin is not None and experience.reward is not None and is_valid_reward(experience.reward):
            of_taskset = rewards.setdefault(origin["taskset_id"], {})
            of_taskset.setdefault(origin["index"], []).append(experience.reward)
    return {
        taskset: {index: (statistics.fmean(values), len(values)) for index, values in tasks.items()}
        for taskset, tasks in rewards.items()
    }


def experience_metrics(experiences: Sequence[Experience]) -> dict[str, float]:
    """Rewards of an explore step's runs, the share of groups with equal ones, and the lengths of its experiences."""
    groups = valid_rewards(experiences)
    rewards = [reward for group in groups.values() for reward in group]
    responses = [float(len(e.tokens) - e.prompt_length) for e in experiences]
    clipped = [e.truncate_status == "response_truncated" for e in experiences]
    metrics = {
        "reward/std": statistics.pstdev(rewards) if rewards else 0.0,
        "frac_reward_zero_std": statistics.fmean(equal_rewards(group) for group in groups.values()),
        "response_length/clip_ratio": statistics.fmean(clipped),
        "sample/model_version/mean": statistics.fmean(float(e.info.get("model_version", 0)) for e in experiences),
    }
    if rewards:
        metrics["reward/mean"] = statistics.fmean(rewards)
    for name in dict.fromkeys(name for e in experiences for name in e.metrics if name.startswith("reward/")):
        metrics[f"{name}/mean"] = statistics.fmean(float(e.metrics[name]) for e in experiences if name in e.metrics)
    metrics |= spread("response_length", responses)
    metrics |= spread("prompt_length", [float(e.prompt_length) for e in experiences])
    return metrics


def rollout_metrics(
    statuses: Sequence[Status], experiences: Sequence[Experience], tasks: int, seconds: float
) -> dict[str, float]:
    """What an explore step scheduled, lost and got."""
    tokens = sum(len(e.tokens) - e.prompt_length for e in experiences)
    return {
        **gathered((status.metric for status in statuses), "rollout"),
        **experience_metrics(experiences),
        "rollout/tasks": float(tasks),
        "rollout/failed_tasks": float(tasks - sum(status.ok for status in statuses)),
        "rollout/experiences": float(len(experiences)),
        "rollout/tokens_per_second": tokens / seconds,
        "time/rollout": seconds,
    }
