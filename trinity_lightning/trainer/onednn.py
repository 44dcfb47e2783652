"""oneDNN, which computes torch's bfloat16 products on a CPU, with a bound on what it remembers."""

import os

# A layer needs about 20 compiled primitives for each shape of micro-batch, and all layers have the same.
BOUNDS = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64", "LRU_CACHE_CAPACITY": "64"}


def bound_primitive_caches() -> None:
    """Let oneDNN, and torch above it, keep 64 compiled primitives instead of 1,024, unless the environment says more.

    Micro-batches have a different shape every time, so that old primitives are never used again, and each holds a piece
    of the heap: a run grew by 0.13 GB a step. Works until the first use in the process, when the settings are read.
    """
    for name, value in BOUNDS.items():
        os.environ.setdefault(name, value)
