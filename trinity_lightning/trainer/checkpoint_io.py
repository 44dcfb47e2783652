"""Checkpoints: named by explore steps, written straight to disk and moved into place; never twice in memory."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO

from trinity_lightning.common.files import new_file
from trinity_lightning.errors import ConfigError


def check_local(path: str | Path) -> None:
    """Refuse an address, which would be taken for the name of a local folder; a ConfigError."""
    if re.match(r"\w[\w+.-]*:/", str(path)):
        raise ConfigError(f"checkpoints go to local folders, and '{path}' is an address: give a local dirpath.")


class StepCheckpoint(ModelCheckpoint):
    """Lightning's callback, whose `filename` may have the number of the explore step: `{explore_step:05d}`, from 1.

    Its state in a checkpoint is that of Lightning's own, for runs to be resumed with either.
    """

    @property
    def state_key(self) -> str:
        return super().state_key.replace(type(self).__qualname__, ModelCheckpoint.__qualname__, 1)

    def format_checkpoint_name(self, metrics: dict[str, Any], *args: Any, **settings: Any) -> str:
        """As of ModelCheckpoint; an explore step is an epoch, and Lightning counts those from 0."""
        step = {"explore_step": metrics["epoch"] + 1} if "epoch" in metrics else {}
        return super().format_checkpoint_name(metrics | step, *args, **settings)


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes to a temporary file next to the target, then renames it.

    Lightning's own way builds the whole checkpoint in memory first, twice: gigabytes that a small machine lacks.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any] | Mapping[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        """Save a checkpoint to a local path; a kill in the midst leaves the checkpoint that was there.

        Raises:
            ConfigError: the path is an address, such as s3://bucket/it.ckpt.
            DiskFullError: the disk is full.
            TypeError: storage options, which a local file does not have.
        """
        if storage_options is not None:
            raise TypeError("`Trainer.save_checkpoint(..., storage_options=...)`: a local file has no storage options.")
        check_local(path)
        with new_file(Path(path)) as file:
            torch.save(checkpoint, file)

    def load_checkpoint(
        self, path: str | Path, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """All of a checkpoint, one in shards (`trainer.shards`) too.

        Raises:
            ConfigError: its shards are damaged.
        """
        if Path(path).is_dir():
            from trinity_lightning.common.checkpoints import contents, whole

            return whole(path, contents(path))
        return super().load_checkpoint(path, map_location, weights_only)
