"""Entries other than the built-in sums: where they come from (reasoning-gym, files, the hub), and their tasks."""

import dataclasses
import functools
import itertools
import json
import logging
import os
import random
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trinity_lightning.common.messages import (
    check_asks,
    check_media,
    read_messages,
    read_template_variables,
    read_tools,
)
from trinity_lightning.config.taskset import FILE_FORMATS, check_dataset_path
from trinity_lightning.config.values import nearest, unknown_name
from trinity_lightning.errors import ConfigError
from trinity_lightning.explorer.tasks.files import SUFFIXES, FileEntries
from trinity_lightning.explorer.tasks.task import ANSWER, MESSAGES, PROMPT

if TYPE_CHECKING:
    from trinity_lightning.config.taskset import TasksetConfig
    from trinity_lightning.explorer.tasks.taskset import Entries, Taskset

logger = logging.getLogger(__name__)

# What reasoning-gym raises for arguments that do not fit: its validation is made of assert statements.
_REFUSALS = (AssertionError, ArithmeticError, LookupError, TypeError, ValueError)
# Its datasets whose entries follow from the order of a set of texts, which is another in every process.
BY_HASH_SEED = (
    "intermediate_integration", "isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note",
    "word_ladder",
)  # fmt: skip


class ReasoningGymEntries:
    """Entries of a reasoning-gym dataset, each generated when it is asked for: entry i depends on seed + i only.

    Those of BY_HASH_SEED also depend on Python's hash seed, which each process draws unless PYTHONHASHSEED is set.
    Each is {"prompt", "answer", "metadata", "reasoning_gym": {"name", "config", "entry"}}: name and config make the
    dataset whose `score_answer(answer, entry)` is the verifier.

    Raises:
        ConfigError: an unknown dataset, or a size or argument that it refuses.
    """

    generated = True

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
        if name in BY_HASH_SEED and os.environ.get("PYTHONHASHSEED", "random") in ("", "random"):
            logger.warning(
                "reasoning-gym dataset '%s' makes other entries in every process: a resumed run would train and "
                "evaluate on other tasks than before. Start and resume it with PYTHONHASHSEED=0 in the environment, "
                "and they stay the same.",
                name,
            )
        self._name = name
        self._size = size
        self._seed = seed
        self._config = config

    def checksum(self, index: int) -> int:
        """Checksum of an entry, or of what makes it if it may be another in the process that resumes a run."""
        made_of = [self._name, self._config, self._seed + index] if self._name in BY_HASH_SEED else self[index]
        return zlib.crc32(json.dumps(made_of, sort_keys=True, default=str).encode())

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int, /) -> dict[str, Any]:
        try:
            with _drawing_from(self._seed + index):
                entry = self._dataset[index]
        except _REFUSALS as error:  # arguments that contradict each other pass its validation and fail here
            raise ConfigError(f"reasoning-gym dataset '{self._name}' cannot make this entry: {error}") from error
        return {
            "prompt": entry["question"],
            "answer": entry["answer"],
            "metadata": entry["metadata"],
            "reasoning_gym": {"name": self._name, "config": self._config, "entry": entry},
        }


@contextmanager
def _drawing_from(seed: int) -> Iterator[None]:
    """Seed Python's and NumPy's global generators, which some datasets draw from; afterwards they go on as before."""
    states = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def dataset_entries(path: str, split: str, subset: str | None, as_text: bool = False) -> "Entries":
    """One split of a file, of a folder, or of a dataset on the hub.

    Args:
        path: a .jsonl, .json, .parquet or .csv file, a folder of such files, a folder made by `save_to_disk`, or a
            hub name.
        split: name of the split, or a slice of it ("train[:100]"); a file has one: train. What was saved has no slices.
        subset: name of the dataset's configuration on the hub ("main" of gsm8k).
        as_text: leave every cell of CSV text, as in examples to imitate, which are text.

    Raises:
        ConfigError: nothing there, an unknown format, split or subset, or content that cannot be read.
    """
    local = Path(path).expanduser()
    check_dataset_path("dataset", path)
    if local.is_file() and local.suffix not in FILE_FORMATS:
        raise ConfigError(f"dataset '{path}' is of no known format", fix=f"give one of {', '.join(FILE_FORMATS)}")
    if local.is_file() and local.stat().st_size == 0:
        raise ConfigError(f"dataset '{path}' is empty", fix="give a file with entries")
    import datasets  # a second to import
    from datasets.exceptions import DatasetsError

    # It logs errors, and raises them, too: they are in the sentence below.
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
        raise ConfigError(f"cannot load split '{split}' of dataset '{path}': {reason}") from error
    return entries  # pyright: ignore[reportReturnType]


