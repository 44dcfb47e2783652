"""Files that are written whole or not at all, and full disks."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from trinity_lightning.errors import DiskFullError, TrinityError, causes

# -- writing -----------------------------------------------------------------------------------------------------------


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file with this content; errors as in `replacing`, or IsADirectoryError."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    with new_file(path) as file:
        file.write(data)


@contextmanager
def new_file(path: Path) -> Iterator[IO[bytes]]:
    """A file to write to, which takes the path's place at the end: whole, or not at all if the power fails before."""
    with replacing(path) as temporary, temporary.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """A temporary path to write a file or a folder to, which takes the target's place at the end.

    If anything fails, it is removed. The target's parent folder is made if it is missing.

    Raises:
        DiskFullError: the disk is full.
        OSError: the folder cannot be written to.
    """
    temporary = target.with_name(f".{target.name}.tmp")  # a fixed name: what a killed process left is removed first
    remove(temporary)
    try:
        with disk_full_named(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            yield temporary
        put_in_place(temporary, target)
    finally:
        with suppress(OSError):  # an error of the writing itself is the one to raise
            remove(temporary)


def put_in_place(temporary: Path, target: Path) -> None:
    """Rename a file or a folder to the target, in place of whatever is there.

    A kill in between may leave what was there as `.NAME.old`. Until the target is on the disk, one of the two is whole:
    `config.checkpoints.checkpoints_in` finds it.
    """
    old = target.with_name(f".{target.name}.old")
    if target.is_dir() or (temporary.is_dir() and target.exists()):  # no system call replaces a folder
        remove(old)
        target.rename(old)
    temporary.replace(target)
    sync_folder(target.parent)
    remove(old)


def sync_folder(path: Path) -> None:
    """Have a folder's entries written to the disk, so that they are there even if the power fails."""
    folder = os.open(path, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network file systems cannot sync folders; the file itself is written
            os.fsync(folder)
    finally:
        os.close(folder)


def remove(path: Path) -> None:
    """Remove a file or a folder with everything in it, if there is one."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


# -- full disks --------------------------------------------------------------------------------------------------------

# The system's words for a full disk, a quota that is used up, and a file larger than its process (ulimit -f) or its
# file system allows.
FULL = {number: os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)}


@contextmanager
def disk_full_named(path: Path) -> Iterator[None]:
    """Turn an error for want of room (see `FULL`) into a DiskFullError: see `disk_full`."""
    try:
        yield
    except Exception as error:
        if (full := disk_full(error, path)) is not None:
            raise full from error
        raise


def disk_full(error: Exception, path: Path) -> DiskFullError | None:
    """The DiskFullError to raise in place of an error for want of room; None for any other error.

    It names the path that the error names, or else this one.
    """
    # Our own errors need no replacement. torch.save raises a second error when it closes the file: causes are searched.
    # Errors of safetensors have no number: texts are compared.
    for cause in () if isinstance(error, TrinityError) else causes(error):
        for number in (number for number, text in FULL.items() if text in str(cause)):
            return DiskFullError(number, FULL[number], str(getattr(cause, "filename", None) or path))
    return None
