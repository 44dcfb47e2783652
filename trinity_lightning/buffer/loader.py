"""The buffer in memory, and the optimizer batches dealt out of it: sized, lazy, stateful.

Sized, so that Lightning neither pre-fetches nor counts by exhausting it; lazy, so that the buffer is read only after
the explorer has filled it; stateful, so that a run stopped in the middle of a step goes on with the next item.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from trinity_lightning.common.experience import Experience
from trinity_lightning.common.optimizer_batch import OptimizerBatch
from trinity_lightning.common.writer import BufferWriter
from trinity_lightning.config.values import whole_number


class MemoryStorage(BufferWriter):
    """Holds the explore step that is trained on, with the columns computed for it, and those that are ready after it.

    What is written becomes ready at `commit`, all at once: a step whose filling was cut short leaves nothing. It takes
    the place of the step before at `advance`: a step can be written while another is trained on.

    Attributes:
        batch: the explore step that is trained on (EID.batch), 0 before the first.
        experiences: of that step, in the order written.
        columns: float32 tensors [response] by name, one an experience.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Hold nothing, as before the first step."""
        self.batch = 0
        self.experiences: list[Experience] = []
        self.columns: dict[str, list[Tensor]] = {}
        self._written: list[Experience] = []
        self._ready: dict[int, list[Experience]] = {}

    def write(self, experiences: list[Experience]) -> None:
        """Append to what is being gathered for the next step."""
        self._written.extend(experiences)

    @property
    def written(self) -> list[Experience]:
        """What was written since `begin`."""
        return self._written

    def begin(self) -> None:
        """What is written from now on belongs to the next step; what was written and never committed is dropped."""
        self._written = []

    def commit(self, batch: int) -> None:
        """What was written since `begin` is explore step `batch`, ready to be trained on."""
        self._ready[batch], self._written = self._written, []

    def is_ready(self, batch: int) -> bool:
        """Whether explore step `batch` waits to be trained on."""
        return batch in self._ready

    def ready(self, batch: int) -> list[Experience]:
        """The experiences of explore step `batch`, which waits to be trained on."""
        return self._ready[batch]

    def advance(self, batch: int, columns: dict[str, list[Tensor]] | None = None) -> None:
        """Explore step `batch` takes the place of the one that was trained on; earlier ones are forgotten."""
        self.batch, self.experiences, self.columns = batch, self._ready[batch], columns or {}
        self._ready = {step: waiting for step, waiting in self._ready.items() if step > batch}

    def state_dict(self) -> dict[str, Any]:
        """Plain containers, tensors and bytes."""
        return {
            "batch": self.batch,
            "payload": Experience.serialize_many(self.experiences),
            "columns": self.columns,
            "ready": {step: Experience.serialize_many(waiting) for step, waiting in self._ready.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned. ExperienceFormatError: a payload is damaged; the storage is as it was."""
        experiences = Experience.deserialize_many(state["payload"])
        ready = {step: Experience.deserialize_many(payload) for step, payload in state["ready"].items()}
        self.batch, self.experiences, self.columns = state["batch"], experiences, state["columns"]
        self._ready = ready


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
