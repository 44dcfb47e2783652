"""Experiences in a database, which any number of processes write and read: SQLite, or PostgreSQL by its URL.

A row is an experience: a payload, and the values by which readers choose. Its pictures lie in a table of their own,
once each, and the payload names them.

Every row has a position, and rows become visible in the order of their positions. A writer takes its positions from a
counter in the database, in the transaction that inserts the rows: the next writer waits at the counter until they are
committed. With plain autoincrement PostgreSQL may commit a later id first, and a reader whose cursor has passed it
would never see the earlier one.
"""

import asyncio
import math
import random
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from trinity_lightning.algorithm.add_strategy.add_strategy import BufferWriter
from trinity_lightning.buffer.database import PICTURE_TABLES, PICTURES, READS, ROWS, USES, Database, sa
from trinity_lightning.buffer.reader import BufferReader, Cursor, CursorReader, Item, check_source, group_of
from trinity_lightning.buffer.step_files import FOLDER, folder_id
from trinity_lightning.common.experience import Experience, ExperienceError, ExperienceFormatError
from trinity_lightning.common.experience.codec import names_apart, write_payload
from trinity_lightning.common.experience.experience import read_payload
from trinity_lightning.common.experience.inputs import InputTable
from trinity_lightning.common.experience.payload import Writer, unpack
from trinity_lightning.config.buffer import BufferConfig
from trinity_lightning.config.values import number, one_of, whole_number
from trinity_lightning.errors import StorageError, StorageFormatError


def reader_of(buffer: BufferConfig, seed: int) -> BufferReader:
    """A reader of the database at `buffer.url` or `buffer.path` (buffer.storage=sql)."""
    place = buffer.url or buffer.path or ""
    if buffer.order == "fifo":
        return SqlReader(place)
    return ReplayReader(
        place,
        order=buffer.order,
        reuse_limit=buffer.reuse_limit,
        decay=buffer.decay,
        use_decay=buffer.use_decay,
        seed=seed,
    )


def keeper_of(buffer: BufferConfig, folder: Path) -> Callable[[int, list[Experience]], object]:
    """A keeper that writes explore steps to a database (buffer.keep=sql), by default in the run's folder."""
    place = buffer.url or buffer.path or folder / f"{FOLDER}.db"
    SqlStorage(place).close()  # a place that cannot be written to is refused before a model is loaded
    return lambda step, experiences: keep_step(place, folder_id(folder), step, experiences)


# -- writing, and reading in order -------------------------------------------------------------------------------------


def _row(experience: Experience, write_id: str, pictures: InputTable) -> dict[str, Any]:
    """The columns of an experience, without its position; `pictures` takes its pictures."""
    priority = experience.info.get("priority", 1.0)
    if not isinstance(priority, (int, float)) or not 0 <= priority < math.inf:
        raise ExperienceError(
            f"experience {experience.eid.uid}: priority: expected a finite number of at least 0, got {priority!r}."
        )
    batch = experience.eid.batch  # the explore step, 0 if it does not say
    if isinstance(batch, str):
        batch = int(batch) if batch.isascii() and batch.isdecimal() and len(batch) < 19 else 0
    return {
        "write_id": write_id,
        "ends_write": False,  # a column of earlier versions
        "task": group_of(experience),
        "step": batch,
        "priority": float(priority),
        "log_priority": math.log(priority) if priority > 0 else 0.0,  # a row of priority 0 is never chosen
        "uses": 0,
        "payload": write_payload([experience], pictures),
    }


def run_of(write_id: str) -> str:
    """The run whose `keep_step` wrote the rows with this `write_id`; empty if another writer did."""
    return write_id.rpartition("/")[0]


class SqlStorage(BufferWriter):
    """Inserts into a database, creating its tables (and a SQLite file) if needed.

    Args:
        place: path of a SQLite file, or a URL: sqlite:///FILE, postgresql://USER:PASSWORD@HOST/NAME. A SQLite file
            must lie on a disk of this machine: its locks do not hold over a network.

    The errors are those of `Database`.
    """

    def __init__(self, place: str | Path) -> None:
        self._database = Database(place, create=True)

    def write(self, experiences: list[Experience], name: str | None = None) -> None:
        """Insert the experiences; they are committed when this returns.

        Args:
            experiences: any number, or none.
            name: name of this write, at most 32 characters; the experiences replace those of an earlier write of that
                name. None: nothing is replaced.

        Raises:
            ExperienceError: one of them cannot be serialized, or has a wrong priority; nothing is written.
            StorageLockedError: the database was busy for too long.
            StorageError: it fails otherwise.
        """
        if not experiences and name is None:
            return
        write_id = name or secrets.token_hex(16)
        pictures = InputTable()
        rows = [_row(experience, write_id, pictures) for experience in experiences]
        written = ROWS.c.write_id == write_id

        def insert(connection: sa.Connection, again: bool) -> None:
            start = self._database.take(connection, "positions", len(rows))
            if name is not None:
                connection.execute(ROWS.delete().where(written))
            # The connection may have broken after an earlier attempt was committed.
            elif again and connection.execute(sa.select(ROWS.c.position).where(written)).first():
                return
            if rows:
                connection.execute(ROWS.insert(), [{**row, "position": start + n} for n, row in enumerate(rows, 1)])
            if pictures.tensors or (name is not None and sa.inspect(connection).has_table(USES.name)):
                _write_pictures(connection, write_id, pictures.tensors)

        self._database.transact(insert, write=True)

    async def write_async(self, experiences: list[Experience]) -> None:
        await asyncio.to_thread(self.write, experiences)

    def close(self) -> None:
        """Close all connections."""
        self._database.close()

    def __enter__(self) -> "SqlStorage":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def keep_step(place: str | Path, run: str, step: int, experiences: list[Experience]) -> None:
    """Insert the experiences of an explore step of a run, in place of those of an earlier attempt at it.

    A reader that has passed the earlier ones reads the new ones too. The errors are those of `SqlStorage.write`.

    Args:
        place: see `SqlStorage`.
        run: id of the run, at most 16 characters: several runs may keep their steps in one database.
        step, experiences: number of the step, and its experiences as the trainer got them.
    """
    with SqlStorage(place) as storage:
        storage.write(experiences, f"{run}/{step}")


