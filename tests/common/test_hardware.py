"""Free memory, in a container too; memory that does not grow with the number of shapes; GPUs by their names."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from trinity_lightning import PRIMITIVE_CACHES
from trinity_lightning.common import hardware
from trinity_lightning.common.hardware import HeapBound, await_kernels, forget, free_memory, known_gpu
from trinity_lightning.monitor.machine import resident_gb

MIB = 1 << 20


@pytest.fixture(params=range(2), ids=["version 2", "version 1"])
def version(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """Control groups of this version in `tmp_path`, of which this process is in /job/step; the names of their files."""
    controller, _, *names = hardware._VERSIONS[request.param]
    monkeypatch.setattr(hardware, "_VERSIONS", [(controller, tmp_path, *names)])
    groups = tmp_path / "groups"
    groups.write_text("5:cpu,memory:/job/step\n1:name=systemd:/a:b\n" if controller else "1:cpu:/other\n0::/job/step\n")
    monkeypatch.setattr(hardware, "_OWN_GROUPS", groups)
    return tuple(names)


def set_limit(group: Path, limit: str, version: tuple[str, ...]) -> None:
    """A group that uses 100 MiB, 60 of them for files that it read."""
    group.mkdir(parents=True, exist_ok=True)
    for name, content in zip(version[:2], (limit, str(100 * MIB)), strict=True):
        (group / name).write_text(f"{content}\n")
    (group / "memory.stat").write_text(f"anon {40 * MIB}\n{version[2]} {60 * MIB}\nactive_file 0\n")


# A job of Slurm, say, has its limit in a group around the process's own, and a container shows its group as the root.
@pytest.mark.parametrize("group", ["job/step", "job", "."])
def test_a_job_or_a_container_has_less_memory_than_its_machine_and_files_that_it_read_take_none(
    group: str, tmp_path: Path, version: tuple[str, ...]
) -> None:
    whole = free_memory()
    for limit, free in ((str(300 * MIB), 260 * MIB), ("1", 0), ("max", None)):
        set_limit(tmp_path / group, limit, version)
        assert free_memory() == free if free is not None else free_memory() > min(whole, 260 * MIB)


def test_the_least_of_the_groups_around_a_process_counts(tmp_path: Path, version: tuple[str, ...]) -> None:
    for group, limit in (("job/step", 800), ("job", 500), (".", 900), ("other", 100), ("job/next", 100)):
        set_limit(tmp_path / group, str(limit * MIB), version)
    assert free_memory() == 460 * MIB


def test_without_control_groups_the_machine_counts(tmp_path: Path, version: tuple[str, ...]) -> None:
    (tmp_path / "groups").unlink()
    assert free_memory() > 0
    set_limit(tmp_path, str(300 * MIB), version)
    assert free_memory() == 260 * MIB


# -- memory of a process that computes on a CPU ------------------------------------------------------------------------


GROWTH = """
import torch
from trinity_lightning.common.hardware import faster_dtype
from trinity_lightning.monitor.machine import resident_gb

faster_dtype("cpu")  # the first that a run computes, after which no setting is read
weight = torch.randn(1536, 576).bfloat16()
def products(first):
    for rows in range(first, first + 300):
        torch.randn(rows, 576).bfloat16() @ weight.T
products(50)
before = resident_gb()
products(350)
print(resident_gb() - before)
"""


def grown(**variables: str) -> float:
    """GB that 300 products of different shapes leave behind, in a process of its own."""
    environment = {key: value for key, value in os.environ.items() if key not in PRIMITIVE_CACHES}
    result = subprocess.run(
        [sys.executable, "-c", GROWTH], env=environment | variables, capture_output=True, text=True, check=True
    )
    return float(result.stdout)


@pytest.mark.slow
def test_products_of_many_shapes_do_not_pile_up() -> None:
    unbounded = grown(**dict.fromkeys(PRIMITIVE_CACHES, "1024"))
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        assert 2 * grown() < unbounded
    else:  # oneDNN, which keeps something of each shape, multiplies no bfloat16 on this CPU
        assert unbounded < 0.05


REUSE = """
import resource
import torch
from trinity_lightning.common.hardware import reuse_large_buffers

if {reuse}:
    reuse_large_buffers()
def faults(size):
    torch.ones(size)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        torch.ones(size)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
# 36 to 72 MB; the least, as the heap has to grow first.
print(min(faults(size) for size in (9_000_000, 12_000_000, 15_000_000, 18_000_000)))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="glibc only")
def test_large_buffers_are_used_again() -> None:
    def page_faults(reuse: bool) -> int:
        script = REUSE.format(reuse=reuse)
        return int(subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout)

    mapped_anew = page_faults(reuse=False)
    # Now and then a library lies where the heap would have to grow, and glibc has to map buffers all the same.
    assert any(10 * page_faults(reuse=True) < mapped_anew for _ in range(6))


HOLES = """
import torch
from trinity_lightning.common.hardware import reuse_large_buffers, trim_heap
from trinity_lightning.monitor.machine import resident_gb

reuse_large_buffers()
buffers = [torch.ones(250_000) for _ in range(400)]  # a megabyte each
kept = buffers[::20]
del buffers
before = resident_gb()
trim_heap()
print(before - resident_gb())
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="glibc only")
def test_free_memory_between_buffers_is_given_back() -> None:
    done = subprocess.run([sys.executable, "-c", HOLES], capture_output=True, text=True, check=True)
    assert float(done.stdout) > 0.3


def test_the_heap_is_trimmed_when_the_process_has_grown_by_a_tenth(monkeypatch: pytest.MonkeyPatch) -> None:
    trimmed_at: list[int] = []
    now = SimpleNamespace(rss=0)
    monkeypatch.setattr(hardware, "trim_heap", lambda: trimmed_at.append(now.rss))
    monkeypatch.setattr(psutil.Process, "memory_info", lambda _: now)
    heap = HeapBound()
    for now.rss in (100, 400, 430, 440, 445, 430, 470, 480, 400, 441):
        heap.check()
    assert trimmed_at == [445, 480, 441]


@pytest.mark.skipif(sys.platform != "linux", reason="madvise")
def test_what_is_forgotten_takes_no_memory_and_reads_as_zeros() -> None:
    tensor, neighbours = torch.ones(50_000_000), [torch.ones(1000) for _ in range(2)]
    before = resident_gb()
    forget(tensor[10:])
    assert before - resident_gb() > 0.19
    assert tensor[5_000:-5_000].sum() == 0
    tensor[7] = 3.0
    assert tensor[7] == 3.0
    assert all(bool((neighbour == 1).all()) for neighbour in neighbours)


# -- GPUs by the names that CUDA gives them ----------------------------------------------------------------------------


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
        ("Tesla T4", 65e12),
    ],
)
def test_a_gpu_is_known_by_its_name(gpu: str, flops: float | None) -> None:
    known = known_gpu(gpu)
    assert (known and known.flops) == flops


def test_a_gpus_kernels_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waits.append)
    await_kernels(torch.device("cpu"))
    await_kernels(torch.device("cuda", 1))
    assert waits == [torch.device("cuda", 1)]
