"""Mathematics read and compared by math-verify, in processes that can be ended.

A response can keep SymPy busy without end (10^{10^{10}}), deep in C code that no thread can interrupt. So this file is
also run as a script, `python -P math_verifier.py <CPU seconds a request> <bytes of memory>`. The script answers each
line of JSON with a line of JSON, and the kernel ends it when a request exceeds its time. It imports nothing of this
package, so as to start quickly. A pool of multiprocessing, as in `workers.py`, would not do: its processes run the
user's script again, start all at once, cannot have another hash seed, and are lost in a fork.
"""

import atexit
import functools
import json
import logging
import math
import os
import resource
import signal
import subprocess
import sys
import threading
import weakref
from typing import IO, Any, cast

import psutil

logger = logging.getLogger(__name__)

CPU_SECONDS = 5.0  # CPU time and not time of the clock, so that results do not depend on the load of the machine
MEMORY = 2 << 30  # bytes: an expression that takes more is no answer
DECIMALS = 6  # decimal places to which numbers without an exact form are compared
MAX_PROCESSES = min(os.cpu_count() or 1, 8)
# Return codes of a process that exceeded its time, or whose arithmetic in C ran out of memory.
_BY_ITS_LIMITS = (-signal.SIGPROF, -signal.SIGABRT, -signal.SIGSEGV)


class MathVerifier:
    """Finds answers in texts and compares them, in processes that are started as they are needed.

    A call blocks until a process is free and has answered, so it is made in a thread. A request that takes more than
    its time, or more than 2 GiB, counts as no answer. The processes end with this process.

    Args:
        max_processes: number of processes at most.
        cpu_seconds: CPU time that one call may take.

    Raises:
        RuntimeError: (by a call) its process ended for another reason than its limits.
    """

    def __init__(self, max_processes: int = MAX_PROCESSES, cpu_seconds: float = CPU_SECONDS) -> None:
        self._max_processes = max_processes
        self._cpu_seconds = cpu_seconds
        self._forget()
        atexit.register(self.close)
        os.register_at_fork(after_in_child=self._forget)  # processes that share a pipe would mix up their replies

    def find(self, text: str) -> str | None:
        """The answer in a text: its last box, or else LaTeX or a number; None if it has none."""
        return cast("str | None", self._ask({"text": text}))

    def same(self, expected: str, given: str) -> bool:
        """True if two answers are the same mathematics: expressions, equations, sets, intervals, matrices."""
        return bool(self._ask({"expected": expected, "given": given}))

    def close(self) -> None:
        """End the processes, even in the middle of a request; the next call starts new ones."""
        for process in list(self._started):
            process.kill()
        while self._idle:
            self._idle.pop().communicate()  # closes its pipes and waits for its end

    def _ask(self, request: dict[str, str]) -> Any:
        with self._places:
            try:
                process = self._idle.pop()  # the one used last, so that no more processes are started than needed
            except IndexError:
                process = self._start()
            try:
                reply = _reply(process, json.dumps(request))
            except BaseException:  # such as an interrupt: the next request must not get this one's reply
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
                f"the process that compares answers ended with exit code {process.returncode}; its output is above"
            )
        logger.warning("An answer that takes too much time or memory counts as wrong: %.300s", request)
        return None

    def _forget(self) -> None:
        self._places = threading.Semaphore(self._max_processes)
        self._idle: list[subprocess.Popen[str]] = []
        self._started: weakref.WeakSet[subprocess.Popen[str]] = weakref.WeakSet()

    def _start(self) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [sys.executable, "-P", __file__, str(self._cpu_seconds), str(MEMORY)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONHASHSEED": "0"},  # so that SymPy iterates over sets in the same order each time
            start_new_session=True,  # Ctrl-C reaches only the run, which ends the processes
        )
        self._started.add(process)
        return process


def _reply(process: "subprocess.Popen[str]", request: str) -> Any:
    """The reply of the process to a request; None if the process ends instead."""
    stdin, stdout = cast("IO[str]", process.stdin), cast("IO[str]", process.stdout)
    try:
        stdin.write(request + "\n")
        stdin.flush()
        line = stdout.readline()
    except BrokenPipeError:
        return None
    return json.loads(line) if line.endswith("\n") else None


def _end(process: "subprocess.Popen[str]") -> None:
    process.kill()  # closing its input may not be enough, because a fork may hold the pipe open
    process.communicate()


VERIFIER = MathVerifier()  # shared by all rewards of this process


# -- the script; it imports math-verify late, so that the output of the import does not become a reply -----------------


def find(text: str) -> str | None:
    parsed = _parse(text, *_extraction())
    return str(parsed[-1]) if parsed else None


def same(expected: str, given: str) -> bool:
    from math_verify import verify

    parsed = [_parse(rf"\boxed{{{text}}}", _extraction()[0]) for text in (expected, given)]
    return bool(all(parsed)) and verify(
        *parsed, float_rounding=_decimals(parsed[0]), timeout_seconds=0, allow_set_relation_comp=True
    )


@functools.cache
def _extraction() -> tuple[Any, Any]:
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import ExprExtractionConfig, LatexExtractionConfig

    # The defaults, but units stay, which `equality` compares. By default math-verify drops some 150 words from each
    # answer, so that 5 cm is 5 m, and 2t is 2.
    normalization = NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="all", equations=False
    )
    return (
        LatexExtractionConfig(boxed_match_priority=0, normalization_config=normalization),
        ExprExtractionConfig(),
    )


def _parse(text: str, *extraction: Any) -> list[Any]:
    from math_verify import parse

    # Without math-verify's time-outs: Python's signal handlers do not run within C code.
    return parse(text, extraction, parsing_timeout=0)


def _decimals(expected: list[Any]) -> int:
    """The number of decimal places that gives a small number as many digits as a number of about 1 has."""
    import sympy

    try:
        size = abs(float(next(form for form in expected if isinstance(form, sympy.Expr))))
        return DECIMALS - min(math.frexp(size)[1] * 3 // 10, 0)
    except (StopIteration, TypeError, ValueError, OverflowError):  # no number, or a very large one
        return DECIMALS


def main(cpu_seconds: float, memory: int) -> None:
    """Answer requests until the input ends.

    A request has the arguments of `same` or `find`; a reply is [result, True if another process must be started].
    """
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # so that the output of a library is no reply
    logging.disable()  # math-verify would log each response that is no mathematics
    _limit_memory(memory)
    _extraction()  # loads math-verify now, so that it does not count to the first request's time
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # the parent may ignore or block the signal
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
    process = psutil.Process()
    for line in sys.stdin:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)  # SIGPROF, unhandled, ends the process
        result = find(**request) if "text" in request else same(**request)
        signal.setitimer(signal.ITIMER_PROF, 0)
        # Without memory math-verify finds no answer, so a process whose caches have grown gets no further request.
        replies.write(json.dumps([result, process.memory_info().rss > memory / 2]) + "\n")
        replies.flush()


def _limit_memory(memory: int) -> None:
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    if sys.platform == "linux":  # macOS refuses it
        resource.setrlimit(resource.RLIMIT_AS, (memory if hard == resource.RLIM_INFINITY else min(memory, hard), hard))


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
