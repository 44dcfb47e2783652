"""Optimizer batches out of the buffer: sized, lazy, stateful.

Sized, so that Lightning neither pre-fetches nor counts by exhausting it; lazy, so that the buffer is read only after
the explorer has filled it; stateful, so that a run stopped in the middle of a step goes on with the next item.
"""

from collections.abc import Iterator
from typing import Any

import torch

from trinity_lightning.buffer.storage.memory import MemoryStorage
from trinity_lightning.common.experience import group_by
from trinity_lightning.common.optimizer_batch import OptimizerBatch


class ExperienceLoader:
    """Yields the optimizer batches of the explore step that the storage holds.

    Args:
        storage: the buffer.
        optimizer_steps: batches that the step's experiences are dealt into, by whole groups.
        inner_epochs: passes over them, each dealt anew.
        seed: seed of the dealing; with the explore step and the pass it decides the order.
    """

    def __init__(self, storage: MemoryStorage, optimizer_steps: int = 1, inner_epochs: int = 1, seed: int = 0) -> None:
        self._storage = storage
        self._optimizer_steps = optimizer_steps
        self._inner_epochs = inner_epochs
        self._seed = seed
        self._explore_step = 0
        self._position = 0

    def __len__(self) -> int:
        """Optimizer batches an epoch: constant."""
        return self._optimizer_steps * self._inner_epochs

    def __iter__(self) -> Iterator[OptimizerBatch]:
        if self._explore_step != self._storage.batch:
            self._explore_step, self._position = self._storage.batch, 0
        elif self._position >= len(self):
            self._position = 0
        for index in range(self._position, len(self)):
            # Counted before it is handed out: a checkpoint after its training step then resumes with the next one.
            self._position = index + 1
            yield self._batch(index)

    def _batch(self, index: int) -> OptimizerBatch:
        inner_epoch, part = divmod(index, self._optimizer_steps)
        rows = self._deal(inner_epoch)[part]
        batch = OptimizerBatch.of([self._storage.experiences[row] for row in rows], self._storage.batch)
        batch.columns = {name: [column[row] for row in rows] for name, column in self._storage.columns.items()}
        return batch

    def _deal(self, inner_epoch: int) -> list[list[int]]:
        """Row numbers of each batch of one pass: whole groups, in a seeded order, evened out by size."""
        row_of = {id(e): row for row, e in enumerate(self._storage.experiences)}
        groups = [[row_of[id(e)] for e in group] for group in group_by(self._storage.experiences, "task").values()]
        if self._optimizer_steps == 1:
            return [[row for group in groups for row in group]]
        generator = torch.Generator().manual_seed(self._seed + 1_000_003 * self._storage.batch + inner_epoch)
        parts: list[list[int]] = [[] for _ in range(self._optimizer_steps)]
        for index in torch.randperm(len(groups), generator=generator).tolist():
            min(parts, key=len).extend(groups[index])
        return parts

    def state_dict(self) -> dict[str, Any]:
        """Which item of which explore step comes next."""
        return {"explore_step": self._explore_step, "position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self._explore_step, self._position = state["explore_step"], state["position"]
