"""Handles an output without a reader, as after `| head`, and the end of a process whose output is complete."""

import gc
import io
import os
import re
import signal
import stat
import sys
from collections.abc import Callable, Iterable
from typing import Any

# Arguments of a command that only prints something.
_SHOWS = re.compile(r"-h|(-c|-i|-sc)\w*|--(help|hydra-help|cfg|info|shell-completion|version)(=.*)?")
_FOLDERS = ("-cd", "-cn", "-cp")  # they match _SHOWS, and are arguments of runs too


def only_shows(arguments: Iterable[str]) -> bool:
    """True if a command with these arguments only prints something, such as its help or its configuration."""
    return any(_SHOWS.fullmatch(argument) and argument not in _FOLDERS for argument in arguments)


def end_unread() -> None:
    """Let this program end silently once nobody reads its output: `... --help | head`."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)


class Output(io.TextIOWrapper):
    """Standard output or error that goes to /dev/null once its reader is gone. The run goes on and writes its log."""

    def write(self, text: str) -> int:
        return self._or_nowhere(lambda: super(Output, self).write(text))

    def flush(self) -> None:
        self._or_nowhere(super().flush)

    def _or_nowhere(self, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            return action()


def outlive_readers() -> None:
    """Let a run go on if the reader of its output is gone, for example after `| head` or a killed `tee`."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper) and stat.S_ISFIFO(os.fstat(stream.fileno()).st_mode):
            stream.flush()
            file = io.BufferedWriter(io.FileIO(stream.fileno(), "wb", closefd=False))
            line_buffering, errors = stream.line_buffering, stream.errors
            setattr(sys, name, Output(file, stream.encoding, errors, line_buffering=line_buffering))


def end_quickly() -> None:
    """Keep the interpreter, as it ends, from taking all objects of torch and vLLM apart, which takes 1 to 3 seconds.

    To be called last. Nothing more is printed: libraries written in C++ would report these objects as leaked.
    """
    gc.freeze()
    sys.stdout.flush()
    sys.stderr.flush()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)
