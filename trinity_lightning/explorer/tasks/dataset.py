"""The task source `dataset`: entries of files, of folders, and of datasets on the hub."""

import dataclasses
import functools
import glob
import itertools
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from trinity_lightning.config.taskset import FILE_FORMATS, TasksetConfig, check_dataset_path
from trinity_lightning.config.values import unknown_name
from trinity_lightning.errors import ConfigError
from trinity_lightning.explorer.tasks.files import SUFFIXES, FileEntries
from trinity_lightning.explorer.tasks.sources import Entries

logger = logging.getLogger(__name__)


def dataset_entries(path: str, split: str = "train", subset: str | None = None, as_text: bool = False) -> Entries:
    """The entries of a split of a file, a folder, or a dataset on the hub.

    Args:
        path: a .jsonl, .json, .parquet or .csv file, a folder of such files, a folder made by `save_to_disk`, or a
            hub name.
        split: name of the split, or a slice of it ("train[:100]"). A file has one split, train; a folder made by
            `save_to_disk` has no slices.
        subset: name of the dataset's configuration on the hub ("main" of gsm8k).
        as_text: True: every cell of CSV stays text, for examples to imitate.

    Raises:
        ConfigError: there is no such dataset; an unknown format, split or subset; or content that cannot be read.
    """
    local = Path(path).expanduser()
    check_dataset_path(None, path, "dataset")
    if local.is_file() and local.stat().st_size == 0:
        raise ConfigError(f"dataset '{path}' is empty", fix="give a file with entries")
    import datasets  # takes a second
    from datasets.exceptions import DatasetsError

    # It logs errors that it also raises; the message below has them.
    logging.getLogger("datasets.packaged_modules").setLevel(logging.CRITICAL)
    try:
        if (local / "state.json").is_file():
            entries = _split_of({"train": datasets.load_from_disk(local)}, split)
        elif (local / "dataset_dict.json").is_file():
            entries = _split_of(datasets.load_from_disk(local), split)
        elif files := _files_of(path, subset):
            entries = _rows_of(files, split, as_text)
        elif local.is_file():
            entries = datasets.load_dataset(FILE_FORMATS[local.suffix], data_files=str(local), split=split)
        else:
            entries = datasets.load_dataset(str(local) if local.is_dir() else path, subset, split=split)
    except ConfigError:
        raise
    except (DatasetsError, OSError, ValueError) as error:
        reason = f"{error} ({error.__cause__})" if error.__cause__ else f"{error}"
        key = ".split" if reason.startswith("Unknown split") else None
        raise ConfigError(f"cannot load split '{split}' of dataset '{path}': {reason}", key=key) from error
    return entries  # pyright: ignore[reportReturnType]


def _files_of(path: str, subset: str | None) -> dict[str, list[Path]]:
    """The files of each split, if this package reads them; empty if `datasets` does, which guesses types of values.

    `datasets` decides which files of a folder, or of a repository of the hub, belong to which split.
    """
    local = Path(path).expanduser()
    if local.is_file():
        return {"train": [local]} if local.suffix in SUFFIXES else {}
    if local.is_dir():
        _check_one_format(local)
        return {split: list(map(Path, files)) for split, files in (_data_files(str(local), subset) or {}).items()}
    try:
        urls = _data_files(path, subset)
    except OSError:  # the hub is not reached
        if (files := _copy_of_hub(path, subset)) is None:
            raise
        return files
    return (_copy_of_hub(path, subset) or {}) if urls is None else _downloaded(path, urls)


def _data_files(path: str, subset: str | None) -> dict[str, list[str]] | None:
    """Paths or URLs of the files of each split of a folder, or of a repository of the hub.

    Empty if `datasets` has to read them. None if the hub is not reached and `datasets` has rows that it read before.
    """
    from datasets import load_dataset_builder

    config: Any = load_dataset_builder(path, subset).config
    if config.data_files is None:
        return None
    files = {str(split): list(map(str, paths)) for split, paths in config.data_files.items()}
    are_rows = all(Path(file).suffix in SUFFIXES for paths in files.values() for file in paths)
    return files if are_rows and not _has_options(config) else {}


def _has_options(config: Any) -> bool:
    """True if the README.md beside the data sets options for reading them, such as `sep`."""
    from datasets import BuilderConfig

    usual, names = type(config)(), {field.name for field in dataclasses.fields(config)}
    options = names - {field.name for field in dataclasses.fields(BuilderConfig)} - {"features"}
    return any(getattr(config, name) != getattr(usual, name) for name in options)


