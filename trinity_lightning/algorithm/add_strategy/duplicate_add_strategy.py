"""A filter that keeps the groups whose rewards differ, and adds copies of them until the step is as large as before."""

import copy
import random
from itertools import count
from typing import Any

import xxhash

from trinity_lightning.algorithm.add_strategy.add_strategy import (
    BufferWriter,
    Groups,
    Metrics,
    RewardVarianceAddStrategy,
)
from trinity_lightning.common.experience import EID, Experience
from trinity_lightning.config.values import whole_number


class DuplicateInformativeAddStrategy(RewardVarianceAddStrategy):
    """Writes the groups whose rewards differ, then copies of whole groups until the step is as large as before.

    POLARIS (Hu et al., 2025). It sets no advantages: it goes before another strategy. It decides whether rewards differ
    as `reward_variance` does, by the same arguments. Groups are copied in a seeded order, none a second time before all
    have been copied once. Whole groups are copied, so the count may pass that of the input by less than a group. A copy
    has a task, and so a group, of its own, and shares its tensors with the original. All are written at once.

    `filtered_count` counts the experiences left out, `duplicated_count` the copies; `add_strategy_time` is in seconds.

    Args:
        seed: decides, with the explore step, which groups are copied.
    """

    def __init__(
        self,
        writer: BufferWriter | None = None,
        variance_threshold: float = 0.0,
        seed: int = 0,
        metric: str | None = None,
        **unknown: Any,
    ) -> None:
        super().__init__(writer, variance_threshold, metric, **unknown)
        self.seed = whole_number("seed", seed, least=0)

    async def add(self, experiences: list[Experience], step: int) -> tuple[int, Metrics]:
        written, metrics = await super().add(experiences, step)
        if metrics:
            metrics["duplicated_count"] = written - (len(experiences) - metrics["filtered_count"])
        return written, metrics

    def _writes(self, differing: Groups, experiences: list[Experience], step: int) -> list[list[Experience]]:
        originals = [exp for group in differing.values() for exp in group]
        return [originals + self._copies(differing, experiences, len(experiences) - len(originals), step)]

    def _copies(self, groups: Groups, experiences: list[Experience], missing: int, step: int) -> list[Experience]:
        """Copies of whole groups, at least `missing` experiences; none without a group."""
        copies: list[Experience] = []
        rng = random.Random(f"{self.seed}/{step}")
        taken = {str(exp.eid.task) for exp in experiences}  # 1 and "1" make the same task identifier
        while groups and len(copies) < missing:
            for group in rng.sample(list(groups.values()), len(groups)):
                if len(copies) >= missing:
                    break
                copies += _copy_group(group, taken)
        return copies


def _copy_group(group: list[Experience], taken: set[str]) -> list[Experience]:
    """A copy of a group under a task of its own, which is added to `taken`."""
    task = _free_task(group[0].eid.task, taken)
    taken.add(str(task))
    copies = []
    for row, exp in enumerate(group):
        copied = copy.copy(exp)
        # No random suffix, so that the same seed gives the same copies.
        suffix = xxhash.xxh3_64_hexdigest(f"{exp.eid.uid}/{task}/{row}".encode())[:12]
        copied.eid = EID(batch=exp.eid.batch, task=task, run=exp.eid.run, step=exp.eid.step, suffix=suffix)
        # New dicts, so that entries added to a copy's info or metrics are not added to the original's.
        copied.info, copied.metrics = dict(exp.info), dict(exp.metrics)
        copies.append(copied)
    return copies


def _free_task(task: int | str, taken: set[str]) -> int | str:
    """A task that is not taken: the next number for an int, else `<task>-copy-<n>`."""
    if isinstance(task, int):
        return max((int(name) for name in taken if name.isdecimal()), default=-1) + 1
    return next(name for n in count(1) if (name := f"{task}-copy-{n}") not in taken)
