"""Weights as a folder: written once for all engines, kept for slow ones, and removed."""

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from trinity_lightning.errors import WeightSyncError
from trinity_lightning.sync import files as folders
from trinity_lightning.sync.files import PREFIX, WeightFolder, fits_in_memory
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
    assert [folder.exists() for folder in newer] == [False, True, True]  # one engine may be slow
    folder.close()
    assert list((tmp_path / "weights").iterdir()) == []


def test_engines_ask_for_weights_at_once_and_runs_share_a_place(tmp_path: Path) -> None:
    folders = [WeightFolder(tmp_path) for _ in range(2)]
    with ThreadPoolExecutor(8) as pool:
        for value in range(1, 20):
            sent = stream(float(value))
            asked = [pool.submit(folder.write, sent, torch.float32) for folder in folders for _ in range(4)]
            places = [request.result() for request in asked]
            assert len(set(places)) == 2
            assert all((load_file(place / "model.safetensors")["embed.weight"] == value).all() for place in places)


def test_a_place_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(WeightSyncError, match=r"synchronizer\.folder"):
        WeightFolder(tmp_path / "file" / "weights").write(stream(1.0), torch.float32)


GB = 1 << 30


@pytest.mark.parametrize(
    ("size", "storage", "memory", "expected"),
    [
        (0.3 * GB, 24 * GB, 11 * GB, True),
        (1 * GB, 6 * GB, 6 * GB, True),  # three copies, and as much again
        (1 * GB, 6 * GB - 1, 64 * GB, False),
        (1 * GB, 64 * GB, 6 * GB - 1, False),
        (0.3 * GB, 64 << 20, 64 * GB, False),  # what containers have by default
        (0, 0, 0, True),
    ],
)
def test_weights_go_to_memory_that_has_room(size: float, storage: int, memory: int, expected: bool) -> None:
    assert fits_in_memory(int(size), storage, memory) is expected


@pytest.mark.parametrize("free", [0, GB])
def test_memory_is_taken_if_there_is_room(free: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "free_memory", lambda: free)
    disk, memory = tmp_path / "disk", tmp_path / "memory"
    memory.mkdir()
    folder = WeightFolder(disk, memory)
    written = folder.write(stream(1.0), torch.float32)
    assert written.is_relative_to(memory if free else disk)
    folder.close()
    assert not written.parent.exists()


@pytest.mark.parametrize(("gpu", "expected"), [(True, "memory"), (False, "disk")])
def test_what_a_trainer_on_the_cpu_is_going_to_take_is_left_free(
    gpu: bool, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    # Twelve numbers of two bytes: three copies, as much again, and then almost all of their gradients and moments.
    monkeypatch.setattr(folders, "free_memory", lambda: 6 * 24 + 12 * 12 - 1)
    (tmp_path / "memory").mkdir()
    folder = WeightFolder(tmp_path / "disk", tmp_path / "memory")
    assert folder.write(stream(1.0), torch.bfloat16).is_relative_to(tmp_path / expected)
    folder.close()


def test_storage_that_is_not_there_is_not_taken(tmp_path: Path) -> None:
    folder = WeightFolder(tmp_path / "disk", memory=tmp_path / "none")
    assert folder.write(stream(1.0), torch.float32).is_relative_to(tmp_path / "disk")


def test_memory_is_given_back_after_an_error(tmp_path: Path) -> None:
    def failing() -> Iterator[tuple[str, torch.Tensor]]:
        yield from stream(2.0)
        raise MemoryError("no room for a copy")

    folder = WeightFolder(memory=tmp_path)
    folder.write(stream(1.0), torch.float32)
    with pytest.raises(MemoryError):
        folder.write(WeightStream(stream(2.0).shapes, failing), torch.float32)
    assert len(list(tmp_path.iterdir())) == 1
    del folder
    assert list(tmp_path.iterdir()) == []


def test_what_killed_runs_have_left_is_deleted_and_what_others_hold_is_not(tmp_path: Path) -> None:
    left = tmp_path / f"{PREFIX}left" / "1"
    left.mkdir(parents=True)
    empty = tmp_path / f"{PREFIX}empty"
    empty.mkdir()
    other, folder = (WeightFolder(memory=tmp_path) for _ in range(2))
    held = other.write(stream(1.0), torch.float32)
    assert not left.parent.exists()
    assert not empty.exists()
    folder.write(stream(2.0), torch.float32)
    assert held.exists()


def test_nothing_of_another_user_is_waited_for_or_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, link, theirs = (tmp_path / f"{PREFIX}{name}" for name in ("pipe", "link", "theirs"))
    for folder in (pipe, link, theirs):
        folder.mkdir()
    os.mkfifo(pipe / folders.LOCK)
    (link / folders.LOCK).symlink_to(tmp_path / "made")
    user = os.getuid()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getuid", lambda: user + 1)
        folders._delete_leftovers(tmp_path)
    assert list(theirs.iterdir()) == []
    folders._delete_leftovers(tmp_path)  # as if they were this user's
    assert pipe.exists()
    assert link.exists()
    assert not (tmp_path / "made").exists()
    assert not theirs.exists()


FORK_SECONDS = 5.0


@pytest.mark.slow
def test_a_fork_that_outlives_a_run_keeps_nothing_of_it_nor_deletes_it(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    run = os.fork()
    if run == 0:
        os.close(reading)
        place, lock = folders._locked(tmp_path)
        if os.fork() == 0:
            folders._delete(place, lock, os.getppid())
            os.write(writing, f"{place.exists()} {place}".encode())
            time.sleep(FORK_SECONDS)
            os._exit(0)
        signal.pause()
    try:
        existed, left = os.read(reading, 4096).decode().split(" ", 1)
        assert existed == "True"
        WeightFolder(memory=tmp_path).write(stream(1.0), torch.float32)
        assert Path(left).exists()  # the run lives
    finally:
        os.kill(run, signal.SIGKILL)
        os.waitpid(run, 0)
    WeightFolder(memory=tmp_path).write(stream(1.0), torch.float32)
    assert not Path(left).exists()
    os.close(reading)
