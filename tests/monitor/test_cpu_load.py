import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from trinity_lightning.monitor import machine
from trinity_lightning.monitor.machine import CPULoad, advice

BUSY = "import os; print(os.getpid(), flush=True)\nwhile True: pass"
ORPHAN = "import os\nif os.fork(): os._exit(0)\n" + BUSY  # its parent has ended: nobody's child here


@contextmanager
def busy_process(code: str) -> Iterator[psutil.Process]:
    """A process that computes all the time, which prints its id first."""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        process = psutil.Process(int(started.stdout.readline()))
        try:
            yield process
        finally:
            process.kill()


def counted_while(process: psutil.Process, seconds: float) -> tuple[float, float]:
    """Own and others' seconds of the cores while a process computed for so long."""

    def computed() -> float:
        times = process.cpu_times()
        return times.user + times.system

    counters, enough = machine._read(), computed() + seconds
    while computed() < enough:
        time.sleep(0.02)
    now = machine._read()
    own = now.own - counters.own
    return own, now.busy - counters.busy - own


def test_a_child_counts_as_the_runs_own() -> None:
    with busy_process(BUSY) as child:
        own, _ = counted_while(child, 0.5)
    assert own >= 0.45


def test_a_process_of_nobody_here_counts_as_another_program() -> None:
    with busy_process(ORPHAN) as stranger:
        own, others = counted_while(stranger, 0.5)
    assert own <= 0.25
    assert others >= 0.45


def test_a_span_that_is_too_short_gives_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    counters = iter([(0.0, 0.0, 0.0), (0.5, 1.0, 0.5), (10.0, 5.0, 5.0), (12.0, 9.0, 6.0), (20.0, 9.0, 6.0)])
    monkeypatch.setattr(machine, "_read", lambda: machine._Counters(*next(counters)))
    load = CPULoad()
    load.start()
    load.stop()
    assert load.take() is None
    load.start()
    load.stop()
    load.stop()  # without a span
    assert load.take() == pytest.approx(1.5)  # 4 s on the cores, of which 1 s its own, in 2 s
    assert load.take() is None


@pytest.mark.parametrize(
    ("others", "threads", "cores", "fitting"),
    [
        (0.1, 2, 2, None),  # next to nothing
        (0.7, 2, 2, 1),  # a busy process beside two threads on two cores gets less than a core
        (1.9, 2, 2, 1),
        (1.0, 1, 2, None),  # both have a core
        (1.0, 1, 1, None),  # no less than one thread
        (3.2, 16, 16, 12),
        (3.2, 8, 16, None),
        (30.0, 2, 64, None),  # few cores of many, by a quota
    ],
)
def test_advice_where_threads_and_others_do_not_fit(
    others: float, threads: int, cores: int, fitting: int | None
) -> None:
    found = advice(others, threads, cores)
    assert found is None if fitting is None else f"OMP_NUM_THREADS={fitting} " in str(found)
