"""Large new buffers in huge pages."""

import ctypes
import mmap
import sys

_SMALLEST = 1 << 22  # bytes; what is smaller holds hardly a huge page


def advise_huge_pages(buffer: memoryview) -> None:
    """Ask Linux to back a large writable buffer with pages of 2 MiB where it was not touched yet; else do nothing.

    A step of experiences is written to tens of megabytes of fresh memory, and to take them from the kernel in pages of
    4 KiB costs as much time as the copying itself. NumPy advises the same for its large arrays.
    """
    if sys.platform != "linux" or len(buffer) < _SMALLEST:
        return
    start = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    first, end = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, (start + len(buffer)) // mmap.PAGESIZE * mmap.PAGESIZE
    # A kernel without huge pages refuses, and pages stay small.
    _madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), mmap.MADV_HUGEPAGE)


_madvise = ctypes.CDLL(None).madvise if sys.platform == "linux" else None