class SqlReader(CursorReader):
    """Reads each experience once, in the order of writing, whoever else reads; for `place` see `SqlStorage`."""

    def __init__(self, place: str | Path) -> None:
        self._database = Database(place, create=False)
        super().__init__(self._database.source, self._database.where)

    def _fetch(self, cursor: Cursor, count: int) -> list[Item]:
        query = sa.select(ROWS.c.position, ROWS.c.payload, ROWS.c.write_id)
        query = query.where(ROWS.c.position > cursor[0]).order_by(ROWS.c.position).limit(count)
        rows, pictures = self._database.transact(lambda connection, _: _read_rows(connection, query))
        experiences = _experiences_of(self._where, rows, pictures)
        return [Item(e, (row.position,), run_of(row.write_id)) for e, row in zip(experiences, rows, strict=True)]

    def close(self) -> None:
        self._database.close()


# -- pictures ----------------------------------------------------------------------------------------------------------
# A write keeps its pictures after it has taken its positions, so that no other writer does so at the same time.

_AT_ONCE = 500  # pictures named in a query, which SQLite bounds
_ATTEMPTS = 3


def _write_pictures(connection: sa.Connection, write_id: str, tensors: Mapping[str, Tensor]) -> None:
    """Keep the tensors of a write by their hashes, in place of those of an earlier write of that name."""
    PICTURE_TABLES.create_all(connection)
    used = USES.c.write_id == write_id
    before = connection.execute(sa.select(USES.c.hash).where(used)).scalars().all()
    connection.execute(USES.delete().where(used))
    for hashes in _in_parts(tensors):
        present = set(connection.execute(sa.select(PICTURES.c.hash).where(PICTURES.c.hash.in_(hashes))).scalars())
        for hashed in hashes:
            if hashed not in present:
                connection.execute(PICTURES.insert(), {"hash": hashed, "payload": Writer().pack(tensors[hashed])})
        connection.execute(USES.insert(), [{"write_id": write_id, "hash": hashed} for hashed in hashes])
    for hashes in _in_parts(before):
        still = connection.execute(sa.select(USES.c.hash).where(USES.c.hash.in_(hashes))).scalars()
        connection.execute(PICTURES.delete().where(PICTURES.c.hash.in_(set(hashes).difference(still))))


def _in_parts(hashes: Iterable[str]) -> Iterator[list[str]]:
    everything = list(hashes)
    for start in range(0, len(everything), _AT_ONCE):
        yield everything[start : start + _AT_ONCE]


def _read_rows(connection: sa.Connection, query: sa.Executable) -> tuple[Sequence[Any], dict[str, bytes]]:
    """The rows of a query, with `position` and `payload` among them, and the payloads of their pictures by hash."""
    attempts = 0
    while True:
        rows, pictures = connection.execute(query).all(), dict[str, bytes]()
        hashes = {hashed for row in rows for hashed in _pictures_of(row.payload)}
        for part in _in_parts(hashes):
            of_part = connection.execute(sa.select(PICTURES).where(PICTURES.c.hash.in_(part)))
            pictures |= {row.hash: row.payload for row in of_part}
        attempts += 1
        # PostgreSQL: if a step was replaced between the queries, its old pictures are gone, and so are its old rows.
        if len(pictures) == len(hashes) or attempts == _ATTEMPTS:
            return rows, pictures


def _pictures_of(payload: bytes) -> list[str]:
    """Hashes of the pictures that a row's payload names."""
    try:
        return names_apart(memoryview(payload))
    except ExperienceFormatError:
        return []  # `_experiences_of` names the row


