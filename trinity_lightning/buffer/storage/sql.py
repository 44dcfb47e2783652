"""Experiences in a database: any number of processes write, any number read. SQLite by default, PostgreSQL by its URL.

One row an experience: a payload of version 2 beside what it is chosen by. Read in the order of writing by `SqlReader`
here, by priority or at random by `ReplayReader` in `replay`.
"""

import asyncio
import math
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trinity_lightning.buffer.reader import Cursor, CursorReader, Item, group_of
from trinity_lightning.buffer.storage.database import Database, logarithm, sa
from trinity_lightning.buffer.storage.errors import StorageFormatError
from trinity_lightning.common.experience import Experience, ExperienceError, ExperienceFormatError
from trinity_lightning.common.writer import BufferWriter

TABLE = "experiences"
RETRY_FOR = 60.0


def info_priority(experience: Experience) -> float:
    """`info["priority"]`, 1 where there is none."""
    return experience.info.get("priority", 1.0)


def explore_step(experience: Experience) -> int:
    """The explore step an experience came from; 0 where it does not say."""
    batch = experience.eid.batch
    if isinstance(batch, str):
        return int(batch) if batch.isascii() and batch.isdecimal() and len(batch) < 19 else 0
    return batch


def experience_at(where: str, position: int, payload: bytes) -> Experience:
    """The experience in a row.

    Raises:
        StorageFormatError: the row is damaged.
    """
    try:
        return Experience.deserialize(payload)
    except (ExperienceError, ExperienceFormatError) as error:
        raise StorageFormatError(
            f"{where}, position {position}: {error} Restore the database from a copy, or delete that row."
        ) from error


class SqlStorage(BufferWriter):
    """Inserts into a database, creating its tables (and a SQLite file) where needed.

    Args:
        place: path of a SQLite file, or a URL: sqlite:///FILE, postgresql://USER:PASSWORD@HOST/NAME. A SQLite file
            must lie on a disk of this machine: its locks do not hold over a network.
        table: name of the buffer within the database.
        priority_of: what a `ReplayReader` chooses by, 0 for never; see there.
        retry_for: seconds for which a busy or restarting database is asked again.

    Raises:
        ConfigError: a URL that is none, or a driver that is not installed.
        StorageError: no connection.
        StorageFormatError: what is there is something else.
    """

    def __init__(
        self,
        place: str | Path,
        *,
        table: str = TABLE,
        priority_of: Callable[[Experience], float] = info_priority,
        retry_for: float = RETRY_FOR,
    ) -> None:
        self._database = Database(place, table, create=True, retry_for=retry_for)
        self._priority_of = priority_of
        self.source = self._database.source

    def write(self, experiences: list[Experience]) -> None:
        """Insert the experiences; they are committed when this returns.

        Raises:
            ExperienceError: one of them cannot be serialized, or its priority is none; nothing is written.
            StorageLockedError: the database was busy for too long.
            StorageError: it fails otherwise.
        """
        if not experiences:
            return
        write_id = secrets.token_hex(16)
        rows = [self._row(experience, write_id) for experience in experiences]
        rows[-1]["ends_write"] = True
        table = self._database.tables.rows

        def insert(connection: sa.Connection, again: bool) -> None:
            start = self._database.take(connection, "positions", len(rows))
            # The connection may have broken after an earlier attempt was committed. Without an index: it is rare.
            done = again and connection.execute(sa.select(table.c.position).where(table.c.write_id == write_id)).first()
            if not done:
                connection.execute(table.insert(), [{**row, "position": start + n} for n, row in enumerate(rows, 1)])

        self._database.transact(insert, write=True)

    def _row(self, experience: Experience, write_id: str) -> dict[str, Any]:
        priority = self._priority_of(experience)
        if not isinstance(priority, (int, float)) or not 0 <= priority < math.inf:
            raise ExperienceError(
                f"experience {experience.eid.uid}: priority: expected a finite number of at least 0, got {priority!r}."
            )
        return {
            "write_id": write_id,
            "ends_write": False,
            "task": group_of(experience),
            "step": explore_step(experience),
            "priority": float(priority),
            "log_priority": logarithm(priority),
            "uses": 0,
            "payload": experience.serialize(),
        }

    async def write_async(self, experiences: list[Experience]) -> None:
        """Awaitable `write`: the database is waited for in a thread."""
        await asyncio.to_thread(self.write, experiences)

    def close(self) -> None:
        """Close all connections."""
        self._database.close()

    def __enter__(self) -> "SqlStorage":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class SqlReader(CursorReader):
    """Reads in the order of writing, each experience once a reader, whoever else reads.

    Args:
        place, table, retry_for: as `SqlStorage`.

    Raises:
        ConfigError: a URL that is none, or a driver that is not installed.
        StorageError: there is no such buffer, or no connection.
        StorageFormatError: what is there is something else.
    """

    def __init__(self, place: str | Path, *, table: str = TABLE, retry_for: float = RETRY_FOR) -> None:
        self._database = Database(place, table, create=False, retry_for=retry_for)
        super().__init__(self._database.source, self._database.where)

    def _fetch(self, cursor: Cursor, count: int) -> list[Item]:
        rows = self._database.tables.rows
        query = sa.select(rows.c.position, rows.c.ends_write, rows.c.payload)
        query = query.where(rows.c.position > cursor[0]).order_by(rows.c.position).limit(count)
        found = self._database.transact(lambda connection, _: connection.execute(query).all())
        return [
            Item(experience_at(self._where, row.position, row.payload), (row.position,), row.ends_write)
            for row in found
        ]

    def close(self) -> None:
        """Close all connections."""
        self._database.close()
