"""Peaks of memory, and what other programs take of the CPU."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil
import pytest
import torch

from trinity_lightning.monitor import machine
from trinity_lightning.monitor.machine import (
    CPULoad,
    MemoryMeter,
    TrainingThreads,
    fitting_threads,
    peak_gpu_memory,
    resident_gb,
)
from trinity_lightning.monitor.presentation import find_metric


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.01)


def test_the_memory_of_a_gpu_is_counted_as_torch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3e9)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 4e9)
    peaks = {"perf/peak_gpu_memory_gb": 3.0, "perf/peak_gpu_memory_reserved_gb": 4.0}
    assert peak_gpu_memory(torch.device("cuda")) == peaks
    assert peak_gpu_memory(torch.device("cpu")) == {}
    assert all(find_metric(name) for name in peaks)


@pytest.mark.slow
def test_children_are_counted() -> None:
    before = resident_gb()
    code = "block = bytearray(b'x' * 100_000_000); print('ready', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert resident_gb() - before > 0.095
        child.communicate("\n")


@pytest.mark.slow
def test_a_child_that_ends_meanwhile_counts_as_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        ended = psutil.Process(child.pid)
    monkeypatch.setattr(psutil.Process, "children", lambda self, recursive: [ended])
    assert resident_gb() > 0


def test_the_thread_sees_a_peak_that_has_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1.0]
    monkeypatch.setattr(machine, "resident_gb", lambda: now[0])
    meter = MemoryMeter(interval=0.005)
    meter.start()
    wait_until(lambda: meter.peak_gb == 1.0)
    now[0] = 5.0
    wait_until(lambda: meter.peak_gb == 5.0)
    now[0] = 2.0
    meter.stop()
    assert meter.peak_gb == 5.0
    assert "memory-meter" not in [thread.name for thread in threading.enumerate()]


def test_each_part_has_its_own_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = iter([1.0, 1.0, 4.0, 2.0, 3.0, 3.0])
    monkeypatch.setattr(machine, "resident_gb", lambda: next(samples))
    meter = MemoryMeter()
    meter.mark("rollout")  # 1.0 belongs to no part, 1.0 to the rollout
    meter.mark("train")  # 4.0 is still the rollout's
    meter.mark("rollout")  # 3.0 the training's, 3.0 the rollout's
    assert meter.by_part == {"rollout": 4.0, "train": 3.0}
    assert meter.peak_gb == 4.0


def test_start_and_stop_may_be_repeated() -> None:
    meter = MemoryMeter(interval=0.01)
    meter.stop()
    meter.start()
    meter.start()
    assert [thread.name for thread in threading.enumerate()].count("memory-meter") == 1
    meter.stop()
    meter.stop()
    assert meter.peak_gb > 0


# -- the CPU -----------------------------------------------------------------------------------------------------------


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
    """Seconds of computing by this run and by others while a process computed for so long."""

    def computed() -> float:
        times = process.cpu_times()
        return times.user + times.system

    before, enough = machine._read(), computed() + seconds
    while computed() < enough:
        time.sleep(0.02)
    now = machine._read()
    assert before is not None
    assert now is not None
    (_, busy, this_run), (_, busy_now, this_run_now) = before, now
    return this_run_now - this_run, busy_now - busy - (this_run_now - this_run)


@pytest.mark.slow
def test_a_child_counts_as_the_runs_own() -> None:
    with busy_process(BUSY) as child:
        this_run, _ = counted_while(child, 0.5)
    assert this_run >= 0.45


@pytest.mark.slow
def test_a_process_of_nobody_here_counts_as_another_program() -> None:
    with busy_process(ORPHAN) as stranger:
        # The first try that nothing else of the tests' own disturbs, such as a server that they start.
        tries = (counted_while(stranger, 0.5) for _ in range(20))
        others = next((others for this_run, others in tries if this_run <= 0.25), None)
    assert others is not None
    assert others >= 0.45


def test_a_span_that_is_too_short_gives_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    counters = iter([(0.0, 0.0, 0.0), (0.5, 1.0, 0.5), (10.0, 5.0, 5.0), (12.0, 9.0, 6.0), (20.0, 9.0, 6.0)])
    monkeypatch.setattr(machine, "_read", lambda: next(counters))
    load = CPULoad()
    load.start()
    load.stop()
    assert load.take() is None
    load.start()
    load.stop()
    load.stop()  # without a span
    assert load.take() == pytest.approx(1.5)  # 4 s on the cores, of which 1 s its own, in 2 s
    assert load.take() is None


CORES = """cpu  900 9 90 9000 9 9 9 9 0 0
cpu0 100 1 10 1000 5 2 3 4 50 0
cpu2 300 0 20 2000 5 0 0 0 0 0
cpu4 500 8 60 6000 5 0 0 0 0 0
intr 12345 0 9
"""


def test_cores_are_found_by_their_numbers_though_some_are_offline(monkeypatch, tmp_path) -> None:
    (tmp_path / "stat").write_text(CORES)
    monkeypatch.setattr(machine, "STAT", tmp_path / "stat")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 4})
    counters = machine._read()
    assert counters is not None
    assert counters[1] == pytest.approx((120 + 568) / os.sysconf("SC_CLK_TCK"))


@pytest.mark.parametrize("cores", [{12, 45}, {0, 1}])
def test_where_cores_cannot_be_read_there_is_no_number(monkeypatch, tmp_path, cores) -> None:
    (tmp_path / "stat").write_text(CORES)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: cores)
    for file in ("stat", "none"):
        monkeypatch.setattr(machine, "STAT", tmp_path / file)
        load = CPULoad()
        load.start()
        load.stop()
        assert load.take() is None


@pytest.mark.parametrize(
    ("others", "threads", "cores", "fitting"),
    [
        (0.1, 2, 2, 2),  # next to nothing
        (0.7, 2, 2, 1),  # a busy process beside two threads on two cores gets less than a core
        (1.9, 2, 2, 1),
        (1.0, 1, 2, 1),  # both have a core
        (1.0, 1, 1, 1),  # no less than one thread
        (3.2, 16, 16, 12),
        (3.2, 8, 16, 8),
        (30.0, 2, 64, 2),  # few cores of many, by a quota
    ],
)
def test_threads_that_have_a_core_each_beside_others(others: float, threads: int, cores: int, fitting: int) -> None:
    assert fitting_threads(others, threads, cores) == fitting


class Seen(CPULoad):
    """A load that has always measured the same."""

    def __init__(self, others: float | None) -> None:
        super().__init__()
        self._seen = others

    def take(self) -> float | None:
        return self._seen


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of torch's threads, in the order in which they were set: of a machine with 16 cores, as many."""
    numbers = [16]
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(16)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: numbers[-1])
    monkeypatch.setattr(torch, "set_num_threads", numbers.append)
    return numbers


