"""Weights as a folder: written once for all engines, kept for those that are slow, and removed."""

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from trinity_lightning.errors import WeightSyncError
from trinity_lightning.sync import files as folders
from trinity_lightning.sync.files import WEIGHTS, WeightFolder, fits_in_memory
from trinity_lightning.sync.stream import WeightStream


def stream(value: float) -> WeightStream:
    tied = torch.full((2, 3), value)
    return WeightStream.of([("embed.weight", tied), ("lm_head.weight", tied)])


def test_weights_are_written_once_for_all_engines_and_replace_the_last(tmp_path: Path) -> None:
    folder, first = WeightFolder(tmp_path / "weights"), stream(1.0)
    place = folder.write(first, torch.bfloat16)
    assert folder.write(first, torch.bfloat16) == place
    weights = load_file(place / "model.safetensors")
    assert weights.keys() == {"embed.weight", "lm_head.weight"}
    assert all(tensor.dtype == torch.bfloat16 and (tensor == 1).all() for tensor in weights.values())
    newer = [folder.write(stream(value), torch.float32) for value in (2.0, 3.0, 4.0)]
    assert not place.exists()
    assert [each.exists() for each in newer] == [False, True, True]  # one engine may be slow
    folder.close()
    assert list((tmp_path / "weights").iterdir()) == []


def test_engines_ask_for_weights_at_once_and_runs_share_a_place(tmp_path: Path) -> None:
    folders = [WeightFolder(tmp_path) for _ in range(2)]
    with ThreadPoolExecutor(8) as pool:
        for value in range(1, 20):
            sent = stream(float(value))
            asked = [pool.submit(folder.write, sent, torch.float32) for folder in folders for _ in range(4)]
            places = [each.result() for each in asked]
            assert len(set(places)) == 2
            assert all((load_file(place / "model.safetensors")["embed.weight"] == value).all() for place in places)


def test_a_place_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(WeightSyncError, match=r"file.*synchronizer\.folder"):
        WeightFolder(tmp_path / "file" / "weights").write(stream(1.0), torch.float32)


GB = 1 << 30


@pytest.mark.parametrize(
    ("size", "memory", "expected"),
    [
        (0.3 * GB, 11 * GB, True),
        (1 * GB, 6 * GB, True),  # three copies, and as much again
        (1 * GB, 6 * GB - 1, False),
        (0, 0, True),
    ],
)
def test_weights_go_to_memory_that_has_room(size: float, memory: int, expected: bool) -> None:
    assert fits_in_memory(int(size), memory) is expected


def descriptors() -> set[str]:
    """Of this process: those of weights in memory."""
    found = {link: str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()}
    return {link.name for link, target in found.items() if WEIGHTS in target}


@pytest.mark.parametrize("free", [0, GB])
def test_memory_is_taken_if_there_is_room(free: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "free_memory", lambda: free)
    folder, before = WeightFolder(tmp_path, in_memory=True), descriptors()
    for value in range(4):
        written = folder.write(stream(value), torch.float32) / WEIGHTS
        assert written.is_symlink() == bool(free)
        assert (load_file(written)["lm_head.weight"] == value).all()
    assert len(descriptors() - before) == (folders.KEPT if free else 0)
    folder.close()
    assert descriptors() == before
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("gpu", "expected"), [(True, True), (False, False)])
def test_what_a_trainer_on_the_cpu_is_going_to_take_is_left_free(
    gpu: bool, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    # Twelve numbers of two bytes: three copies, as much again, and then almost all of their gradients and moments.
    monkeypatch.setattr(folders, "free_memory", lambda: 6 * 24 + 12 * 12 - 1)
    folder = WeightFolder(tmp_path, in_memory=True)
    assert (folder.write(stream(1.0), torch.bfloat16) / WEIGHTS).is_symlink() is expected
    folder.close()


def test_memory_is_given_back_after_an_error(tmp_path: Path) -> None:
    def failing() -> Iterator[tuple[str, torch.Tensor]]:
        yield from stream(2.0)
        raise MemoryError("no room for a copy")

    before = descriptors()
    folder = WeightFolder(tmp_path, in_memory=True)
    folder.write(stream(1.0), torch.float32)
    with pytest.raises(MemoryError):
        folder.write(WeightStream(stream(2.0).shapes, failing), torch.float32)
    del folder
    assert list(tmp_path.iterdir()) == []
    assert descriptors() == before


@pytest.mark.slow
def test_other_processes_read_the_memory_and_a_fork_does_not_delete_it(tmp_path: Path) -> None:
    folder = WeightFolder(tmp_path, in_memory=True)
    written = folder.write(stream(1.0), torch.bfloat16) / WEIGHTS
    if (fork := os.fork()) == 0:
        folder.close()
        os._exit(0)
    os.waitpid(fork, 0)
    code = f"from safetensors.torch import load_file; print(load_file({str(written)!r})['embed.weight'].sum().item())"
    read = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert read.stdout.split() == ["6.0"]
    folder.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_file_is_the_one_that_safetensors_would_write(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 5).T, "b": torch.randn(()), "c": torch.empty(0, 2), "d": torch.randn(7)[::2]}
    folder = WeightFolder(tmp_path)
    written = folder.write(WeightStream.of(tensors.items()), dtype) / WEIGHTS
    with safe_open(written, "pt") as file:
        assert file.metadata() == {"format": "pt"}
    read = load_file(written)
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensor.to(dtype)) for name, tensor in tensors.items())
    folder.close()
