"""Where entries come from: the built-in sums, reasoning-gym's generators, files and the hub."""

import dataclasses
import itertools
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from trinity_lightning.config.values import nearest, unknown_name
from trinity_lightning.errors import ConfigError

FILE_FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}

# Of the split between train and held-out sums, and of nothing else: no other seed may move a sum across it.
_SPLIT_SEED = 0

# What reasoning-gym raises for arguments that do not fit: its validation is made of assert statements.
_REFUSALS = (AssertionError, ArithmeticError, LookupError, TypeError, ValueError)


class Entries(Protocol):
    """Entries by position: a list of dicts, a Hugging Face dataset, or a generator of entries by index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Mapping[str, Any]: ...


def addition_entries(split: str, low: int, high: int, heldout: int) -> list[dict[str, Any]]:
    """The sums a + b of all low <= a, b <= high, shuffled once and for all; the first `heldout` are kept apart.

    Raises:
        ConfigError: an unknown split, low > high, or a number of held-out sums that leaves none to train on.
    """
    if split not in ("train", "heldout"):
        raise ConfigError(unknown_name("split", split, ("train", "heldout")))
    if low > high:
        raise ConfigError(f"low = {low} is above high = {high}: there is no sum to ask for.")
    pairs = list(itertools.product(range(low, high + 1), repeat=2))
    if not 0 <= heldout < len(pairs):
        raise ConfigError(f"heldout = {heldout}: there are {len(pairs)} sums, hold out 0 to {len(pairs) - 1} of them.")
    random.Random(_SPLIT_SEED).shuffle(pairs)
    chosen = pairs[heldout:] if split == "train" else pairs[:heldout]
    return [{"prompt": f"What is {a} + {b}? Reply with only the number.", "answer": str(a + b)} for a, b in chosen]


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


def dataset_entries(path: str, split: str, subset: str | None) -> Entries:
    """One split of a file, of a folder, or of a dataset on the hub.

    Args:
        path: a .jsonl, .json, .parquet or .csv file, a folder of such files, a folder made by `save_to_disk`, or a
            hub name.
        split: name of the split, or a slice of it ("train[:100]"); a file has the one that is asked for.
        subset: name of the dataset's configuration on the hub ("main" of gsm8k).

    Raises:
        ConfigError: nothing there, an unknown format, split or subset, or content that cannot be read.
    """
    local = Path(path).expanduser()
    if local.is_file() or local.suffix in FILE_FORMATS:
        _check_file(local)
    elif not local.is_dir() and (path.startswith((".", "~", "/")) or path.count("/") > 1):
        raise ConfigError(_missing(local))
    import datasets  # a second to import
    from datasets.exceptions import DatasetsError

    try:
        if local.is_file():
            files = {split.partition("[")[0]: str(local)}
            entries = datasets.load_dataset(FILE_FORMATS[local.suffix], data_files=files, split=split)
        elif (local / "state.json").is_file():
            entries = datasets.load_from_disk(local)
        elif (local / "dataset_dict.json").is_file():
            entries = _split_of(datasets.load_from_disk(local), split)
        else:
            entries = datasets.load_dataset(str(local) if local.is_dir() else path, subset, split=split)
    except (DatasetsError, OSError, ValueError) as error:
        reason = f"{error} ({error.__cause__})" if error.__cause__ else f"{error}"
        raise ConfigError(f"cannot load split '{split}' of dataset '{path}': {reason}") from error
    return entries  # pyright: ignore[reportReturnType]


def _split_of(splits: Any, split: str) -> Entries:
    if split not in splits:
        raise ConfigError(unknown_name("split", split, splits))
    return splits[split]


def _check_file(file: Path) -> None:
    if file.suffix not in FILE_FORMATS:
        raise ConfigError(f"dataset '{file}' is of no known format: give one of {', '.join(FILE_FORMATS)}.")
    if not file.is_file():
        raise ConfigError(_missing(file))
    if file.stat().st_size == 0:
        raise ConfigError(f"dataset '{file}' is empty.")


def _missing(place: Path) -> str:
    neighbours = [path.name for path in place.parent.iterdir()] if place.parent.is_dir() else []
    match = nearest(place.name, neighbours)
    hint = f"did you mean '{place.parent / match}'?" if match else "give a file, a folder, or a hub name 'org/name'."
    return f"there is no dataset '{place}': {hint}"


# -- what of an entry is the prompt, the answer and the conversation --------------------------------------------------


PROMPT, ANSWER, MESSAGES = "prompt", "answer", "messages"


@dataclass(frozen=True)
class Formatter:
    """Turns an entry into a raw task: its other fields as they are, and these three.

    - `prompt`: the text, if the entry has one.
    - `messages`: the conversation, a list of {"role", "content"}, if the entry has one or a system prompt is set.
    - `answer`: the reference answer, if there is one.

    A field named here (other than by the default) has to be there. Where neither the prompt's nor the messages' field
    is named, `prompt` is taken before `messages`. A prompt that is a list is a conversation.

    Attributes:
        prompt_field, answer_field, messages_field: names of an entry's fields.
        system_prompt: first message of every conversation, in place of the entry's own; None changes nothing.
    """

    prompt_field: str = PROMPT
    answer_field: str = ANSWER
    messages_field: str = MESSAGES
    system_prompt: str | None = None

    def __call__(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        """The raw task of one entry; the entry is left as it is.

        Raises:
            ConfigError: a field is missing, empty, or neither text nor a conversation.
        """
        self._check_named_fields(entry)
        task = {key: value for key, value in entry.items() if key not in (PROMPT, ANSWER, MESSAGES)}
        task |= self._conversation(entry)
        if entry.get(self.answer_field) is not None:
            task[ANSWER] = entry[self.answer_field]
        return task

    def _check_named_fields(self, entry: Mapping[str, Any]) -> None:
        for default in (PROMPT, ANSWER, MESSAGES):
            field = getattr(self, f"{default}_field")
            if field != default and field not in entry:
                raise ConfigError(unknown_name("field", field, entry) + f" Mend {default}_field.")

    def _conversation(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        """`prompt` if it is text, `messages` if it is not or a system prompt comes before it."""
        field = self._conversation_field(entry)
        if isinstance(entry[field], str):
            task: dict[str, Any] = {PROMPT: entry[field]}
            if self.system_prompt is None:
                return task
            messages = [{"role": "user", "content": entry[field]}]
        else:
            task = {}
            messages = _checked_messages(field, entry[field])
        if self.system_prompt is not None:
            rest = messages[1:] if messages[0]["role"] == "system" else messages
            messages = [{"role": "system", "content": self.system_prompt}, *rest]
        return task | {MESSAGES: messages}

    def _conversation_field(self, entry: Mapping[str, Any]) -> str:
        defaults = ((self.prompt_field, PROMPT), (self.messages_field, MESSAGES))
        candidates = [field for field, default in defaults if field != default] or [PROMPT, MESSAGES]
        present = [field for field in candidates if field in entry]
        if not present:
            raise ConfigError(unknown_name("field", candidates[0], entry) + " Set prompt_field or messages_field.")
        for field in present:
            if entry[field]:
                return field
        raise ConfigError(f"field '{present[0]}' is empty: every entry needs a prompt or messages.")


def _checked_messages(field: str, source: object) -> list[dict[str, Any]]:
    if not isinstance(source, list) or not all(
        isinstance(message, Mapping) and "role" in message for message in source
    ):
        raise ConfigError(
            f"field '{field}' holds {type(source).__name__}: a prompt is text, or a list of "
            '{"role": ..., "content": ...} messages.'
        )
    return [dict(message) for message in source]
