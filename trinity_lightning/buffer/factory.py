"""Storages and readers by their names in the configuration."""

from collections.abc import Sequence
from pathlib import Path

from trinity_lightning.buffer.reader import BufferReader, CursorReader, MemoryReader
from trinity_lightning.buffer.storage.memory import MemoryStorage
from trinity_lightning.common.experience import Experience
from trinity_lightning.common.writer import BufferWriter
from trinity_lightning.config.schema import BUFFER_ORDERS, BUFFER_STORAGES
from trinity_lightning.config.values import unknown_name
from trinity_lightning.errors import ConfigError


def create_storage(name: str, *, path: str | Path | None = None, url: str | None = None) -> BufferWriter:
    """A storage to write to.

    Args:
        name: "memory", "file" or "sql".
        path: the file; for "sql" that of a SQLite database.
        url: of a database, instead of a path.

    Raises:
        ConfigError: an unknown name, a path or URL missing or too many, or SQLAlchemy is not installed.
        StorageError: the storage cannot be opened.
    """
    _check(name, path, url)
    if name == "memory":
        return MemoryStorage()
    if name == "file":
        from trinity_lightning.buffer.storage.file import FileStorage

        return FileStorage(_given(path))
    from trinity_lightning.buffer.storage.sql import SqlStorage

    return SqlStorage(_given(url or path))


def create_reader(
    name: str,
    *,
    path: str | Path | None = None,
    url: str | None = None,
    experiences: Sequence[Experience] | None = None,
    order: str = "fifo",
    reuse_limit: int | None = 1,
    decay: float = 1.0,
    use_decay: float = 1.0,
    seed: int = 0,
) -> BufferReader:
    """A reader of what a storage of that name holds.

    Args:
        name: "memory", "file" or "sql".
        path: the file, or the folder of kept steps; for "sql" the SQLite database.
        url: of a database, instead of a path.
        experiences: what a reader of memory reads.
        order: "fifo", in which they were written; of a database also "priority" or "random".
        reuse_limit, decay, use_decay, seed: as `ReplayReader`, for its two orders.

    Raises:
        ConfigError: an unknown name or order, something missing or too much, or SQLAlchemy is not installed.
        StorageError: there is nothing to read from.
    """
    _check(name, path, url)
    if order not in BUFFER_ORDERS:
        raise ConfigError(unknown_name("buffer.order", order, BUFFER_ORDERS))
    if name != "sql":
        if order != "fifo":
            raise ConfigError(f"buffer.order={order} needs buffer.storage=sql, not {name}.")
        return _memory_reader(experiences) if name == "memory" else _path_reader(Path(_given(path)))
    place = _given(url or path)
    if order == "fifo":
        from trinity_lightning.buffer.storage.sql import SqlReader

        return SqlReader(place)
    from trinity_lightning.buffer.storage.replay import ReplayReader

    return ReplayReader(place, order=order, reuse_limit=reuse_limit, decay=decay, use_decay=use_decay, seed=seed)


def _memory_reader(experiences: Sequence[Experience] | None) -> CursorReader:
    if experiences is None:
        raise ConfigError("buffer.storage=memory has nothing to read without an explorer: use file or sql.")
    return MemoryReader(experiences)


def _path_reader(path: Path) -> CursorReader:
    from trinity_lightning.buffer.kept import FolderReader
    from trinity_lightning.buffer.storage.file import FileReader

    return FolderReader(path) if path.is_dir() else FileReader(path)


def _check(name: str, path: str | Path | None, url: str | None) -> None:
    if name not in BUFFER_STORAGES:
        raise ConfigError(unknown_name("buffer.storage", name, BUFFER_STORAGES))
    if name == "file" and (path is None or url is not None):
        raise ConfigError("buffer.storage=file needs buffer.path=FILE, and no buffer.url.")
    if name == "sql" and (path is None) == (url is None):
        raise ConfigError("buffer.storage=sql needs either buffer.path=FILE (SQLite) or buffer.url=URL.")
    if name == "memory" and (path is not None or url is not None):
        raise ConfigError("buffer.storage=memory has no buffer.path and no buffer.url; choose file or sql.")


def _given(place: str | Path | None) -> str | Path:
    if place is None:  # `_check` has seen to it
        raise ConfigError("buffer.path or buffer.url is missing.")
    return place