def test_a_run_beside_others_begins_with_fewer_threads_and_gives_them_back(
    threads: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    chosen = TrainingThreads(Seen(3.2))
    chosen.choose()
    assert threads == [16, 12]
    [record] = caplog.records
    assert "OMP_NUM_THREADS=16" in record.getMessage()
    chosen.give_back()
    chosen.give_back()
    assert threads == [16, 12, 16]


@pytest.mark.parametrize("others", [None, 0.2])
def test_a_run_that_is_alone_or_began_too_fast_to_tell_has_all_threads(
    others: float | None, threads: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    chosen = TrainingThreads(Seen(others))
    chosen.choose()
    chosen.give_back()
    assert (threads, caplog.records) == ([16], [])


def test_the_users_own_number_of_threads_stays(threads: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "16")
    TrainingThreads(Seen(3.2)).choose()
    assert threads == [16]


@pytest.mark.parametrize(
    ("at_start", "later", "advised"),
    [
        (0.0, [0.3, 3.2, 9.0], 12),  # once, by the first that does not fit
        (3.2, [3.2, 3.9, 2.9, 0.2], 13),  # by others that have gone, in part
        (3.2, [0.2, 9.0], 16),
        (3.2, [3.2, 3.5], None),
        (0.0, [0.0, 0.4], None),
    ],
)
def test_a_restart_is_advised_once_when_others_come_or_go(
    at_start: float, later: list[float], advised: int | None, threads: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    chosen = TrainingThreads(Seen(at_start))
    chosen.choose()
    caplog.clear()
    for others in later:
        chosen.advise(others)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == (advised is not None)
    assert all(f"restart with OMP_NUM_THREADS={advised} and ckpt_path=last" in message for message in messages)
