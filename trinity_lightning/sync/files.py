"""The policy's weights in files: a folder that engines of other processes read, and what a run's checkpoint has."""

import json
import math
import os
import shutil
import tempfile
import threading
import weakref
from pathlib import Path
from pickle import UnpicklingError

import torch
from torch import Tensor

from trinity_lightning.common.devices import free_memory
from trinity_lightning.errors import ConfigError, WeightSyncError
from trinity_lightning.sync.stream import WeightStream

# -- a folder for engines ----------------------------------------------------------------------------------------------

KEPT = 2  # an engine may still be reading the weights before the last
WEIGHTS = "model.safetensors"
DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}  # as safetensors calls them
TRAINING_BYTES = 12  # a parameter's gradient and two moments: a trainer on this CPU makes them in its first step


def fits_in_memory(size: int, memory: int, due: int = 0) -> bool:
    """Whether to hold weights in memory: only if it has room for twice the copies that exist during a write.

    All in bytes: the weights, what is free of memory, and what training is still going to take.
    """
    return 2 * (KEPT + 1) * size <= memory - due


class WeightFolder:
    """Holds the weights that were last sent; every engine that takes the same stream reads the same files.

    A tied head is written as a tensor of its own (`save_pretrained` would drop it): an engine may keep a packed copy of
    it that would silently stay stale.

    Args:
        place: where a folder of its own is made, which the engines' processes must see too; None for the system's
            place for temporary files. Several runs may share it.
        in_memory: whether the files are links to memory of this process, if there is room: for engines on this machine.
            However the process ends, its memory ends with it.
    """

    def __init__(self, place: str | Path | None = None, in_memory: bool = False) -> None:
        self._place = None if place is None else Path(place)
        self._in_memory = in_memory
        self._lock = threading.Lock()  # engines ask from threads, all at once
        self._folder: Path | None = None
        self._stream: WeightStream | None = None
        self._written: list[Path] = []
        self._memory: dict[Path, int] = {}  # descriptors of the files that are in memory
        self._writes = 0

    def write(self, stream: WeightStream, dtype: torch.dtype) -> Path:
        """The folder that holds these weights, in the engine's dtype; written again unless it is the same stream.

        A WeightSyncError: it cannot be written.
        """
        with self._lock:
            if stream is not self._stream:
                try:
                    self._write(stream, dtype)
                except OSError as error:
                    raise WeightSyncError(
                        f"the weights cannot be written to {self._folder or self._place}: {error}. Make room there, or "
                        "set synchronizer.folder to another place."
                    ) from error
                self._stream = stream
            return self._written[-1]

    def _write(self, stream: WeightStream, dtype: torch.dtype) -> None:
        if self._folder is None:
            self._folder = self._made()
            numbers = sum(map(math.prod, stream.shapes.values()))
            due = 0 if torch.cuda.is_available() else TRAINING_BYTES * numbers
            self._fits = self._in_memory and fits_in_memory(numbers * dtype.itemsize, free_memory(), due)
        self._writes += 1
        folder = self._folder / str(self._writes)
        folder.mkdir()
        if self._fits:
            self._memory[folder] = memory = os.memfd_create(WEIGHTS)
            (folder / WEIGHTS).symlink_to(f"/proc/{os.getpid()}/fd/{memory}")
        _write_safetensors(folder / WEIGHTS, stream, dtype)
        self._written.append(folder)
        while len(self._written) > KEPT:
            old = self._written.pop(0)
            shutil.rmtree(old, ignore_errors=True)
            if old in self._memory:
                os.close(self._memory.pop(old))

    def _made(self) -> Path:
        """A new folder, deleted when this object or the process ends."""
        if self._place is not None:
            self._place.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix="trinity-weights-", dir=self._place))
        self._delete = weakref.finalize(self, _delete, folder, self._memory, os.getpid())
        return folder

    def close(self) -> None:
        """Delete what was written; the next `write` writes everything."""
        with self._lock:
            if self._folder is not None:
                self._delete()
            self._folder, self._stream, self._written = None, None, []


def _delete(folder: Path, memory: dict[Path, int], owner: int) -> None:
    if os.getpid() != owner:  # a fork of the run, whose engines still read it
        return
    shutil.rmtree(folder, ignore_errors=True)
    while memory:
        os.close(memory.popitem()[1])


def _write_safetensors(file: Path, stream: WeightStream, dtype: torch.dtype) -> None:
    """Write tensors as they come, in that dtype; safetensors would have all of them at once, and replace a link."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in stream.shapes.items():
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": DTYPES[dtype], "shape": shape, "data_offsets": [begin, end]}
    said = json.dumps(header).encode()
    said += b" " * (-len(said) % 8)
    with file.open("wb") as written:
        written.write(len(said).to_bytes(8, "little") + said)
        for _, tensor in stream:
            plain = tensor.detach().to("cpu", dtype).contiguous()
            written.write(plain.view(-1).view(torch.uint8).numpy().data)


# -- a run's checkpoint ------------------------------------------------------------------------------------------------

_POLICY = "model."  # PolicyModule.model


def checkpoint_weights(path: str | Path) -> tuple[int, WeightStream]:
    """The explore step that a checkpoint was written after, and the policy's weights in it, by its parameters' names.

    A ConfigError: not a checkpoint of a training run.
    """
    from trinity_lightning.common.checkpoints import whole  # servers, which use the folder alone, read no checkpoint

    step, saved = saved_weights(path)
    weights = whole(path, {"state_dict": saved})["state_dict"]
    return step, WeightStream.of((name.removeprefix(_POLICY), tensor) for name, tensor in weights.items())


def saved_weights(path: str | Path) -> tuple[int, dict[str, Tensor]]:
    """The step, and the weights by the checkpoint's names as `common.checkpoints.contents` has them: not read yet.

    Errors as `checkpoint_weights`.
    """
    from trinity_lightning.common.checkpoints import contents

    try:
        checkpoint = contents(path)
        # Not the explorer's, which may be ahead; nor "epoch", which is counted up only after a checkpoint at its end.
        step = int(checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"]["processed"])
        weights = {name: each for name, each in checkpoint["state_dict"].items() if name.startswith(_POLICY)}
    except (OSError, RuntimeError, ValueError, LookupError, TypeError, AttributeError, UnpicklingError) as error:
        raise ConfigError(f"'{path}' is no checkpoint of a training run: {type(error).__name__}: {error}") from error
    return step, weights
