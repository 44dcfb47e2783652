"""Keeps the experiences of every explore step in a folder, as the trainer got them, to look at and to train on again.

A step is a file `step_<n>.trxp`, a payload of version 2; a resumed run writes the steps after its checkpoint again.
`to_hf_datasets(read_experiences("outputs/.../experiences"))` makes a dataset of them.
"""

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from trinity_lightning.buffer.reader import Cursor, CursorReader, Item
from trinity_lightning.common.experience import Experience, ExperienceFormatError
from trinity_lightning.common.experience.payload import MAGIC
from trinity_lightning.common.files import write_atomically
from trinity_lightning.common.optimizer_batch import is_expert, trained_mask
from trinity_lightning.config.buffer import BufferConfig
from trinity_lightning.errors import StorageError, StorageFormatError

FOLDER = "experiences"
ID_FILE = "folder.id"  # holds the folder's id, also once it is moved: a position in one folder means nothing in another
_UNKNOWN = "steps"  # in place of an id: the folder has no step yet, or is of an earlier version
_STEP = re.compile(r"step_(\d+)\.trxp")
_MOST_COUNTED = 24
_FRAMES = b"TRXB"  # the beginning of the append-only files of earlier versions


def keeper_of(buffer: BufferConfig, folder: Path) -> Callable[[int, list[Experience]], object]:
    """A keeper that writes explore steps to the folder `experiences` in that of their run (buffer.keep=true)."""
    return partial(keep_step, folder / FOLDER)


def reader_of(buffer: BufferConfig, seed: int) -> CursorReader:
    """A reader of the folder at `buffer.path` (buffer.storage=file)."""
    return StepReader(buffer.path or "")


# -- writing -----------------------------------------------------------------------------------------------------------


def keep_step(folder: str | Path, step: int, experiences: Sequence[Experience]) -> Path:
    """Write the experiences of an explore step, in place of those of an earlier attempt at it; returns the file.

    Raises:
        ExperienceError: one of them cannot be serialized.
        StorageError: the disk is full, or the folder is not to be written to.
    """
    path = Path(folder) / f"step_{step}.trxp"
    payload = Experience.serialize_many(experiences)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not step_files(path.parent):
            folder_id(path.parent)
        write_atomically(path, payload)
    except OSError as error:
        raise StorageError(
            f"{path}: cannot be written: {error.strerror}. Make room there, or set buffer.keep=false."
        ) from error
    return path


def folder_id(folder: Path) -> str:
    """The id in a folder's `folder.id`, which is written if there is none yet."""
    file = folder / ID_FILE
    if not file.exists():
        write_atomically(file, secrets.token_hex(8).encode())
    return file.read_text(encoding="ascii")


# -- reading -----------------------------------------------------------------------------------------------------------


def read_experiences(place: str | Path) -> list[Experience]:
    """All experiences of a folder, in the order of the steps, or of the file of one step.

    Raises:
        StorageError: there is no such file, or no step in the folder.
        StorageFormatError: a file is damaged, or something else.
    """
    path = Path(place)
    if not path.exists():
        raise StorageError(f"{path}: there is no such file or folder.")
    files = list(step_files(path).values()) if path.is_dir() else [path]
    if not files:
        raise StorageError(f"{path}: no step_<n>.trxp in this folder. A run with buffer.keep=true writes them.")
    return [experience for file in files for experience in _read_step(file)]


def step_files(folder: Path) -> dict[int, Path]:
    """The files of a folder by their steps, in order."""
    matches = [(_STEP.fullmatch(path.name), path) for path in folder.iterdir()]
    return dict(sorted((int(match[1]), path) for match, path in matches if match))


def _read_step(path: Path) -> list[Experience]:
    data = path.read_bytes()
    try:
        return Experience.deserialize_many(data)
    except ExperienceFormatError as error:
        fix = "Restore the file from a copy, or delete it."
        if data.startswith(_FRAMES):
            fix = "`FileStorage` wrote it, up to commit 845fb87: read it there, and write it again by `keep_step`."
        raise StorageFormatError(f"{path}: {error} {fix}") from error


class StepReader(CursorReader):
    """Reads a folder of steps in their order, one file at a time.

    Raises:
        StorageError: there is no such folder.
        StorageFormatError: it is a file.
    """

    START = (0, 0)

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if self.folder.is_file():
            with self.folder.open("rb") as file:
                is_kept = file.read(len(MAGIC) + len(_FRAMES)).startswith((MAGIC, _FRAMES))
            if not is_kept:
                raise StorageFormatError(
                    f"{self.folder}: a file that holds no kept rollouts: give a run's folder of experiences. Examples "
                    "(JSONL, CSV, parquet) are trained on by +recipe=sft or +recipe=dpo."
                )
            _read_step(self.folder)  # raises if the file is damaged, or of an earlier version
            raise StorageFormatError(f"{self.folder}: the file of one step: give its folder.")
        if not self.folder.is_dir():
            raise StorageError(f"{self.folder}: there is no such folder. A run with buffer.keep=true writes one.")
        super().__init__(_UNKNOWN, str(self.folder))

    def _fetch(self, cursor: Cursor, count: int) -> list[Item]:
        first, index = cursor
        for step, path in step_files(self.folder).items():
            if step < first:
                continue
            experiences = _read_step(path)
            ends = [(step, number) for number in range(1, len(experiences))] + [(step + 1, 0)]
            items = list(map(Item, experiences, ends))[index if step == first else 0 :]
            if items:
                return items
        return []

    def state_dict(self) -> dict[str, Any]:
        self._source = _identity(self.folder)
        return super().state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Same as in the base class; a folder without an id is not checked."""
        self._source = _identity(self.folder)
        unknown = _UNKNOWN in (self._source, state["source"])
        super().load_state_dict(state | {"source": self._source} if unknown else state)


def _identity(folder: Path) -> str:
    return folder_id(folder) if (folder / ID_FILE).exists() else _UNKNOWN


# -- in a run's report -------------------------------------------------------------------------------------------------


def counted(files: Mapping[int, Path]) -> list[tuple[object, ...]]:
    """One row per step: number, experiences, expert experiences, trained tokens, mean reward, MB of its file.

    The files are read whole for this. If there are more than 24, only 24 are read, evenly spread, first and last too.

    Raises:
        StorageError: a file is damaged.
    """
    steps = list(files)
    if len(steps) > _MOST_COUNTED:
        steps = [steps[round(index * (len(steps) - 1) / (_MOST_COUNTED - 1))] for index in range(_MOST_COUNTED)]
    rows = []
    for step in steps:
        experiences = _read_step(files[step])
        rewards = [experience.reward for experience in experiences if experience.reward is not None]
        reward = f"{sum(rewards) / len(rewards):.4g}" if rewards else ""
        tokens = sum(int(trained_mask(experience).sum()) for experience in experiences)
        megabytes = f"{files[step].stat().st_size / 1e6:.2f}"
        rows.append((step, len(experiences), sum(map(is_expert, experiences)), tokens, reward, megabytes))
    return rows
