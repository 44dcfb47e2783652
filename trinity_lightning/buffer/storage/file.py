"""Experiences in an append-only file: one process writes, any number read, also while it is written.

A write is acknowledged (`write` returns) once it is on the disk. Killed in the midst of one, a writer leaves a torn
frame, which the next one cuts off; readers never see it. POSIX only.
"""

import asyncio
import os
import threading
from pathlib import Path

from filelock import FileLock, Timeout

from trinity_lightning.buffer.reader import Cursor, CursorReader, Item
from trinity_lightning.buffer.storage import frames
from trinity_lightning.common.experience import Experience, ExperienceFormatError
from trinity_lightning.common.files import write_atomically
from trinity_lightning.common.writer import BufferWriter
from trinity_lightning.errors import StorageError, StorageFormatError, StorageLockedError


def damaged(path: Path, offset: int, problem: object) -> StorageFormatError:
    """The error for a file that is damaged at an offset."""
    return StorageFormatError(
        f"{path}, offset {offset}: {problem}: the file is damaged. Restore it from a copy; or cut it there, which "
        f"loses what follows: `truncate -s {offset} '{path}'`."
    )


def open_file(path: Path, flags: int) -> tuple[int, str]:
    """A descriptor of a file of experiences, and the file's id.

    Raises:
        StorageError: it cannot be opened.
        StorageFormatError: it is something else.
    """
    try:
        descriptor = os.open(path, flags | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise StorageError(
            f"{path}: there is no such file. Check the path; a writer (`FileStorage`, buffer.storage=file) creates it."
        ) from error
    except OSError as error:
        raise StorageError(f"{path}: cannot be opened: {error.strerror}.") from error
    try:
        return descriptor, frames.read_file_header(os.pread(descriptor, frames.FILE_HEADER.size, 0))
    except (frames.DamagedError, OSError) as error:
        os.close(descriptor)
        raise StorageFormatError(
            f"{path}, offset 0: {error}: this is no file of experiences. Give the path of one, or of a file that does "
            "not exist yet for a writer to create it."
        ) from error


class FileStorage(BufferWriter):
    """Appends to a file, creating it and its folders where needed; the only writer of that file.

    Args:
        path: the file; `<path>.lock` beside it is held while it is open.

    Raises:
        StorageLockedError: another writer has it open.
        StorageFormatError: it is something else, or damaged before its last write.
        StorageError: it cannot be created or opened.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._pid = os.getpid()
        self._writing = threading.Lock()
        self._descriptor = -1
        self._lock = FileLock(self.path.with_name(self.path.name + ".lock"), timeout=0, thread_local=False)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._lock.acquire()
        except Timeout as error:
            raise StorageLockedError(
                f"{self.path}: another writer has it open (it holds {self._lock.lock_file}). A file has one writer: "
                "stop the other, write to another file, or use buffer.storage=sql."
            ) from error
        except OSError as error:
            raise StorageError(f"{self.path}: cannot be created: {error}.") from error
        try:
            if not self.path.exists():
                write_atomically(self.path, frames.new_file_header())
            self._descriptor, self.source = open_file(self.path, os.O_RDWR | os.O_APPEND)
            self._end = self._recover()
        except BaseException:
            self.close()
            raise

    def _recover(self) -> int:
        """Cut off a torn tail; where the file ends."""
        offset, last = frames.FILE_HEADER.size, None
        size = os.fstat(self._descriptor).st_size
        try:
            while offset < size:
                offset, last = frames.skip_frame(self._descriptor, offset), offset
        except frames.TornError:
            os.ftruncate(self._descriptor, offset)
            os.fsync(self._descriptor)
        except frames.DamagedError as error:
            raise damaged(self.path, offset, error) from error
        if last is not None:  # the payloads before it are checked when they are read
            try:
                frames.read_frame(self._descriptor, last)
            except frames.DamagedError as error:
                raise damaged(self.path, last, error) from error
        return offset

    def write(self, experiences: list[Experience]) -> None:
        """Append the experiences; they are on the disk when this returns.

        Raises:
            ExperienceError: one of them cannot be serialized; nothing is written.
            StorageError: the disk is full or fails, or the storage is closed.
        """
        if not experiences:
            return
        parts = frames.pack_frame(Experience.serialize_many(experiences), len(experiences))
        with self._writing:
            self._check_open()
            try:
                self._append(parts)
                os.fsync(self._descriptor)
            except OSError as error:
                # After a failed fsync nobody knows what is on the disk: only opening the file again shows it.
                self.close()
                raise StorageError(
                    f"{self.path}, offset {self._end}: cannot be written: {error.strerror}. Make room or mend the "
                    "disk, then open the file again."
                ) from error

    def _append(self, parts: tuple[bytes, ...]) -> None:
        """Write a frame, whole or not at all."""
        views = [memoryview(part) for part in parts]
        end = self._end + sum(map(len, views))
        try:
            while views:
                count = os.writev(self._descriptor, views)
                while views and count >= len(views[0]):
                    count -= len(views.pop(0))
                if views:
                    views[0] = views[0][count:]
        finally:
            # A whole frame stays also where an interruption keeps it from being acknowledged: it may have been read.
            if os.fstat(self._descriptor).st_size != end:
                os.ftruncate(self._descriptor, self._end)
            else:
                self._end = end

    async def write_async(self, experiences: list[Experience]) -> None:
        """Awaitable `write`: the disk is waited for in a thread."""
        await asyncio.to_thread(self.write, experiences)

    def _check_open(self) -> None:
        if self._descriptor < 0:
            raise StorageError(f"{self.path}: this storage is closed; open another on the same path.")
        if self._pid != os.getpid():
            raise StorageError(
                f"{self.path}: opened before this process was forked; open it in the process that writes."
            )

    def close(self) -> None:
        """Let another writer in."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        self._lock.release()

    def __enter__(self) -> "FileStorage":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class FileReader(CursorReader):
    """Reads a file of experiences in the order of writing, also while it is written: it ends at a torn frame.

    Args:
        path: the file; its cursor is the offset of a frame and the number of experiences read of it.

    Raises:
        StorageError: there is no such file.
        StorageFormatError: it is something else.
    """

    START = (frames.FILE_HEADER.size, 0)

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._descriptor, source = open_file(self.path, os.O_RDONLY)
        super().__init__(source, str(self.path))

    def _fetch(self, cursor: Cursor, count: int) -> list[Item]:
        offset, index = cursor
        if self._descriptor < 0:
            raise StorageError(f"{self.path}: this reader is closed; open another on the same path.")
        if offset > (size := os.fstat(self._descriptor).st_size):
            raise StorageError(
                f"{self.path}, offset {offset}: the saved position lies behind the end of the file ({size} bytes): it "
                "was cut or replaced. Restore it, or start without the saved state."
            )
        try:
            frame = frames.read_frame(self._descriptor, offset)
            experiences = Experience.deserialize_many(frame.payload)
        except frames.TornError:
            return []
        except (frames.DamagedError, ExperienceFormatError) as error:
            raise damaged(self.path, offset, error) from error
        except OSError as error:
            raise StorageError(f"{self.path}, offset {offset}: cannot be read: {error.strerror}.") from error
        if not index < len(experiences) == frame.count:
            raise damaged(self.path, offset, f"{len(experiences)} experiences, {frame.count} announced, {index} read")
        ends = [(offset, number + 1) for number in range(frame.count - 1)] + [(frame.end, 0)]
        return [Item(experiences[n], ends[n], n == frame.count - 1) for n in range(index, frame.count)]

    def close(self) -> None:
        """Close the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
