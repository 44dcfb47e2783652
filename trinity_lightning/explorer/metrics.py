"""Metrics of an explore step, and of an evaluation."""

import math
import statistics
from collections.abc import Mapping, Sequence

from trinity_lightning.common.criterion import Criterion, criterion_of
from trinity_lightning.common.experience import Experience, group_by
from trinity_lightning.common.runs import (
    Run,
    equal_rewards,
    is_valid_reward,
    last_step,
    runs_of,
    spread,
    spread_of_each,
    written_tokens,
)
from trinity_lightning.common.solved import is_solved, metrics_of, values_of
from trinity_lightning.explorer.workflow_runner import Status, mean_metrics

# -- an explore step --------------------------------------------------------------------------------------------------


def valid_rewards(experiences: Sequence[Experience]) -> dict[str, list[float]]:
    """Finite rewards of the runs, by task; the reward of a run with several steps is that of its last step."""
    return {
        task: [reward for run in runs_of(group) if is_valid_reward(reward := last_step(run).reward)]
        for task, group in group_by(experiences, "task").items()
    }


def pass_rates(
    experiences: Sequence[Experience], reward_solved: Mapping[str, float] | None = None
) -> dict[str, dict[int, tuple[float, int]]]:
    """Share of a task's runs that solved it, and their number, by taskset and index (`info["task_index"]`).

    If `reward_solved` is None and the reward has a single component, the rate is the mean of that component: a reward
    between 0 and 1 counts in part. Without a criterion the rate is the mean reward.

    Args:
        experiences: experiences of the runs.
        reward_solved: see `criterion_of`.
    """
    criterion = criterion_of(metrics_of(experiences), reward_solved)
    rates: dict[str, dict[int, list[float]]] = {}
    for run in runs_of(experiences):
        last = last_step(run)
        if criterion is None:
            value = last.reward
        elif criterion.graded:
            value = next(iter((values_of(criterion, run) or {}).values()), None)
        else:
            value = is_solved(criterion, run)
        if (origin := last.info.get("task_index")) is not None and is_valid_reward(value):
            rates.setdefault(origin["taskset_id"], {}).setdefault(origin["index"], []).append(float(value))
    return {
        taskset: {index: (statistics.fmean(values), len(values)) for index, values in tasks.items()}
        for taskset, tasks in rates.items()
    }


def experience_metrics(experiences: Sequence[Experience]) -> dict[str, float]:
    """Rewards of the runs of an explore step, the share of groups with equal rewards, and lengths.

    The share is left out if no group has several runs.
    """
    groups = valid_rewards(experiences)
    rewards = [reward for group in groups.values() for reward in group]
    responses = [float(written_tokens(e)) for e in experiences]
    clipped = [e.truncate_status == "response_truncated" for e in experiences]
    metrics = {
        "reward/std": statistics.pstdev(rewards) if rewards else 0.0,
        "response_length/clip_ratio": statistics.fmean(clipped),
        "sample/model_version/mean": statistics.fmean(float(e.info.get("model_version", 0)) for e in experiences),
    }
    if len(runs_of(experiences)) > len(groups):
        metrics["frac_reward_zero_std"] = statistics.fmean(equal_rewards(group) for group in groups.values())
    if rewards:
        metrics["reward/mean"] = statistics.fmean(rewards)
    means = mean_metrics(experiences)
    metrics |= {f"{name}/mean": mean for name, mean in means.items() if name.startswith("reward/")}
    prompts = [float(e.prompt_length) for e in experiences]
    return metrics | spread("response_length", responses) | spread("prompt_length", prompts)


def rollout_metrics(
    statuses: Sequence[Status], experiences: Sequence[Experience], tasks: int, seconds: float
) -> dict[str, float]:
    """Metrics of an explore step: tasks scheduled and failed, experiences and their metrics, tokens and times.

    Args:
        statuses: statuses of the tasks that ended.
        experiences: all experiences, before operators change their rewards.
        tasks: number of tasks scheduled.
        seconds: duration of the rollouts.
    """
    tokens = sum(map(written_tokens, experiences))
    return {
        **spread_of_each((status.metric for status in statuses), "rollout"),
        **experience_metrics(experiences),
        "rollout/tasks": float(tasks),
        "rollout/failed_tasks": float(tasks - sum(status.ok for status in statuses)),
        "rollout/experiences": float(len(experiences)),
        "rollout/tokens_per_second": tokens / seconds,
        "time/rollout": seconds,
    }


# -- an evaluation: statistics over several rollouts of each task -----------------------------------------------------


