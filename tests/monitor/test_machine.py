import subprocess
import sys
import threading
import time
from collections.abc import Callable

import psutil
import pytest

from trinity_lightning.monitor import machine
from trinity_lightning.monitor.machine import MemoryMeter, resident_gb


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.01)


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