def _files_of(path: str, subset: str | None) -> dict[str, list[Path]]:
    """The files of each split, if they are read here; empty: `datasets` reads them, and guesses the types of values.

    Which files of a folder, or of a repository of the hub, are of which split is what `datasets` says.
    """
    from datasets import DownloadManager, load_dataset_builder

    local = Path(path).expanduser()
    if local.is_file():
        return {"train": [local]} if local.suffix in SUFFIXES else {}
    if local.is_dir():
        _check_one_format(local)
    try:
        config: Any = load_dataset_builder(str(local) if local.is_dir() else path, subset).config
    except OSError:  # the hub is not reached
        if not (folder := _copy_of_hub(path)):
            raise
        return _files_of(folder, subset)
    files = config.data_files
    if files is None:  # neither, and `datasets` has rows of it that were read before
        return _files_of(folder, subset) if (folder := _copy_of_hub(path)) else {}
    if _has_options(config) or not all(Path(each).suffix in SUFFIXES for paths in files.values() for each in paths):
        return {}
    found = {str(split): list(map(str, paths)) for split, paths in files.items()}
    if local.is_dir():
        copies: Any = found
    else:
        unfinished = _unfinished(path)
        with suppress(OSError):  # nothing is downloaded to a folder that is not to be written to
            unfinished.parent.mkdir(parents=True, exist_ok=True)
            if all(_is_cached(url) for urls in found.values() for url in urls):
                unfinished.unlink(missing_ok=True)
            else:
                unfinished.touch()
        copies = DownloadManager().download(found)
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
    return {split: list(map(Path, each)) for split, each in copies.items()}


def _has_options(config: Any) -> bool:
    """Whether the data's README.md has options for how `datasets` reads them (`sep`, say), which are not known here."""
    from datasets import BuilderConfig

    usual, names = type(config)(), {field.name for field in dataclasses.fields(config)}
    own = names - {field.name for field in dataclasses.fields(BuilderConfig)} - {"features"}
    return any(getattr(config, name) != getattr(usual, name) for name in own)


def _copy_of_hub(path: str) -> str | None:
    """The folder with what was downloaded of a repository of the hub, or None. ConfigError: only a part of it was."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    if _unfinished(path).exists():
        raise ConfigError(
            f"dataset '{path}' was downloaded in part only", fix="start once with a connection to the hub"
        )
    try:
        return snapshot_download(path, repo_type="dataset", local_files_only=True)
    except (HFValidationError, LocalEntryNotFoundError):
        return None


def _is_cached(url: str) -> bool:
    """Whether a file of the hub, hf://datasets/REPOSITORY@REVISION/NAME, is on this machine."""
    from huggingface_hub import try_to_load_from_cache

    repository, _, place = url.removeprefix("hf://datasets/").partition("@")
    revision, _, name = place.partition("/")
    if not url.startswith("hf://datasets/"):
        return False
    return isinstance(try_to_load_from_cache(repository, name, revision=revision, repo_type="dataset"), str)


