"""The memory of this machine: what is free of it, what does not fit, and giving back a tensor's."""

from collections.abc import Mapping
from pathlib import Path

import psutil
from torch import Tensor

from trinity_lightning.common.hardware import GIB, advise
from trinity_lightning.errors import ConfigError

# The container that a process runs in, by control groups version 2 and version 1: limit, use, and what `memory.stat`
# next to them calls the files in that use that were read before: they are given back when memory is needed.
_CONTAINER = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current", "inactive_file"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        "total_inactive_file",
    ),
)


def free_memory() -> int:
    """Bytes that this process may still take: what the machine has free, or its container, whichever is less."""
    free = psutil.virtual_memory().available
    for limit, used, files in _CONTAINER:
        try:
            left = int(Path(limit).read_text()) - int(Path(used).read_text())
            statistics = dict(line.split() for line in Path(limit).with_name("memory.stat").read_text().splitlines())
            free = min(free, left + int(statistics[files]))
        except (OSError, ValueError, KeyError):  # no such file, or "max": no limit
            continue
    return max(free, 0)


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
