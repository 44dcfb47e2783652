"""Memory of this machine that a process reuses, gives back or may still take; its threads; its speed; its GPU."""

import ctypes
import math
import mmap
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cache, partial
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import psutil
import torch
from torch import Tensor
from torch.nn import functional

from trinity_lightning.config.model import WeightDtype
from trinity_lightning.errors import ConfigError

GIB = 1 << 30

# -- memory that the C library keeps or gives back ---------------------------------------------------------------------

# glibc's parameters of mallopt(3) as malloc.h numbers them, and their values: the largest buffer that comes from the
# heap, and the most free bytes that the heap keeps at its end.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES, _LARGEST_BYTES = 1 << 30, 1 << 29
_GROWTH = 1.1


def reuse_large_buffers() -> None:
    """Let the C library (where it is glibc) keep buffers of up to 512 MiB for the next ones of their kind.

    By default it maps each buffer of more than 32 MiB anew, and each of its pages is zeroed at the first touch: logits
    take hundreds of megabytes, and zeroing was a sixth of a training step. This is a wish, not a promise: glibc maps
    buffers all the same if a library lies where the heap would have to grow.
    """
    if (mallopt := _of_glibc("mallopt")) is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def trim_heap() -> None:
    """Give the free pages of the heap back to the system, including pages between buffers that are in use.

    Every micro-batch has a different shape, and leaves holes that the next one does not fit into: without this a run
    grows for hours.
    """
    if (trim := _of_glibc("malloc_trim")) is not None:
        trim(ctypes.c_size_t(0))


class HeapBound:
    """Keeps the heap's holes from growing over a run: `check` trims the heap once the process has grown by a tenth.

    Trimming after every step would cost a tenth of a short step: each page that is used again is zeroed again. The
    first step does not count: the optimizer's states, made at its end, take the places that its activations left.
    """

    def __init__(self) -> None:
        self._is_first, self._least = True, math.inf

    def check(self) -> None:
        """Trim the heap if the process has grown by a tenth; call it at the same point of every step."""
        if self._is_first:
            self._is_first = False
            return
        resident = psutil.Process().memory_info().rss
        self._least = min(self._least, resident)
        if resident > _GROWTH * self._least:
            trim_heap()
            self._least = math.inf


def forget(tensor: Tensor) -> None:
    """Give the whole pages of a tensor's storage back to the system; they read as zeros then. Linux only.

    Args:
        tensor: on the CPU, in memory that torch allocated itself (no file, nothing shared between processes).
    """
    storage = tensor.untyped_storage()
    advise("MADV_DONTNEED", storage.data_ptr(), storage.nbytes())


def advise(advice: str, address: int, size: int) -> None:
    """Tell Linux how to treat the whole pages of a stretch of memory. The kernel may refuse; other systems ignore it.

    Args:
        advice: name of the advice in madvise(2) and Python's mmap.
        address: first byte of the stretch.
        size: its size in bytes.
    """
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address + size) // mmap.PAGESIZE * mmap.PAGESIZE
    if end > start and (madvise := _of_glibc("madvise")) is not None:
        madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), getattr(mmap, advice))


