"""Where entries come from that are not the built-in sums: reasoning-gym's generators, files and the hub."""

import dataclasses
import itertools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trinity_lightning.config.stored import FILE_FORMATS, check_dataset_path
from trinity_lightning.config.values import unknown_name
from trinity_lightning.errors import ConfigError

if TYPE_CHECKING:
    from trinity_lightning.explorer.tasks.taskset import Entries, Taskset

FIRST_ENTRIES = 100  # of a dataset, which are looked at when it is opened

# What reasoning-gym raises for arguments that do not fit: its validation is made of assert statements.
_REFUSALS = (AssertionError, ArithmeticError, LookupError, TypeError, ValueError)


class ReasoningGymEntries:
    """Entries of a reasoning-gym dataset, each generated when it is asked for: entry i depends on seed + i only.

    Each is {"prompt", "answer", "metadata", "reasoning_gym": {"name", "config", "entry"}}: name and config make the
    dataset whose `score_answer(answer, entry)` is the verifier.

    Raises:
        ConfigError: an unknown dataset, or a size or argument that it refuses.
    """

    def __init__(self, name: str, size: int, seed: int, config: dict[str, Any]) -> None:
        import reasoning_gym  # a second to import, and needed by no other source
        from reasoning_gym.factory import DATASETS

        if name not in DATASETS:
            raise ConfigError(unknown_name("reasoning-gym dataset", name, DATASETS))
        fields = {field.name for field in dataclasses.fields(DATASETS[name][1])}
        for key in config:
            if key not in fields:
                raise ConfigError(unknown_name(f"argument of reasoning-gym dataset '{name}'", key, fields))
        try:
            self._dataset = reasoning_gym.create_dataset(name, size=size, seed=seed, **config)
        except _REFUSALS as error:
            raise ConfigError(f"reasoning-gym dataset '{name}' refuses its arguments: {error}") from error
        self._name = name
        self._size = size
        self._config = config

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int, /) -> dict[str, Any]:
        try:
            entry = self._dataset[index]
        except _REFUSALS as error:  # arguments that contradict each other pass its validation and fail here
            raise ConfigError(f"reasoning-gym dataset '{self._name}' cannot make this entry: {error}") from error
        return {
            "prompt": entry["question"],
            "answer": entry["answer"],
            "metadata": entry["metadata"],
            "reasoning_gym": {"name": self._name, "config": self._config, "entry": entry},
        }


def dataset_entries(path: str, split: str, subset: str | None) -> "Entries":
    """One split of a file, of a folder, or of a dataset on the hub.

    Args:
        path: a .jsonl, .json, .parquet or .csv file, a folder of such files, a folder made by `save_to_disk`, or a
            hub name.
        split: name of the split, or a slice of it ("train[:100]"); a file has one: train. What was saved has no slices.
        subset: name of the dataset's configuration on the hub ("main" of gsm8k).

    Raises:
        ConfigError: nothing there, an unknown format, split or subset, or content that cannot be read.
    """
    local = Path(path).expanduser()
    check_dataset_path("dataset", path)
    if local.is_file() and local.suffix not in FILE_FORMATS:
        raise ConfigError(f"dataset '{path}' is of no known format: give one of {', '.join(FILE_FORMATS)}.")
    if local.is_file() and local.stat().st_size == 0:
        raise ConfigError(f"dataset '{path}' is empty.")
    import datasets  # a second to import
    from datasets.exceptions import DatasetsError

    try:
        if local.is_file():
            entries = datasets.load_dataset(FILE_FORMATS[local.suffix], data_files=str(local), split=split)
        elif (local / "state.json").is_file():
            entries = _split_of({"train": datasets.load_from_disk(local)}, split)
        elif (local / "dataset_dict.json").is_file():
            entries = _split_of(datasets.load_from_disk(local), split)
        else:
            entries = datasets.load_dataset(str(local) if local.is_dir() else path, subset, split=split)
    except (DatasetsError, OSError, ValueError) as error:
        reason = _wrong_line(local) or (f"{error} ({error.__cause__})" if error.__cause__ else f"{error}")
        raise ConfigError(f"cannot load split '{split}' of dataset '{path}': {reason}") from error
    return entries  # pyright: ignore[reportReturnType]


def _wrong_line(file: Path) -> str:
    """The first line of a JSONL file that is no JSON object; nothing if there is none, and for other files."""
    lines = file.read_bytes().splitlines() if file.suffix == ".jsonl" and file.is_file() else ()
    for number, line in enumerate(lines, start=1):
        try:
            json.loads(line.strip() or "{}").items()
        except (AttributeError, ValueError):
            return f"line {number} is no JSON object, which every line has to be."
    return ""


def _split_of(splits: Any, split: str) -> "Entries":
    if split not in splits:
        raise ConfigError(unknown_name("split", split, splits))
    return splits[split]


def check_first_entries(taskset: "Taskset", path: str, split: str) -> None:
    """Refuse entries without a prompt before an engine is loaded; a ConfigError that names file and line."""
    for index in range(min(len(taskset), FIRST_ENTRIES)):
        try:
            taskset[index]
        except ConfigError as error:
            raise ConfigError(f"{path}{_line(path, split, index)}: {error}") from error


def _line(path: str, split: str, index: int) -> str:
    """The line of an entry in a JSONL file, whose blank lines are no entries; nothing for other files and slices."""
    if not path.endswith(".jsonl") or "[" in split:
        return ""
    with Path(path).open(encoding="utf-8") as file:
        lines = (number for number, line in enumerate(file, start=1) if line.strip())
        return f", line {next(itertools.islice(lines, index, None))}"
