"""A Trainer for tests."""

from pathlib import Path
from typing import Any

import lightning


def quiet_trainer(folder: Path | None, *callbacks: lightning.Callback, **settings: Any) -> lightning.Trainer:
    """On the CPU, one epoch; without logger, checkpoints and what is printed, unless the settings say otherwise."""
    quiet = {"max_epochs": 1, "accelerator": "cpu", "logger": False, "enable_checkpointing": False}
    quiet |= {"enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
    return lightning.Trainer(**(quiet | settings), callbacks=list(callbacks), default_root_dir=folder)
