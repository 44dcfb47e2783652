from typing import Any

import pytest
from lightning.pytorch.loggers import WandbLogger
from omegaconf import OmegaConf

from trinity_lightning.build import finish, given


class FullDisk(WandbLogger):
    """One that cannot write any more."""

    def __init__(self) -> None:
        """No run of W&B."""

    def log_hyperparams(self, params: Any) -> None:
        """Nowhere."""

    def save(self) -> None:
        raise OSError("the disk is full")


class Saves(FullDisk):
    saved = False

    def save(self) -> None:
        self.saved = True


def test_every_logger_saves_though_another_cannot() -> None:
    first, last = Saves(), Saves()
    with pytest.raises(OSError, match="the disk is full"):
        finish([first, FullDisk(), last])
    assert first.saved
    assert last.saved


def test_a_run_of_wandb_ends_though_another_logger_cannot_write(monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr("wandb.finish", lambda exit_code: codes.append(exit_code))
    with pytest.raises(RuntimeError, match="why it failed"), given([FullDisk()], OmegaConf.create({})):
        raise RuntimeError("why it failed")
    with pytest.raises(OSError, match="the disk is full"):
        finish([FullDisk()])
    assert codes == [1, 0]
