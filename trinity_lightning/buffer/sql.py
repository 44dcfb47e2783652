"""Experiences in a database, which any number of processes write and read: SQLite, or PostgreSQL by its URL.

A row is an experience: a payload of version 2, and the values by which readers choose.

Every row has a position, and rows become visible in the order of their positions. A writer takes its positions from a
counter in the database, in the transaction that inserts the rows: the next writer waits at the counter until they are
committed. With plain autoincrement PostgreSQL may commit a later id first, and a reader whose cursor has passed it
would never see the earlier one.
"""

import asyncio
import math
import random
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from trinity_lightning.algorithm.add_strategy.add_strategy import BufferWriter
from trinity_lightning.buffer.reader import BufferReader, Cursor, CursorReader, Item, check_source, group_of
from trinity_lightning.buffer.step_files import FOLDER, folder_id
from trinity_lightning.common.experience import Experience, ExperienceError, ExperienceFormatError
from trinity_lightning.config.buffer import BufferConfig
from trinity_lightning.config.values import number, one_of, whole_number
from trinity_lightning.errors import ConfigError, StorageError, StorageFormatError, StorageLockedError

try:
    import sqlalchemy as sa
    from sqlalchemy import event
    from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError, OperationalError
except ModuleNotFoundError as error:
    if error.name != "sqlalchemy":
        raise
    raise ConfigError(
        "experiences in a database need SQLAlchemy. Install it with `pip install 'trinity-lightning[sql]'`, or choose "
        "files: buffer.storage=file, buffer.keep=true."
    ) from error

T = TypeVar("T")

FORMAT = 1
RETRY_FOR = 60.0  # seconds for which a busy or restarting database is asked again
# Seconds between attempts: doubled each time, and never in step with another process.
FIRST_PAUSE, LONGEST_PAUSE = 0.01, 0.5
# PostgreSQL: serialization failure, deadlock, lock not available, and a server that stops or starts.
_TRANSIENT = frozenset({"40001", "40P01", "55P03", "57P01", "57P02", "57P03"})
_CREATING = 0x7472696E69747921  # a number that nobody else locks
_BUSY = ("database is locked", "database table is locked", "database schema is locked")


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


# -- the tables --------------------------------------------------------------------------------------------------------

