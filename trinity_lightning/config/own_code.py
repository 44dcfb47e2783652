"""The line of the user's own code that raised an error, for messages."""

import inspect
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import dropwhile
from pathlib import Path
from typing import Any

from trinity_lightning.errors import PartError, TrinityError

LIBRARIES = [Path(__file__).parents[1], *(Path(sysconfig.get_path(key)) for key in ("stdlib", "purelib", "platlib"))]
_FRAMES, _AWAITED = ("cr_frame", "gi_frame"), ("cr_await", "gi_yieldfrom")  # of coroutines, and of generators
_PLACE = "raised_at"  # attribute of an error that came from another process without its traceback


def of_a_library(file: str) -> bool:
    """True if a source file belongs to Python, to this package, or to an installed package."""
    return file.startswith("<frozen") or any(Path(file).is_relative_to(folder) for folder in LIBRARIES)


def _is_own(frame: traceback.FrameSummary) -> bool:
    """True for a line of the user's code. Generated code, such as a dataclass's constructor, has no line."""
    return frame.filename != "<string>" and not of_a_library(frame.filename)


def own_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """The frames from the user's outermost line on, outermost first; empty if no line is the user's."""
    return list(dropwhile(lambda frame: not _is_own(frame), traceback.extract_tb(error.__traceback__)))


def place_of(error: BaseException) -> str | None:
    """The user's innermost line in a traceback, as "my_loss.py:12 in tempered"; None if no line is the user's."""
    frames = [frame for frame in own_frames(error) if _is_own(frame)]
    return place(frames[-1].filename, frames[-1].lineno, frames[-1].name) if frames else getattr(error, _PLACE, None)


def waits_at(coroutine: Any) -> str | None:
    """The user's innermost line in a suspended coroutine and those that it awaits, as by `place_of`, or None.

    A task or an asynchronous generator that the coroutine awaits is not looked into: the line awaits it.
    """
    line = None
    while coroutine is not None:
        frame = next((frame for name in _FRAMES if (frame := getattr(coroutine, name, None))), None)
        if frame is not None and not of_a_library(frame.f_code.co_filename):
            line = place(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        coroutine = next((inner for name in _AWAITED if (inner := getattr(coroutine, name, None))), None)
    return line


def place(file: str, line: int | None, function: str) -> str:
    """A line of code for messages; a file below the current folder is shown relative to it."""
    path, folder = Path(file), Path.cwd()
    return f"{path.relative_to(folder) if path.is_relative_to(folder) else path}:{line} in {function}"


def defined_at(part: Any) -> str:
    """The line where a user's function, or the method `__call__` of an object, is defined, as " (LINE)"; else empty."""
    part = inspect.unwrap(part.func if isinstance(part, partial) else part)
    function = part if inspect.isroutine(part) else getattr(type(part), "__call__", None)  # noqa: B004
    code = getattr(function, "__code__", None)
    if code is None or of_a_library(code.co_filename):
        return ""
    return f" ({place(code.co_filename, code.co_firstlineno, code.co_name)})"


def described(error: BaseException) -> str:
    """An error's type and text, and the user's line that raised it."""
    return f"{type(error).__name__}: {error}{where(error)}"


def where(error: BaseException) -> str:
    """The user's line that raised an error, as " (LINE)"; empty for a TrinityError, whose message is enough."""
    line = None if isinstance(error, TrinityError) else place_of(error)
    return f" ({line})" if line else ""


def keep_place(error: BaseException) -> None:
    """Note on an error its line and frames, before it goes to another process, which does not get the traceback.

    A TrinityError needs no note: its message is enough, and a RewardError carries its frames.
    """
    if not isinstance(error, TrinityError) and (frames := own_frames(error)):
        setattr(error, _PLACE, place_of(error))
        error.add_note("".join(traceback.format_list(frames)).rstrip())


@contextmanager
def raised_by(part: str, kind: Callable[[str], TrinityError] = PartError) -> Iterator[None]:
    """Turn an error of a user's code within this context into one that names the part and the line.

    Raises:
        TrinityError: made by `kind` of the message, in place of the user's error. Other errors pass unchanged.
    """
    try:
        yield
    except TrinityError:
        raise
    except Exception as error:
        if place_of(error) is None:
            raise
        raise kind(f"{part} raised {described(error)}") from error
