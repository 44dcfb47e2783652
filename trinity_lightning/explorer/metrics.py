"""Numbers that describe an explore step, and an evaluation."""

import math
import statistics
from collections.abc import Mapping, Sequence

from trinity_lightning.common.experience import Experience, group_by
from trinity_lightning.common.runs import (
    equal_rewards,
    is_valid_reward,
    last_step,
    runs_of,
    spread,
    spread_of_each,
    written_tokens,
)
from trinity_lightning.common.solved import criterion_of, metrics_of
from trinity_lightning.explorer.workflow_runner import Status, mean_metrics

# -- An explore step --------------------------------------------------------------------------------------------------


def valid_rewards(experiences: Sequence[Experience]) -> dict[str, list[float]]:
    """The rewards of each task's runs, without those that are no finite number; of several steps the last one's."""
    return {
        task: [reward for run in runs_of(group) if is_valid_reward(reward := last_step(run).reward)]
        for task, group in group_by(experiences, "task").items()
    }


def pass_rates(
    experiences: Sequence[Experience], reward_solved: Mapping[str, float] | None = None
) -> dict[str, dict[int, tuple[float, int]]]:
    """By taskset and index of the task (`info["task_index"]`), the share of its runs that solved it, and their number.

    `reward_solved` is as of `criterion_of`. If it is None, and the reward has a single component, the rate is the mean
    of that component, so that a reward between 0 and 1 counts in part; without a criterion it is the mean reward.
    """
    criterion = criterion_of(metrics_of(experiences), reward_solved)
    rates: dict[str, dict[int, list[float]]] = {}
    for run in runs_of(experiences):
        last = last_step(run)
        if criterion is None:
            value = last.reward
        elif criterion.graded:
            value = next(iter((criterion.values(run) or {}).values()), None)
        else:
            value = criterion.solved(run)
        if (origin := last.info.get("task_index")) is not None and is_valid_reward(value):
            rates.setdefault(origin["taskset_id"], {}).setdefault(origin["index"], []).append(float(value))
    return {
        taskset: {index: (statistics.fmean(values), len(values)) for index, values in tasks.items()}
        for taskset, tasks in rates.items()
    }


def experience_metrics(experiences: Sequence[Experience]) -> dict[str, float]:
    """Rewards of an explore step's runs, the share of groups (of several) with equal ones, lengths of experiences."""
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
    """What an explore step scheduled, lost and got."""
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


# -- An evaluation: what several rollouts of each task were worth -----------------------------------------------------


_REWARD = ""  # the reward's statistics have no name between the taskset's and their own


def evaluation_metrics(
    taskset: str, experiences: Sequence[Experience], reward_solved: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Statistics of the reward and of every metric of a workflow, over the k rollouts of each task.

    `mean@k` and `std@k` are mean and standard deviation (ddof 0) of a task's rollouts; `best@m` and `worst@m`, for m =
    2, 4, ... below k and for k, what the best and the worst of m of them may be expected to be (`expected_best`);
    `pass@m`, of the reward only, the share of tasks that one of m rollouts solves, if it is known what that is
    (`criterion_of`). All are means over tasks.

    A rollout of several steps counts once: with the reward of the last, as in training, and the means of its metrics. A
    task that lost rollouts counts with those that it has, k being the most that any task has. Values that are no finite
    number are left out.

    Args:
        taskset: its name.
        experiences: of the evaluation.
        reward_solved: as of `criterion_of`.

    Returns:
        `eval/<taskset>/<statistic>` of the reward, and `eval/<taskset>/<metric>/<statistic>` of each metric: for k = 1
        only its mean.
    """
    runs = [runs_of(its) for its in group_by(experiences, "task").values()]
    tasks = [[_measured(run) for run in its] for its in runs]
    criterion = criterion_of(metrics_of(experiences), reward_solved)
    metrics: dict[str, float] = {}
    for name in dict.fromkeys(name for runs in tasks for run in runs for name in run):
        groups = [values for runs in tasks if (values := [run[name] for run in runs if name in run])]
        k = max(map(len, groups))
        found = {f"mean@{k}": statistics.fmean(map(statistics.fmean, groups))}
        if k > 1:
            found[f"std@{k}"] = statistics.fmean(map(statistics.pstdev, groups))
        sizes = subset_sizes(k)
        if k > 1 or name == _REWARD:
            negative = [[-value for value in group] for group in groups]
            found |= {f"best@{m}": _mean_best(groups, m) for m in sizes}
            found |= {f"worst@{m}": 0.0 - _mean_best(negative, m) for m in sizes}
        if name == _REWARD and criterion is not None:
            known = [[float(solved) for run in its if (solved := criterion.solved(run)) is not None] for its in runs]
            if solved := [group for group in known if group]:
                found |= {f"pass@{m}": _mean_best(solved, m) for m in sizes}
        prefix = "/".join(filter(None, ("eval", taskset, name)))
        metrics |= {f"{prefix}/{statistic}": value for statistic, value in found.items()}
    return metrics


def subset_sizes(k: int) -> list[int]:
    """2, 4, 8, ... below k, and k itself."""
    return [2**i for i in range(1, k.bit_length()) if 2**i < k] + [k]


def expected_best(values: Sequence[float], m: int) -> float:
    """The largest of m of these n values, drawn without replacement, on average over all draws.

    The i-th smallest is the largest of a draw in C(i - 1, m - 1) of C(n, m) cases, so that it is the sum of
    x_(i) C(i - 1, m - 1) / C(n, m) over i = m ... n: exact, without resampling. For values of 0 and 1 it is the
    unbiased estimate of pass@m, 1 - C(n - c, m) / C(n, m) with c ones (Chen et al. 2021, arXiv:2107.03374).

    Args:
        values: n numbers, at least one.
        m: size of a draw; above n it is n.
    """
    n, m = len(values), min(m, len(values))
    cases = math.comb(n, m)
    return math.fsum(x * (math.comb(i, m - 1) / cases) for i, x in enumerate(sorted(values)))


def _measured(run: Sequence[Experience]) -> dict[str, float]:
    """The reward of a rollout, which is its last step's, and the means of its metrics."""
    reward = last_step(run).reward
    measured = {_REWARD: reward} if is_valid_reward(reward) else {}
    return measured | {name: value for name, value in mean_metrics(run).items() if math.isfinite(value)}


def _mean_best(groups: Sequence[Sequence[float]], m: int) -> float:
    return statistics.fmean(expected_best(group, m) for group in groups)