METADATA = sa.MetaData()
# One experience a row. `position` orders the rows; those of one write share a `write_id`; `task` is the group, `step`
# the explore step; `uses` is the number of replays.
ROWS = sa.Table(
    "experiences",
    METADATA,
    sa.Column("position", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("write_id", sa.String(32), nullable=False, index=True),
    sa.Column("ends_write", sa.Boolean, nullable=False),
    sa.Column("task", sa.Text),
    sa.Column("step", sa.BigInteger, nullable=False),
    sa.Column("priority", sa.Double, nullable=False),
    sa.Column("log_priority", sa.Double, nullable=False),
    sa.Column("uses", sa.Integer, nullable=False),
    sa.Column("payload", sa.LargeBinary, nullable=False),
)
# The rows that each read of a replaying reader took: a reader that is resumed from before takes them back.
READS = sa.Table(
    "experiences_reads",
    METADATA,
    sa.Column("reader", sa.String(255), primary_key=True),
    sa.Column("number", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("position", sa.BigInteger, primary_key=True, autoincrement=False),
)
# Format and id of the buffer, and the counters at which writers and readers queue.
INFO = sa.Table(
    "experiences_info",
    METADATA,
    sa.Column("key", sa.String(32), primary_key=True),
    sa.Column("number", sa.BigInteger, nullable=False),
    sa.Column("text", sa.Text, nullable=False),
)


# -- the database ------------------------------------------------------------------------------------------------------


def database_url(place: str | Path) -> sa.URL:
    """The URL of a database, given as a URL or as the path of a SQLite file.

    Raises:
        ConfigError: it is no URL, or the database is in memory, where no other process would see it.
    """
    if isinstance(place, Path) or "://" not in place:
        return sa.URL.create("sqlite", database=str(place))
    try:
        url = sa.make_url(place)
    except ArgumentError as error:
        raise ConfigError(
            f"url is {place!r}",
            key=".url",
            fix="give one such as sqlite:///FILE or postgresql://USER@HOST/NAME",
        ) from error
    if url.drivername == "postgresql":
        url = url.set(drivername="postgresql+psycopg")
    if url.get_backend_name() == "sqlite" and url.database in (None, "", ":memory:"):
        raise ConfigError(
            "url names a database in memory",
            key=".url",
            fix="give a file, sqlite:///FILE, or buffer.storage=memory",
        )
    return url


class Database:
    """An open buffer in a database. It does not survive a fork: each process opens its own.

    Args:
        place: a URL, or the path of a SQLite file.
        create: create a missing file and missing tables, which are an error otherwise.

    Raises:
        ConfigError: `place` is a wrong URL, or the driver is not installed.
        StorageError: there is no such buffer, or no connection.
        StorageFormatError: the database holds something else.
    """

    def __init__(self, place: str | Path, create: bool) -> None:
        url = database_url(place)
        self.where = url.render_as_string(hide_password=True)
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
        """The id of the buffer, which is created if `create` is set."""
        if create and connection.dialect.name == "postgresql":  # two that create the same tables would collide
            connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_CREATING)))
        inspector = sa.inspect(connection)
        if inspector.has_table(INFO.name):
            columns = {column["name"] for column in inspector.get_columns(INFO.name)}
            info = {}
            if columns == set(INFO.columns.keys()):
                info = {row.key: row for row in connection.execute(sa.select(INFO))}
            if "id" not in info or info["format"].number != FORMAT:
                raise StorageFormatError(f"{self.where}: not of format {FORMAT}. Choose another database.")
            return info["id"].text
        if inspector.has_table(ROWS.name):
            raise StorageFormatError(f"{self.where}: a table '{ROWS.name}' of another kind. Choose another database.")
        if not create:
            raise StorageError(
                f"{self.where}: there is no such table as '{ROWS.name}'; a writer (`SqlStorage`) creates it."
            )
        METADATA.create_all(connection)
        identity = secrets.token_hex(8)
        numbers = {"format": FORMAT, "id": 0, "positions": 0, "reads": 0}
        rows = [{"key": key, "number": n, "text": identity if key == "id" else ""} for key, n in numbers.items()]
        connection.execute(INFO.insert(), rows)
        return identity

    def transact(self, work: Callable[[sa.Connection, bool], T], write: bool = False) -> T:
        """Do `work` in one transaction, again and again while the database is busy; returns its result.

        Args:
            work: called with the connection, and with True if an earlier attempt failed. If the connection broke at the
                commit, that attempt may have succeeded all the same.
            write: True if it writes.

        Raises:
            StorageLockedError: the database was busy for too long.
            StorageFormatError: the database is damaged, or the file is no database.
            StorageError: it failed otherwise.
        """
        deadline, pause, again = time.monotonic() + RETRY_FOR, FIRST_PAUSE, False
        jitter = random.SystemRandom()  # leaves the global generator alone, which training may have seeded
        while True:
            try:
                with self._engine.connect().execution_options(trinity_write=write) as connection, connection.begin():
                    return work(connection, again)
            except DBAPIError as error:
                if not self._is_transient(error):
                    raise self._explain(error) from error
                if time.monotonic() >= deadline:
                    raise StorageLockedError(
                        f"{self.where}: busy for {RETRY_FOR:g} s ({error.orig}). Look for a process that holds it (a "
                        "stopped debugger, a long transaction)."
                    ) from error
            time.sleep(pause * jitter.uniform(0.5, 1.0))
            pause, again = min(2 * pause, LONGEST_PAUSE), True

    def _is_transient(self, error: DBAPIError) -> bool:
        """True if the same attempt may succeed later."""
        if self._engine.dialect.name == "sqlite":
            return any(words in str(error.orig) for words in _BUSY)
        state = getattr(error.orig, "sqlstate", None)
        lost = error.connection_invalidated or (self._opened and state is None and isinstance(error, OperationalError))
        return lost or state in _TRANSIENT

    def _explain(self, error: DBAPIError) -> StorageError:
        text = str(error.orig).strip()
        if "not a database" in text or "malformed" in text:
            return StorageFormatError(
                f"{self.where}: {text}. Restore the file from a copy (or rescue what there is with sqlite3's "
                "`.recover`), or give another path."
            )
        return StorageError(f"{self.where}: {text}")

    def take(self, connection: sa.Connection, counter: str, amount: int) -> int:
        """Raise a counter; returns its value before. A second process waits here until the first has committed."""
        connection.execute(INFO.update().where(INFO.c.key == counter).values(number=INFO.c.number + amount))
        return connection.execute(sa.select(INFO.c.number).where(INFO.c.key == counter)).scalar_one() - amount

    def close(self) -> None:
        """Close all connections."""
        self._engine.dispose()


def _make_engine(url: sa.URL, create: bool) -> sa.Engine:
    try:
        engine = sa.create_engine(url, pool_pre_ping=url.get_backend_name() != "sqlite")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"url needs the driver '{error.name}'. Install it: `pip install 'trinity-lightning[sql]'` brings "
            "that of PostgreSQL.",
            key=".url",
        ) from error
    except NoSuchModuleError as error:
        raise ConfigError(f"url: SQLAlchemy knows no database '{url.drivername}'.", key=".url") from error
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


# -- writing, and reading in order -------------------------------------------------------------------------------------


def _row(experience: Experience, write_id: str) -> dict[str, Any]:
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
        "payload": experience.serialize(),
    }


def run_of(write_id: str) -> str:
    """The run whose `keep_step` wrote the rows with this `write_id`; empty if another writer did."""
    return write_id.rpartition("/")[0]


def experience_at(where: str, position: int, payload: bytes) -> Experience:
    """The experience in a row. StorageFormatError: the row is damaged."""
    try:
        return Experience.deserialize(payload)
    except (ExperienceError, ExperienceFormatError) as error:
        raise StorageFormatError(
            f"{where}, position {position}: {error} Restore the database from a copy, or delete that row."
        ) from error


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
        rows = [_row(experience, write_id) for experience in experiences]
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
        rows = self._database.transact(lambda connection, _: connection.execute(query).all())
        experiences = [experience_at(self._where, row.position, row.payload) for row in rows]
        return [Item(e, (row.position,), run_of(row.write_id)) for e, row in zip(experiences, rows, strict=True)]

    def close(self) -> None:
        self._database.close()


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

        def read(connection: sa.Connection, again: bool) -> list[tuple[int, bytes]] | None:
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
            payloads = {row.position: row.payload for row in connection.execute(query)}
            return [(p, payloads[p]) for p in chosen if p in payloads]  # the other rows were replaced

        rows = self._database.transact(read, write=True)
        if rows:
            self._number = number
        return None if rows is None else [experience_at(self._database.where, p, data) for p, data in rows]

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
