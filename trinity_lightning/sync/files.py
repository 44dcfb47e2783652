"""The policy's weights in files: a folder that engines in other processes read, and the checkpoint of a run."""

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

from trinity_lightning.common.checkpoints import contents, whole
from trinity_lightning.common.hardware import free_memory
from trinity_lightning.errors import ConfigError, WeightSyncError
from trinity_lightning.sync.stream import WeightStream

# -- a folder for engines ----------------------------------------------------------------------------------------------

KEPT = 2  # number of newest weights that are kept: an engine may still be reading the last but one
WEIGHTS = "model.safetensors"
MEMORY = Path("/dev/shm")  # on Linux, files in this folder are memory of this machine
PREFIX = "trinity-weights-"
LOCK = "lock"
TRAINING_BYTES = 12  # a parameter's gradient and two moments, which a trainer on this CPU makes in its first step
_folders_in_use: set[Path] = set()  # folders of this process in MEMORY: locks keep only other processes off


def fits_in_memory(size: int, storage: int, memory: int, due: int = 0) -> bool:
    """True if weights may be written to storage that is memory: there is room for twice the copies of a write.

    Args:
        size: bytes of the weights.
        storage: free bytes of the storage.
        memory: free bytes of memory.
        due: bytes of memory that training will take later.
    """
    return 2 * (KEPT + 1) * size <= min(storage, memory - due)


class WeightFolder:
    """Holds the weights that were last sent; every engine that takes the same stream reads the same files.

    A tied head is written as a separate tensor (`save_pretrained` would drop it), because an engine may keep a packed
    copy of it that would silently stay stale.

    Args:
        place: parent of a new folder, which the engines' processes must see too; several runs may share it. None: the
            system's folder of temporary files.
        memory: storage that is memory, used in place of `place` if it exists and is large enough.
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
        """Write these weights in the engine's dtype, unless the same stream was written before; returns the folder.

        Raises:
            WeightSyncError: the folder cannot be written.
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
            self._folder = self._new_folder(sum(map(math.prod, stream.shapes.values())), dtype.itemsize)
        self._writes += 1
        folder = self._folder / str(self._writes)
        folder.mkdir()
        # Copies, because safetensors refuses tensors that share memory, such as tied ones.
        tensors = {name: tensor.to("cpu", dtype, copy=True).contiguous() for name, tensor in stream}
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        self._written.append(folder)
        while len(self._written) > KEPT:
            shutil.rmtree(self._written.pop(0), ignore_errors=True)

    def _new_folder(self, numbers: int, width: int) -> Path:
        """A new folder for a count of numbers of `width` bytes each; deleted when this object or the process ends."""
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
        """Delete the files; the next `write` begins anew."""
        with self._lock:
            if self._folder is not None:
                self._delete()
            self._folder, self._stream, self._written = None, None, []


def _delete(folder: Path, lock: IO[str] | None, owner: int) -> None:
    if os.getpid() != owner:  # a fork of the run, while the run's engines still read the folder
        return
    shutil.rmtree(folder, ignore_errors=True)
    _folders_in_use.discard(folder)
    if lock is not None:
        lock.close()


def _locked(memory: Path) -> tuple[Path, IO[str]]:
    """A new folder, and its lock, by which other runs know that the folder is in use.

    A lock of `lockf` is not inherited by a fork, so that a fork that outlives the run does not keep the memory.
    """
    hidden = Path(tempfile.mkdtemp(prefix=".", dir=memory))  # renamed once it is locked, for other runs to see
    lock = (hidden / LOCK).open("w")
    fcntl.lockf(lock, fcntl.LOCK_EX)
    folder = memory / f"{PREFIX}{hidden.name[1:]}"
    _folders_in_use.add(folder)
    return hidden.rename(folder), lock


def _delete_leftovers(memory: Path) -> None:
    """Delete folders that killed runs of this user left, because nothing else would free their memory."""
    # Any user can write there, so no link is followed and no pipe is waited for.
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    for folder in set(memory.glob(f"{PREFIX}*/")) - _folders_in_use:
        with contextlib.suppress(OSError):  # a run still uses the folder, or another run deletes it
            if folder.lstat().st_uid == os.getuid():
                with os.fdopen(os.open(folder / LOCK, flags, mode=0o600), "w") as lock:
                    fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)


# -- the checkpoint of a run -------------------------------------------------------------------------------------------

_POLICY = "model."  # PolicyModule.model


def checkpoint_weights(path: str | Path) -> tuple[int, WeightStream]:
    """The explore step after which a checkpoint was written, and its weights, by the names of the policy's parameters.

    Raises:
        ConfigError: the file is no checkpoint of a training run.
    """
    step, saved = saved_weights(path)
    weights = whole(path, {"state_dict": saved})["state_dict"]
    return step, WeightStream.of((name.removeprefix(_POLICY), tensor) for name, tensor in weights.items())


def saved_weights(path: str | Path) -> tuple[int, dict[str, Tensor]]:
    """The step, and the weights by the checkpoint's own names, not read yet (see `common.checkpoints.contents`).

    Errors as in `checkpoint_weights`.
    """
    try:
        checkpoint = contents(path)
        # The explorer's step may be ahead, and "epoch" is counted only after the checkpoint at its end.
        step = int(checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"]["processed"])
        weights = {name: tensor for name, tensor in checkpoint["state_dict"].items() if name.startswith(_POLICY)}
    except (OSError, RuntimeError, ValueError, LookupError, TypeError, AttributeError, UnpicklingError) as error:
        message = f"'{path}' is no checkpoint of a training run: {type(error).__name__}: {error}"
        raise ConfigError(message, key="ckpt_path") from error
    return step, weights
