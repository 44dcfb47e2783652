"""A process that compares mathematical expressions for `verifier.py`: JSON lines in, JSON lines out.

    python -P math_worker.py <CPU seconds a comparison> <bytes of memory>

Apart, because what a model writes can keep SymPy busy for ever (10^{10^{10}}), deep in C code that no thread can
interrupt: past its time the kernel ends this process. It imports nothing of this project, to start quickly.
"""

import json
import logging
import resource
import signal
import sys

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

EXTRACTION = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())


def same(expected: str, given: str) -> bool:
    """Whether the mathematics found in both texts is the same; False where there is none in one of them."""
    # Without math-verify's own time-outs, which Python's signal handlers cannot keep within C code.
    found = [parse(text, EXTRACTION, parsing_timeout=None) for text in (expected, given)]
    return bool(all(found)) and verify(*found, timeout_seconds=None)


def main(cpu_seconds: float, memory: int) -> None:
    """Answer requests {"expected", "given"} with true or false until the input ends."""
    logging.disable()  # a response that is no mathematics is nothing to report
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)  # SIGPROF, unhandled, ends the process
        try:
            equal = same(**json.loads(line))
        except (MemoryError, RecursionError):  # of a monstrous expression
            equal = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(equal), flush=True)


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
