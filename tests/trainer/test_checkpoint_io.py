"""Checkpoints are whole or absent."""

import pytest
import torch

from trinity_lightning.trainer.checkpoint_io import AtomicCheckpointIO


def test_what_is_written_is_read_back_in_a_folder_made_for_it(tmp_path):
    io, path = AtomicCheckpointIO(), tmp_path / "new" / "it.ckpt"
    io.save_checkpoint({"weight": torch.arange(3.0), "step": 4, "payload": b"\x00\x01"}, path)
    read = io.load_checkpoint(path, weights_only=True)
    assert read["weight"].tolist() == [0.0, 1.0, 2.0]
    assert (read["step"], read["payload"]) == (4, b"\x00\x01")
    assert [file.name for file in path.parent.iterdir()] == ["it.ckpt"]


def test_a_failure_leaves_the_checkpoint_that_was_there(tmp_path, monkeypatch):
    io, path = AtomicCheckpointIO(), tmp_path / "it.ckpt"
    io.save_checkpoint({"step": 1}, path)

    def fail(checkpoint, file):
        file.write(b"half of it")
        raise OSError("disk full")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(OSError, match="disk full"):
        io.save_checkpoint({"step": 2}, path)
    assert io.load_checkpoint(path, weights_only=True) == {"step": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["it.ckpt"]


def test_storage_options_are_refused(tmp_path):
    with pytest.raises(TypeError, match="storage_options"):
        AtomicCheckpointIO().save_checkpoint({}, tmp_path / "it.ckpt", storage_options={"retries": 3})
