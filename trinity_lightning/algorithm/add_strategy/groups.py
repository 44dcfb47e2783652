"""What the add strategies do with groups of experiences: validate, filter, set advantages, gather metrics."""

import logging
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from trinity_lightning.algorithm.add_strategy import functional
from trinity_lightning.common.experience import Experience, ExperienceError
from trinity_lightning.common.rewards import is_valid_reward

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


def has_valid_reward(exp: Experience) -> bool:
    """Whether its reward is a finite number."""
    return is_valid_reward(exp.reward)


def split_valid(
    groups: Groups, is_valid: Callable[[Experience], bool] = has_valid_reward, numbers: str = "reward"
) -> tuple[Groups, int]:
    """The groups whose experiences are all valid, and the number of the others, which are logged.

    Args:
        groups: by id.
        is_valid: here, whether the reward is a finite number.
        numbers: what `is_valid` looks at, in words.
    """
    valid = {id_: exps for id_, exps in groups.items() if all(map(is_valid, exps))}
    invalid = [id_ for id_ in groups if id_ not in valid]
    if invalid:
        logger.warning(
            "left out %d groups with a %s that is no finite number: %s", len(invalid), numbers, ", ".join(invalid)
        )
    return valid, len(invalid)


def informative_groups(groups: Groups, variance_threshold: float) -> Groups:
    """The groups of at least two experiences whose rewards' population variance is above the threshold."""
    rewards = torch.tensor([exp.reward for exps in groups.values() for exp in exps], dtype=torch.float64)
    sizes = [len(exps) for exps in groups.values()]
    index = torch.repeat_interleave(torch.tensor(sizes, dtype=torch.int64))
    kept = (
        [part[0] for part in functional.informative(rewards, index, variance_threshold).split(sizes)] if sizes else []
    )
    return {id_: exps for (id_, exps), keep in zip(groups.items(), kept, strict=True) if keep}


def action_mask(exp: Experience) -> Tensor:
    """The experience's action mask [response].

    Raises:
        ExperienceError: it has none.
    """
    if exp.action_mask is None:
        raise ExperienceError(f"experience {exp.eid} has no action_mask: there is no response to weigh.")
    return exp.action_mask


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


def gather_metrics(metrics: Sequence[Mapping[str, float]], prefix: str) -> Metrics:
    """`<prefix>/<name>/{mean,max,min}` of each metric over the groups that have it."""
    columns: dict[str, list[float]] = {}
    for group in metrics:
        for name, value in group.items():
            columns.setdefault(name, []).append(value)
    stats = {"mean": lambda values: sum(values) / len(values), "max": max, "min": min}
    return {f"{prefix}/{name}/{how}": f(values) for name, values in columns.items() for how, f in stats.items()}