_HUB_FILE = re.compile(r"hf://datasets/(?P<repository>[^@]+)@(?P<revision>[^/]+)/(?P<name>.+)")


def _downloaded(path: str, urls: Mapping[str, Sequence[str]]) -> dict[str, list[Path]]:
    """The downloaded files of these URLs in a repository of the hub; empty if some are elsewhere."""
    from huggingface_hub import snapshot_download

    places = {split: [_HUB_FILE.fullmatch(url) for url in split_urls] for split, split_urls in urls.items()}
    matches = [match for split_matches in places.values() for match in split_matches if match]
    are_here = {match["repository"] for match in matches} == {path}
    if not are_here or len(matches) < sum(map(len, urls.values())):
        return {}
    names = [glob.escape(match["name"]) for match in matches]
    folder = snapshot_download(path, repo_type="dataset", revision=matches[0]["revision"], allow_patterns=names)
    return {
        split: [Path(folder, match["name"]) for match in split_matches if match]
        for split, split_matches in places.items()
    }


def _copy_of_hub(path: str, subset: str | None) -> dict[str, list[Path]] | None:
    """The files of each split of a repository of the hub that was downloaded before; None if it was not.

    Raises:
        ConfigError: only some of the files were downloaded.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(path, repo_type="dataset", local_files_only=True, allow_patterns="README.md"))
    except (HFValidationError, LocalEntryNotFoundError):
        return None
    names = _names_on_hub(path, folder, subset)
    if missing := [name for split_names in names.values() for name in split_names if not (folder / name).exists()]:
        raise ConfigError(
            f"dataset '{path}' was downloaded in part only ({missing[0]} is missing)",
            fix="start once with a connection to the hub",
        )
    return {split: [folder / name for name in split_names] for split, split_names in names.items()}


def _names_on_hub(path: str, folder: Path, subset: str | None) -> dict[str, list[str]]:
    """Names of the files of each split, by the hub's listing that was downloaded with them.

    Earlier versions of huggingface_hub left no listing; then the names of the files in the folder.
    """
    try:
        from huggingface_hub import get_cached_repo_tree
        from huggingface_hub.errors import CachedRepoTreeNotFoundError
    except ImportError:  # this version keeps no listing
        return _names_in(folder, subset)
    try:
        listing = get_cached_repo_tree(path, repo_type="dataset")
    except CachedRepoTreeNotFoundError:
        return _names_in(folder, subset)
    with TemporaryDirectory() as empty:  # files of these names, for `datasets` to find the splits
        for file in listing:
            place = Path(empty, file.path)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.touch()
        if (readme := folder / "README.md").is_file():
            shutil.copy(readme, empty)
        return _names_in(Path(empty), subset)


def _names_in(folder: Path, subset: str | None) -> dict[str, list[str]]:
    files = _data_files(str(folder.resolve()), subset) or {}
    return {split: [os.path.relpath(file, folder.resolve()) for file in paths] for split, paths in files.items()}


def _check_one_format(folder: Path) -> None:
    """Refuse a folder with several formats, of which `datasets` reads one, unless `configs` in README.md choose."""
    from datasets.data_files import DataFilesDict, get_data_patterns

    readme = folder / "README.md"
    if readme.is_file() and "\nconfigs:" in readme.read_text(encoding="utf-8"):
        return
    files = DataFilesDict.from_patterns(get_data_patterns(str(folder)), base_path=str(folder))
    paths = [Path(file) for split_files in files.values() for file in split_files]
    kinds = {FILE_FORMATS[path.suffix]: path.name for path in paths if path.suffix in FILE_FORMATS}
    if len(kinds) > 1:
        raise ConfigError(
            f"dataset '{folder}' has files of several formats, such as {' and '.join(sorted(kinds.values()))}",
            fix="leave those of one format there, or give a single file",
        )


def _rows_of(files: dict[str, list[Path]], split: str, as_text: bool) -> FileEntries:
    from datasets import ReadInstruction

    names = names_of(split)
    chosen = {name: paths for name, paths in files.items() if name in names}
    paths = [file for paths in chosen.values() for file in paths]
    entries = _read(tuple((file, file.stat().st_size, file.stat().st_mtime_ns) for file in paths), as_text)
    counts = iter(entries.counts)
    sizes = {name: sum(itertools.islice(counts, len(paths))) for name, paths in chosen.items()}
    starts = dict(zip(sizes, itertools.accumulate(sizes.values(), initial=0), strict=False))
    parts = ReadInstruction.from_spec(split).to_absolute(dict.fromkeys(files, 0) | sizes)
    return entries.chosen([slice(*(starts[part.splitname] + row for row in (part.from_, part.to))) for part in parts])


@functools.lru_cache(maxsize=4)
def _read(files: tuple[tuple[Path, int, int], ...], as_text: bool) -> FileEntries:
    """The rows of files by path, size and time of the last change, read once for the check and for the run."""
    return FileEntries([file for file, _, _ in files], as_text)


def names_of(split: str) -> list[str]:
    """The names of the splits in a slice, or in a sum of slices, in order, each once."""
    return list(dict.fromkeys(name.partition("[")[0].strip() for name in split.split("+")))


def folder_of(path: str | None) -> Path:
    """The folder of a dataset; the working directory if the path is none of this machine."""
    place = Path(path or "").expanduser()
    return place.parent if place.is_file() else place if place.is_dir() else Path()


def undecoded(entries: Any, columns: Iterable[str]) -> Any:
    """The entries with the pictures of a Hugging Face dataset as the bytes of their files; other entries as they are.

    A dataset would decode every picture whenever an entry is looked at, as when entries are checked before a run.

    Args:
        entries: entries of a task source.
        columns: columns that may have pictures.
    """
    if not type(entries).__module__.startswith("datasets.") or not hasattr(entries, "select_columns"):
        return entries
    pictures = [name for name in columns if name in entries.column_names and _has_pictures(entries.features[name])]
    return _Undecoded(entries, pictures) if pictures and entries.format["type"] is None else entries


def _has_pictures(feature: Any) -> bool:
    """True for datasets' type of a picture, or of a list of them."""
    element = feature[0] if isinstance(feature, list) and feature else getattr(feature, "feature", feature)
    return type(element).__name__ == "Image"


