"""What the devices of a run have: free memory of this machine, and GPUs by their data sheets."""

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path, PurePath
from typing import NamedTuple

import psutil
from torch import Tensor

from trinity_lightning.common.hardware import GIB, advise
from trinity_lightning.errors import ConfigError

# -- the memory of this machine: what is free, what does not fit, and giving back a tensor's ---------------------------

_OWN_GROUPS = Path("/proc/self/cgroup")  # the control group of this process, for each controller
# By versions 2 and 1 of control groups the controller, where its groups are, and in each of them the limit, the usage,
# and the key in memory.stat for page cache, which the kernel reclaims when memory is needed.
_VERSIONS = (
    ("", "/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    ("memory", "/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def free_memory() -> int:
    """Bytes that this process may still take: what is free of the machine, its container or its job, the least."""
    free = psutil.virtual_memory().available
    for group, limit, used, cache in _groups():
        try:
            left = int((group / limit).read_text()) - int((group / used).read_text())
            statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            free = min(free, left + int(statistics[cache]))
        except (OSError, ValueError, KeyError):  # no such file, or "max": no limit
            continue
    return max(free, 0)


def _groups() -> Iterator[tuple[Path, str, str, str]]:
    """The control groups around this process, with the names of `_VERSIONS`; a container may show the last one only."""
    lines: list[str] = []
    with suppress(OSError):
        lines = _OWN_GROUPS.read_text().splitlines()
    paths = {each: path for _, several, path in (line.split(":", 2) for line in lines) for each in several.split(",")}
    for controller, root, limit, used, cache in _VERSIONS:
        own = PurePath(paths.get(controller, "/").lstrip("/"))
        yield from ((Path(root, group), limit, used, cache) for group in (own, *own.parents))


def check_caches(caches: Mapping[str, float]) -> None:
    """Refuse key-value caches of engines, GiB by the key that they stand under, that are more than what is free.

    Raises:
        ConfigError: names the keys.
    """
    if sum(caches.values()) * GIB > (free := free_memory()):
        raise ConfigError(
            f"{' and '.join(f'{key}.kv_cache_gb' for key in caches)}: {sum(caches.values()):g} GiB in all, and "
            f"{free / GIB:.1f} GiB of memory are free: give less, or null."
        )


def forget(tensor: Tensor) -> None:
    """Give the memory behind a tensor's storage back to the system; it reads as zeros then.

    Only whole pages, and on Linux: elsewhere nothing happens.

    Args:
        tensor: on the CPU, in memory that torch allocated itself (no file, nothing shared between processes).
    """
    storage = tensor.untyped_storage()
    advise("MADV_DONTNEED", storage.data_ptr(), storage.nbytes())


# -- GPUs by their data sheets: memory, speed of matrix products, bandwidth --------------------------------------------


class Gpu(NamedTuple):
    """What a GPU has."""

    name: str  # a regular expression of the name that CUDA gives it ("NVIDIA H100 80GB HBM3")
    gib: float  # its memory, as CUDA reports it: less than its name says
    # Dense bfloat16 operations a second with float32 accumulation: of NVIDIA's data sheets, halved where those count
    # structured sparsity, and of the architectures' white papers for GeForce.
    flops: float
    bandwidth: float  # bytes a second of its memory


# The first whose expression fits. Lightning's own table counts sparsity for some GPUs, and no tensor cores for others.
GPUS = {
    "B200": Gpu(r"\bB200\b", 178.3, 2.25e15, 7.7e12),
    "H200-NVL": Gpu(r"\bH200 NVL\b", 139.7, 8.355e14, 4.8e12),
    "H100-NVL": Gpu(r"\bH100 NVL\b", 93.0, 8.355e14, 3.9e12),
    "H100-PCIe": Gpu(r"\bH100 PCIe\b", 79.1, 7.56e14, 2.0e12),
    "GH200": Gpu(r"\bGH200\b", 94.5, 9.895e14, 4.0e12),
    "H200": Gpu(r"\bH200\b", 139.7, 9.895e14, 4.8e12),
    "H100-80GB": Gpu(r"\bH100\b", 79.1, 9.895e14, 3.35e12),
    "A100-80GB": Gpu(r"\bA100\b.*80GB", 79.1, 3.12e14, 1.935e12),
    "A100-40GB": Gpu(r"\bA100\b", 39.4, 3.12e14, 1.555e12),
    "L40S": Gpu(r"\bL40S\b", 44.4, 3.62e14, 8.64e11),
    "L40": Gpu(r"\bL40\b", 44.4, 1.81e14, 8.64e11),
    "L4": Gpu(r"\bL4\b", 22.0, 1.21e14, 3.0e11),
    "A10": Gpu(r"\bA10\b", 22.0, 1.25e14, 6.0e11),
    "RTX-4090": Gpu(r"\bRTX 4090$", 23.6, 1.652e14, 1.008e12),  # not those of laptops
    "RTX-3090": Gpu(r"\bRTX 3090$", 23.6, 7.1e13, 9.36e11),
}


def known_gpu(name: str) -> Gpu | None:
    """What is known of a GPU by the name that CUDA gives it."""
    return next((gpu for gpu in GPUS.values() if re.search(gpu.name, name)), None)
