"""Readers of experiences, the counterpart of `BufferWriter`.

An experience counts as read once it lies before the reader's cursor, which `state_dict` returns. A run that saves this
state together with the weights trains on each experience exactly once, however often it is killed.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Self

from trinity_lightning.common.experience import Experience
from trinity_lightning.common.experience.inputs import share_inputs
from trinity_lightning.config.buffer import BufferConfig
from trinity_lightning.config.registry import Registry
from trinity_lightning.errors import ForeignPositionError

Cursor = tuple[int, ...]

# Seconds between two looks at a buffer that another process fills.
POLL = 0.05


class BufferReader(ABC):
    """Gives out experiences, and remembers which it has given out.

    A read of more experiences than there are waits up to `wait` seconds for the rest. Then it returns those that there
    are, perhaps none.
    """

    endless_with = "buffer.repeat=true"  # for messages: the setting with which reads would not end, if there is one

    def read(
        self,
        count: int,
        *,
        whole_groups: bool = False,
        wait: float = 0.0,
        pause: Callable[[float], None] = time.sleep,
    ) -> list[Experience]:
        """The next experiences, in the reader's order. Those with equal pictures share them.

        Args:
            count: how many at most.
            whole_groups: never part experiences of one task that follow each other. There are fewer than `count` if the
                next group does not fit, and more if the first one alone is larger. The end of the data ends a group.
            wait: seconds to wait for `count` experiences.
            pause: sleeps for a number of seconds during the wait; if it raises, nothing has been read.

        Raises:
            StorageError: the buffer is damaged or gone.
            ValueError: a count below 1.
        """
        if count < 1:
            raise ValueError(f"count: expected at least 1, got {count}.")
        deadline = time.monotonic() + wait
        while True:
            left = deadline - time.monotonic()
            if (experiences := self._try_read(count, whole_groups, last=left <= 0)) is not None:
                share_inputs(experiences)  # some were fetched in different turns
                return experiences
            pause(min(POLL, max(left, 0.0)))

    @abstractmethod
    def _try_read(self, count: int, whole_groups: bool, last: bool) -> list[Experience] | None:
        """The experiences that `read` asks for; None if they are not there yet and this is not the last attempt."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """The reader's position, in plain containers."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken. ForeignPositionError: the state is another buffer's."""

    def close(self) -> None:  # noqa: B027  # optional: not every reader holds something
        """Let go of files and connections."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Item(NamedTuple):
    """An experience as a buffer gives it to a `CursorReader`."""

    experience: Experience
    cursor: Cursor  # the reader's position once it has read the experience
    run: str = ""  # the run that wrote it, if a buffer holds several, which may have tasks of the same name


def group_of(experience: Experience) -> str | None:
    """The name of an experience's task; None if it has none."""
    return None if experience.eid.batch == "" and experience.eid.task == "" else experience.eid.tid


def check_source(state: Mapping[str, Any], source: str, where: str) -> None:
    """Refuse a reader's state that belongs to another buffer than the one with the id `source`.

    Raises:
        ForeignPositionError: it does; the message calls the buffer `where`.
    """
    if state["source"] != source:
        raise ForeignPositionError(
            f"{where}: the saved position belongs to another buffer (id {state['source']}, this one has {source}). "
            "Give the path it was saved with, or start without the saved state."
        )


