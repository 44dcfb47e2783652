"""Weights as a checkpoint folder, for engines that live in other processes."""

import shutil
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from trinity_lightning.common.errors import WeightSyncError
from trinity_lightning.common.weights import WeightStream


class WeightFolder:
    """Holds the weights that were last sent; every engine that takes the same stream reads the same files.

    A tied head is written as a tensor of its own (`save_pretrained` would drop it): an engine may keep a packed copy of
    it that would silently stay stale.

    Args:
        place: a folder that the engines' processes see too; None for a temporary one.
    """

    def __init__(self, place: str | Path | None = None) -> None:
        self._own = place is None
        self._place = Path(tempfile.mkdtemp(prefix="weights-")) if place is None else Path(place)
        self._writes = 0
        self._stream: WeightStream | None = None

    def write(self, stream: WeightStream, dtype: torch.dtype) -> Path:
        """The folder that holds these weights, in the engine's dtype; written anew unless it is the same stream.

        Raises:
            WeightSyncError: it cannot be written.
        """
        current = self._place / f"weights_{self._writes}"
        if stream is self._stream and current.is_dir():
            return current
        self._writes += 1
        folder = self._place / f"weights_{self._writes}"
        try:
            shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed
            folder.mkdir(parents=True)
            # A copy of each: safetensors refuses tensors that share memory, as tied ones do.
            tensors = {name: tensor.to("cpu", dtype, copy=True).contiguous() for name, tensor in stream}
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        except OSError as error:
            raise WeightSyncError(
                f"the weights cannot be written to {folder}: {error}. Make room there, or set synchronizer.folder to "
                "another place."
            ) from error
        shutil.rmtree(current, ignore_errors=True)
        self._stream = stream
        return folder

    def close(self) -> None:
        """Delete what was written."""
        self._stream = None
        if self._own:
            shutil.rmtree(self._place, ignore_errors=True)
        else:
            shutil.rmtree(self._place / f"weights_{self._writes}", ignore_errors=True)