def _experiences_of(where: str, rows: Sequence[Any], pictures: Mapping[str, bytes]) -> list[Experience]:
    """The experiences in rows, which share their pictures. StorageFormatError: a row or a picture is damaged."""
    tensors: dict[str, Tensor] = {}
    experiences: list[Experience] = []
    place = ""
    try:
        for hashed, payload in pictures.items():
            place = f"picture {hashed}"
            tensors[hashed] = unpack(memoryview(payload))
        for row in rows:
            place = f"position {row.position}"
            (experience,) = read_payload(memoryview(row.payload), tensors)
            experiences.append(experience)
    except ValueError as error:
        raise StorageFormatError(
            f"{where}, {place}: {error} Restore the database from a copy, or delete that row."
        ) from error
    return experiences


# -- replaying: by priority or at random, the same experience several times --------------------------------------------
# Each read is logged in the database under the reader's name, and the reader's state is the number of its reads. A
# reader that is resumed from an earlier state takes back its reads since, so that a killed run counts no use twice.

ORDERS = ("priority", "random")


class ReplayReader(BufferReader):
    """Chooses among all experiences of a buffer that were used fewer than `reuse_limit` times, by any reader.

    The order "priority" takes the highest score first, where

        score = priority * decay ** age * use_decay ** uses

    with the priority given at writing, the age in explore steps (the newest experience's step less its own), and the
    number of reads before. Among equal scores the less used comes first, then the older. Priority 0 is never chosen.
    The order "random" draws uniformly, no experience twice in a read; the draw follows from the seed, the number of
    reads before, and the experiences that there are.

    Args:
        place: see `SqlStorage`.
        order: "priority" or "random".
        reuse_limit: number of reads of an experience, by all readers together; None: any number.
        decay, use_decay: in (0, 1].
        seed: of the random order.

    Raises:
        ConfigError: an argument is out of range; or as `Database`, as are other errors.
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
        self._name, self._number = secrets.token_hex(8), 0  # name of the reader, and number of its reads, in the log

    def _try_read(self, count: int, whole_groups: bool, last: bool) -> list[Experience] | None:
        number = self._number + 1

        def read(connection: sa.Connection, again: bool) -> tuple[list[Any], dict[str, bytes]] | None:
            # Readers take turns, so that two do not choose the same; writers need not wait.
            self._database.take(connection, "reads", 1)
            taken = self._taken(number)
            # An earlier attempt, whose answer was lost, may have read already.
            chosen: list[Any] = list(connection.execute(taken.order_by(READS.c.position)).scalars()) if again else []
            if not chosen:
                candidates = self._candidates(connection, number, None if whole_groups else count)
                if len(candidates) < count and not last:
                    return None
                positions = [row.position for row in candidates[:count]]
                chosen = _whole_groups(candidates, count) if whole_groups else positions
                self._log(connection, number, chosen)
            query = sa.select(ROWS.c.position, ROWS.c.payload).where(ROWS.c.position.in_(taken))
            rows, pictures = _read_rows(connection, query)
            by_position = {row.position: row for row in rows}
            return [by_position[p] for p in chosen if p in by_position], pictures  # the other rows were replaced

        answer = self._database.transact(read, write=True)
        if answer is None:
            return None
        if answer[0]:
            self._number = number
        return _experiences_of(self._database.where, *answer)

    def _candidates(self, connection: sa.Connection, number: int, most: int | None) -> Sequence[Any]:
        """Rows that may be read, the first choice first; at least the first `most` of them."""
        query = sa.select(ROWS.c.position, ROWS.c.task, ROWS.c.write_id).where(ROWS.c.priority > 0)
        if self._reuse_limit is not None:
            query = query.where(ROWS.c.uses < self._reuse_limit)
        if self._order == "priority":
            # The logarithm of the score, without the part that all scores have in common: the age counts from any step.
            score = ROWS.c.log_priority - ROWS.c.step * self._log_decay + ROWS.c.uses * self._log_use_decay
            query = query.order_by(score.desc(), ROWS.c.uses, ROWS.c.position).limit(most)
            return connection.execute(query).all()
        rows = list(connection.execute(query.order_by(ROWS.c.position)))
        random.Random(f"{self._seed}/{number}").shuffle(rows)
        return rows

    def _taken(self, number: int) -> "sa.Select[tuple[int]]":
        """The positions that the read with this number took."""
        return sa.select(READS.c.position).where(READS.c.reader == self._name, READS.c.number == number)

    def _log(self, connection: sa.Connection, number: int, chosen: list[int]) -> None:
        if not chosen:
            return
        logged = sa.select(READS.c.number).where(READS.c.reader == self._name, READS.c.number >= number)
        if connection.execute(logged).first():
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
        """Go on where `state_dict` was taken; the reads of this reader since then are taken back.

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


def _whole_groups(candidates: Sequence[Any], count: int) -> list[int]:
    """Positions of the first groups that fit into `count`, at least of one group, each in the order of writing."""
    groups: dict[object, list[int]] = {}
    for row in candidates:
        # Runs that keep their steps in one database have tasks of the same name, which are different groups.
        group = row.position if row.task is None else (run_of(row.write_id), row.task)
        groups.setdefault(group, []).append(row.position)
    chosen: list[int] = []
    for positions in groups.values():
        if chosen and len(chosen) + len(positions) > count:
            break
        chosen.extend(sorted(positions))
    return chosen
