"""GPUs by the names that CUDA gives them."""

import pytest

from trinity_lightning.common.devices import known_gpu


@pytest.mark.parametrize(
    ("gpu", "flops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H100 80GB HBM3", 989.5e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835.5e12),
        ("NVIDIA H200", 989.5e12),
        ("NVIDIA GH200 480GB", 989.5e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA RTX A1000", None),
        ("NVIDIA A10G", None),
        ("Tesla T4", None),
    ],
)
def test_a_gpu_is_known_by_its_name(gpu: str, flops: float | None) -> None:
    found = known_gpu(gpu)
    assert (found and found.flops) == flops
