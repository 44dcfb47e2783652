"""Memory of this machine: how much is free, and what a process that computes on a CPU reuses or gives back."""

import ctypes
import mmap
import sys
from pathlib import Path

import psutil
from torch import Tensor

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


# glibc's names for them in malloc.h, and the most that a buffer and the free end of the heap may be.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES, _LARGEST_BYTES = 1 << 30, 1 << 28
_MADV_DONTNEED = 4  # of madvise(2)


def reuse_large_buffers() -> None:
    """Let the C library (where it is glibc) keep buffers of up to 256 MiB for the next ones of their kind.

    It would map each buffer of more than 32 MiB again every time, and every page of it would be zeroed at its first
    touch: logits come by the hundred megabytes, and that was a sixth of a training step. A wish, not a promise: where a
    library lies in the heap's way, glibc maps them all the same.
    """
    if (mallopt := _of_glibc("mallopt")) is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def trim_heap() -> None:
    """Give the free pages of the heap back to the system, those between buffers that are in use too.

    Micro-batches have a different shape every time, and leave holes that the next ones do not fit into: without this a
    run grows for hours.
    """
    if (trim := _of_glibc("malloc_trim")) is not None:
        trim(ctypes.c_size_t(0))


def forget(tensor: Tensor) -> None:
    """Give the memory behind a tensor's storage back to the system: it reads as zeros, and takes memory where written.

    Only whole pages, and on Linux: elsewhere nothing happens.

    Args:
        tensor: on the CPU, in memory that torch allocated itself (no file, nothing shared between processes).
    """
    madvise = _of_glibc("madvise")
    storage = tensor.untyped_storage()
    start = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (storage.data_ptr() + storage.nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE
    if madvise is not None and end > start:
        madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_DONTNEED)


def _of_glibc(name: str) -> "ctypes._NamedFuncPointer | None":
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
