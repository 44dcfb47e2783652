"""Which GPUs this process may use, found without a library that would take hold of them."""

import os


def visible_gpus() -> list[str] | None:
    """What CUDA_VISIBLE_DEVICES lists, numbers or names, in order; None where it is not set: all of the machine."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if listed is None else [name.strip() for name in listed.split(",") if name.strip()]
