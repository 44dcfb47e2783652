"""Which dtype multiplies matrices faster on this machine's CPU, timed within milliseconds."""

import time
from functools import cache

import torch

from trinity_lightning.common.config import WeightDtype

TORCH_DTYPES = {WeightDtype.bf16: torch.bfloat16, WeightDtype.fp32: torch.float32}

# Tokens of a micro-batch, and a layer of a small model: with AMX, AVX512-BF16 or neither, larger ones rank alike.
SHAPE = (512, 576, 1536)
WARM_UPS, ROUNDS = 2, 7


@cache
def product_seconds() -> dict[WeightDtype, float]:
    """Seconds of one matrix product of `SHAPE` in each dtype, with as many threads as torch uses; once a process.

    The least of several, which take turns: whatever else runs on the machine only ever adds to it.
    """
    rows, inner, columns = SHAPE
    pairs = {
        d: (torch.ones(rows, inner, dtype=t), torch.ones(inner, columns, dtype=t)) for d, t in TORCH_DTYPES.items()
    }
    times: dict[WeightDtype, list[float]] = {dtype: [] for dtype in pairs}
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
    seconds = product_seconds()
    return min(seconds, key=lambda dtype: seconds[dtype])
