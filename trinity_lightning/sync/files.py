"""The policy's weights in files: a folder that engines of other processes read, and what a run's checkpoint has."""

import contextlib
import fcntl
import math
import os
import shutil
import tempfile
import threading
import weakref
from pathlib import Path
from pickle import UnpicklingError
from typing import IO

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from trinity_lightning.common.hardware import free_memory
from trinity_lightning.errors import ConfigError, WeightSyncError
from trinity_lightning.sync.stream import WeightStream

# -- a folder for engines ----------------------------------------------------------------------------------------------

KEPT = 2  # an engine may still be reading the weights before the last
WEIGHTS = "model.safetensors"
MEMORY = Path("/dev/shm")  # files here are memory of this machine, on Linux
PREFIX = "trinity-weights-"
LOCK = "lock"
TRAINING_BYTES = 12  # a parameter's gradient and two moments: a trainer on this CPU makes them in its first step
_own: set[Path] = set()  # folders of this process in memory: it is not kept out by its own locks, and must skip these


def fits_in_memory(size: int, storage: int, memory: int, due: int = 0) -> bool:
    """Whether to write weights to storage that is memory: only if it has room for twice the copies that exist during a
    write.

    All in bytes: the weights, what is free in the storage and of memory, and what training is still going to take.
    """
    return 2 * (KEPT + 1) * size <= min(storage, memory - due)


class WeightFolder:
    """Holds the weights that were last sent; every engine that takes the same stream reads the same files.

    A tied head is written as a tensor of its own (`save_pretrained` would drop it): an engine may keep a packed copy of
    it that would silently stay stale.

    Args:
        place: where a folder of its own is made, which the engines' processes must see too; None for the system's
            place for temporary files. Several runs may share it.
        memory: storage that is memory, to be taken instead if it is there and large enough.
    """

    def __init__(self, place: str | Path | None = None, memory: Path | None = None) -> None:
        self._place = None if place is None else Path(place)
        self._memory = memory
        self._lock = threading.Lock()  # engines ask from threads, all at once
        self._folder: Path | None = None
        self._stream: WeightStream | None = None
        self._written: list[Path] = []
        self._writes = 0

    def write(self, stream: WeightStream, dtype: torch.dtype) -> Path:
        """The folder that holds these weights, in the engine's dtype; written again unless it is the same stream.

        A WeightSyncError: it cannot be written.
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
            self._folder = self._made(sum(map(math.prod, stream.shapes.values())), dtype.itemsize)
        self._writes += 1
        folder = self._folder / str(self._writes)
        folder.mkdir()
        # A copy of each: safetensors refuses tensors that share memory, as tied ones do.
        tensors = {name: tensor.to("cpu", dtype, copy=True).contiguous() for name, tensor in stream}
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        self._written.append(folder)
        while len(self._written) > KEPT:
            shutil.rmtree(self._written.pop(0), ignore_errors=True)

    def _made(self, numbers: int, width: int) -> Path:
        """A new folder for so many numbers of that many bytes; deleted when this object or the process ends."""
        place, memory = self._place, self._memory
        if memory is not None and os.access(memory, os.W_OK):
            _delete_leftovers(memory)
            due = 0 if torch.cuda.is_available() else TRAINING_BYTES * numbers
            if fits_in_memory(numbers * width, shutil.disk_usage(memory).free, free_memory(), due):
                place = memory
        if place is not None:
            place.mkdir(parents=True, exist_ok=True)
        if place == memory and memory is not None:
            folder, lock = _locked(memory)
        else:
            folder, lock = Path(tempfile.mkdtemp(prefix=PREFIX, dir=place)), None
        self._delete = weakref.finalize(self, _delete, folder, lock, os.getpid())
        return folder

    def close(self) -> None:
        """Delete what was written; the next `write` writes everything."""
        with self._lock:
            if self._folder is not None:
                self._delete()
            self._folder, self._stream, self._written = None, None, []


def _delete(folder: Path, lock: IO[str] | None, owner: int) -> None:
    if os.getpid() != owner:  # a fork of the run, whose engines still read it
        return
    shutil.rmtree(folder, ignore_errors=True)
    _own.discard(folder)
    if lock is not None:
        lock.close()


def _locked(memory: Path) -> tuple[Path, IO[str]]:
    """A new folder, and the lock by which other runs know that it is no leftover.

    A lock of `lockf` is its process's alone: a fork of the run that outlives it does not keep the memory.
    """
    hidden = Path(tempfile.mkdtemp(prefix=".", dir=memory))  # others see it when it is locked
    lock = (hidden / LOCK).open("w")
    fcntl.lockf(lock, fcntl.LOCK_EX)
    folder = memory / f"{PREFIX}{hidden.name[1:]}"
    _own.add(folder)
    return hidden.rename(folder), lock


def _delete_leftovers(memory: Path) -> None:
    """Delete what this user's runs that were killed have left, as nothing else would give that memory back."""
    # Anybody can write there: no link is followed, and a pipe is not waited for.
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    for folder in set(memory.glob(f"{PREFIX}*/")) - _own:
        with contextlib.suppress(OSError):  # its run lives, or another run deletes it
            if folder.lstat().st_uid == os.getuid():
                with os.fdopen(os.open(folder / LOCK, flags, mode=0o600), "w") as lock:
                    fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)


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
