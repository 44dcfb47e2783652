"""Checkpoints are whole or absent."""

import os
import random
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from support.policy import fit, make_policy

from trinity_lightning.build import quiet_libraries
from trinity_lightning.config.checkpoints import check_whole
from trinity_lightning.errors import ConfigError
from trinity_lightning.trainer.checkpoint import AtomicCheckpointIO, StepCheckpoint
from trinity_lightning.trainer.ddp import ReplicaStrategy


def test_what_is_written_is_read_back_in_a_folder_made_for_it(tmp_path):
    io, path = AtomicCheckpointIO(), tmp_path / "new" / "it.ckpt"
    path.with_name(".it.ckpt.tmp").mkdir(parents=True)  # which a kill left within a checkpoint in shards
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


@pytest.mark.parametrize("path", ["s3://bucket/run/it.ckpt", Path("gs://bucket/it.ckpt"), "file:/run/it.ckpt"])
def test_an_address_is_refused_and_no_folder_made_of_its_name(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"^checkpoints go to local folders, and '.*' is an address: give a"):
        AtomicCheckpointIO().save_checkpoint({"step": 1}, path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("strategy", ["auto", ReplicaStrategy()])
def test_an_address_for_checkpoints_is_refused_before_the_model_is_loaded(strategy):
    policy = make_policy()
    settings = {"plugins": [AtomicCheckpointIO()], "enable_checkpointing": True, "strategy": strategy}
    with pytest.raises(ConfigError, match="'memory://bucket/run' is an address"):
        fit(policy, [], ModelCheckpoint("memory://bucket/run"), **settings)
    assert policy.model is None


def test_a_damaged_checkpoint_is_refused_and_the_one_before_it_named(tmp_path):
    before, path = tmp_path / "epoch=00009.ckpt", tmp_path / "epoch=00019.ckpt"
    for age, each in ((10, before), (0, path)):
        AtomicCheckpointIO().save_checkpoint({"weight": torch.randn(5000), "step": 4}, each)
        os.utime(each, (1000 - age, 1000 - age))
        check_whole(each)
    written = path.read_bytes()
    middle = bytearray(written)
    middle[len(written) // 2] ^= 1
    for content in (b"", b"garbage", written[:-1], written[: len(written) // 2], middle):
        path.write_bytes(content)
        os.utime(path, (1000, 1000))
        with pytest.raises(
            ConfigError, match=r"^'.*' is no checkpoint of a training run, or a damaged one \(.*"
        ) as said:
            check_whole(path)
        assert str(said.value).endswith(f"give the one before it, ckpt_path='{before}'.")


def test_a_damaged_checkpoint_is_not_replaced_by_another_damaged_one(tmp_path):
    first, second, last = (tmp_path / f"{number}.ckpt" for number in range(3))
    for age, each in ((20, first), (10, second), (0, last)):
        torch.save({"step": age}, each)
        each.write_bytes(each.read_bytes() if each == first else b"damaged")
        os.utime(each, (1000 - age, 1000 - age))
    with pytest.raises(ConfigError, match=f"give the one before it, ckpt_path='{first}'"):
        check_whole(last)
    first.write_bytes(b"damaged")
    with pytest.raises(ConfigError, match="give another, or leave ckpt_path out to begin again"):
        check_whole(last)


def test_no_damage_is_read_as_if_it_were_whole(tmp_path):
    saved, path, rng = {"weight": torch.randn(100), "step": 4}, tmp_path / "it.ckpt", random.Random(0)
    torch.save(saved, path)
    written = path.read_bytes()
    refused = 0
    for at in rng.sample(range(len(written)), 200):
        damaged = bytearray(written)
        damaged[at] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        try:
            check_whole(path)
            read = torch.load(path, weights_only=True)
        except (ConfigError, RuntimeError, ValueError):  # the latter are a sentence of `checkpoint_weights`
            refused += 1
        else:  # padding, or what nothing reads
            assert read["step"] == 4
            assert read["weight"].equal(saved["weight"])
    assert refused > 100


def test_a_resumed_runs_folder_of_checkpoints_is_nothing_to_warn_of(tmp_path, recwarn):
    (tmp_path / "it.ckpt").touch()
    checkpoints = ModelCheckpoint(tmp_path)
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    with pytest.warns(UserWarning, match="not empty"):  # Lightning's own way
        checkpoints.setup(trainer, L.LightningModule(), "fit")
    quiet_libraries()
    checkpoints.setup(trainer, L.LightningModule(), "fit")
    assert not [each for each in recwarn if "not empty" in str(each.message)]


def test_a_checkpoint_with_none_before_it(tmp_path):
    (tmp_path / "it.ckpt").write_bytes(b"PK")
    with pytest.raises(ConfigError, match=r"\): give another, or leave ckpt_path out to begin again\.$"):
        check_whole(tmp_path / "it.ckpt")


def test_a_checkpoint_has_the_number_of_the_explore_step_that_is_done(tmp_path):
    callback = StepCheckpoint(tmp_path, filename="step_{explore_step:05d}", auto_insert_metric_name=False)
    assert callback.format_checkpoint_name({"epoch": torch.tensor(0)}) == f"{tmp_path}/step_00001.ckpt"
    own = StepCheckpoint(tmp_path, filename="{epoch}-{loss:.2f}")
    assert own.format_checkpoint_name({"epoch": 9, "loss": 0.5}) == f"{tmp_path}/epoch=9-loss=0.50.ckpt"


def test_lightnings_own_callback_and_ours_have_the_same_state(tmp_path):
    assert StepCheckpoint(tmp_path, every_n_epochs=3).state_key == ModelCheckpoint(tmp_path, every_n_epochs=3).state_key
