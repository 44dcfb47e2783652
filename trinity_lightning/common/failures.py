"""What failed: a full disk, another process, a reward function, in words; and what a traceback holds, let go."""

import errno
import os
import signal
import sysconfig
import traceback
from collections.abc import Iterator, Sequence
from itertools import dropwhile
from pathlib import Path

from trinity_lightning.errors import DiskFullError, RewardError, TrinityError

PACKAGE = Path(__file__).parents[1]
LIBRARIES = [PACKAGE, *(sysconfig.get_path(each) for each in ("stdlib", "purelib", "platlib"))]
# What Python raises of mistakes in code, which come again. What servers and disks raise is of other kinds.
MISTAKES = (ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NameError, SyntaxError)
MISTAKES += (NotImplementedError, TypeError, ValueError)
# A full disk, a quota, and a limit of a file's size, of the process (ulimit -f) or of the file system.
FULL = {number: os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)}


def disk_full(error: Exception, path: Path) -> DiskFullError | None:
    """What to raise in place of it, of this path or of the one that it names; None: it is of something else."""
    # Ours say enough. torch.save fails once more as it ends the file; safetensors has the text alone.
    for cause in () if isinstance(error, TrinityError) else causes(error):
        for number in (each for each, text in FULL.items() if text in str(cause)):
            return DiskFullError(number, FULL[number], str(getattr(cause, "filename", None) or path))
    return None


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error, and those that it was raised for or after."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def raised(name: str, error: BaseException) -> RewardError:
    """What a rollout fails with if a reward function raised; its traceback is a note, which other processes read."""
    failure = RewardError(f"reward function '{name}' raised {type(error).__name__}: {error}")
    failure.may_pass = not all(isinstance(each, MISTAKES) for each in causes(error))
    stack = traceback.extract_tb(error.__traceback__)
    own = list(dropwhile(lambda frame: of_a_library(frame.filename), stack))
    failure.add_note("".join(traceback.format_list(own or stack)).rstrip())
    return failure


def of_a_library(file: str) -> bool:
    """Whether a file of code is Python's, this package's, or that of something installed."""
    return file.startswith("<frozen") or any(Path(file).is_relative_to(folder) for folder in LIBRARIES)


def listed(names: Sequence[object], most: int) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(str, names[:most])) + more


def release(error: BaseException) -> None:
    """Let go of what the functions that raised an error hold, such as a policy; its traceback stays as it is.

    Hydra keeps the error of a sweep's job until all jobs have run, and the next one needs that memory.
    """
    for each in causes(error):
        traceback.clear_frames(each.__traceback__)


def how_it_ended(code: int) -> str:
    """How a process with this return code of `subprocess` ended: "ended with exit code 1", say."""
    killed = " (out of memory?)" if code == -signal.SIGKILL else ""
    return f"was ended by signal {-code}{killed}" if code < 0 else f"ended with exit code {code}"
