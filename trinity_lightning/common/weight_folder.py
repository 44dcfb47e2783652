"""Weights as a checkpoint folder, for engines that live in other processes."""

import shutil
import tempfile
import threading
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from trinity_lightning.common.weights import WeightStream
from trinity_lightning.errors import WeightSyncError

KEPT = 2  # an engine may still be reading the weights before the last


class WeightFolder:
    """Holds the weights that were last sent; every engine that takes the same stream reads the same files.

    A tied head is written as a tensor of its own (`save_pretrained` would drop it): an engine may keep a packed copy of
    it that would silently stay stale.

    Args:
        place: where a folder of its own is made, which the engines' processes must see too; None for the system's
            place for temporary files. Several runs may share it.
    """

    def __init__(self, place: str | Path | None = None) -> None:
        self._place = None if place is None else Path(place)
        self._lock = threading.Lock()  # engines ask from threads, all at once
        self._folder: Path | None = None
        self._stream: WeightStream | None = None
        self._written: list[Path] = []
        self._writes = 0

    def write(self, stream: WeightStream, dtype: torch.dtype) -> Path:
        """The folder that holds these weights, in the engine's dtype; written again unless it is the same stream.

        Raises:
            WeightSyncError: it cannot be written.
        """
        with self._lock:
            if stream is not self._stream:
                try:
                    self._write(stream, dtype)
                except (OSError, SafetensorError) as error:
                    raise WeightSyncError(
                        f"the weights cannot be written to {self._folder or self._place}: {error}. Make room there, or "
                        "set synchronizer.folder to another place."
                    ) from error
                self._stream = stream
            return self._written[-1]

    def _write(self, stream: WeightStream, dtype: torch.dtype) -> None:
        if self._folder is None:
            if self._place is not None:
                self._place.mkdir(parents=True, exist_ok=True)
            self._folder = Path(tempfile.mkdtemp(prefix="weights-", dir=self._place))
        self._writes += 1
        folder = self._folder / str(self._writes)
        folder.mkdir()
        # A copy of each: safetensors refuses tensors that share memory, as tied ones do.
        tensors = {name: tensor.to("cpu", dtype, copy=True).contiguous() for name, tensor in stream}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        self._written.append(folder)
        while len(self._written) > KEPT:
            shutil.rmtree(self._written.pop(0), ignore_errors=True)

    def close(self) -> None:
        """Delete what was written; the next `write` writes everything."""
        with self._lock:
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)
            self._folder, self._stream, self._written = None, None, []
