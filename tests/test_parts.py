"""Parts that are built from a configuration, apart from whole runs."""

import errno
import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from support.compose import composed
from support.runs import TWO

from trinity_lightning import build as build_module
from trinity_lightning.build import _summary, build, online_data, record_config
from trinity_lightning.common.experience import EID, Experience
from trinity_lightning.config.run import TrainConfig, typed_config
from trinity_lightning.errors import DiskFullError
from trinity_lightning.plan.memory import MemoryPlan
from trinity_lightning.trainer.out_of_memory import Expected


def own_messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The package's messages: asyncio may log here what an earlier test left, once it is collected."""
    return [record.getMessage() for record in caplog.records if record.name.startswith("trinity_lightning")]


def test_a_resumed_run_says_what_has_changed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "config.yaml"
    config = OmegaConf.create({"ckpt_path": None, "steps": 5, "optimizer": {"lr": 1e-5, "betas": [0.9, 0.99]}})
    record_config(config, file)
    config.ckpt_path = "last"
    record_config(config, file)
    assert own_messages(caplog) == []
    config.steps, config.optimizer.lr = 9, 2e-5
    with caplog.at_level(logging.WARNING):
        record_config(config, file)
    assert own_messages(caplog) == [
        "resuming with optimizer.lr = 2e-05; it was 1e-05",
        "resuming with steps = 9; it was 5",
    ]
    assert OmegaConf.load(file) == config


def test_a_run_that_is_resumed_in_another_folder_says_what_has_changed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    earlier, file = tmp_path / "first" / "config.yaml", tmp_path / "second" / "config.yaml"
    earlier.parent.mkdir()
    file.parent.mkdir()
    checkpoint = str(earlier.parent / "checkpoints" / "final.ckpt")
    config = OmegaConf.create({"ckpt_path": checkpoint, "model": {"processor_args": {}}})
    record_config(config, earlier)
    config.model.processor_args = {"do_normalize": False}
    record_config(config, file, checkpoint)
    assert "resuming with model.processor_args.do_normalize = False; it was None" in own_messages(caplog)


def test_a_run_of_an_earlier_version_is_resumed_with_a_warning_of_what_is_judged_now(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "config.yaml"
    config = composed("+recipe=grpo", "model=tiny", "logger=csv", "ckpt_path=last")
    record_config(config, file)
    record_config(config, file)
    assert "an earlier version" not in caplog.text
    earlier: Any = OmegaConf.load(file)
    del earlier.model.thoughts
    OmegaConf.save(earlier, file)
    record_config(config, file)
    assert "an earlier version" in caplog.text


def test_a_record_that_cannot_be_written_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill or a full disk in between must not leave half of it, without which no resume is possible."""
    file = tmp_path / "config.yaml"
    config = OmegaConf.create({"ckpt_path": None, "steps": 5})
    record_config(config, file)
    before = file.stat().st_ino
    changed = OmegaConf.create({"ckpt_path": None, "steps": 9})
    monkeypatch.setattr("os.fsync", disk_full)
    with pytest.raises(DiskFullError, match=r"config\.yaml"):
        record_config(changed, file)
    assert OmegaConf.load(file) == config
    assert file.stat().st_ino == before


def disk_full(_: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    ("overrides", "devices", "names", "tokens"),
    [
        (("+recipe=grpo",), "cpu", ["while training", "while generating"], 512),
        (("+recipe=sft", "buffer.path=data.jsonl"), "cpu", ["while training"], None),  # chosen by the free memory
        (("+recipe=grpo", *TWO), "2 x cpu", ["memory of rank 1, each", "while generating"], 512),
    ],
)
def test_the_table_at_the_start_says_what_memory_is_expected_on_which_devices(
    overrides: tuple[str, ...],
    devices: str,
    names: list[str],
    tokens: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.jsonl").write_text('{"text": "a"}\n')
    run = build(composed("model=tiny", "logger=csv", *overrides, f"output_dir={tmp_path / 'run'}"))
    table = dict(_summary(run))
    assert table["devices"] == devices
    assert "GiB free" in table["memory"]
    assert "device memory" not in table
    assert ("while generating" in table) == ("while generating" in names)
    assert all("GiB" in table[name] for name in names)
    assert run.policy.hparams["planned_tokens"] == tokens


def test_a_rank_other_than_0_has_a_plan_of_its_own_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def planned(config: TrainConfig, gpu: int, checkpoint: str | None) -> MemoryPlan:
        return MemoryPlan(80, {"policy": gpu}, {"policy": gpu}, micro_batch_tokens=8192)

    monkeypatch.setattr(build_module, "follower_plan", planned)
    monkeypatch.setenv("LOCAL_RANK", "1")
    run = build(composed("+recipe=grpo", "model=tiny", "logger=csv", *TWO, f"output_dir={tmp_path / 'run'}"))
    assert run.policy.hparams["planned_tokens"] == 8192
    assert run.policy.expected == Expected({"policy": 1})


def test_the_table_of_a_run_on_a_gpu_says_how_it_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    config = typed_config(composed("+recipe=grpo", "model=tiny", "engine=vllm_server"))
    strategy = SimpleNamespace(root_device=torch.device("cuda", 0))
    memory = MemoryPlan(80, {"policy": 1}, {"policy": 1}, micro_batch_tokens=4096)
    run: Any = SimpleNamespace(config=config, folder="x", checkpoint=None, plan=memory, why_folder="no GPU is shared")
    run.trainer = SimpleNamespace(strategy=strategy, world_size=2)
    table = dict(_summary(run))
    assert table["devices"] == "2 x cuda"
    assert table["weight sync"] == "through a folder (checkpoint): no GPU is shared"
    assert {"attention", "graphs", "micro-batches", "device memory", "while training"} <= table.keys()
    run.plan = None
    assert "device memory" not in dict(_summary(run))


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("+recipe=grpo",), 32),
        (("+recipe=multi_turn",), 384),
        (("+recipe=grpo", "workflow.name=my_module.MyWorkflow"), 256),
    ],
)
def test_normalised_sums_are_divided_by_what_the_run_allows(
    overrides: tuple[str, ...], expected: int, tmp_path: Path
) -> None:
    config = composed("model=tiny", f"output_dir={tmp_path}", "trainer=cpu", *overrides)
    typed = typed_config(config)
    data = online_data(typed, tmp_path, {})
    data.storage.ready[1] = [Experience(eid=EID(batch=1), tokens=[1, 2, 3], prompt_length=1, advantages=[1.0, 1.0])]
    data.storage.advance(1)
    [item] = data.train_dataloader()
    assert item.max_response_length == expected
