"""A database of experiences: its tables, its transactions, and what to do when it is busy.

Every row has a position, and rows become visible in the order of their positions: a writer takes its positions from a
counter in the database, in the transaction that inserts the rows, so that the next writer waits at the counter until
they are committed. With plain autoincrement a later id may be committed first (PostgreSQL), and a reader whose cursor
has passed it never sees the earlier one.
"""

import asyncio
import math
import random
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from trinity_lightning.buffer.reader import BufferReader, Cursor, CursorReader, Item, check_count, group_of
from trinity_lightning.common.experience import Experience, ExperienceError, ExperienceFormatError
from trinity_lightning.common.writer import BufferWriter
from trinity_lightning.config.values import number, one_of, whole_number
from trinity_lightning.errors import ConfigError, StorageError, StorageFormatError, StorageLockedError

# -- A database of experiences: its tables, its transactions, and what to do when it is busy ---------------------------


try:
    import sqlalchemy as sa
    from sqlalchemy import event
    from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError, OperationalError
except ModuleNotFoundError as error:
    if error.name != "sqlalchemy":
        raise
    raise ConfigError(
        "buffer.storage=sql needs SQLAlchemy. Install it with `pip install 'trinity-lightning[sql]'`, or choose "
        "buffer.storage=file."
    ) from error

T = TypeVar("T")

FORMAT = 1
# Seconds between attempts at a busy database: doubled each time, and never in step with another process.
FIRST_PAUSE, LONGEST_PAUSE = 0.01, 0.5
# SQLite allows as few as 999 variables in a statement.
MOST_VARIABLES = 500
# PostgreSQL: serialization failure, deadlock, lock not available, and a server that stops or starts.
_PASSING = frozenset({"40001", "40P01", "55P03", "57P01", "57P02", "57P03"})
_CREATING = 0x7472696E69747921  # any number that nobody else locks
_BUSY = ("database is locked", "database table is locked", "database schema is locked")


class Tables:
    """The tables of one buffer; several buffers share a database by their names.

    Attributes:
        rows: one experience a row. `position` orders them; `write_id` and `ends_write` tell what was written together;
            `task` is the group and `step` the explore step it came from; `uses` counts how often it was replayed.
        reads: which rows each read of a replaying reader took, for a reader resumed from before to take them back.
        info: format and id of the buffer, and the counters that writers and readers queue at.
    """

    def __init__(self, name: str) -> None:
        self.metadata = sa.MetaData()
        self.rows = sa.Table(
            name,
            self.metadata,
            sa.Column("position", sa.BigInteger, primary_key=True, autoincrement=False),
            sa.Column("write_id", sa.String(32), nullable=False),
            sa.Column("ends_write", sa.Boolean, nullable=False),
            sa.Column("task", sa.Text),
            sa.Column("step", sa.BigInteger, nullable=False),
            sa.Column("priority", sa.Double, nullable=False),
            sa.Column("log_priority", sa.Double, nullable=False),
            sa.Column("uses", sa.Integer, nullable=False),
            sa.Column("payload", sa.LargeBinary, nullable=False),
        )
        self.reads = sa.Table(
            f"{name}_reads",
            self.metadata,
            sa.Column("reader", sa.String(255), primary_key=True),
            sa.Column("number", sa.BigInteger, primary_key=True, autoincrement=False),
            sa.Column("position", sa.BigInteger, primary_key=True, autoincrement=False),
        )
        self.info = sa.Table(
            f"{name}_info",
            self.metadata,
            sa.Column("key", sa.String(32), primary_key=True),
            sa.Column("number", sa.BigInteger, nullable=False),
            sa.Column("text", sa.Text, nullable=False),
        )


def database_url(place: str | Path) -> sa.URL:
    """The URL of a database: as given, or of the SQLite file at a path.

    Raises:
        ConfigError: it is no URL, or of a database in memory, which no other process would see.
    """
    if isinstance(place, Path) or "://" not in place:
        return sa.URL.create("sqlite", database=str(place))
    try:
        url = sa.make_url(place)
    except ArgumentError as error:
        raise ConfigError(
            f"buffer.url is {place!r}; give one such as sqlite:///FILE or postgresql://USER@HOST/NAME."
        ) from error
    if url.drivername == "postgresql":
        url = url.set(drivername="postgresql+psycopg")
    if url.get_backend_name() == "sqlite" and url.database in (None, "", ":memory:"):
        raise ConfigError(
            "buffer.url names a database in memory; give a file, sqlite:///FILE, or buffer.storage=memory."
        )
    return url


