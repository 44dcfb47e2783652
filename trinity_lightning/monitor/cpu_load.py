"""What other programs take of the processors while the trainer trains on them."""

import math
import os
import time
from dataclasses import dataclass

import psutil

BUSY = ("user", "nice", "system", "irq", "softirq", "steal")  # of /proc/stat; `user` has `guest` in it
ENOUGH_SECONDS = 1.0  # the kernel counts in hundredths of a second
NOTABLE = 0.5  # cores


@dataclass(frozen=True, slots=True)
class _Counters:
    """Seconds since some moment: of the clock, of all that ran on the usable cores, and of this run's own processes."""

    clock: float
    busy: float
    own: float


def _read() -> _Counters:
    by_core = psutil.cpu_times(percpu=True)
    usable = [by_core[core] for core in os.sched_getaffinity(0)]
    busy = sum(getattr(times, name, 0.0) for times in usable for name in BUSY)
    process, own = psutil.Process(), 0.0
    for member in (process, *process.children(recursive=True)):
        try:
            own += sum(member.cpu_times()[:4])  # user and system, its own and of its children that ended
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue  # it ended meanwhile: its time is with its parent's
    return _Counters(time.perf_counter(), busy, own)


class CPULoad:
    """Cores that programs other than this run and its children use, in the spans between `start` and `stop`."""

    def __init__(self) -> None:
        self._started: _Counters | None = None
        self._seconds = self._others = 0.0

    def start(self) -> None:
        """Begin a span."""
        self._started = _read()

    def stop(self) -> None:
        """End the span; without one, nothing happens."""
        if self._started is not None:
            now, before = _read(), self._started
            self._started = None
            self._seconds += now.clock - before.clock
            self._others += now.busy - before.busy - (now.own - before.own)

    def take(self) -> float | None:
        """Cores that others used in the spans since the last call; None if these were too short to tell."""
        seconds, others = self._seconds, self._others
        self._seconds = self._others = 0.0
        return max(others / seconds, 0.0) if seconds >= ENOUGH_SECONDS else None


def advice(others: float, threads: int, cores: int) -> str | None:
    """What to do if so many training threads and others (in cores) do not fit on the usable cores; None if they do.

    The threads of an operation wait for its slowest: one that others hold back holds back all.
    """
    fitting = max(cores - math.ceil(others), 1)
    if others < NOTABLE or threads + others <= cores or fitting >= threads:
        return None
    return (
        f"other programs use {others:.1f} of {cores} cores while {threads} threads train, which wait for each other at "
        f"every operation: if that lasts, OMP_NUM_THREADS={fitting} is faster (ckpt_path=last goes on with it)."
    )
