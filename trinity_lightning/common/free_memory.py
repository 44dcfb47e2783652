"""How much memory of this machine is free: for what is decided by it once, at a run's start."""

from pathlib import Path

import psutil

# The container that a process runs in, by control groups version 2 and version 1: limit, use, and what `memory.stat`
# beside them calls the part of that use which is files read before, and is given back when memory is needed.
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
    for limit, used, cache in _CONTAINER:
        try:
            left = int(Path(limit).read_text()) - int(Path(used).read_text())
            statistics = dict(line.split() for line in Path(limit).with_name("memory.stat").read_text().splitlines())
            free = min(free, left + int(statistics[cache]))
        except (OSError, ValueError, KeyError):  # no such file, or "max": no limit
            continue
    return max(free, 0)
