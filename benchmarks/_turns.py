"""Sides of a comparison in processes of their own, which work in turns: one when it is asked to, while the others wait.

Standard library only: a side that is somebody else's program runs without this package, and without its settings.
"""

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, cast


class Side:
    """A process that answers requests: lines of its standard input, by lines of JSON.

    Args:
        arguments: what follows `python` on its command line.
        environment: its environment variables; None: those of this process.
        python: the interpreter, which may have other packages; None: that of this process.
    """

    def __init__(
        self, arguments: Sequence[str], environment: Mapping[str, str] | None = None, python: str | None = None
    ) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - open as long as the process is
        self._process = subprocess.Popen(
            [python or sys.executable, *arguments],
            env=environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
        )

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def ask(self, request: str) -> Any:
        """Send a request and wait for its answer."""
        stdin = cast(IO[str], self._process.stdin)
        stdin.write(request + "\n")
        stdin.flush()
        return self.answer()

    def answer(self) -> Any:
        """The next answer; an error with the end of what the process wrote where it ended instead."""
        line = cast(IO[str], self._process.stdout).readline()
        if not line:
            self._errors.seek(0)
            raise RuntimeError(f"the process {self._process.args} ended:\n{self._errors.read()[-4000:]}")
        return json.loads(line)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._errors.close()


class Requests:
    """The other end of a `Side`; what libraries print goes to standard error, where it is not taken for an answer."""

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def __iter__(self) -> Iterator[str]:
        return (line.rstrip("\n") for line in iter(sys.stdin.readline, ""))

    def answer(self, value: Any) -> None:
        self._answers.write(json.dumps(value) + "\n")
        self._answers.flush()


def steps_on_request(requests: Requests, batch: Any, warmed_up: Callable[[], Any]) -> Iterator[Any]:
    """Yield the batch to a training: once to warm up, for memory and compiled primitives, and then once a request.

    A request is answered with the seconds of its step, and the warm-up with what `warmed_up` returns. Any request but
    "step" ends the training.
    """
    yield batch
    reset_peak()
    requests.answer(warmed_up())
    for request in requests:
        if request != "step":
            return
        start = clock()
        yield batch
        requests.answer(clock() - start)


class EnoughError(Exception):
    """Ends a training from within a callback: nothing more is asked for."""


def take_turns(sides: Mapping[str, Side], seconds: float, rounds: int) -> dict[str, list[Any]]:
    """Answers to "step", by side, in turns: at least so many rounds, and more until so many seconds have passed."""
    answers: dict[str, list[Any]] = {name: [] for name in sides}
    start = time.perf_counter()
    done = 0
    while done < rounds or time.perf_counter() - start < seconds:
        for name, side in sides.items():
            answers[name].append(side.ask("step"))
        done += 1
    return answers


def spread(values: Sequence[float], digits: int = 3) -> dict[str, float]:
    """Median, least and largest."""
    figures = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return {name: round(value, digits) for name, value in figures.items()}


def reset_peak() -> None:
    """Count the peak memory of this process (Linux), or of its GPU, from now on."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    Path("/proc/self/clear_refs").write_text("5")  # sets VmHWM to what is resident now (proc(5))


def peak_gb() -> float:
    """Peak memory since `reset_peak` in GB (10^9 bytes): of the GPU where there is one, else of this process."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e9
    [kib] = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(kib) * 1024 / 1e9


def clock() -> float:
    """Seconds, once the GPU has done what it was asked to."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
