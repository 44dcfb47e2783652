"""This machine: what a process reuses or gives back of its memory, its threads, how fast its CPU multiplies."""

import ctypes
import math
import mmap
import sys
import threading
import time
from collections.abc import Sequence
from functools import cache

import psutil
import torch

from trinity_lightning.config.training import WeightDtype

# -- Memory ------------------------------------------------------------------------------------------------------------


GIB = 1 << 30

# glibc's names for them in malloc.h, and the most that a buffer and the free end of the heap may be.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES, _LARGEST_BYTES = 1 << 30, 1 << 29
_GROWTH = 1.1


def reuse_large_buffers() -> None:
    """Let the C library (where it is glibc) keep buffers of up to 512 MiB for the next ones of their kind.

    It would map each buffer of more than 32 MiB again every time, and every page of it would be zeroed at its first
    touch: logits come by the hundred megabytes, and that was a sixth of a training step. A wish, not a promise: glibc
    maps them all the same if a library lies in the heap's way.
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


class HeapBound:
    """Keeps the heap's holes from growing over a run: `check` trims it once the process has grown by a tenth.

    Trimming after every step would cost a tenth of a short one: all pages that are used again are zeroed again. The
    first step is no measure: the optimizer's states, made at its end, lie where activations would have lain again.
    """

    def __init__(self) -> None:
        self._is_first, self._least = True, math.inf

    def check(self) -> None:
        """Look at what the process takes, at the same point of every step."""
        if self._is_first:
            self._is_first = False
            return
        resident = psutil.Process().memory_info().rss
        self._least = min(self._least, resident)
        if resident > _GROWTH * self._least:
            trim_heap()
            self._least = math.inf


def advise(advice: str, address: int, size: int) -> None:
    """What Linux is to do with the whole pages of a stretch of memory; a kernel may refuse, and others are not asked.

    Args:
        advice: as madvise(2) and Python's mmap call it.
        address: where it begins.
        size: in bytes.
    """
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address + size) // mmap.PAGESIZE * mmap.PAGESIZE
    if end > start and (madvise := _of_glibc("madvise")) is not None:
        madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), getattr(mmap, advice))


def _of_glibc(name: str) -> "ctypes._NamedFuncPointer | None":
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None


# -- Threads -----------------------------------------------------------------------------------------------------------


def compute_on_one_thread() -> None:
    """From now on, what this thread computes with torch takes no threads of OpenMP; other threads keep theirs.

    libgomp counts the threads of all its pools. A second pool makes them more than there are cores, and from then on
    none of them spins at a barrier: each sleeps, and has to be woken for nearly every operation.
    """
    threads = torch.get_num_threads()  # before: at a thread's first call torch sets it to the process's number
    # Not torch.set_num_threads, which vLLM replaces by nothing while it loads.
    set_threads = torch._C.set_num_threads
    set_threads(1)  # of this thread, and of threads that start later
    others = threading.Thread(target=set_threads, args=(threads,))
    others.start()
    others.join()


# -- Speed of matrix products, and in which dtype they are faster: timed within milliseconds ---------------------------


TORCH_DTYPES = {WeightDtype.bf16: torch.bfloat16, WeightDtype.fp32: torch.float32}

# Tokens of a micro-batch, and a layer of a small model: with AMX, AVX512-BF16 or neither, larger ones rank alike.
SHAPE = (512, 576, 1536)
LARGE_SHAPE = (1024, 1024, 2048)  # nearer to what the CPU can do at best
WARM_UPS, ROUNDS = 2, 7


@cache
def timed_product() -> tuple[dict[WeightDtype, float], int]:
    """Seconds of one matrix product of `SHAPE` in each dtype, and the threads that torch used for it.

    Timed once a process, however many threads it uses later.
    """
    seconds = _least_seconds(SHAPE, list(TORCH_DTYPES.values()))
    return {dtype: seconds[each] for dtype, each in TORCH_DTYPES.items()}, torch.get_num_threads()


@cache
def product_flops(dtype: torch.dtype, threads: int) -> float:
    """Floating-point operations a second of the best matrix product found, once a process and number of threads.

    Args:
        dtype: of both factors.
        threads: as many as torch uses now.
    """
    return max(2 * math.prod(shape) / _least_seconds(shape, [dtype])[dtype] for shape in (SHAPE, LARGE_SHAPE))


def _least_seconds(shape: tuple[int, int, int], dtypes: Sequence[torch.dtype]) -> dict[torch.dtype, float]:
    """Of several products, which take turns: whatever else runs on the machine only ever adds to it."""
    rows, inner, columns = shape
    pairs = {d: (torch.ones(rows, inner, dtype=d), torch.ones(inner, columns, dtype=d)) for d in dtypes}
    times: dict[torch.dtype, list[float]] = {dtype: [] for dtype in pairs}
    with torch.inference_mode():
        for _ in range(WARM_UPS + ROUNDS):
            for dtype, (left, right) in pairs.items():
                start = time.perf_counter()
                _ = left @ right
                times[dtype].append(time.perf_counter() - start)
    return {dtype: min(seconds[WARM_UPS:]) for dtype, seconds in times.items()}


def faster_dtype(accelerator: object = "auto") -> WeightDtype:
    """The dtype that `model.dtype=auto` stands for: bf16 on a GPU, else the one of the faster product."""
    if accelerator != "cpu" and torch.cuda.is_available():
        return WeightDtype.bf16
    seconds, _ = timed_product()
    return min(seconds, key=lambda dtype: seconds[dtype])
