"""Experiences of explore steps in this process's memory."""

from typing import Any

from torch import Tensor

from trinity_lightning.common.experience import Experience
from trinity_lightning.common.writer import BufferWriter


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
        """Restore what `state_dict` returned.

        Raises:
            ExperienceFormatError: a payload is damaged; the storage is as it was.
        """
        experiences = Experience.deserialize_many(state["payload"])
        ready = {step: Experience.deserialize_many(payload) for step, payload in state["ready"].items()}
        self.batch, self.experiences, self.columns = state["batch"], experiences, state["columns"]
        self._ready = ready