def _of_glibc(name: str) -> "ctypes._NamedFuncPointer | None":
    """The C library's function of this name; None elsewhere than on Linux, or if the library has none."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None


# -- memory that is free -----------------------------------------------------------------------------------------------

_OWN_GROUPS = Path("/proc/self/cgroup")  # the control group of this process, for each controller

# For versions 2 and 1 of control groups: the controller, the folder of its groups, the files in a group with its limit
# and its usage, and the key in memory.stat for page cache, which the kernel reclaims when memory is needed.
_VERSIONS = (
    ("", "/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    ("memory", "/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def free_memory() -> int:
    """Bytes that this process may still take: the least that is free in the machine, its container and its job."""
    free = psutil.virtual_memory().available
    for group, limit, used, cached in _groups():
        try:
            left = int((group / limit).read_text()) - int((group / used).read_text())
            statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            free = min(free, left + int(statistics[cached]))
        except (OSError, ValueError, KeyError):  # no such file, or "max": no limit
            continue
    return max(free, 0)


def _groups() -> Iterator[tuple[Path, str, str, str]]:
    """The control groups around this process, each with the last three names of `_VERSIONS`.

    A container may show the outermost one only.
    """
    lines: list[str] = []
    with suppress(OSError):
        lines = _OWN_GROUPS.read_text().splitlines()
    paths: dict[str, str] = {}  # by controller
    for _, controllers, path in (line.split(":", 2) for line in lines):
        paths |= dict.fromkeys(controllers.split(","), path)
    for controller, root, limit, used, cached in _VERSIONS:
        innermost = PurePath(paths.get(controller, "/").lstrip("/"))
        yield from ((Path(root, group), limit, used, cached) for group in (innermost, *innermost.parents))


def check_caches(caches: Mapping[str, float]) -> None:
    """Refuse key-value caches of engines that need more memory than is free.

    Args:
        caches: size of each cache in GiB, by the key of its engine.

    Raises:
        ConfigError: the caches do not fit; the message names the keys.
    """
    if sum(caches.values()) * GIB > (free := free_memory()):
        raise ConfigError(
            f"{' and '.join(f'{key}.kv_cache_gb' for key in caches)}: {sum(caches.values()):g} GiB in all, and "
            f"{free / GIB:.1f} GiB of memory are free",
            key=f"{next(iter(caches))}.kv_cache_gb" if len(caches) == 1 else None,
            fix="give less, or null",
        )


# -- a GPU's kernels, which run on after they were started -------------------------------------------------------------


def await_kernels(device: torch.device) -> None:
    """Wait until a GPU has computed all that it was given; other devices compute while they are called."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# -- threads -----------------------------------------------------------------------------------------------------------


def compute_on_one_thread() -> None:
    """Let torch use none of OpenMP's threads for this thread's computations from now on; other threads keep theirs.

    libgomp counts the threads of all its pools. With a second pool there are more threads than cores, and from then on
    none of them spins at a barrier: each sleeps, and has to be woken for nearly every operation.
    """
    threads = torch.get_num_threads()  # read first: at a thread's first call torch sets it to the process's number
    # Not torch.set_num_threads, which vLLM replaces by nothing while it loads.
    set_threads = torch._C.set_num_threads
    set_threads(1)  # for this thread, and for threads that start later
    others = threading.Thread(target=set_threads, args=(threads,))
    others.start()
    others.join()


# -- speed of matrix products, and the dtype in which they are faster: timed within milliseconds -----------------------

TORCH_DTYPES = {WeightDtype.bf16: torch.bfloat16, WeightDtype.fp16: torch.float16, WeightDtype.fp32: torch.float32}
ON_A_CPU = (WeightDtype.bf16, WeightDtype.fp32)  # the dtypes that `auto` chooses from on a CPU

# Rows, inner and columns: tokens of a micro-batch, and a layer of a small model. With AMX, AVX512-BF16 or neither,
# larger products rank the dtypes alike.
SHAPE = (512, 576, 1536)
LARGE_SHAPE = (1024, 1024, 2048)  # comes nearer to the CPU's best
WARM_UPS, ROUNDS = 2, 7
PEAK_SECONDS = 0.02  # for each shape, and three rounds at least


@cache
def timed_product() -> tuple[dict[WeightDtype, float], int]:
    """Seconds of one matrix product of `SHAPE` in each dtype of `ON_A_CPU`, and the threads that torch used for it.

    Timed once a process, however many threads it uses later. The products take turns, and the least time of each
    counts: other programs on the machine only ever add to it.
    """
    products = {dtype: _product(SHAPE, TORCH_DTYPES[dtype]) for dtype in ON_A_CPU}
    times: dict[WeightDtype, list[float]] = {dtype: [] for dtype in products}
    for _ in range(WARM_UPS + ROUNDS):
        for dtype, product in products.items():
            times[dtype].append(_busy_seconds(product))
    return {dtype: min(seconds[WARM_UPS:]) for dtype, seconds in times.items()}, torch.get_num_threads()


