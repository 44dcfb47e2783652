"""Experiences of an explore step in this process's memory."""

from typing import Any

from torch import Tensor

from trinity_lightning.common.experience import Experience
from trinity_lightning.common.writer import BufferWriter


class MemoryStorage(BufferWriter):
    """Holds the experiences of one explore step, and the per-token columns computed for them.

    Attributes:
        batch: the explore step held (EID.batch), 0 before the first.
        experiences: in the order written.
        columns: float32 tensors [response] by name, one an experience.
    """

    def __init__(self) -> None:
        self.batch = 0
        self.experiences: list[Experience] = []
        self.columns: dict[str, list[Tensor]] = {}

    def write(self, experiences: list[Experience]) -> None:
        """Append to what is being gathered for the next step."""
        self.experiences.extend(experiences)

    def begin(self) -> None:
        """Drop the step that was held; what is written from now on belongs to the next one."""
        self.experiences = []
        self.columns = {}

    def commit(self, batch: int) -> None:
        """What was written since `begin` is explore step `batch`."""
        self.batch = batch

    def state_dict(self) -> dict[str, Any]:
        """Plain containers, tensors and bytes."""
        return {
            "batch": self.batch,
            "payload": Experience.serialize_many(self.experiences),
            "columns": self.columns,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.batch = state["batch"]
        self.experiences = Experience.deserialize_many(state["payload"])
        self.columns = state["columns"]
