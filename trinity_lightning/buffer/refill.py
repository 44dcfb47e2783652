"""Further tasks for a step that filters leave short: DAPO's dynamic sampling (arXiv 2503.14476, section 3.2)."""

import logging
import math
from collections.abc import Awaitable, Callable
from typing import Protocol

from trinity_lightning.common.experience import Experience

logger = logging.getLogger(__name__)


class MoreRollouts(Protocol):
    """Rolls out further tasks for the step under way."""

    @property
    def tasks(self) -> int:
        """How many a step is meant to have."""
        ...

    async def __call__(self, tasks: int) -> list[Experience]:
        """The experiences of that many new tasks; nothing once no more are to be had.

        Tasks that all failed are replaced in turn, as long as the limit of such requests allows.
        """
        ...


# Tidies the experiences of some tasks, as it does those of a whole step: what is left, and metrics.
Tidy = Callable[[list[Experience]], Awaitable[tuple[list[Experience], dict[str, float]]]]
# Those of some experiences' groups that would be trained on, by task.
Survivors = Callable[[list[Experience]], dict[str, list[Experience]]]

# Assume that at least this share of new tasks survives, however few did so far, so that one request stays bounded.
_MIN_RATE = 0.25


async def refill(
    experiences: list[Experience],
    metrics: dict[str, float],
    step: int,
    more: MoreRollouts,
    tidy: Tidy,
    survivors: Survivors,
) -> tuple[list[Experience], dict[str, float]]:
    """Ask for more tasks until as many groups survive as the step is meant to have, or no more are to be had.

    Only `tidy` and the filter see the new groups apart; what weighs a whole step sees it once it is full. Groups
    beyond that number are dropped and counted: the earliest are kept.

    The `experiences` and `metrics` are those of the tidied step. Returned are all experiences, filtered ones too,
    without surplus groups, and the metrics of all rounds.
    """
    kept, asked = survivors(experiences), more.tasks
    filled, rounds, dropped = list(experiences), [metrics], 0
    while (missing := more.tasks - len(kept)) > 0:
        rate = max(len(kept) / asked, _MIN_RATE)
        tasks = min(math.ceil(missing / rate), more.tasks)
        if not (added := await more(tasks)):
            break
        added, metrics = await tidy(added)
        rounds.append(metrics)
        asked += tasks
        new = survivors(added)
        surplus = set(list(new)[missing:])
        dropped += len(surplus)
        filled += [e for e in added if e.eid.tid not in surplus]
        kept |= {task: group for task, group in new.items() if task not in surplus}
    if missing > 0:
        logger.warning(
            "step %d: %d of its %d tasks are missing after filters left out the others and %d more tasks were tried: "
            "raise explorer.max_refills, or take tasks that are neither too easy nor too hard.",
            step,
            missing,
            more.tasks,
            asked - more.tasks,
        )
    counts = {"surplus_groups": float(dropped), "missing_groups": float(max(missing, 0))}
    return filled, merged(rounds) | {f"experience_pipeline/{name}": count for name, count in counts.items()}


def merged(parts: list[dict[str, float]]) -> dict[str, float]:
    """Metrics of several rounds as those of one step: counts and times add up, anything else is averaged."""
    names = dict.fromkeys(name for part in parts for name in part)
    values = {name: [part[name] for part in parts if name in part] for name in names}
    adds_up = {name: "count" in name or "dropped" in name or name.startswith("time/") for name in names}
    return {name: sum(each) if adds_up[name] else sum(each) / len(each) for name, each in values.items()}
