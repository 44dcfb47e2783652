"""Finds the folders of runs, and tells whether a process is at work in one. It imports little."""

import fcntl
import os
import re
import struct
from pathlib import Path

# The last one is config.explain.LOCK, which takes a third of a second to import.
RUN_FILES = ("metrics.csv", "config.yaml", "train.log", ".hydra/overrides.yaml", ".lock")
ENVIRONMENT = "environment.json"  # versions and hardware
STEP_FILE = re.compile(r"step_(\d+)\.jsonl")  # completions of an explore step, or a few responses with their tokens
TOKENS = "tokens"  # the folder of the latter, beside the completions
_FLOCK = "hhqqi4x"  # struct flock of 64-bit Linux: type, whence, start, length, process


def is_run(folder: Path) -> bool:
    """True if a run has begun to write to the folder."""
    return any((folder / name).is_file() for name in RUN_FILES)


def runs_in(folder: Path) -> list[Path]:
    """The runs in the folders of a folder, such as a sweep's, in the order of their numbers or names."""
    runs = [path for path in folder.iterdir() if path.is_dir() and is_run(path)] if folder.is_dir() else []
    return sorted(runs, key=lambda run: (not run.name.isdigit(), run.name.zfill(9), run.name))


def is_locked(path: Path) -> bool | None:
    """True if another process holds a run's lock, which is only asked for and never taken; None if nobody can tell.

    Not for a run's own process: closing the file would release the lock, see fcntl(2).
    """
    try:
        with path.open("rb") as file:
            asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            answer = fcntl.fcntl(file, fcntl.F_GETLK, asked)
        return struct.unpack(_FLOCK, answer)[0] != fcntl.F_UNLCK
    except OSError:
        return None
