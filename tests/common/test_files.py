"""Files are written whole or not at all, and a full disk is named: /dev/full is one."""

import errno
import os
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import save_file

from trinity_lightning.common.files import disk_full_named, write_atomically
from trinity_lightning.errors import DiskFullError
from trinity_lightning.train import train
from trinity_lightning.trainer.checkpoint import AtomicCheckpointIO


@contextmanager
def no_room(number: int, path: Path) -> Iterator[None]:
    """Assert that the block raises a DiskFullError with this number, whose message names the path and the fix."""
    with pytest.raises(DiskFullError, match=re.escape(str(path))) as full:
        yield
    assert full.value.errno == number
    assert ("ulimit" in str(full.value)) == (number == errno.EFBIG)


@pytest.fixture
def full(monkeypatch):
    """Writes everything to a full disk: a link to one takes the place of the temporary file that is removed first."""

    def remove(path):
        path.unlink() if path.is_symlink() else path.symlink_to("/dev/full")

    monkeypatch.setattr("trinity_lightning.common.files.remove", remove)


def test_a_file_that_finds_the_disk_full_is_named_and_what_was_there_stays(tmp_path, full):
    path = tmp_path / "step_1.jsonl"
    path.write_bytes(b"before")
    with no_room(errno.ENOSPC, path):
        write_atomically(path, b"after")
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]


def test_a_checkpoint_that_finds_the_disk_full_is_named(tmp_path, full):
    with no_room(errno.ENOSPC, tmp_path / "final.ckpt"):
        AtomicCheckpointIO().save_checkpoint({"weight": torch.zeros(100_000)}, tmp_path / "final.ckpt")
    assert list(tmp_path.iterdir()) == []


def test_the_folder_of_a_file_is_made(tmp_path):
    write_atomically(tmp_path / "outputs" / "run" / "environment.json", b"{}")
    assert (tmp_path / "outputs" / "run" / "environment.json").read_bytes() == b"{}"


def test_other_errors_go_on_as_they_are(tmp_path):
    with pytest.raises(FileNotFoundError), disk_full_named(tmp_path):
        (tmp_path / "none").read_bytes()


def test_a_run_on_a_full_disk_names_its_folder(tmp_path, monkeypatch):
    def fit(*_, **__):
        with Path("/dev/full").open("wb", buffering=0) as file:
            file.write(b"a table, say")

    run = SimpleNamespace(folder=tmp_path, announce=lambda: None, trainer=SimpleNamespace(loggers=[]), fit=fit)
    monkeypatch.setattr("trinity_lightning.build.build", lambda *_: run)
    with no_room(errno.ENOSPC, tmp_path):
        train(OmegaConf.create())


@pytest.fixture
def small_files() -> Iterator[None]:
    """No file may become larger than 1 MB."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_checkpoint_larger_than_a_file_may_be_is_named_with_the_limit(tmp_path, small_files):
    for size in (250_000, 260_000, 1_000_000):  # within the zip file's directory, or the first tensor
        with no_room(errno.EFBIG, tmp_path / "final.ckpt"):
            AtomicCheckpointIO().save_checkpoint({"weight": torch.zeros(size)}, tmp_path / "final.ckpt")
        assert list(tmp_path.iterdir()) == []


def test_weights_larger_than_a_file_may_be_are_named_with_the_limit(tmp_path, small_files):
    with no_room(errno.EFBIG, tmp_path / "model"), disk_full_named(tmp_path / "model"):
        save_file({"weight": torch.zeros(300_000)}, tmp_path / "model.safetensors")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_each_want_of_room_is_named(number, tmp_path):
    with no_room(number, tmp_path), disk_full_named(tmp_path):
        raise RuntimeError("a library's words") from OSError(number, os.strerror(number))
