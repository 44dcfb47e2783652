"""Resuming a run: the command for it, and which checkpoint is the last."""

import logging
import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hydra.core.hydra_config import HydraConfig
from support.compose import composed

from trinity_lightning.config import hydra as compose
from trinity_lightning.config.checkpoints import last_checkpoint, recorded_run, resume_command
from trinity_lightning.config.registry import PACKAGE_DIR
from trinity_lightning.errors import ConfigError

OVERRIDES = ["+recipe=grpo", "model=tiny", "ckpt_path=last", "hydra.verbose=true"]
OVERRIDES += ["++output_dir=elsewhere"]


@pytest.fixture
def begun() -> Iterator[None]:
    """A run that Hydra started with these overrides."""
    HydraConfig.instance().set_config(composed(*OVERRIDES, hydra=True))
    yield
    HydraConfig.instance().cfg = None


@pytest.mark.parametrize("name", ["2026-01-01_10-00-00", "2026-01-01_10-00-00~2", "my runs/a=b", "it's (one)"])
def test_a_run_is_resumed_in_its_own_folder(
    begun: None, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [str(PACKAGE_DIR / "train.py")])
    command = shlex.split(resume_command(tmp_path / name) or "")
    assert command[:3] == ["python", "-m", "trinity_lightning.train"]
    assert command[3:6] == ["+recipe=grpo", "model=tiny", "hydra.verbose=true"]
    assert command[-1] == "ckpt_path=last"
    assert len(command) == 8
    again = composed(*command[3:], hydra=True)
    assert again.hydra.run.dir == again.output_dir == str(tmp_path / name)


def test_a_run_whose_recipe_says_where_hydra_writes_is_resumed_by_that_key(begun: None, tmp_path: Path) -> None:
    assert "output_dir=" in (resume_command(tmp_path) or "")
    config = composed("+recipe=grpo", hydra=True)
    config.hydra.run.dir = "somewhere/${name}"
    HydraConfig.instance().set_config(config)
    assert f"hydra.run.dir={tmp_path}" in (resume_command(tmp_path) or "")


@pytest.mark.parametrize(
    ("program", "words"),
    [("/usr/bin/trinity-lightning", "trinity-lightning +recipe=grpo"), ("runs/mine.py", "python runs/mine.py +recipe")],
)
def test_a_run_is_resumed_by_what_started_it(
    begun: None, program: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [program])
    assert (resume_command("run") or "").startswith(words)


def test_the_last_run_is_the_newest_that_has_a_checkpoint_and_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    earlier, later, failed = (tmp_path / "grpo" / f"2026-01-0{day}_10-00-00" for day in (1, 2, 3))
    for age, run in enumerate((later, earlier)):
        (run / "checkpoints").mkdir(parents=True)
        checkpoint = run / "checkpoints" / "epoch=00009.ckpt"
        checkpoint.touch()
        os.utime(checkpoint, (1000 - age, 1000 - age))
    failed.mkdir()
    assert compose.run_dir(str(tmp_path), "grpo", "last") == str(later)
    with caplog.at_level(logging.INFO):
        assert last_checkpoint(later) == later / "checkpoints" / "epoch=00009.ckpt"
    assert f"ckpt_path=last is {later}/checkpoints/epoch=00009.ckpt; begun later, and without" in caplog.text
    assert f"without a checkpoint: {failed.name}" in caplog.text


@pytest.mark.parametrize("content", [b"", b"[1]", b"text", b"a: [", b"\x80\x81", b"model: {dtype: fp32}"])
def test_a_damaged_record_of_the_run_is_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_bytes(content)
    with pytest.raises(ConfigError, match=r"config.yaml', the record of the run to resume, is damaged \(.+\): restore"):
        recorded_run(tmp_path / "config.yaml")


def test_no_checkpoint_says_where_it_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^ckpt_path=last: there is no .* in .*/checkpoints .*output_dir="):
        last_checkpoint(tmp_path)
