"""What the add strategies do with groups of experiences: validate, filter, set advantages, gather metrics."""

import logging
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from trinity_lightning.algorithm.add_strategy import functional
from trinity_lightning.common.experience import Experience, ExperienceError
from trinity_lightning.common.rewards import is_valid_reward
from trinity_lightning.common.runs import Criterion
from trinity_lightning.common.untrained import mark_untrained

logger = logging.getLogger(__name__)

Groups = dict[str, list[Experience]]
Metrics = dict[str, float]


def reject_dpo(exps: Sequence[Experience]) -> None:
    """Refuse preference pairs, which have no response to weigh.

    Raises:
        ExperienceError: naming the first of them.
    """
    for exp in exps:
        if exp.experience_type == "dpo":
            raise ExperienceError(
                f"experience {exp.eid} is a DPO pair, which has no advantages: train on it without an add strategy."
            )


def have_valid_rewards(exps: Sequence[Experience]) -> bool:
    """Whether all rewards are finite numbers."""
    return all(is_valid_reward(exp.reward) for exp in exps)


def split_valid(
    groups: Groups, is_valid: Callable[[list[Experience]], bool] = have_valid_rewards, numbers: str = "reward"
) -> tuple[Groups, int]:
    """The valid groups, and the number of the others, which are logged and marked as untrained.

    Args:
        groups: by id.
        is_valid: here, whether all rewards of a group are finite numbers.
        numbers: what `is_valid` looks at, in words.
    """
    valid = {id_: exps for id_, exps in groups.items() if is_valid(exps)}
    invalid = [id_ for id_ in groups if id_ not in valid]
    for exp in (exp for id_ in invalid for exp in groups[id_]):
        mark_untrained(exp, f"invalid {numbers}")
    if invalid:
        logger.warning(
            "left out %d groups with a %s that is no finite number: %s", len(invalid), numbers, ", ".join(invalid)
        )
    return valid, len(invalid)


def differing_groups(groups: Groups, variance_threshold: float, criterion: Criterion) -> tuple[Groups, int]:
    """The groups of at least two runs whose rewards differ, and the number of the invalid ones, which are logged.

    Args:
        groups: by id.
        variance_threshold: what the population variance over the runs must exceed.
        criterion: what runs are judged by; a group with a run without it is invalid.

    Raises:
        ExperienceError: as `Criterion.values`.
    """
    values = criterion.values(groups)
    valid, invalid = split_valid(
        groups, lambda exps: all(map(is_valid_reward, values[exps[0].eid.tid])), criterion.metric or "reward"
    )
    if not valid:
        return {}, invalid
    sizes = [len(values[id_]) for id_ in valid]
    numbers = torch.tensor([value for id_ in valid for value in values[id_]], dtype=torch.float64)
    index = torch.repeat_interleave(torch.tensor(sizes))
    differs = functional.rewards_differ(numbers, index, variance_threshold).split(sizes)
    return {id_: exps for (id_, exps), part in zip(valid.items(), differs, strict=True) if part[0]}, invalid


def action_mask(exp: Experience) -> Tensor:
    """The experience's action mask [response].

    Raises:
        ExperienceError: it has none.
    """
    if exp.action_mask is None:
        raise ExperienceError(f"experience {exp.eid} has no action_mask: there is no response to weigh.")
    return exp.action_mask


def response_values(exp: Experience, name: str, use: str) -> Tensor:
    """The experience's `logprobs` or `teacher_logprobs`, as `name` says, [response].

    Raises:
        ExperienceError: it has none, and what their use is; or another number of them than response tokens.
    """
    values = getattr(exp, name)
    if values is None:
        raise ExperienceError(f"experience {exp.eid} has no {name}, {use}.")
    length = len(action_mask(exp))
    if values.shape != (length,):
        raise ExperienceError(f"experience {exp.eid}: {name} has {len(values)} values for {length} response tokens.")
    return values


def set_advantages(exps: Sequence[Experience], scores: Sequence[float]) -> None:
    """Give each experience its score on its trained tokens: `advantages` and a copy, `returns`, float32 [response]."""
    if not exps:
        return
    masks = [action_mask(exp) for exp in exps]
    lengths = [len(mask) for mask in masks]
    # All experiences at once: three small operations for each would take most of a strategy's time.
    per_token = torch.tensor(scores, dtype=torch.float32).repeat_interleave(torch.tensor(lengths))
    rows = (torch.cat(masks).float() * per_token).split(lengths)
    for exp, row in zip(exps, rows, strict=True):
        # Copies: a row as it is would keep the whole step's memory alive.
        exp.advantages, exp.returns = row.clone(), row.clone()


def reward_metrics(rewards: Tensor, groups: Tensor) -> dict[str, Tensor]:
    """reward_mean and reward_std of each group, [G]: 0 and 1 for a group of one."""
    stats = functional.group_stats(rewards, groups)
    lone = stats.size == 1
    return {"reward_mean": stats.mean.masked_fill(lone, 0.0), "reward_std": stats.std.masked_fill(lone, 1.0)}


def by_group(metrics: Mapping[str, Tensor], count: int) -> list[Metrics]:
    """The metrics of each of `count` groups, from a tensor [G] a metric."""
    columns = {name: values.tolist() for name, values in metrics.items()}
    return [{name: values[group] for name, values in columns.items()} for group in range(count)]


def gather_metrics(metrics: Sequence[Mapping[str, float]], prefix: str) -> Metrics:
    """`<prefix>/<name>/{mean,max,min}` of each metric over the groups that have it."""
    columns: dict[str, list[float]] = {}
    for group in metrics:
        for name, value in group.items():
            columns.setdefault(name, []).append(value)
    stats = {"mean": lambda values: sum(values) / len(values), "max": max, "min": min}
    return {f"{prefix}/{name}/{how}": f(values) for name, values in columns.items() for how, f in stats.items()}
