"""Opens a database that holds experiences: its tables, its transactions, and the errors of a busy or foreign one."""

import random
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

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

# Pictures of experiences, each tensor once, by the hash of its content; and the writes that have a tensor. The tables
# are made with the first picture: buffers without any, and those of earlier versions, lack them.
PICTURE_TABLES = sa.MetaData()
PICTURES = sa.Table(
    "experiences_pictures",
    PICTURE_TABLES,
    sa.Column("hash", sa.String(32), primary_key=True),
    sa.Column("payload", sa.LargeBinary, nullable=False),
)
USES = sa.Table(
    "experiences_picture_uses",
    PICTURE_TABLES,
    sa.Column("write_id", sa.String(32), primary_key=True),
    sa.Column("hash", sa.String(32), primary_key=True, index=True),
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
