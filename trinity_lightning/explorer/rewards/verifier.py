"""Symbolic comparison of answers by math-verify, in processes that can be ended."""

import atexit
import json
import logging
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO, cast

logger = logging.getLogger(__name__)

WORKER = Path(__file__).with_name("math_worker.py")
# Of CPU time, not of the clock: what a comparison comes to does not depend on what else the machine does.
CPU_SECONDS = 5.0
MEMORY = 2 << 30  # bytes: an expression that unfolds into more is no answer
MAX_PROCESSES = 8
# How a process ends that went past its time, or whose arithmetic in C met the end of its memory.
_BY_ITS_LIMITS = (-signal.SIGPROF, -signal.SIGABRT, -signal.SIGSEGV)


class MathVerifier:
    """Says whether two texts hold the same mathematics, in processes that are started as they are needed.

    For threads: a call blocks until a process is free and has answered. The processes end with this one.

    Args:
        max_processes: how many at once.
        cpu_seconds: CPU time that one comparison may take.
    """

    def __init__(self, max_processes: int = MAX_PROCESSES, cpu_seconds: float = CPU_SECONDS) -> None:
        self._cpu_seconds = cpu_seconds
        self._places = threading.Semaphore(max_processes)
        self._idle: list[subprocess.Popen[str]] = []
        atexit.register(self.close)

    def same(self, expected: str, given: str) -> bool:
        """Whether the answer found in `given` equals the one in `expected`; False where that is not found out in time.

        Both are read by math-verify: the last box, or else LaTeX or a number in the text.

        Raises:
            RuntimeError: the process ended, and not by its limits.
        """
        with self._places:
            try:
                process = self._idle.pop()  # the one used last: few run where few are needed
            except IndexError:
                process = self._start()
            reply = _ask(process, json.dumps({"expected": expected, "given": given}))
            if reply is not None:
                self._idle.append(process)
                return bool(json.loads(reply))
            process.communicate()  # closes its pipes and waits for its end
        if process.returncode not in _BY_ITS_LIMITS:
            raise RuntimeError(f"the process that compares answers ended with exit code {process.returncode}")
        logger.warning("An answer that takes too long to compare counts as wrong: %.200s", given)
        return False

    def close(self) -> None:
        """End the processes; the next call starts new ones."""
        while self._idle:
            self._idle.pop().communicate()  # it ends with its input

    def _start(self) -> "subprocess.Popen[str]":
        # In a session of its own: Ctrl-C is for the run, which closes what it started.
        return subprocess.Popen(
            [sys.executable, "-P", str(WORKER), str(self._cpu_seconds), str(MEMORY)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )


def _ask(process: "subprocess.Popen[str]", request: str) -> str | None:
    """The answer's line; None where the process ends instead."""
    stdin, stdout = cast(IO[str], process.stdin), cast(IO[str], process.stdout)
    try:
        stdin.write(request + "\n")
        stdin.flush()
        reply = stdout.readline()
    except BrokenPipeError:
        return None
    return reply if reply.endswith("\n") else None
