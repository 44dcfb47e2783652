"""What failed outside of this program: a disk that is full, and how another process ended."""

import errno
import os
import signal
import traceback
from pathlib import Path

from trinity_lightning.errors import DiskFullError, TrinityError

FULL = {number: os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT)}


def disk_full(error: Exception, path: Path) -> DiskFullError | None:
    """What to raise in place of it, of this path or of the one that it names; None: it is of something else."""
    cause: BaseException | None = None if isinstance(error, TrinityError) else error  # ours say enough
    while cause is not None:  # torch.save fails once more as it ends the file; safetensors has the text alone
        for number in (each for each, text in FULL.items() if text in str(cause)):
            return DiskFullError(number, FULL[number], str(getattr(cause, "filename", None) or path))
        cause = cause.__cause__ or cause.__context__
    return None


def release(error: BaseException | None) -> None:
    """Let go of what the functions that raised an error hold, such as a policy; its traceback stays as it is.

    Hydra keeps the error of a sweep's job until all jobs have run, and the next one needs that memory.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def how_it_ended(code: int) -> str:
    """How a process with this return code of `subprocess` ended: "ended with exit code 1", say."""
    killed = " (out of memory?)" if code == -signal.SIGKILL else ""
    return f"was ended by signal {-code}{killed}" if code < 0 else f"ended with exit code {code}"
