"""What a device can compute in a second: what `perf/mfu` is a share of."""

import re

import torch

from trinity_lightning.common.product_speed import product_flops

# Dense bfloat16 operations a second with float32 accumulation, by the name that CUDA gives a GPU (a regular expression,
# the first that fits): of NVIDIA's data sheets, halved where those count structured sparsity, and of the architectures'
# white papers for GeForce. Lightning's own table counts sparsity for some GPUs, and no tensor cores for others.
BFLOAT16_FLOPS = (
    (r"\bB200\b", 2.25e15),
    (r"\bH[12]00 NVL\b", 8.355e14),
    (r"\bH100 PCIe\b", 7.56e14),
    (r"\bG?H[12]00\b", 9.895e14),
    (r"\bA100\b", 3.12e14),
    (r"\bL40S\b", 3.62e14),
    (r"\bL40\b", 1.81e14),
    (r"\bL4\b", 1.21e14),
    (r"\bA10\b", 1.25e14),
    (r"\bRTX 4090$", 1.652e14),  # not those of laptops
    (r"\bRTX 3090$", 7.1e13),
)


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Operations a second of matrix products in this dtype; None where that is not known.

    On a CPU measured, within a second; on a GPU known for bfloat16 by its name.
    """
    if device.type == "cpu":
        return product_flops(dtype, torch.get_num_threads())
    if device.type == "cuda" and dtype == torch.bfloat16:
        return known_bfloat16_flops(torch.cuda.get_device_name(device))
    return None


def known_bfloat16_flops(gpu: str) -> float | None:
    """Of a GPU by the name that CUDA gives it ("NVIDIA H100 80GB HBM3"), or None."""
    return next((flops for name, flops in BFLOAT16_FLOPS if re.search(name, gpu)), None)