class CursorReader(BufferReader):
    """Reads in the order of writing, each experience once.

    Args:
        source: id of the buffer. It is in the state, so that the cursor of another buffer is refused.
        where: the buffer in words, for messages.
    """

    START: Cursor = (0,)

    def __init__(self, source: str, where: str) -> None:
        self._source = source
        self._where = where
        self._cursor = self.START
        self._ahead: list[Item] = []  # fetched, not read

    @abstractmethod
    def _fetch(self, cursor: Cursor, count: int) -> list[Item]:
        """About `count` of the experiences after `cursor`, at least one; empty if there is none yet."""

    def _try_read(self, count: int, whole_groups: bool, last: bool) -> list[Experience] | None:
        if whole_groups:
            number, complete = self._next_groups(count)
        else:
            complete = self._fetch_ahead(count)
            number = min(count, len(self._ahead))
        if not (complete or last):
            return None
        taken, self._ahead = self._ahead[:number], self._ahead[number:]
        if taken:
            self._cursor = taken[-1].cursor
        return [item.experience for item in taken]

    def _next_groups(self, count: int) -> tuple[int, bool]:
        """The number of experiences in the whole groups within `count`; True if no further group can join them."""
        self._fetch_ahead(count + 1)  # the experience after them says if a group goes on
        ends = [index for index in range(1, min(count, len(self._ahead)) + 1) if self._ends_group(index)]
        if ends:
            return ends[-1], ends[-1] == count or len(self._ahead) > count
        number = min(count, len(self._ahead))  # 0, or a first group larger than `count`
        while number and self._fetch_ahead(number + 1) and not self._ends_group(number):
            number += 1
        return number, number > 0

    def _ends_group(self, number: int) -> bool:
        """True if a group ends after the first `number` experiences ahead."""
        if number >= len(self._ahead):
            return True
        last, after = self._ahead[number - 1], self._ahead[number]
        group = group_of(last.experience)
        return group is None or group != group_of(after.experience) or last.run != after.run

    def _fetch_ahead(self, number: int) -> bool:
        """Fetch until `number` experiences are ahead; False if there are fewer."""
        while (missing := number - len(self._ahead)) > 0:
            more = self._fetch(self._ahead[-1].cursor if self._ahead else self._cursor, missing)
            if not more:
                return False
            self._ahead.extend(more)
        return True

    def rewind(self) -> None:
        """Start over from the first experience."""
        self._cursor, self._ahead = self.START, []

    def state_dict(self) -> dict[str, Any]:
        return {"source": self._source, "cursor": list(self._cursor)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        check_source(state, self._source, self._where)
        self._cursor, self._ahead = tuple(state["cursor"]), []


class MemoryReader(CursorReader):
    """Reads a sequence of experiences, such as `from_hf_datasets` gives."""

    def __init__(self, experiences: Sequence[Experience]) -> None:
        super().__init__("memory", "experiences in memory")
        self._experiences = experiences

    def _fetch(self, cursor: Cursor, count: int) -> list[Item]:
        (start,) = cursor
        chosen = self._experiences[start : start + count]
        return [Item(experience, (start + index + 1,)) for index, experience in enumerate(chosen)]


class RepeatingReader(BufferReader):
    """Starts over where another reader ends; the last read of a pass may be short."""

    endless_with = ""

    def __init__(self, reader: CursorReader) -> None:
        self._reader = reader

    def _try_read(self, count: int, whole_groups: bool, last: bool) -> list[Experience] | None:
        experiences = self._reader.read(count, whole_groups=whole_groups)
        if not experiences:
            self._reader.rewind()
            experiences = self._reader.read(count, whole_groups=whole_groups)
        return experiences if experiences or last else None

    def state_dict(self) -> dict[str, Any]:
        return {"reader": self._reader.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._reader.load_state_dict(state["reader"])

    def close(self) -> None:
        self._reader.close()


READERS: Registry[Callable[[BufferConfig, int], BufferReader]] = Registry("experience reader")


def create_reader(buffer: BufferConfig, seed: int = 0) -> BufferReader:
    """A reader of the experiences that a run kept or a program wrote.

    Args:
        buffer: a section whose storage is "file" or "sql".
        seed: of the order "random".

    Raises:
        ConfigError: a number out of its range, or SQLAlchemy is not installed.
        StorageError: there is nothing to read from.
    """
    reader = READERS.get(buffer.storage)(buffer, seed)
    return RepeatingReader(reader) if buffer.repeat and isinstance(reader, CursorReader) else reader
