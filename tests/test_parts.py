"""What is built from a configuration, apart from whole runs."""

import logging
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from trinity_lightning.parts import record_config


def test_a_resumed_run_says_what_has_changed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "config.yaml"
    config = OmegaConf.create({"ckpt_path": None, "steps": 5, "optimizer": {"lr": 1e-5, "betas": [0.9, 0.99]}})
    record_config(config, file)
    config.ckpt_path = "last"
    record_config(config, file)
    assert caplog.messages == []
    config.steps, config.optimizer.lr = 9, 2e-5
    with caplog.at_level(logging.WARNING):
        record_config(config, file)
    assert caplog.messages == [
        "resuming with optimizer.lr = 2e-05; it was 1e-05",
        "resuming with steps = 9; it was 5",
    ]
    assert OmegaConf.load(file) == config
