"""This machine: what a process reuses or gives back of its memory, its threads, how fast its CPU multiplies."""

import ctypes
import math
import mmap
import sys
import threading
import time
from collections.abc import Callable
from functools import cache, partial

import psutil
import torch
from torch import Tensor
from torch.nn import functional

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
PEAK_SECONDS = 0.02  # for each shape, and three rounds at least


@cache
def timed_product() -> tuple[dict[WeightDtype, float], int]:
    """Seconds of one matrix product of `SHAPE` in each dtype, and the threads that torch used for it.

    Timed once a process, however many threads it uses later. The products take turns: whatever else runs on the machine
    only ever adds to their times.
    """
    products = {dtype: _product(SHAPE, torch_dtype) for dtype, torch_dtype in TORCH_DTYPES.items()}
    times: dict[WeightDtype, list[float]] = {dtype: [] for dtype in products}
    for _ in range(WARM_UPS + ROUNDS):
        for dtype, product in products.items():
            times[dtype].append(_busy_seconds(product))
    return {dtype: min(seconds[WARM_UPS:]) for dtype, seconds in times.items()}, torch.get_num_threads()


@cache
def product_flops(
    dtype: torch.dtype, threads: int, shapes: tuple[tuple[int, int, int], ...] = (SHAPE, LARGE_SHAPE)
) -> float:
    """Floating-point operations a second of the best matrix product found, timed once a process for these arguments.

    Args:
        dtype: of both factors.
        threads: as many as torch uses now.
        shapes: rows, inner and columns of each product that is tried, for `PEAK_SECONDS`.
    """
    rates = []
    for shape in shapes:
        product = _product(shape, dtype)
        _busy_seconds(product)  # warm-up
        times: list[float] = []
        while len(times) < 3 or sum(times) < PEAK_SECONDS:
            times.append(_busy_seconds(product))
        least = min(times) or sum(times) / len(times)  # some sandboxes count hundredths of a second
        rates.append(2 * math.prod(shape) / least)
    return max(rates)


def _product(shape: tuple[int, int, int], dtype: torch.dtype) -> Callable[[], Tensor]:
    """The product of inputs with a weight, as a linear layer computes it."""
    rows, inner, columns = shape
    return partial(functional.linear, torch.ones(rows, inner, dtype=dtype), torch.ones(columns, inner, dtype=dtype))


def _busy_seconds(product: Callable[[], Tensor]) -> float:
    """Seconds that this thread computes its share of a product, which torch cuts evenly among its threads.

    Not those of the clock, by which it takes four times as long beside programs that hold threads up.
    """
    start = time.thread_time()
    with torch.inference_mode():
        product()
    return time.thread_time() - start


def faster_dtype(accelerator: object = "auto") -> WeightDtype:
    """The dtype that `model.dtype=auto` stands for: bf16 on a GPU, else the one of the faster product."""
    if accelerator != "cpu" and torch.cuda.is_available():
        return WeightDtype.bf16
    seconds, _ = timed_product()
    return min(seconds, key=lambda dtype: seconds[dtype])
