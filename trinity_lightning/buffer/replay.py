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

from trinity_lightning.buffer.reader import BufferReader, check_source
from trinity_lightning.buffer.sql import READS, ROWS, Database, experience_at, run_of, sa
from trinity_lightning.common.experience import Experience
from trinity_lightning.config.values import number, one_of, whole_number
from trinity_lightning.errors import StorageError

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
        place: as `SqlStorage`.
        order: "priority" or "random".
        reuse_limit: how often an experience may be read by all readers together; None: without end.
        decay, use_decay: in (0, 1].
        seed: of the random order.

    A ConfigError if an argument is out of range; other errors as `Database`.
    """

    endless_with = "a higher buffer.reuse_limit"

    def __init__(
        self,
        place: str | Path,
        *,
        order: str = "priority",
        reuse_limit: int | None = 1,
        decay: float = 1.0,
        use_decay: float = 1.0,
        seed: int = 0,
    ) -> None:
        one_of("order", order, ORDERS)
        whole_number("reuse_limit", reuse_limit, least=1, optional=True)
        for key, value in (("decay", decay), ("use_decay", use_decay)):
            number(key, value, above=0, most=1)
        self._order, self._reuse_limit, self._seed = order, reuse_limit, seed
        self._log_decay, self._log_use_decay = math.log(decay), math.log(use_decay)
        self._database = Database(place, create=False)
        self._name, self._number = secrets.token_hex(8), 0  # under which its reads are logged; how many there were

    def _try_read(self, count: int, whole_groups: bool, last: bool) -> list[Experience] | None:
        number = self._number + 1

        def read(connection: sa.Connection, again: bool) -> list[tuple[int, bytes]] | None:
            # Readers take turns, for none to choose what another is choosing; writers need not wait.
            self._database.take(connection, "reads", 1)
            taken = self._taken(number)
            # An attempt whose answer was lost may have read already.
            chosen: list[Any] = list(connection.execute(taken.order_by(READS.c.position)).scalars()) if again else []
            if not chosen:
                candidates = self._candidates(connection, number, None if whole_groups else count)
                if len(candidates) < count and not last:
                    return None
                positions = [position for position, _ in candidates[:count]]
                chosen = _whole_groups(candidates, count) if whole_groups else positions
                self._log(connection, number, chosen)
            query = sa.select(ROWS.c.position, ROWS.c.payload).where(ROWS.c.position.in_(taken))
            payloads = {row.position: row.payload for row in connection.execute(query)}
            return [(p, payloads[p]) for p in chosen if p in payloads]  # others were replaced

        rows = self._database.transact(read, write=True)
        if rows:
            self._number = number
        return None if rows is None else [experience_at(self._database.where, p, data) for p, data in rows]

    def _candidates(self, connection: sa.Connection, number: int, most: int | None) -> Sequence[Candidate]:
        """What may be read, the first choice first; at least the first `most`."""
        query = sa.select(ROWS.c.position, ROWS.c.task, ROWS.c.write_id).where(ROWS.c.priority > 0)
        if self._reuse_limit is not None:
            query = query.where(ROWS.c.uses < self._reuse_limit)
        if self._order == "priority":
            # The logarithm of the score, less what all scores have in common: the age counts from any step.
            score = ROWS.c.log_priority - ROWS.c.step * self._log_decay + ROWS.c.uses * self._log_use_decay
            query = query.order_by(score.desc(), ROWS.c.uses, ROWS.c.position).limit(most)
            return list(map(_candidate, connection.execute(query)))
        found = list(map(_candidate, connection.execute(query.order_by(ROWS.c.position))))
        random.Random(f"{self._seed}/{number}").shuffle(found)
        return found

    def _taken(self, number: int) -> "sa.Select[tuple[int]]":
        """The positions that the read of this number took."""
        return sa.select(READS.c.position).where(READS.c.reader == self._name, READS.c.number == number)

    def _log(self, connection: sa.Connection, number: int, chosen: list[int]) -> None:
        if not chosen:
            return
        held = sa.select(READS.c.number).where(READS.c.reader == self._name, READS.c.number >= number)
        if connection.execute(held).first():
            raise StorageError(
                f"{self._database.where}: another reader '{self._name}' has read meanwhile: let only one run at a time "
                "go on from a checkpoint."
            )
        read = {"reader": self._name, "number": number}
        connection.execute(READS.insert(), [read | {"position": position} for position in chosen])
        self._count_uses(connection, number, 1)

    def _count_uses(self, connection: sa.Connection, number: int, by: int) -> None:
        taken = ROWS.c.position.in_(self._taken(number))
        connection.execute(ROWS.update().where(taken).values(uses=ROWS.c.uses + by))

    def state_dict(self) -> dict[str, Any]:
        return {"source": self._database.source, "reader": self._name, "reads": self._number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken: what this reader has read since becomes unread.

        Raises:
            ForeignPositionError: the state is another buffer's.
            StorageError: the database cannot be written to.
        """
        check_source(state, self._database.source, self._database.where)
        self._name = state["reader"]
        since = (READS.c.reader == self._name) & (READS.c.number > state["reads"])

        def take_back(connection: sa.Connection, _again: bool) -> None:
            self._database.take(connection, "reads", 1)
            for read in connection.execute(sa.select(READS.c.number).where(since).distinct()).scalars().all():
                self._count_uses(connection, read, -1)
            connection.execute(READS.delete().where(since))

        self._database.transact(take_back, write=True)
        self._number = state["reads"]

    def close(self) -> None:
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
