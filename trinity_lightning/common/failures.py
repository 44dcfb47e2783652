"""What failed: a full disk, another process, a reward function, in words; and what a traceback holds, let go."""

import signal
import traceback
from collections.abc import Iterator, Sequence

from trinity_lightning.config.own_code import described, own_frames
from trinity_lightning.errors import RewardError

# What Python raises of mistakes in code, which come again. What servers and disks raise is of other kinds.
MISTAKES = (ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NameError, SyntaxError)
MISTAKES += (NotImplementedError, TypeError, ValueError)


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error, and those that it was raised for or after."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def raised(name: str, error: BaseException) -> RewardError:
    """What a rollout fails with if a reward function raised; its traceback is a note, which other processes read."""
    failure = RewardError(f"reward function '{name}' raised {described(error)}")
    failure.may_pass = not all(isinstance(each, MISTAKES) for each in causes(error))
    frames = own_frames(error) or traceback.extract_tb(error.__traceback__)
    failure.add_note("".join(traceback.format_list(frames)).rstrip())
    return failure


def listed(names: Sequence[object], most: int) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(str, names[:most])) + more


def how_it_ended(code: int) -> str:
    """How a process with this return code of `subprocess` ended: "ended with exit code 1", say."""
    killed = " (out of memory?)" if code == -signal.SIGKILL else ""
    return f"was ended by signal {-code}{killed}" if code < 0 else f"ended with exit code {code}"
