"""Whole files or none, also on a full disk: /dev/full is one."""

import errno
import os
import resource
from collections.abc import Iterator
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


@pytest.fixture
def full(monkeypatch):
    """What is written lands on a full disk: in the place of what is removed first is a link to one."""

    def remove(path):
        path.unlink() if path.is_symlink() else path.symlink_to("/dev/full")

    monkeypatch.setattr("trinity_lightning.common.files.remove", remove)


def test_a_file_that_finds_the_disk_full_is_named_and_what_was_there_stays(tmp_path, full):
    path = tmp_path / "step_1.jsonl"
    path.write_bytes(b"before")
    with pytest.raises(DiskFullError, match=r"step_1\.jsonl' could not be written \(No space left on device\): make"):
        write_atomically(path, b"after")
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]


def test_a_checkpoint_that_finds_the_disk_full_is_named(tmp_path, full):
    with pytest.raises(DiskFullError, match=r"final\.ckpt' could not be written \(No space left"):
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
    with pytest.raises(DiskFullError, match=tmp_path.name):
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
        with pytest.raises(DiskFullError, match=r"final\.ckpt' could not be written \(File too large\): .*ulimit -f"):
            AtomicCheckpointIO().save_checkpoint({"weight": torch.zeros(size)}, tmp_path / "final.ckpt")
        assert list(tmp_path.iterdir()) == []


def test_weights_larger_than_a_file_may_be_are_named_with_the_limit(tmp_path, small_files):
    with pytest.raises(DiskFullError, match="File too large"), disk_full_named(tmp_path / "model"):
        save_file({"weight": torch.zeros(300_000)}, tmp_path / "model.safetensors")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_each_want_of_room_is_named(number, tmp_path):
    with pytest.raises(DiskFullError) as full, disk_full_named(tmp_path):
        raise RuntimeError("a library's words") from OSError(number, os.strerror(number))
    assert (full.value.errno, full.value.filename) == (number, str(tmp_path))
    assert ("ulimit" in str(full.value)) == (number == errno.EFBIG)
