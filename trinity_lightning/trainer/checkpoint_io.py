"""Checkpoints written straight to disk and moved into place: whole or absent, and never twice in memory."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes to a temporary file beside the target, then renames it.

    Lightning's own way builds the whole checkpoint in memory first, twice: gigabytes that a small machine lacks.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any] | Mapping[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        """Save a checkpoint to a local path; a kill in the midst leaves the checkpoint that was there."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        try:
            with temporary.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)
