"""Which GPUs this process may use, told without a library that would take hold of them."""

import os


def visible_gpus() -> list[str]:
    """What CUDA_VISIBLE_DEVICES lists, numbers or names, in order; empty where it is not set: all of the machine."""
    return [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