class _Undecoded:
    """Entries of a dataset with some columns as they are stored."""

    def __init__(self, dataset: Any, columns: list[str]) -> None:
        self._others = dataset.remove_columns(columns)
        self._stored = dataset.select_columns(columns).with_format("arrow")

    def __len__(self) -> int:
        return len(self._stored)

    def __getitem__(self, index: int, /) -> dict[str, Any]:
        return self._others[index] | self._stored[index].to_pylist()[0]


def _split_of(splits: Any, split: str) -> Entries:
    if split not in splits:
        raise ConfigError(unknown_name("split", split, splits), key=".split")
    return splits[split]


def warn_of_trained_entries(trained: Iterable[TasksetConfig], evaluated: Iterable[TasksetConfig]) -> None:
    """Warn of entries of datasets that are both trained on and evaluated on, as from overlapping slices."""
    size = functools.cache(lambda path, split, subset: len(dataset_entries(path, split, subset)))
    for test, train in itertools.product(evaluated, trained):
        if test.source == train.source == "dataset" and _place(test) == _place(train):
            rows, others = _rows(test, size), _rows(train, size)
            if shared := sum(int((mask & others[name]).sum()) for name, mask in rows.items() if name in others):
                logger.warning("%d of %d tasks of eval_tasksets '%s' (split %s) are trained on, too (split %s).",
                               shared, sum(map(np.sum, rows.values())), test.name, test.split, train.split)  # fmt: skip


def _place(taskset: TasksetConfig) -> tuple[str, str | None]:
    local = Path(str(taskset.path)).expanduser()
    return str(local.resolve() if local.exists() else taskset.path), taskset.args.get("subset")


def _rows(taskset: TasksetConfig, size: Callable[[str, str, str | None], int]) -> dict[str, np.ndarray]:
    """Masks of the entries of a taskset, by split; `size` returns the number of entries of a split."""
    from datasets import ReadInstruction

    sizes = {name: size(str(taskset.path), name, taskset.args.get("subset")) for name in names_of(taskset.split)}
    rows = {name: np.zeros(count, bool) for name, count in sizes.items()}
    for part in ReadInstruction.from_spec(taskset.split).to_absolute(sizes):
        rows[part.splitname][part.from_ : part.to] = True
    return rows
