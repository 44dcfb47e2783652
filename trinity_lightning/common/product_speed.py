"""How fast this machine's CPU multiplies matrices, and in which dtype faster: timed within milliseconds."""

import math
import time
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch

from trinity_lightning.config.training import WeightDtype

TORCH_DTYPES = {WeightDtype.bf16: torch.bfloat16, WeightDtype.fp32: torch.float32}

# Tokens of a micro-batch, and a layer of a small model: with AMX, AVX512-BF16 or neither, larger ones rank alike.
SHAPE = (512, 576, 1536)
LARGE_SHAPE = (1024, 1024, 2048)  # nearer to what the CPU can do at best
WARM_UPS, ROUNDS = 2, 7


class TimedProduct(NamedTuple):
    """Seconds of one matrix product of `SHAPE` in each dtype, and the threads that torch used for it."""

    seconds: dict[WeightDtype, float]
    threads: int


@cache
def timed_product() -> TimedProduct:
    """The product timed with as many threads as torch uses; once a process, however many threads it uses later."""
    seconds = _least_seconds(SHAPE, list(TORCH_DTYPES.values()))
    by_dtype = {dtype: seconds[torch_dtype] for dtype, torch_dtype in TORCH_DTYPES.items()}
    return TimedProduct(by_dtype, torch.get_num_threads())


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
    seconds = timed_product().seconds
    return min(seconds, key=lambda dtype: seconds[dtype])
