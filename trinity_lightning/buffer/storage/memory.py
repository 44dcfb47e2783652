"""Experiences of an explore step in this process's memory."""

from typing import Any

from torch import Tensor

from trinity_lightning.common.experience import Experience
from trinity_lightning.common.writer import BufferWriter


class MemoryStorage(BufferWriter):
    """Holds the experiences of one explore step, and the per-token columns computed for them.

    What is written becomes visible at `commit`, all at once: a step whose filling was cut short leaves the one before.

    Attributes:
        batch: the explore step held (EID.batch), 0 before the first.
        experiences: in the order written.
        columns: float32 tensors [response] by name, one an experience.
    """

    def __init__(self) -> None:
        self.batch = 0
        self.experiences: list[Experience] = []
        self.columns: dict[str, list[Tensor]] = {}
        self._written: list[Experience] = []

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
        """What was written since `begin` is explore step `batch`, and takes the place of the step that was held."""
        self.batch, self.experiences, self.columns, self._written = batch, self._written, {}, []

    def state_dict(self) -> dict[str, Any]:
        """Plain containers, tensors and bytes."""
        return {
            "batch": self.batch,
            "payload": Experience.serialize_many(self.experiences),
            "columns": self.columns,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Raises:
            ExperienceFormatError: the payload is damaged; the storage is as it was.
        """
        experiences = Experience.deserialize_many(state["payload"])
        self.batch, self.experiences, self.columns = state["batch"], experiences, state["columns"]
