"""Memory of a process that trains on a CPU: what oneDNN remembers is bounded, what is freed is used again."""

import ctypes
import os
import sys

# A layer needs about 20 compiled primitives for each shape of micro-batch, and all layers have the same.
BOUNDS = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64", "LRU_CACHE_CAPACITY": "64"}


def bound_primitive_caches() -> None:
    """Let oneDNN, and torch above it, keep 64 compiled primitives instead of 1,024, unless the environment says more.

    Micro-batches have a different shape every time, so that old primitives are never used again, and each holds a piece
    of the heap: a run grew by 0.13 GB a step. Works until the first use in the process, when the settings are read.
    """
    for name, value in BOUNDS.items():
        os.environ.setdefault(name, value)


# glibc's names for them in malloc.h, and the most that a buffer and the free end of the heap may be.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES, _LARGEST_BYTES = 1 << 30, 1 << 28


def reuse_large_buffers() -> None:
    """Let the C library (where it is glibc) keep buffers of up to 256 MiB for the next ones of their kind.

    It would map each buffer of more than 32 MiB anew, and every page of it would be zeroed at its first touch: logits
    come by the hundred megabytes, and that was a sixth of a training step. A wish, not a promise: where a library lies
    in the heap's way, glibc maps them all the same.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
