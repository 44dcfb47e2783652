"""Whole files or none."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from trinity_lightning.common.failures import causes
from trinity_lightning.errors import DiskFullError, TrinityError


@contextmanager
def disk_full_named(path: Path) -> Iterator[None]:
    """Raise a DiskFullError of this path, or of the one that the error within names, for want of room (`FULL`)."""
    try:
        yield
    except Exception as error:
        if (full := disk_full(error, path)) is not None:
            raise full from error
        raise


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Where to write a file or a folder, which at the end takes the target's place; if anything fails it is removed.

    The folder that the target is in is made.

    Raises:
        DiskFullError: the disk is full.
        OSError: the folder is not to be written to.
    """
    temporary = target.with_name(f".{target.name}.tmp")  # of a fixed name: what a kill left is removed
    remove(temporary)
    try:
        with disk_full_named(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            yield temporary
        put_in_place(temporary, target)
    finally:
        with suppress(OSError):  # why it failed is what matters
            remove(temporary)


@contextmanager
def new_file(path: Path) -> Iterator[IO[bytes]]:
    """A file to write to, as `replacing`: whole or not, also when the power fails."""
    with replacing(path) as temporary, temporary.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def write_atomically(path: Path, data: bytes) -> None:
    """A file with this content; errors: as of `new_file`, and IsADirectoryError."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    with new_file(path) as file:
        file.write(data)


def sync_folder(path: Path) -> None:
    """Have its entries on the disk, also when the power fails."""
    folder = os.open(path, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network file systems sync no folders; the file is there
            os.fsync(folder)
    finally:
        os.close(folder)


def put_in_place(temporary: Path, target: Path) -> None:
    """Rename a file or a folder, whatever is there; a kill in between may leave what was there as `.NAME.old`.

    Until the target is on the disk, one of the two is whole: `config.checkpoints.checkpoints_in` finds it.
    """
    old = target.with_name(f".{target.name}.old")
    if target.is_dir() or (temporary.is_dir() and target.exists()):  # no system call replaces those
        remove(old)
        target.rename(old)
    temporary.replace(target)
    sync_folder(target.parent)
    remove(old)


def remove(path: Path) -> None:
    """Remove a file, a folder with all in it, or nothing."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


# A full disk, a quota, and a limit of a file's size, of the process (ulimit -f) or of the file system.
FULL = {number: os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)}


def disk_full(error: Exception, path: Path) -> DiskFullError | None:
    """What to raise in place of it, of this path or of the one that it names; None: it is of something else."""
    # Ours say enough. torch.save fails once more as it ends the file; safetensors has the text alone.
    for cause in () if isinstance(error, TrinityError) else causes(error):
        for number in (each for each, text in FULL.items() if text in str(cause)):
            return DiskFullError(number, FULL[number], str(getattr(cause, "filename", None) or path))
    return None
