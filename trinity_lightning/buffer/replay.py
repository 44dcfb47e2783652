"""Reading a database of experiences by priority or at random, the same experience several times.

Each read is logged in the database under the reader's name, and its state is the number of its reads: resumed from an
earlier state, a reader takes back what it had read since, so that a run that was killed counts no use twice.
"""

import math
import random
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trinity_lightning.buffer.reader import BufferReader, check_count
from trinity_lightning.buffer.sql import MOST_VARIABLES, RETRY_FOR, TABLE, Database, experience_at, run_of, sa
from trinity_lightning.common.experience import Experience
from trinity_lightning.config.values import number, one_of, whole_number
from trinity_lightning.errors import ForeignPositionError, StorageError

ORDERS = ("priority", "random")

# Position of a row, and what those of its group have in common.
Candidate = tuple[int, object]


class ReplayReader(BufferReader):
    """Chooses among all experiences of a buffer that have been used fewer than `reuse_limit` times, by anyone.

    In order "priority" the highest score first, where

        score = priority * decay ** age * use_decay ** uses

    with the priority given at writing, the age in explore steps (of the newest experience less its own), and how often
    it was read before; of equal scores the less used, then the older. Priority 0 is never chosen. In order "random"
    uniformly, no experience twice in a read: a function of the seed, the number of reads before, and what there is.

    Args:
        place, table, retry_for: as `SqlStorage`.
        order: "priority" or "random".
        reuse_limit: how often an experience may be read by all readers together; None: without end.
        decay, use_decay: in (0, 1].
        seed: of the random order.
        name: under which reads are logged, another for each reader; None: a new one, or that of the state it loads.

    A ConfigError if an argument is out of range; other errors as `Database`.
    """

    endless_with = "a higher buffer.reuse_limit"

    def __init__(
        self,
        place: str | Path,
        *,
        table: str = TABLE,
        order: str = "priority",
        reuse_limit: int | None = 1,
        decay: float = 1.0,
        use_decay: float = 1.0,
        seed: int = 0,
        name: str | None = "trainer",
        retry_for: float = RETRY_FOR,
    ) -> None:
        one_of("order", order, ORDERS)
        whole_number("reuse_limit", reuse_limit, least=1, optional=True)
        for key, value in (("decay", decay), ("use_decay", use_decay)):
            number(key, value, above=0, most=1)
        self._order, self._reuse_limit, self._seed = order, reuse_limit, seed
        self._name, self._named = name or secrets.token_hex(8), name is not None
        self._log_decay, self._log_use_decay = math.log(decay), math.log(use_decay)
        self._database = Database(place, table, create=False, retry_for=retry_for)
        reads = self._database.tables.reads
        newest = sa.select(sa.func.max(reads.c.number)).where(reads.c.reader == self._name)
        self._number = self._database.transact(lambda connection, _: connection.execute(newest).scalar()) or 0

    def _try_read(self, count: int | None, whole_groups: bool, last: bool) -> list[Experience] | None:
        check_count(count)
        if count is None:
            raise ValueError("count: expected a number: in this order there is no next write.")
        number = self._number + 1

        def read(connection: sa.Connection, again: bool) -> list[Any] | None:
            # Readers take turns, for none to choose what another is choosing; writers need not wait.
            self._database.take(connection, "reads", 1)
            chosen = self._logged(connection, number) if again else []
            if chosen:
                return self._payloads(connection, chosen)
            candidates = self._candidates(connection, number, None if whole_groups else count)
            if len(candidates) < count and not last:
                return None
            chosen = (
                _whole_groups(candidates, count) if whole_groups else [position for position, _ in candidates[:count]]
            )
            self._log(connection, number, chosen)
            return self._payloads(connection, chosen)

        rows = self._database.transact(read, write=True)
        if rows:
            self._number = number
        return None if rows is None else [experience_at(self._database.where, p, data) for p, data in rows]

    def _candidates(self, connection: sa.Connection, number: int, most: int | None) -> Sequence[Candidate]:
        """What may be read, the first choice first; at least the first `most`."""
        rows = self._database.tables.rows
        query = sa.select(rows.c.position, rows.c.task, rows.c.write_id).where(rows.c.priority > 0)
        if self._reuse_limit is not None:
            query = query.where(rows.c.uses < self._reuse_limit)
        if self._order == "priority":
            # The logarithm of the score, less what all scores have in common: the age counts from any step.
            score = rows.c.log_priority - rows.c.step * self._log_decay + rows.c.uses * self._log_use_decay
            query = query.order_by(score.desc(), rows.c.uses, rows.c.position).limit(most)
            return list(map(_candidate, connection.execute(query)))
        found = list(map(_candidate, connection.execute(query.order_by(rows.c.position))))
        random.Random(f"{self._seed}/{number}").shuffle(found)
        return found

    def _logged(self, connection: sa.Connection, number: int) -> list[int]:
        """What an attempt whose answer was lost has read."""
        reads = self._database.tables.reads
        query = sa.select(reads.c.position).where(reads.c.reader == self._name, reads.c.number == number)
        return list(connection.execute(query.order_by(reads.c.position)).scalars())

    def _log(self, connection: sa.Connection, number: int, chosen: list[int]) -> None:
        tables = self._database.tables
        if not chosen:
            return
        held = sa.select(tables.reads.c.number).where(tables.reads.c.reader == self._name)
        if connection.execute(held.where(tables.reads.c.number >= number)).first():
            raise StorageError(
                f"{self._database.where}: another reader '{self._name}' has read meanwhile; give each its own `name`, "
                "and let only one run at a time go on from a checkpoint."
            )
        connection.execute(
            tables.reads.insert(), [{"reader": self._name, "number": number, "position": p} for p in chosen]
        )
        self._count_uses(connection, chosen, 1)

    def _count_uses(self, connection: sa.Connection, positions: list[int], by: int) -> None:
        rows = self._database.tables.rows
        for start in range(0, len(positions), MOST_VARIABLES):
            some = positions[start : start + MOST_VARIABLES]
            connection.execute(rows.update().where(rows.c.position.in_(some)).values(uses=rows.c.uses + by))

    def _payloads(self, connection: sa.Connection, chosen: list[int]) -> list[tuple[int, bytes]]:
        rows, found = self._database.tables.rows, {}
        for start in range(0, len(chosen), MOST_VARIABLES):
            some = chosen[start : start + MOST_VARIABLES]
            query = sa.select(rows.c.position, rows.c.payload).where(rows.c.position.in_(some))
            found.update({row.position: row.payload for row in connection.execute(query)})
        return [(position, found[position]) for position in chosen if position in found]  # others were replaced

    def state_dict(self) -> dict[str, Any]:
        """How often this reader has read, and of what."""
        return {"source": self._database.source, "reader": self._name, "reads": self._number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken: what this reader has read since becomes unread.

        Raises:
            ForeignPositionError: the state is another buffer's or another reader's.
            StorageError: the database cannot be written to.
        """
        if not self._named:
            self._name = state["reader"]
        mine = {"source": self._database.source, "reader": self._name}
        for key, value in mine.items():
            if state[key] != value:
                raise ForeignPositionError(
                    f"{self._database.where}: the saved position has {key} '{state[key]}', expected '{value}'. Give "
                    "what it was saved with, or start without the saved state."
                )
        reads = self._database.tables.reads
        since = (reads.c.reader == self._name) & (reads.c.number > state["reads"])

        def take_back(connection: sa.Connection, _again: bool) -> None:
            self._database.take(connection, "reads", 1)
            query = sa.select(reads.c.number, reads.c.position).where(since).order_by(reads.c.number)
            by_read: dict[int, list[int]] = {}
            for read, position in connection.execute(query):
                by_read.setdefault(read, []).append(position)
            for positions in by_read.values():
                self._count_uses(connection, positions, -1)
            connection.execute(reads.delete().where(since))

        self._database.transact(take_back, write=True)
        self._number = state["reads"]

    def close(self) -> None:
        """Close all connections."""
        self._database.close()


def _candidate(row: Any) -> Candidate:
    """Runs that keep their steps in one database have tasks of the same name, which are not one group."""
    return row.position, row.position if row.task is None else (run_of(row.write_id), row.task)


def _whole_groups(candidates: Sequence[Candidate], count: int) -> list[int]:
    """Positions of the first groups that fit into `count`, at least one group, each in the order of writing."""
    groups: dict[object, list[int]] = {}
    for position, group in candidates:
        groups.setdefault(group, []).append(position)
    chosen: list[int] = []
    for positions in groups.values():
        if chosen and len(chosen) + len(positions) > count:
            break
        chosen.extend(sorted(positions))
    return chosen
