"""Mathematics read and compared by math-verify, in processes that can be ended."""

import atexit
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import IO, Any, cast

logger = logging.getLogger(__name__)

WORKER = Path(__file__).with_name("math_worker.py")
# Of CPU time, not of the clock: what a busy machine still compares, a free one does too.
CPU_SECONDS = 5.0
MEMORY = 2 << 30  # bytes: an expression that unfolds into more is no answer
MAX_PROCESSES = min(os.cpu_count() or 1, 8)
# How a process ends that went past its time, or whose arithmetic in C met the end of its memory.
_BY_ITS_LIMITS = (-signal.SIGPROF, -signal.SIGABRT, -signal.SIGSEGV)


class MathVerifier:
    """Finds answers in texts and compares them, in processes that are started as they are needed.

    For threads: a call blocks until a process is free and has answered. What takes longer than its time, or more than
    2 GiB, counts as no answer. The processes end with this one.

    Args:
        max_processes: how many at once.
        cpu_seconds: CPU time that one call may take.
    """

    def __init__(self, max_processes: int = MAX_PROCESSES, cpu_seconds: float = CPU_SECONDS) -> None:
        self._max_processes = max_processes
        self._cpu_seconds = cpu_seconds
        self._forget()
        atexit.register(self.close)
        os.register_at_fork(after_in_child=self._forget)  # two processes at one pipe would take each other's replies

    def find(self, text: str) -> str | None:
        """The answer in a text: its last box, or else LaTeX or a number; None where it has none.

        Raises:
            RuntimeError: the process ended, and not by its limits.
        """
        return cast("str | None", self._ask({"text": text}))

    def same(self, expected: str, given: str) -> bool:
        """Whether two answers are the same mathematics: expressions, equations, sets, intervals, matrices and the like.

        Raises:
            RuntimeError: the process ended, and not by its limits.
        """
        return bool(self._ask({"expected": expected, "given": given}))

    def close(self) -> None:
        """End the processes, and what they are at; the next call starts new ones."""
        for process in list(self._started):
            process.kill()
        while self._idle:
            self._idle.pop().communicate()  # closes its pipes and waits for its end

    def _ask(self, request: dict[str, str]) -> Any:
        with self._places:
            try:
                process = self._idle.pop()  # the one used last: few run where few are needed
            except IndexError:
                process = self._start()
            try:
                reply = _reply(process, json.dumps(request))
            except BaseException:  # interrupted, say: the reply that is still to come must not be the next one's
                _end(process)
                raise
            if reply is not None:
                result, full = reply
                if full:
                    _end(process)
                else:
                    self._idle.append(process)
                return result
            process.communicate()
        if process.returncode not in _BY_ITS_LIMITS:
            raise RuntimeError(
                f"the process that compares answers ended with exit code {process.returncode}; what it wrote is above"
            )
        logger.warning("An answer that takes too much time or memory counts as wrong: %.300s", request)
        return None

    def _forget(self) -> None:
        self._places = threading.Semaphore(self._max_processes)
        self._idle: list[subprocess.Popen[str]] = []
        self._started: weakref.WeakSet[subprocess.Popen[str]] = weakref.WeakSet()

    def _start(self) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [sys.executable, "-P", str(WORKER), str(self._cpu_seconds), str(MEMORY)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONHASHSEED": "0"},  # SymPy's ways through sets are the same each time
            start_new_session=True,  # Ctrl-C is for the run, which closes what it started
        )
        self._started.add(process)
        return process


def _reply(process: "subprocess.Popen[str]", request: str) -> Any:
    """The answer; None where the process ends instead."""
    stdin, stdout = cast("IO[str]", process.stdin), cast("IO[str]", process.stdout)
    try:
        stdin.write(request + "\n")
        stdin.flush()
        line = stdout.readline()
    except BrokenPipeError:
        return None
    return json.loads(line) if line.endswith("\n") else None


def _end(process: "subprocess.Popen[str]") -> None:
    process.kill()  # its input alone may not end: somebody who forked may hold it open
    process.communicate()
