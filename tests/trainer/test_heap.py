"""Freed memory goes back to the system."""

import sys

import pytest
import torch

from trinity_lightning.monitor.memory import resident_gb
from trinity_lightning.trainer.heap import return_free_memory


@pytest.mark.skipif(sys.platform != "linux", reason="glibc only")
def test_free_pages_are_returned() -> None:
    """Small tensors live in the heap; every second one freed leaves holes that only trimming returns."""
    tensors = [torch.ones(16_384) for _ in range(8_000)]  # 64 KB each, 0.5 GB in all
    keep = tensors[::100]
    del tensors
    return_free_memory()
    after = resident_gb()
    more = [torch.ones(16_384) for _ in range(8_000)]
    full = resident_gb()
    del more
    return_free_memory()
    assert full - after > 0.4
    assert resident_gb() - after < 0.1
    assert len(keep) == 80
