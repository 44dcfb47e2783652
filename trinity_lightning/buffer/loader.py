"""Optimizer batches out of the buffer: sized, lazy, stateful.

Sized, so that Lightning neither pre-fetches nor counts by exhausting it; lazy, so that the buffer is read only after
the explorer has filled it; stateful, so that a run stopped in the middle of a step goes on with the next item.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from trinity_lightning.buffer.memory import MemoryStorage
from trinity_lightning.buffer.reader import BufferReader
from trinity_lightning.common.optimizer_batch import OptimizerBatch
from trinity_lightning.config.values import number, whole_number
from trinity_lightning.errors import StorageError


class ExperienceLoader:
    """Yields the optimizer batches of the explore step that the storage holds.

    Args:
        storage: the buffer.
        optimizer_steps: batches that the step's experiences are dealt into, by whole groups.
        inner_epochs: passes over them, each dealt again.
        seed: seed of the dealing; with the explore step and the pass it decides the order.
        max_response_length: longest response that the run allows, in tokens; None: unknown, see `OptimizerBatch`.

    Raises:
        ConfigError: a number of steps or passes below 1.
    """

    def __init__(
        self,
        storage: MemoryStorage,
        optimizer_steps: int = 1,
        inner_epochs: int = 1,
        seed: int = 0,
        max_response_length: int | None = None,
    ) -> None:
        for name, value in (("optimizer_steps", optimizer_steps), ("inner_epochs", inner_epochs)):
            whole_number(name, value, least=1)
        self._storage = storage
        self._optimizer_steps = optimizer_steps
        self._inner_epochs = inner_epochs
        self._seed = seed
        self._max_response_length = max_response_length
        self._explore_step = 0
        self._position = 0

    def __len__(self) -> int:
        """Optimizer batches an epoch: constant."""
        return self._optimizer_steps * self._inner_epochs

    def __iter__(self) -> Iterator[OptimizerBatch]:
        if self._explore_step != self._storage.batch or self._position >= len(self):
            self._explore_step, self._position = self._storage.batch, 0
        for index in range(self._position, len(self)):
            # Counted before it is handed out: a checkpoint after its training step then resumes with the next one.
            self._position = index + 1
            yield self._batch(index)

    def _batch(self, index: int) -> OptimizerBatch:
        inner_epoch, part = divmod(index, self._optimizer_steps)
        rows = self._deal(inner_epoch)[part]
        experiences = [self._storage.experiences[row] for row in rows]
        batch = OptimizerBatch.of(experiences, self._storage.batch, self._max_response_length)
        batch.columns = {name: [column[row] for row in rows] for name, column in self._storage.columns.items()}
        batch.step = self._storage.experiences if self._optimizer_steps > 1 else None
        return batch

    def _deal(self, inner_epoch: int) -> list[list[int]]:
        """Row numbers of each batch of one pass: whole groups, in a seeded order, evened out by size."""
        groups: dict[str, list[int]] = {}
        for row, experience in enumerate(self._storage.experiences):
            groups.setdefault(experience.eid.tid, []).append(row)
        generator = torch.Generator().manual_seed(self._seed + 1_000_003 * self._storage.batch + inner_epoch)
        order = torch.randperm(len(groups), generator=generator).tolist()
        members = list(groups.values())
        parts: list[list[int]] = [[] for _ in range(self._optimizer_steps)]
        for index in order:
            min(parts, key=len).extend(members[index])
        return parts

    def rewind(self, position: int) -> None:
        """What was handed out behind the first `position` items of the step was not trained on: it comes again."""
        self._position = min(self._position, position)

    def state_dict(self) -> dict[str, Any]:
        """Which item of which explore step comes next."""
        return {"explore_step": self._explore_step, "position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self._explore_step, self._position = state["explore_step"], state["position"]


class OfflineLoader:
    """Yields `steps_per_epoch` optimizer batches an epoch, each one read.

    Its state is the position in the epoch; that of the reader is the data module's.

    Args:
        reader: where experiences come from.
        batch_size: experiences a batch: at most, or with whole groups, unless one group alone is larger.
        steps_per_epoch: batches an epoch.
        whole_groups: never part the experiences of a task.
        wait: seconds to wait for a batch that another process is still to write.
        max_response_length: longest response that the data allow, in tokens; None: unknown, see `OptimizerBatch`.

    Attributes:
        pause: as the reader's `read` has it, for a run that may end while it waits.

    Raises:
        ConfigError: a number below 1, or a wait below 0.
    """

    def __init__(
        self,
        reader: BufferReader,
        batch_size: int,
        steps_per_epoch: int,
        *,
        whole_groups: bool = True,
        wait: float = 0.0,
        max_response_length: int | None = None,
    ) -> None:
        whole_number("batch_size", batch_size, least=1)
        whole_number("steps_per_epoch", steps_per_epoch, least=1)
        number("wait", wait, least=0)
        self._reader = reader
        self._batch_size, self._steps_per_epoch = batch_size, steps_per_epoch
        self._whole_groups, self._wait = whole_groups, wait
        self._max_response_length = max_response_length
        self.pause: Callable[[float], None] = time.sleep
        self._epoch, self._position = 1, 0
        self._before: dict[str, Any] = {}  # where the reader stood before the last batch

    def __len__(self) -> int:
        """Optimizer batches an epoch: constant."""
        return self._steps_per_epoch

    def __iter__(self) -> Iterator[OptimizerBatch]:
        if self._position >= len(self):
            self._epoch, self._position = self._epoch + 1, 0
        for index in range(self._position, len(self)):
            self._before = self._reader.state_dict()
            experiences = self._reader.read(
                self._batch_size, whole_groups=self._whole_groups, wait=self._wait, pause=self.pause
            )
            if not experiences:
                raise StorageError(
                    f"nothing left to read for step {index + 1} of {len(self)} in epoch {self._epoch} (waited "
                    f"{self._wait:g} s). Give more data, fewer steps, or repeat them (RepeatingReader)."
                )
            # Counted before it is handed out: a checkpoint after its training step then resumes with the next one.
            self._position = index + 1
            yield OptimizerBatch.of(experiences, self._epoch, self._max_response_length)

    def rewind(self, position: int) -> None:
        """What was handed out last, behind the first `position` batches, was not trained on: it is read again."""
        if self._position > position:
            self._reader.load_state_dict(self._before)
            self._position = position

    def state_dict(self) -> dict[str, Any]:
        """Which batch of which epoch comes next."""
        return {"epoch": self._epoch, "position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self._epoch, self._position = state["epoch"], state["position"]