@cache
def product_flops(
    dtype: torch.dtype, threads: int, shapes: tuple[tuple[int, int, int], ...] = (SHAPE, LARGE_SHAPE)
) -> float:
    """Floating-point operations a second of the fastest matrix product, timed once a process for these arguments.

    Args:
        dtype: dtype of both factors.
        threads: number of threads that torch uses now; results are kept for each number.
        shapes: rows, inner and columns of the products to try, each for `PEAK_SECONDS`.
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
    """Seconds of CPU time that this thread takes for its share of a product, which torch cuts evenly among threads.

    By the clock it would take four times as long beside programs that hold threads up.
    """
    start = time.thread_time()
    with torch.inference_mode():
        product()
    return time.thread_time() - start


def faster_dtype(accelerator: object = "auto") -> WeightDtype:
    """The dtype for `model.dtype=auto`: on a GPU bf16, or fp16 if it has no bfloat16; on a CPU the faster one."""
    if accelerator != "cpu" and torch.cuda.is_available():
        return WeightDtype.bf16 if torch.cuda.is_bf16_supported(including_emulation=False) else WeightDtype.fp16
    seconds, _ = timed_product()
    return min(seconds, key=lambda dtype: seconds[dtype])


# -- GPUs by the names that CUDA gives them ----------------------------------------------------------------------------


AMPERE = (8, 0)  # compute capability of the first GPUs with bfloat16


class Gpu(NamedTuple):
    """Memory and speed of a kind of GPU."""

    name: str  # a regular expression for the name that CUDA gives it ("NVIDIA H100 80GB HBM3")
    gib: float  # its memory, as CUDA reports it: less than its name says
    # Dense operations a second in 16 bits with float32 accumulation: from NVIDIA's data sheets, halved where they count
    # structured sparsity; for GeForce from the architectures' white papers.
    flops: float
    bandwidth: float  # bytes a second of its memory
    half: WeightDtype = WeightDtype.bf16  # the 16 bits of model.dtype=auto

    @property
    def before_ampere(self) -> bool:
        """True for an architecture before Ampere, whose tensor cores know no bfloat16."""
        return self.half is WeightDtype.fp16


# The first one whose expression fits a name counts. Lightning's own table includes sparsity for some GPUs, and leaves
# out tensor cores for others.
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
    "RTX-4090": Gpu(r"\bRTX 4090$", 23.6, 1.652e14, 1.008e12),  # not the one of laptops
    "RTX-3090": Gpu(r"\bRTX 3090$", 23.6, 7.1e13, 9.36e11),
    "T4": Gpu(r"\bT4\b", 14.6, 6.5e13, 3.2e11, WeightDtype.fp16),
}


def is_before_ampere(device: torch.device | int) -> bool:
    """True for a GPU of an architecture before Ampere: for these, torch has no FlashAttention."""
    is_gpu = isinstance(device, int) or device.type == "cuda"
    return is_gpu and torch.cuda.get_device_capability(device) < AMPERE


def known_gpu(name: str) -> Gpu | None:
    """The kind of GPU with this name, as CUDA gives it; None if it is unknown."""
    return next((gpu for gpu in GPUS.values() if re.search(gpu.name, name)), None)


# -- compiled code -----------------------------------------------------------------------------------------------------


def name_vectors() -> None:
    """Let torch's cache of compiled code on disk tell apart code for vectors of different length.

    Otherwise code that was generated under ATEN_CPU_CAPABILITY=avx2, or by a CPU without AVX-512, is compiled for
    AVX-512 by the next process: it then writes 16 numbers where 8 have room, and the process ends at some later time.
    """
    from torch._inductor import config
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    settings: Any = config.cpp
    if settings.simdlen is None and (vectors := pick_vec_isa()):
        settings.simdlen = vectors.bit_width()