def _unfinished(path: str) -> Path:
    """The file that is there until all files of a repository of the hub are downloaded."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE) / f"datasets--{path.replace('/', '--')}" / "trinity_lightning.unfinished"


def _check_one_format(folder: Path) -> None:
    """Refuse files of several formats, of which `datasets` reads one; its README.md may say which (`configs`)."""
    from datasets.data_files import DataFilesDict, get_data_patterns

    readme = folder / "README.md"
    if readme.is_file() and "\nconfigs:" in readme.read_text(encoding="utf-8"):
        return
    files = DataFilesDict.from_patterns(get_data_patterns(str(folder)), base_path=str(folder))
    paths = [Path(each) for of_split in files.values() for each in of_split]
    kinds = {FILE_FORMATS[path.suffix]: path.name for path in paths if path.suffix in FILE_FORMATS}
    if len(kinds) > 1:
        raise ConfigError(
            f"dataset '{folder}' has files of several formats, such as {' and '.join(sorted(kinds.values()))}",
            fix="leave those of one format there, or give a single file",
        )


def _rows_of(files: dict[str, list[Path]], split: str, as_text: bool) -> FileEntries:
    from datasets import ReadInstruction

    names = names_of(split)
    used = {name: paths for name, paths in files.items() if name in names}
    paths = [file for paths in used.values() for file in paths]
    entries = _read(tuple((file, file.stat().st_size, file.stat().st_mtime_ns) for file in paths), as_text)
    counts = iter(entries.counts)
    sizes = {name: sum(itertools.islice(counts, len(paths))) for name, paths in used.items()}
    starts = dict(zip(sizes, itertools.accumulate(sizes.values(), initial=0), strict=False))
    parts = ReadInstruction.from_spec(split).to_absolute(dict.fromkeys(files, 0) | sizes)
    return entries.chosen([slice(starts[one.splitname] + one.from_, starts[one.splitname] + one.to) for one in parts])


@functools.lru_cache(maxsize=4)
def _read(files: tuple[tuple[Path, int, int], ...], as_text: bool) -> FileEntries:
    """The rows of files, by path, size and time of their last change: read once for the check and for the run."""
    return FileEntries([file for file, _, _ in files], as_text)


def names_of(split: str) -> list[str]:
    """The names of splits in a slice, or in a sum of several, in order, each once."""
    return list(dict.fromkeys(name.partition("[")[0].strip() for name in split.split("+")))


def _split_of(splits: Any, split: str) -> "Entries":
    if split not in splits:
        raise ConfigError(unknown_name("split", split, splits))
    return splits[split]


def warn_of_trained_entries(trained: Iterable["TasksetConfig"], evaluated: Iterable["TasksetConfig"]) -> None:
    """Warn of entries of datasets that are both trained on and evaluated on, as of overlapping slices of one split."""
    size = functools.cache(lambda path, split, subset: len(dataset_entries(path, split, subset)))
    for own, other in itertools.product(evaluated, trained):
        if own.source == other.source == "dataset" and _place(own) == _place(other):
            rows, others = _rows(own, size), _rows(other, size)
            if both := sum(int((mine & others[name]).sum()) for name, mine in rows.items() if name in others):
                logger.warning("%d of %d tasks of eval_tasksets '%s' (split %s) are trained on, too (split %s).",
                               both, sum(map(np.sum, rows.values())), own.name, own.split, other.split)  # fmt: skip


def _place(taskset: "TasksetConfig") -> tuple[str, str | None]:
    local = Path(str(taskset.path)).expanduser()
    return str(local.resolve() if local.exists() else taskset.path), taskset.args.get("subset")


def _rows(taskset: "TasksetConfig", size: Callable[[str, str, str | None], int]) -> dict[str, np.ndarray]:
    """Which entries of each split, whose size is asked for, a taskset has: all of them, or slices."""
    from datasets import ReadInstruction

    sizes = {name: size(str(taskset.path), name, taskset.args.get("subset")) for name in names_of(taskset.split)}
    rows = {name: np.zeros(count, bool) for name, count in sizes.items()}
    for each in ReadInstruction.from_spec(taskset.split).to_absolute(sizes):
        rows[each.splitname][each.from_ : each.to] = True
    return rows


def taskset_of(config: "TasksetConfig", settings: Mapping[str, Any]) -> "Taskset":
    """The taskset that a configuration describes, of reasoning-gym or of a dataset; `settings`: those of any source.

    Entry i of reasoning-gym is drawn from seed + i: for two tasksets without a common entry, keep their seeds `size`
    apart. A ConfigError: a path or size that is missing, or as the source and `Taskset` say.
    """
    from trinity_lightning.explorer.tasks.taskset import Taskset

    if config.path is None:
        raise ConfigError(
            f"taskset.path of '{config.name}' is not given, and source {config.source} needs it.", key="taskset.path"
        )
    if config.source == "reasoning_gym":
        if config.size is None:
            raise ConfigError(
                f"taskset.size of '{config.name}' is not given: say how many entries.", key="taskset.size"
            )
        generated = ReasoningGymEntries(config.path, config.size, config.seed, dict(config.args))
        return Taskset(generated, name=config.name, **settings)
    entries = dataset_entries(config.path, config.split, config.args.get("subset"))
    return Taskset(entries, name=config.name, difficulty_field=config.difficulty_field, **settings)


def check_files(tasksets: Iterable["TasksetConfig"]) -> None:
    """Refuse files of rows as their tasksets would: before anything heavy is imported."""
    from trinity_lightning.explorer.tasks.taskset import Taskset

    for each in tasksets:
        file = Path(each.path or "").expanduser()
        if each.source == "dataset" and file.suffix in SUFFIXES and file.is_file():
            Taskset.from_config(each)


# -- what of an entry is the prompt, the answer and the conversation ---------------------------------------------------


CONVERSATIONS = "conversations"  # what some datasets call messages


@dataclass(frozen=True)
class Formatter:
    """Turns an entry into a raw task: its other fields as they are, and these three.

    - `prompt`: the text, if the entry has one.
    - `messages`: the conversation, a list of {"role", "content"}, if the entry has one or a system prompt is set.
    - `answer`: the reference answer, if there is one.

    A field named here (other than by the default) has to be there; `reward_model.ground_truth` is one within a field.
    Where neither the prompt's nor the messages' field is named, `prompt` is taken before `messages`, and this before
    `conversations`. A prompt that is a list, or JSON text of one, is a conversation.

    Attributes:
        prompt_field, answer_field, messages_field: names of an entry's fields.
        system_prompt: first message of every conversation, in place of the entry's own; None changes nothing.
        answered: whether a conversation may end with the assistant, as one of an expert does.
    """

    prompt_field: str = PROMPT
    answer_field: str = ANSWER
    messages_field: str = MESSAGES
    system_prompt: str | None = None
    answered: bool = True

    def __call__(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        """The raw task of one entry; the entry is left as it is.

        Raises:
            ConfigError: a field is missing, empty, or neither text nor a conversation; the entry has pictures; or its
                tools or chat_template_kwargs cannot be read.
        """
        fields = dict(entry)
        for default in (PROMPT, ANSWER, MESSAGES):
            field = getattr(self, f"{default}_field")
            if field != default and field not in entry:
                fields[field] = _nested_field(entry, field, f"{default}_field")
        check_media(entry)
        read_tools(entry)
        read_template_variables(entry)
        task = {key: value for key, value in entry.items() if key not in (PROMPT, ANSWER, MESSAGES)}
        task |= self._conversation(fields)
        if fields.get(self.answer_field) is not None:
            task[ANSWER] = fields[self.answer_field]
        return task

    def _conversation(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        """`prompt` if it is text, `messages` if it is not or a system prompt comes before it."""
        field = self._conversation_field(entry)
        conversation = read_messages(field, entry[field])
        task: dict[str, Any] = {}
        if isinstance(conversation, str):
            task[PROMPT] = conversation
            if self.system_prompt is None:
                return task
            conversation = [{"role": "user", "content": conversation}]
        self._check(field, conversation)
        if self.system_prompt is not None:
            rest = conversation[1:] if conversation[0]["role"] == "system" else conversation
            conversation = [{"role": "system", "content": self.system_prompt}, *rest]
        return task | {MESSAGES: conversation}

    def _check(self, field: str, conversation: object) -> None:
        """Refuse what is no conversation, and one that does not end where the policy goes on."""
        if not isinstance(conversation, list):
            raise ConfigError(
                f"field '{field}' holds {type(conversation).__name__}: a prompt is text, or a list of "
                '{"role": ..., "content": ...} messages.'
            )
        if not any(message.get("content", "").strip() for message in conversation):
            raise ConfigError(f"field '{field}' is empty: every entry needs a prompt or messages.")
        if not self.answered:
            check_asks(field, conversation)

    def _conversation_field(self, entry: Mapping[str, Any]) -> str:
        defaults = ((self.prompt_field, PROMPT), (self.messages_field, MESSAGES))
        candidates = [field for field, default in defaults if field != default] or [PROMPT, MESSAGES, CONVERSATIONS]
        present = [field for field in candidates if field in entry]
        if not present:
            fields, match = ", ".join(sorted(map(str, entry))), nearest(candidates[0], map(str, entry))
            raise ConfigError(
                f"there is no field '{candidates[0]}' among {fields or 'none'}",
                fix=(
                    "name that of the question, "
                    f"prompt_field={match or 'NAME'}, or of a conversation, messages_field=NAME"
                ),
            )
        for name in present:
            value = entry[name]
            if value.strip() if isinstance(value, str) else value:
                return name
        others = ", ".join(str(field) for field, value in entry.items() if value and field not in candidates)
        lacks = "missing" if entry[present[0]] is None else "empty"
        raise ConfigError(
            f"field '{present[0]}' is {lacks}: every entry needs a prompt or messages, in the same field "
            f"(prompt_field=NAME). Other fields of this one: {others or 'none'}."
        )


def _nested_field(entry: Mapping[str, Any], name: str, key: str) -> Any:
    """The value of a field within a field, as in `reward_model.ground_truth`; a ConfigError for `key` without one."""
    value: Any = entry
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            within = [f"{outer}.{inner}" for outer, its in entry.items() if isinstance(its, Mapping) for inner in its]
            same = next((field for field in within if field.endswith(f".{name}")), None)
            hint = (
                f"there is no field '{name}'. Did you mean '{same}'?"
                if same
                else unknown_name("field", name, [*entry, *within])
            )
            raise ConfigError(f"{hint} Correct {key}.")
        value = value[part]
    return value