class Database:
    """An open buffer in a database. Not to be carried through a fork: each process opens its own.

    Args:
        place: a URL, or the path of a SQLite file.
        name: name of the buffer: of its tables.
        create: make what is missing, else it is an error.
        retry_for: seconds for which a busy or restarting database is asked again.

    Raises:
        ConfigError: a URL that is none, or a driver that is not installed.
        StorageError: there is no such buffer, or no connection.
        StorageFormatError: there is something else.
    """

    def __init__(self, place: str | Path, name: str, create: bool, retry_for: float) -> None:
        url = database_url(place)
        self.where = f"{url.render_as_string(hide_password=True)}, table '{name}'"
        self.tables = Tables(name)
        self._retry_for = retry_for
        self._opened = False
        file = Path(url.database or "") if url.get_backend_name() == "sqlite" else None
        if file is not None and not file.exists():
            if not create:
                raise StorageError(f"{self.where}: there is no such file; a writer (`SqlStorage`) creates it.")
            file.parent.mkdir(parents=True, exist_ok=True)
        self._engine = _make_engine(url, create)
        try:
            self.source = self.transact(lambda c, _: self._open(c, create), write=create)
        except BaseException:
            self.close()
            raise
        self._opened = True

    def _open(self, connection: sa.Connection, create: bool) -> str:
        """The id of the buffer, created where it may be."""
        if create and connection.dialect.name == "postgresql":  # two that create the same tables would collide
            connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_CREATING)))
        info, inspector = self.tables.info, sa.inspect(connection)
        if inspector.has_table(info.name):
            columns = {column["name"] for column in inspector.get_columns(info.name)}
            found = {}
            if columns == set(info.columns.keys()):
                found = {row.key: row for row in connection.execute(sa.select(info))}
            if "id" not in found or found["format"].number != FORMAT:
                raise StorageFormatError(f"{self.where}: not of format {FORMAT}. Choose another table or database.")
            return found["id"].text
        if inspector.has_table(self.tables.rows.name):
            raise StorageFormatError(f"{self.where}: a table of another kind. Choose another name or database.")
        if not create:
            raise StorageError(f"{self.where}: there is no such table; a writer (`SqlStorage`) creates it.")
        self.tables.metadata.create_all(connection)
        identity = secrets.token_hex(8)
        numbers = {"format": FORMAT, "id": 0, "positions": 0, "reads": 0}
        rows = [{"key": key, "number": n, "text": identity if key == "id" else ""} for key, n in numbers.items()]
        connection.execute(info.insert(), rows)
        return identity

    def transact(self, work: Callable[[sa.Connection, bool], T], write: bool = False) -> T:
        """What `work` returns, done in one transaction, again and again while the database is busy.

        Args:
            work: given the connection, and whether an earlier attempt failed (and may, where the connection broke
                at the commit, have succeeded all the same).
            write: whether it writes.

        Raises:
            StorageLockedError: the database was busy for too long.
            StorageFormatError: the database is damaged, or none.
            StorageError: anything else.
        """
        failed = False

        def attempt() -> T:
            nonlocal failed
            again, failed = failed, True
            with self._engine.connect().execution_options(trinity_write=write) as connection, connection.begin():
                return work(connection, again)

        return self._retry(attempt)

    def _retry(self, attempt: Callable[[], T]) -> T:
        deadline, pause = time.monotonic() + self._retry_for, FIRST_PAUSE
        jitter = random.SystemRandom()  # leaves the global generator, which training may be seeded with, alone
        while True:
            try:
                return attempt()
            except DBAPIError as error:
                if not self._passes(error):
                    raise self._explain(error) from error
                if time.monotonic() >= deadline:
                    raise StorageLockedError(
                        f"{self.where}: busy for {self._retry_for:.0f} s ({error.orig}). Look for a process that holds "
                        "it (a stopped debugger, a long transaction), or raise `retry_for`."
                    ) from error
            time.sleep(pause * jitter.uniform(0.5, 1.0))
            pause = min(2 * pause, LONGEST_PAUSE)

    def _passes(self, error: DBAPIError) -> bool:
        """Whether the same thing may succeed in a while."""
        if self._engine.dialect.name == "sqlite":
            return any(words in str(error.orig) for words in _BUSY)
        state = getattr(error.orig, "sqlstate", None)
        lost = error.connection_invalidated or (self._opened and state is None and isinstance(error, OperationalError))
        return lost or state in _PASSING

    def _explain(self, error: DBAPIError) -> StorageError:
        text = str(error.orig).strip()
        if "not a database" in text or "malformed" in text:
            return StorageFormatError(
                f"{self.where}: {text}. Restore the file from a copy (or rescue what there is with sqlite3's "
                "`.recover`), or give another path."
            )
        return StorageError(f"{self.where}: {text}")

    def take(self, connection: sa.Connection, counter: str, amount: int) -> int:
        """Raise a counter; its value before. Who comes second waits here until the first has committed."""
        info = self.tables.info
        connection.execute(info.update().where(info.c.key == counter).values(number=info.c.number + amount))
        return connection.execute(sa.select(info.c.number).where(info.c.key == counter)).scalar_one() - amount

    def close(self) -> None:
        """Close all connections."""
        self._engine.dispose()


