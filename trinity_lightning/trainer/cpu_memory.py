"""Memory of a process that trains on a CPU: what is freed is used again."""

import ctypes
import sys

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
