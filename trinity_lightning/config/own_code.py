"""Where in your own code an error was raised: the line that a message names."""

import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import dropwhile
from pathlib import Path

from trinity_lightning.errors import PartError, TrinityError

LIBRARIES = [Path(__file__).parents[1], *(Path(sysconfig.get_path(each)) for each in ("stdlib", "purelib", "platlib"))]
_PLACE = "raised_at"  # an attribute of an error that comes from another process, where its traceback stays


def of_a_library(file: str) -> bool:
    """True if a file of code is Python's, this package's, or that of something installed."""
    return file.startswith("<frozen") or any(Path(file).is_relative_to(folder) for folder in LIBRARIES)


def _is_own(frame: traceback.FrameSummary) -> bool:
    """True if it is a line of the user's; code made at run time (the constructor of a dataclass, say) has no line."""
    return frame.filename != "<string>" and not of_a_library(frame.filename)


def own_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """The frames from the first line of the user's code on, outermost first; none if the error was raised elsewhere."""
    return list(dropwhile(lambda frame: not _is_own(frame), traceback.extract_tb(error.__traceback__)))


def place_of(error: BaseException) -> str | None:
    """The user's innermost line that raised, "my_loss.py:12 in tempered"; None: the error was raised elsewhere."""
    frames = [frame for frame in own_frames(error) if _is_own(frame)]
    return place(frames[-1].filename, frames[-1].lineno, frames[-1].name) if frames else getattr(error, _PLACE, None)


def place(file: str, line: int | None, function: str) -> str:
    """A line of code for messages, its file relative to the current folder if it lies in there."""
    path, here = Path(file), Path.cwd()
    return f"{path.relative_to(here) if path.is_relative_to(here) else path}:{line} in {function}"


def described(error: BaseException) -> str:
    """Type and text of an error, and the user's line that raised it."""
    return f"{type(error).__name__}: {error}{where(error)}"


def where(error: BaseException) -> str:
    """The user's line that raised an error, in brackets after a space; empty for one of ours, which says enough."""
    line = None if isinstance(error, TrinityError) else place_of(error)
    return f" ({line})" if line else ""


def keep_place(error: BaseException) -> None:
    """Note on an error where it was raised and its frames, for other processes, which do not get its traceback.

    An error of ours says enough; that of a reward function has its frames.
    """
    if not isinstance(error, TrinityError) and (frames := own_frames(error)):
        setattr(error, _PLACE, place_of(error))
        error.add_note("".join(traceback.format_list(frames)).rstrip())


@contextmanager
def raised_by(part: str, kind: type[TrinityError] = PartError) -> Iterator[None]:
    """Name the part of the user's in the errors that its code raises in here, and the line.

    Raises:
        TrinityError: of that kind, in the place of an error of the user's code; others are raised as they are.
    """
    try:
        yield
    except TrinityError:
        raise
    except Exception as error:
        if place_of(error) is None:
            raise
        raise kind(f"{part} raised {described(error)}") from error
