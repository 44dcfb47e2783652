"""Checkpoints are whole or absent."""

import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from support.errors import refuses
from support.policy import batch_of, fit, make_experiences, make_policy, optimizer_of
from torch import nn

from trinity_lightning.build import quiet_libraries
from trinity_lightning.config.checkpoints import check_whole
from trinity_lightning.config.model import OptimizerConfig
from trinity_lightning.errors import ConfigError
from trinity_lightning.trainer.checkpoint import AtomicCheckpointIO, StepCheckpoint, check_resumed, schedule_changed
from trinity_lightning.trainer.ddp import ReplicaStrategy
from trinity_lightning.trainer.optim import learning_rate_schedule


def test_what_is_written_is_read_back_in_a_folder_made_for_it(tmp_path):
    io, path = AtomicCheckpointIO(), tmp_path / "new" / "it.ckpt"
    path.with_name(".it.ckpt.tmp").mkdir(parents=True)  # a kill left it within a checkpoint in shards
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
    with pytest.raises(TypeError):
        AtomicCheckpointIO().save_checkpoint({}, tmp_path / "it.ckpt", storage_options={"retries": 3})


@pytest.mark.parametrize("path", ["s3://bucket/run/it.ckpt", Path("gs://bucket/it.ckpt"), "file:/run/it.ckpt"])
def test_an_address_is_refused_and_no_folder_made_of_its_name(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with refuses("callbacks.checkpoint.dirpath"):
        AtomicCheckpointIO().save_checkpoint({"step": 1}, path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("strategy", ["auto", ReplicaStrategy()])
def test_an_address_for_checkpoints_is_refused_before_the_model_is_loaded(strategy):
    policy = make_policy()
    settings = {"plugins": [AtomicCheckpointIO()], "enable_checkpointing": True, "strategy": strategy}
    with refuses("callbacks.checkpoint.dirpath"):
        fit(policy, [], ModelCheckpoint("memory://bucket/run"), **settings)
    assert policy.model is None


def test_a_damaged_checkpoint_is_refused_and_the_one_before_it_named(tmp_path):
    before, path = tmp_path / "epoch=00009.ckpt", tmp_path / "epoch=00019.ckpt"
    for age, file in ((10, before), (0, path)):
        AtomicCheckpointIO().save_checkpoint({"weight": torch.randn(5000), "step": 4}, file)
        os.utime(file, (1000 - age, 1000 - age))
        check_whole(file)
    written = path.read_bytes()
    middle = bytearray(written)
    middle[len(written) // 2] ^= 1
    for content in (b"", b"garbage", written[:-1], written[: len(written) // 2], middle):
        path.write_bytes(content)
        os.utime(path, (1000, 1000))
        with refuses("ckpt_path") as refused:
            check_whole(path)
        assert str(refused.value).startswith(f"'{path}'")
        assert f"ckpt_path='{before}'" in str(refused.value.fix)


def test_a_damaged_checkpoint_is_not_replaced_by_another_damaged_one(tmp_path):
    first, second, last = (tmp_path / f"{number}.ckpt" for number in range(3))
    for age, file in ((20, first), (10, second), (0, last)):
        torch.save({"step": age}, file)
        file.write_bytes(file.read_bytes() if file == first else b"damaged")
        os.utime(file, (1000 - age, 1000 - age))
    with refuses("ckpt_path") as refused:
        check_whole(last)
    assert f"ckpt_path='{first}'" in str(refused.value.fix)
    first.write_bytes(b"damaged")
    with refuses("ckpt_path") as refused:
        check_whole(last)
    assert "begin again" in str(refused.value.fix)
    assert f"{first}" not in str(refused.value)


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
    assert not [warning for warning in recwarn if "not empty" in str(warning.message)]


def test_a_checkpoint_with_none_before_it(tmp_path):
    (tmp_path / "it.ckpt").write_bytes(b"PK")
    with refuses("ckpt_path") as refused:
        check_whole(tmp_path / "it.ckpt")
    assert "begin again" in str(refused.value.fix)


def test_a_checkpoint_has_the_number_of_the_explore_step_that_is_done(tmp_path):
    callback = StepCheckpoint(tmp_path, filename="step_{explore_step:05d}", auto_insert_metric_name=False)
    assert callback.format_checkpoint_name({"epoch": torch.tensor(0)}) == f"{tmp_path}/step_00001.ckpt"
    checkpoint = StepCheckpoint(tmp_path, filename="{epoch}-{loss:.2f}")
    assert checkpoint.format_checkpoint_name({"epoch": 9, "loss": 0.5}) == f"{tmp_path}/epoch=9-loss=0.50.ckpt"


def test_lightnings_own_callback_and_ours_have_the_same_state(tmp_path):
    assert StepCheckpoint(tmp_path, every_n_epochs=3).state_key == ModelCheckpoint(tmp_path, every_n_epochs=3).state_key


# -- resuming: what is configured now holds ----------------------------------------------------------------------------

LR = 1e-2


def scheduled(lr: float) -> torch.optim.SGD:
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=lr)


def rates(schedule: Any) -> list[float]:
    rates_used = []
    for _ in range(6):
        rates_used.append(schedule.get_last_lr()[0])
        schedule.optimizer.step()
        schedule.step()
    return rates_used


def of_torch(name: str, **args: Any) -> dict[str, Any]:
    return {"name": f"torch.optim.lr_scheduler.{name}", "args": args}


RESUMED = {
    "of more steps": ({"lr_scheduler": "linear", "total_steps": 2}, {"lr_scheduler": "linear", "total_steps": 8}),
    "of another name": ({"lr_scheduler": of_torch("StepLR", step_size=1)}, {"lr_scheduler": "constant"}),
    "by its path": ({}, {"lr_scheduler": of_torch("StepLR", step_size=1, gamma=0.5)}),
    "other arguments": (
        {"lr_scheduler": of_torch("ExponentialLR", gamma=0.5)},
        {"lr_scheduler": of_torch("ExponentialLR", gamma=0.9)},
    ),
    "another peak": (
        {"lr": 2 * LR, "lr_scheduler": of_torch("ExponentialLR", gamma=0.9)},
        {"lr_scheduler": of_torch("ExponentialLR", gamma=0.9)},
    ),
    "of momentum too": (
        {"lr_scheduler": of_torch("OneCycleLR", max_lr=LR, total_steps=4)},
        {"lr_scheduler": of_torch("PolynomialLR", total_iters=8)},
    ),
    "the same": ({"lr_scheduler": "cosine", "total_steps": 7}, {"lr_scheduler": "cosine", "total_steps": 7}),
}


@pytest.mark.parametrize("case", RESUMED)
def test_a_resumed_run_has_the_learning_rates_of_its_schedule_as_configured_now(case: str, tmp_path: Path) -> None:
    before, after = ({"lr": LR} | schedule_settings for schedule_settings in RESUMED[case])
    batches = [batch_of(make_experiences(seed=seed)) for seed in range(3)]
    fit(make_policy(OptimizerConfig(**before)), batches[:2]).save_checkpoint(file := tmp_path / "it.ckpt")
    policy = make_policy(OptimizerConfig(**after))
    trainer = fit(policy, batches[2:], ckpt_path=file, max_epochs=2)
    *_, third, fourth = rates(learning_rate_schedule(scheduled(LR), OptimizerConfig(**after)))[:4]
    assert float(trainer.logged_metrics["actor/lr"]) == pytest.approx(third, rel=1e-6)
    for group in optimizer_of(policy).param_groups:
        assert (group["lr"], group["betas"]) == (fourth, (0.9, 0.999))


def test_a_resumed_run_has_the_settings_of_its_optimizer_as_configured_now(tmp_path: Path) -> None:
    batches = [batch_of(make_experiences(seed=seed)) for seed in range(2)]
    before = {"lr": LR, "betas": [0.8, 0.9], "eps": 1e-6, "weight_decay": 0.2}
    fit(make_policy(OptimizerConfig(**before)), batches[:1]).save_checkpoint(file := tmp_path / "it.ckpt")
    after = {"lr": LR, "betas": [0.9, 0.99], "eps": 1e-7, "weight_decay": 0.1}
    fit(policy := make_policy(OptimizerConfig(**after)), batches[1:], ckpt_path=file, max_epochs=2)
    decay, none = optimizer_of(policy).param_groups
    assert (decay["betas"], decay["eps"], decay["weight_decay"]) == ((0.9, 0.99), 1e-7, 0.1)
    assert (none["betas"], none["eps"], none["weight_decay"]) == ((0.9, 0.99), 1e-7, 0.0)
    assert all(state["step"] == 2 for state in optimizer_of(policy).state.values())


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_an_argument_that_a_resumed_run_no_longer_gives_its_optimizer_is_no_longer_in_force(
    dtype: str, tmp_path: Path
) -> None:
    before = OptimizerConfig(name="torch.optim.SGD", lr=LR, args={"momentum": 0.9, "nesterov": True})
    after = replace(before, args={"momentum": 0.8})
    batches = [batch_of(make_experiences())]
    fit(make_policy(before, dtype), batches).save_checkpoint(file := tmp_path / "it.ckpt")
    fit(policy := make_policy(after, dtype), batches, ckpt_path=file, max_epochs=2)
    optimizer = optimizer_of(policy)
    for group in [*optimizer.param_groups, *(optimizer.inner.param_groups if dtype == "bf16" else [])]:
        assert (group["momentum"], group["nesterov"]) == (0.8, False)


def test_a_checkpoint_of_no_run_is_refused() -> None:
    with refuses("ckpt_path") as refused:
        check_resumed({"state_dict": {}}, OptimizerConfig())
    assert "settings of an optimizer" in str(refused.value)


def test_a_checkpoint_of_a_version_without_settings_is_refused_as_that() -> None:
    with refuses("ckpt_path") as refused:
        check_resumed({"state_dict": {}, "policy": {"skipped_items": 0}}, OptimizerConfig())
    assert "'hyper_parameters'" in str(refused.value)


def test_a_schedule_keeps_its_state_unless_something_that_it_takes_has_changed() -> None:
    config = OptimizerConfig(lr_scheduler=of_torch("StepLR", step_size=2), total_steps=2)
    assert not schedule_changed(config, replace(config, total_steps=4))
    assert schedule_changed(config, replace(config, lr_scheduler=of_torch("StepLR", step_size=3)))


# -- resuming: what cannot go on is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_checkpoint_of_one_group_is_refused(dtype: str, tmp_path: Path) -> None:
    trainer = fit(make_policy(dtype=dtype), [batch_of(make_experiences())])
    trainer.save_checkpoint(tmp_path / "it.ckpt")
    checkpoint = torch.load(tmp_path / "it.ckpt", weights_only=True)
    del checkpoint["optimizer_states"][0]["param_groups"][1]
    torch.save(checkpoint, tmp_path / "old.ckpt")
    with refuses("ckpt_path") as refused:
        fit(make_policy(dtype=dtype), [batch_of(make_experiences())], ckpt_path=tmp_path / "old.ckpt", max_epochs=2)
    assert "one parameter group" in str(refused.value)


def test_a_checkpoint_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    batches = [batch_of(make_experiences())]
    fit(make_policy(), batches).save_checkpoint(tmp_path / "it.ckpt")
    other = make_policy(OptimizerConfig(name="torch.optim.SGD", lr=LR))
    with refuses("optimizer.name"):
        fit(other, batches, ckpt_path=tmp_path / "it.ckpt", max_epochs=2)