def _make_engine(url: sa.URL, create: bool) -> sa.Engine:
    try:
        engine = sa.create_engine(url, pool_pre_ping=url.get_backend_name() != "sqlite")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"buffer.url needs the driver '{error.name}'. Install it: `pip install 'trinity-lightning[sql]'` brings "
            "that of PostgreSQL."
        ) from error
    except NoSuchModuleError as error:
        raise ConfigError(f"buffer.url: SQLAlchemy knows no database '{url.drivername}'.") from error
    if engine.dialect.name != "sqlite":
        return engine

    @event.listens_for(engine, "connect")
    def set_up(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # sqlite3 begins no transactions of its own; `begin` below does
        connection.execute("PRAGMA busy_timeout=5000")
        if create:  # readers and the writer then do not wait for each other; the file remembers it
            connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")  # a commit is on the disk, also when the power fails

    @event.listens_for(engine, "begin")
    def begin(connection: sa.Connection) -> None:
        # A writer that begins as a reader cannot wait for another: its snapshot would be old by then.
        writes = connection.get_execution_options().get("trinity_write")
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return engine


def logarithm(priority: float) -> float:
    """Of a priority; that of 0 is never looked at."""
    return math.log(priority) if priority > 0 else 0.0


# -- Experiences in a database: any number of processes write, any number read. SQLite by default, PostgreSQL by its URL


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


# -- Reading a database of experiences by priority or at random, the same experience several times ---------------------


ORDERS = ("priority", "random")

# Position and task of a row.
Candidate = tuple[int, str | None]


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
        name: under which reads are logged; readers at work at the same time need different ones.

    Raises:
        ConfigError: an argument out of range, a URL that is none, or a driver that is not installed.
        StorageError: there is no such buffer, or no connection.
        StorageFormatError: what is there is something else.
    """

    def __init__(
        self,
        place: str | Path,
        *,
        table: str = TABLE,
        order: Literal["priority", "random"] = "priority",
        reuse_limit: int | None = 1,
        decay: float = 1.0,
        use_decay: float = 1.0,
        seed: int = 0,
        name: str = "trainer",
        retry_for: float = RETRY_FOR,
    ) -> None:
        one_of("order", order, ORDERS)
        whole_number("reuse_limit", reuse_limit, least=1, optional=True)
        for key, value in (("decay", decay), ("use_decay", use_decay)):
            number(key, value, above=0, most=1)
        self._order, self._reuse_limit, self._seed, self._name = order, reuse_limit, seed, name
        self._log_decay, self._log_use_decay = math.log(decay), math.log(use_decay)
        self._database = Database(place, table, create=False, retry_for=retry_for)
        reads = self._database.tables.reads
        newest = sa.select(sa.func.max(reads.c.number)).where(reads.c.reader == name)
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
        query = sa.select(rows.c.position, rows.c.task).where(rows.c.priority > 0)
        if self._reuse_limit is not None:
            query = query.where(rows.c.uses < self._reuse_limit)
        if self._order == "priority":
            # The logarithm of the score, less what all scores have in common: the age counts from any step.
            score = rows.c.log_priority - rows.c.step * self._log_decay + rows.c.uses * self._log_use_decay
            query = query.order_by(score.desc(), rows.c.uses, rows.c.position).limit(most)
            return [(row.position, row.task) for row in connection.execute(query)]
        found = [(row.position, row.task) for row in connection.execute(query.order_by(rows.c.position))]
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
                f"{self._database.where}: another reader '{self._name}' has read meanwhile; give each its own `name`."
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
        return [(position, found[position]) for position in chosen]

    def state_dict(self) -> dict[str, Any]:
        """How often this reader has read, and of what."""
        return {"source": self._database.source, "reader": self._name, "reads": self._number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken: what this reader has read since becomes unread.

        Raises:
            StorageError: the state is another buffer's or another reader's.
        """
        mine = {"source": self._database.source, "reader": self._name}
        for key, value in mine.items():
            if state[key] != value:
                raise StorageError(
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


def _whole_groups(candidates: Sequence[Candidate], count: int) -> list[int]:
    """Positions of the first groups that fit into `count`, at least one group, each in the order of writing."""
    groups: dict[object, list[int]] = {}
    for position, task in candidates:
        groups.setdefault(position if task is None else task, []).append(position)
    chosen: list[int] = []
    for positions in groups.values():
        if chosen and len(chosen) + len(positions) > count:
            break
        chosen.extend(sorted(positions))
    return chosen
