"""Whole files or none."""

import os
from contextlib import suppress
from pathlib import Path


def write_atomically(path: Path, data: bytes) -> None:
    """A file with this content, whole or not at all, also when the power fails.

    Raises:
        OSError: the disk is full, or the folder is not to be written to.
    """
    temporary = path.with_name(f".{path.name}.tmp")  # of a fixed name: what a kill left is written over
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network file systems sync no folders; the file is there
            os.fsync(folder)
    finally:
        os.close(folder)
