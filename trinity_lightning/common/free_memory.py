"""How much memory of this machine is free: for what is decided by it once, at a run's start."""

from pathlib import Path

import psutil

# Limit and use of the container that a process runs in: of control groups version 2, and version 1.
_CONTAINER = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def free_memory() -> int:
    """Bytes that this process may still take: what the machine has free, or its container, whichever is less."""
    free = psutil.virtual_memory().available
    for limit, used in _CONTAINER:
        try:
            free = min(free, int(Path(limit).read_text()) - int(Path(used).read_text()))
        except (OSError, ValueError):  # no such file, or "max": no limit
            continue
    return max(free, 0)
