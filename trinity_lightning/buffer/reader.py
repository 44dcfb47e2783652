"""Reading experiences back: the counterpart of `BufferWriter`.

An experience counts as read once it lies before the reader's cursor, and the cursor is what `state_dict` returns: who
saves that state together with what was made of the experiences reads each of them exactly once, however often killed.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Self

from trinity_lightning.common.experience import Experience
from trinity_lightning.config.buffer import BufferConfig
from trinity_lightning.errors import ForeignPositionError

Cursor = tuple[int, ...]

# Seconds between two looks at a buffer that another process fills.
POLL = 0.05


class BufferReader(ABC):
    """Gives out experiences, and remembers which.

    A read of more than there is waits up to `wait` seconds for the rest, and then returns what there is, which may be
    nothing.
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
        """The next experiences, in the reader's order.

        Args:
            count: how many at most.
            whole_groups: never part experiences of one task that follow each other: fewer than `count` if the next
                group does not fit, more if the first one alone is larger. At the end of the data a group ends.
            wait: seconds to wait for `count` experiences.
            pause: sleeps for so many seconds while it waits; if it raises, nothing has been read.

        Raises:
            StorageError: the buffer is damaged or gone.
            ValueError: a count below 1.
        """
        if count < 1:
            raise ValueError(f"count: expected at least 1, got {count}.")
        deadline = time.monotonic() + wait
        while True:
            left = deadline - time.monotonic()
            if (got := self._try_read(count, whole_groups, last=left <= 0)) is not None:
                return got
            pause(min(POLL, max(left, 0.0)))

    @abstractmethod
    def _try_read(self, count: int, whole_groups: bool, last: bool) -> list[Experience] | None:
        """What `read` asks for; None when that is not there yet and this is not the last attempt."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Where the reader stands: plain containers."""

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
    cursor: Cursor  # where the reader stands once it has been read
    run: str = ""  # which run it is from, where a buffer holds those of several: they may have tasks of the same name


def group_of(experience: Experience) -> str | None:
    """The task an experience belongs to; None if it does not say."""
    return None if experience.eid.batch == "" and experience.eid.task == "" else experience.eid.tid


def check_source(state: Mapping[str, Any], source: str, where: str) -> None:
    """ForeignPositionError unless a reader's state is of the buffer with this id, which messages call `where`."""
    if state["source"] != source:
        raise ForeignPositionError(
            f"{where}: the saved position belongs to another buffer (id {state['source']}, this one has {source}). "
            "Give the path it was saved with, or start without the saved state."
        )


class CursorReader(BufferReader):
    """Reads in the order of writing, each experience once.

    Args:
        source: identity of the buffer, kept in the state so that the cursor of another one is refused.
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
        """At least one, about `count`, of the experiences after `cursor`; empty when there is none yet."""

    def _try_read(self, count: int, whole_groups: bool, last: bool) -> list[Experience] | None:
        if whole_groups:
            number, complete = self._next_groups(count)
        else:
            complete = self._look(count)
            number = min(count, len(self._ahead))
        if not (complete or last):
            return None
        taken, self._ahead = self._ahead[:number], self._ahead[number:]
        if taken:
            self._cursor = taken[-1].cursor
        return [item.experience for item in taken]

    def _next_groups(self, count: int) -> tuple[int, bool]:
        """How many experiences make up the whole groups within `count`, and whether more could not be added."""
        self._look(count + 1)  # one further tells whether a group goes on
        ends = [index for index in range(1, min(count, len(self._ahead)) + 1) if self._ends_group(index)]
        if ends:
            return ends[-1], ends[-1] == count or len(self._ahead) > count
        number = min(count, len(self._ahead))  # nothing, or a first group larger than `count`
        while number and self._look(number + 1) and not self._ends_group(number):
            number += 1
        return number, number > 0

    def _ends_group(self, number: int) -> bool:
        """Whether a group ends after the first `number` experiences ahead."""
        if number >= len(self._ahead):
            return True
        last, after = self._ahead[number - 1], self._ahead[number]
        group = group_of(last.experience)
        return group is None or group != group_of(after.experience) or last.run != after.run

    def _look(self, number: int) -> bool:
        """Have `number` experiences ahead; whether there are."""
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
        got = self._reader.read(count, whole_groups=whole_groups)
        if not got:
            self._reader.rewind()
            got = self._reader.read(count, whole_groups=whole_groups)
        return got if got or last else None

    def state_dict(self) -> dict[str, Any]:
        return {"reader": self._reader.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._reader.load_state_dict(state["reader"])

    def close(self) -> None:
        self._reader.close()


def create_reader(buffer: BufferConfig, seed: int = 0) -> BufferReader:
    """A reader of what a run kept, or a program wrote: `storage`, `path` or `url`, and how the section has it read.

    Args:
        buffer: a section whose storage is "file" or "sql".
        seed: of the order "random".

    Raises:
        ConfigError: a number out of its range, or SQLAlchemy is not installed.
        StorageError: there is nothing to read from.
    """
    place = buffer.url or buffer.path or ""
    if buffer.storage == "file":
        from trinity_lightning.buffer.step_files import StepReader

        reader: CursorReader = StepReader(place)
    else:
        from trinity_lightning.buffer.sql import ReplayReader, SqlReader

        if buffer.order != "fifo":
            return ReplayReader(
                place,
                order=buffer.order,
                reuse_limit=buffer.reuse_limit,
                decay=buffer.decay,
                use_decay=buffer.use_decay,
                seed=seed,
            )
        reader = SqlReader(place)
    return RepeatingReader(reader) if buffer.repeat else reader