_REWARD = ""  # the reward's name among metrics: empty, since its statistics are called eval/<taskset>/<statistic>


def evaluation_metrics(
    taskset: str, experiences: Sequence[Experience], reward_solved: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Statistics of the reward and of every metric of a workflow, over the k rollouts of each task.

    - `mean@k` and `std@k`: mean and standard deviation (ddof 0) of a task's rollouts.
    - `best@m` and `worst@m`, for m = 2, 4, ... below k and for k: the expected best and worst of m of its rollouts
      (`expected_best`).
    - `pass@m`, of the reward only: the share of tasks that one of m rollouts solves, if there is a criterion for a
      solved task (`criterion_of`).

    All are means over tasks. A rollout of several steps counts once: with the reward of its last step, as in training,
    and the means of its metrics. A task that lost rollouts counts as much as the others; k is the largest number of
    rollouts of a task. Values that are not finite are left out.

    Args:
        taskset: the taskset's name.
        experiences: experiences of the evaluation.
        reward_solved: see `criterion_of`.

    Returns:
        `eval/<taskset>/<statistic>` of the reward, and `eval/<taskset>/<metric>/<statistic>` of each metric. With k = 1
        a metric has only its mean.
    """
    runs = [runs_of(group) for group in group_by(experiences, "task").values()]
    tasks = [[_measured(run) for run in runs_of_task] for runs_of_task in runs]
    criterion = criterion_of(metrics_of(experiences), reward_solved)
    metrics: dict[str, float] = {}
    for name in dict.fromkeys(name for runs in tasks for run in runs for name in run):
        groups = [values for runs in tasks if (values := [run[name] for run in runs if name in run])]
        k = max(map(len, groups))
        values_of = {f"mean@{k}": statistics.fmean(map(statistics.fmean, groups))}
        if k > 1:
            values_of[f"std@{k}"] = statistics.fmean(map(statistics.pstdev, groups))
        sizes = subset_sizes(k)
        if k > 1 or name == _REWARD:
            negative = [[-value for value in group] for group in groups]
            values_of |= {f"best@{m}": _mean_best(groups, m) for m in sizes}
            values_of |= {f"worst@{m}": 0.0 - _mean_best(negative, m) for m in sizes}
        if name == _REWARD and criterion is not None:
            solved = _solved(runs, criterion)
            values_of |= {f"pass@{m}": _mean_best(solved, m) for m in sizes if solved}
        prefix = "/".join(filter(None, ("eval", taskset, name)))
        metrics |= {f"{prefix}/{statistic}": value for statistic, value in values_of.items()}
    return metrics


def _solved(runs: Sequence[Sequence[Run]], criterion: Criterion) -> list[list[float]]:
    """1 for each run that solved its task and 0 for others, by task; runs that cannot be judged are left out."""
    solved = [[is_solved(criterion, run) for run in runs_of_task] for runs_of_task in runs]
    known = [[float(value) for value in values if value is not None] for values in solved]
    return [values for values in known if values]


def subset_sizes(k: int) -> list[int]:
    """2, 4, 8, ... below k, and k itself."""
    return [2**i for i in range(1, k.bit_length()) if 2**i < k] + [k]


def expected_best(values: Sequence[float], m: int) -> float:
    """Expected maximum of m of these n values, drawn without replacement.

    The i-th smallest value is the maximum of C(i - 1, m - 1) of the C(n, m) draws. So the expectation is the sum of
    x_(i) C(i - 1, m - 1) / C(n, m) over i = m ... n: exact, without resampling. For values of 0 and 1 it is the
    unbiased estimate of pass@m, 1 - C(n - c, m) / C(n, m) with c ones (Chen et al. 2021, arXiv:2107.03374).

    Args:
        values: n numbers, at least one.
        m: size of a draw; if it is above n, n is taken.
    """
    n, m = len(values), min(m, len(values))
    cases = math.comb(n, m)
    return math.fsum(x * (math.comb(i, m - 1) / cases) for i, x in enumerate(sorted(values)))


def _measured(run: Sequence[Experience]) -> dict[str, float]:
    """The reward of a rollout's last step, and the means of its metrics."""
    reward = last_step(run).reward
    measured = {_REWARD: reward} if is_valid_reward(reward) else {}
    return measured | {name: value for name, value in mean_metrics(run).items() if math.isfinite(value)}


def _mean_best(groups: Sequence[Sequence[float]], m: int) -> float:
    return statistics.fmean(expected_best(group, m) for group in groups)
