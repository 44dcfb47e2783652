"""A reader made of a reader: the same data again and again."""

from typing import Any

from trinity_lightning.buffer.reader import BufferReader, CursorReader
from trinity_lightning.common.experience import Experience


class RepeatingReader(BufferReader):
    """Starts over where another reader ends; the last read of a pass may be short.

    Attributes:
        passes: how often it has started over.
    """

    def __init__(self, reader: CursorReader) -> None:
        self._reader = reader
        self.passes = 0

    def _try_read(self, count: int | None, whole_groups: bool, last: bool) -> list[Experience] | None:
        got = self._reader.read(count, whole_groups=whole_groups)
        if not got:
            self._reader.rewind()
            got = self._reader.read(count, whole_groups=whole_groups)
            self.passes += bool(got)
        return got if got or last else None

    def state_dict(self) -> dict[str, Any]:
        """Where the reader stands, and in which pass."""
        return {"reader": self._reader.state_dict(), "passes": self.passes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken; errors as the reader's."""
        self._reader.load_state_dict(state["reader"])
        self.passes = state["passes"]

    def close(self) -> None:
        """Close the reader."""
        self._reader.close()
