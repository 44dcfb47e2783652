"""A process that reads and compares mathematics for `verifier.py`: a line of JSON for each line of JSON.

    python -P math_worker.py <CPU seconds a request> <bytes of memory>

Apart, because what a model writes can keep SymPy busy for ever (10^{10^{10}}), deep in C code that no thread can
interrupt: past its time the kernel ends this process. It imports nothing of this project, to start quickly.
"""

import functools
import json
import logging
import math
import os
import resource
import signal
import sys
from typing import Any

import psutil

# math-verify is imported late throughout: what is printed at that time is no reply either.
DECIMALS = 6  # to which numbers without an exact form are compared


def find(text: str) -> str | None:
    """The answer in a text: its last box, or else LaTeX or a number; None where it has none."""
    found = _parse(text, *_extraction())
    return str(found[-1]) if found else None


def same(expected: str, given: str) -> bool:
    """Whether two answers are the same mathematics; False where one of them is none."""
    from math_verify import verify

    found = [_parse(rf"\boxed{{{text}}}", _extraction()[0]) for text in (expected, given)]
    return bool(all(found)) and verify(*found, float_rounding=_decimals(found[0]), timeout_seconds=0)


@functools.cache
def _extraction() -> tuple[Any, Any]:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig

    return LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()


def _parse(text: str, *extraction: Any) -> list[Any]:
    from math_verify import parse

    # Without math-verify's own time-outs, which Python's signal handlers cannot keep within C code.
    return parse(text, extraction, parsing_timeout=0)


def _decimals(expected: list[Any]) -> int:
    """Decimal places for as many digits of a small number as of one of about 1."""
    import sympy

    try:
        size = abs(float(next(form for form in expected if isinstance(form, sympy.Expr))))
        return DECIMALS - min(math.frexp(size)[1] * 3 // 10, 0)
    except (StopIteration, TypeError, ValueError, OverflowError):  # no number, or a very large one
        return DECIMALS


def main(cpu_seconds: float, memory: int) -> None:
    """Answer requests, the arguments of `same` or of `find`, with [result, whether to start another] until they end."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no reply
    logging.disable()  # nor is it worth a line that a response is no mathematics
    _limit_memory(memory)
    _extraction()  # loads math-verify: not in the first request's time
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # a parent may have ignored or blocked it
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
    process = psutil.Process()
    for line in sys.stdin:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)  # SIGPROF, unhandled, ends the process
        result = find(**request) if "text" in request else same(**request)
        signal.setitimer(signal.ITIMER_PROF, 0)
        # Where memory runs out, math-verify finds no answer: what caches keep must not make that of the next one's.
        replies.write(json.dumps([result, process.memory_info().rss > memory / 2]) + "\n")
        replies.flush()


def _limit_memory(memory: int) -> None:
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    if sys.platform == "linux":  # macOS refuses it
        resource.setrlimit(resource.RLIMIT_AS, (memory if hard == resource.RLIM_INFINITY else min(memory, hard), hard))


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
