"""Task sources, which give the entries of tasksets: built-in ones by name, a user's own by their dotted path.

A task source is a class or a function. It gives entries by their index (`Entries`), or one after the other without a
length (`EntryStream`). Its arguments are `taskset.args`. If it has parameters called `path`, `split`, `size` or `seed`,
it also gets these settings of the taskset.
"""

import dataclasses
import functools
import inspect
import itertools
import json
import logging
import os
import random
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import numpy as np

from trinity_lightning.config.own_code import raised_by
from trinity_lightning.config.registry import Registry
from trinity_lightning.config.signatures import check_arguments, made
from trinity_lightning.config.taskset import TasksetConfig, data_key
from trinity_lightning.config.values import unknown_name
from trinity_lightning.errors import ConfigError, configured_at

logger = logging.getLogger(__name__)

TASK_SOURCES: Registry[Callable[..., Any]] = Registry("task source")
GIVEN = ("path", "split", "size", "seed")  # settings of a taskset that a source gets as parameters of these names

# -- entries -----------------------------------------------------------------------------------------------------------


class Entries(Protocol):
    """Entries by their index: a list of dicts, a Hugging Face dataset, or a class that makes entry i on demand.

    An entry is a mapping; a `Formatter` knows which of its fields are prompt and answer. Entry i has to be the same
    each time, also in another process: a resumed run compares the entries that it was trained on.

    A class may also have:
        generated = True: entries are made on demand. Only the first one is checked before a run begins.
        checksum(index): a checksum of an entry's settings, if the entry itself differs between processes.
        place(index): the place of an entry, for messages, instead of "entry 3".
        folder(index): the folder in which an entry's relative paths of pictures begin, instead of the folder of `path`.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Mapping[str, Any]: ...


class EntryStream:
    """The entries of a source without length, such as a generator, one after the other.

    To go back, as a resumed run does, the source is made again, and has to give the same entries from the first one on.
    A source with `state_dict` and `load_state_dict` goes on from its state instead; then its settings are compared
    with those of the saved run, and its entries are not.

    Args:
        make: makes the source, an iterable.
        settings: settings of the source, as plain values.
        label, key: name of the source in messages, and its dotted key.

    Raises:
        ConfigError: the source does not go on where its state was taken.
    """

    generated = True

    def __init__(
        self, make: Callable[[], Iterable[Mapping[str, Any]]], settings: Mapping[str, Any], label: str, key: str
    ) -> None:
        self._make, self._settings, self._label, self._key = make, dict(settings), label, key
        self._restart()
        self.has_state = hasattr(self._source, "state_dict") and hasattr(self._source, "load_state_dict")
        if self.has_state:
            self._check_state()

    def _restart(self, position: int = 0) -> None:
        with self._named_errors():
            self._source: Any = self._make()
            self._entries = iter(self._source)
        self._next = position  # index of the entry that `_entries` gives next
        self._last: tuple[int, Mapping[str, Any]] = (-1, {})  # index and value of the entry that it gave last

    def __getitem__(self, index: int, /) -> Mapping[str, Any]:
        """Entry `index`; IndexError: the source ends before it."""
        if not self.reaches(index):
            raise IndexError(index)
        return self._last[1]

    def reaches(self, index: int) -> bool:
        """True if the source has an entry `index`."""
        if index < self._next and index != self._last[0]:
            self._restart()
        while self._next <= index:
            with self._named_errors():
                entry = next(self._entries, _END)
            if entry is _END:
                return False
            self._last = self._next, entry
            self._next += 1
        return True

    def state_dict(self, position: int) -> dict[str, Any]:
        """The settings, and the state of the source from which entry `position` comes next."""
        if not self.has_state:
            return {}
        if position < self._next:
            self._restart()
        if position > self._next:
            self.reaches(position - 1)
        with self._named_errors():
            return {"settings": self._settings, "source": self._source.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any], position: int) -> None:
        """Go on with entry `position`, before which `state` was taken; a source that stands there is not made again.

        Raises:
            ConfigError: the source had other settings, or had no state then.
        """
        if not self.has_state:
            return
        if "settings" not in state:
            raise ConfigError(
                f"{self._label} has a state now, and had none when the run was saved",
                key=self._key,
                fix="resume with the source as it was, without state_dict, or start a new run",
            )
        if state["settings"] != self._settings:
            raise ConfigError(
                f"{self._label} has the settings {self._settings}, and had {state['settings']} when the run was saved: "
                "resume with those, or start a new run.",
                key=self._key,
            )
        if position == self._next and _equal(state["source"], self.state_dict(position)["source"]):
            return
        self._restart(position)
        self._load(state)

    def _load(self, state: Mapping[str, Any]) -> None:
        with self._named_errors():
            self._source.load_state_dict(state["source"])
            self._entries = iter(self._source)

    def _check_state(self) -> None:
        """Refuse a source whose state, taken after its first entry, does not lead to its second one."""
        if not self.reaches(1):
            return
        first, state, second = self[0], self.state_dict(1), self[1]
        self._restart(1)
        self._load(state)
        if not self.reaches(1) or not _equal(self[1], second):
            again = ", but gives an entry again" if _equal(self._last[1], first) else ""
            raise ConfigError(
                f"{self._label} does not go on where its state was taken{again}: state_dict has to say which entry "
                "comes next. A generator, say, counts an entry before it yields it.",
                key=self._key,
            )
        self._restart()

    def _named_errors(self) -> AbstractContextManager[None]:
        return raised_by(self._label, functools.partial(ConfigError, key=self._key))


_END: Any = object()  # in place of an entry: the source has ended


def _equal(first: Any, second: Any) -> bool:
    """True if two entries or states have the same values; arrays are compared as lists."""
    if hasattr(first, "tolist") and hasattr(second, "tolist"):
        return _equal(first.tolist(), second.tolist())
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return first.keys() == second.keys() and all(_equal(value, second[name]) for name, value in first.items())
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return len(first) == len(second) and all(map(_equal, first, second))
    return first is second or bool(first == second) or bool(first != first and second != second)  # NaN equals NaN


def place_of(entries: Any, index: int) -> str:
    """The place of an entry, for messages: the line in its file, counted from 1, or its number, counted from 0."""
    return entries.place(index) if hasattr(entries, "place") else f"entry {index}"


# -- a source by its name and arguments --------------------------------------------------------------------------------


def entries_of(config: TasksetConfig, key: str = "taskset") -> Entries | EntryStream:
    """The entries that a taskset's source gives.

    Args:
        config: the taskset's section of the configuration.
        key: the dotted key of the section, for messages.

    Raises:
        ConfigError: as in `check_source`; or the source gives no entries, or refuses its arguments.
    """
    label = f"task source '{config.source}'"
    make = functools.partial(_made, check_source(config, key), config, key)
    with raised_by(label, functools.partial(ConfigError, key=f"{key}.source")):
        source = make()
    if hasattr(source, "__iter__") and not hasattr(source, "__len__"):
        settings = {name: getattr(config, name) for name in ("source", *GIVEN, "args")}
        return EntryStream(make, json.loads(json.dumps(settings, default=str)), label, f"{key}.source")
    if isinstance(source, Mapping | str) or not hasattr(source, "__len__"):
        keys = f" with the keys {', '.join(map(str, source))}" if isinstance(source, Mapping) else ""
        raise ConfigError(
            f"{key}.source: {label} gives a {type(source).__name__}{keys}",
            key=f"{key}.source",
            fix=(
                "give entries by their index (a list, or a class with __len__ and __getitem__), or one after the other "
                "(a generator, or a class with __iter__)"
            ),
        )
    with raised_by(label, functools.partial(ConfigError, key=f"{key}.source")):
        return source if hasattr(source, "__getitem__") else list(source)


def check_source(config: TasksetConfig, key: str = "taskset") -> Callable[..., Any]:
    """The function or class that a taskset's source names, which takes the taskset's arguments.

    Raises:
        ConfigError: there is no such source, it does not take an argument of the taskset, or it needs another one.
    """
    label = f"task source '{config.source}'"
    try:
        source: Any = TASK_SOURCES.resolve(config.source)
    except ConfigError as error:
        raise ConfigError(f"{key}.source: {error}", key=f"{key}.source") from error
    if not callable(source):
        raise ConfigError(
            f"{key}.source: {label} cannot be called", key=f"{key}.source", fix="name a function or a class"
        )
    try:
        parameters = inspect.signature(source).parameters
    except ValueError as error:  # written in C, such as builtins.range
        raise ConfigError(
            f"{key}.source: {label} does not tell its parameters",
            key=f"{key}.source",
            fix="name a function or a class that is written in Python",
        ) from error
    for name in GIVEN:
        value = getattr(config, name)
        if name not in parameters:
            if name != "seed" and value != getattr(TasksetConfig, name):  # the order has the seed, too
                raise ConfigError(
                    f"{key}.{name} is {value}, and {label} has no parameter {name}",
                    key=f"{key}.{name}",
                    fix="leave it out",
                )
        elif value is None and parameters[name].default is inspect.Parameter.empty:
            raise ConfigError(
                f"{key}.{name} of '{config.name}' is not given, and source {config.source} needs it.",
                key=f"{key}.{name}",
            )
    if source is not reasoning_gym:  # its arguments are those of the dataset `path`, which checks them
        check_arguments(label, source, config.args, f"{key}.args", GIVEN)
    return source


def _made(source: Callable[..., Any], config: TasksetConfig, key: str) -> Any:
    """The entries, or the stream, that a source makes of a taskset's arguments and its settings in `GIVEN`."""
    values = {name: value for name in GIVEN if (value := getattr(config, name)) is not None}
    with configured_at(data_key(config, key), section=key):
        if isinstance(source, type):
            return made(f"task source '{config.source}'", source, config.args, f"{key}.args", values)
        parameters = inspect.signature(source).parameters
        return source(**{name: value for name, value in values.items() if name in parameters}, **config.args)


# -- addition: built-in sums -------------------------------------------------------------------------------------------

_SPLIT_SEED = 0  # seed of the split of sums into train and heldout; no other seed moves a sum to the other part


def addition(split: str = "train", low: int = 0, high: int = 20, heldout: int = 128) -> list[dict[str, Any]]:
    """The sums a + b of all low <= a, b <= high, shuffled once and for all; the first `heldout` are kept apart.

    Raises:
        ConfigError: an unknown split, low > high, or no sum left to train on.
    """
    if split not in ("train", "heldout"):
        raise ConfigError(unknown_name("split", split, ("train", "heldout")), key=".split")
    if low > high:
        raise ConfigError(f"low = {low} is above high = {high}: there is no sum to ask for.", key=".args.low")
    pairs = list(itertools.product(range(low, high + 1), repeat=2))
    if not 0 <= heldout < len(pairs):
        raise ConfigError(
            f"heldout = {heldout}: there are {len(pairs)} sums, hold out 0 to {len(pairs) - 1} of them.",
            key=".args.heldout",
        )
    random.Random(_SPLIT_SEED).shuffle(pairs)
    chosen = pairs[heldout:] if split == "train" else pairs[:heldout]
    return [{"prompt": f"What is {a} + {b}? Reply with only the number.", "answer": str(a + b)} for a, b in chosen]


# -- reasoning_gym: tasks with verifiers of their own ------------------------------------------------------------------

# Errors of reasoning-gym for arguments that do not fit; it validates by assert statements.
_REFUSALS = (AssertionError, ArithmeticError, LookupError, TypeError, ValueError)
# Datasets of reasoning-gym whose entries depend on the order of a set of texts, which differs between processes.
BY_HASH_SEED = (
    "intermediate_integration", "isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note",
    "word_ladder",
)  # fmt: skip


def reasoning_gym(path: str, size: int, seed: int = 0, **arguments: Any) -> "ReasoningGymEntries":
    """The entries of the reasoning-gym dataset called `path`, with that dataset's own arguments.

    For two tasksets without a common entry, keep their seeds `size` apart.
    """
    return ReasoningGymEntries(path, size, seed, arguments)


class ReasoningGymEntries:
    """Entries of a reasoning-gym dataset, each generated when it is asked for: entry i depends on seed + i only.

    Entries of datasets in BY_HASH_SEED also depend on Python's hash seed, which each process draws unless
    PYTHONHASHSEED is set. An entry is {"prompt", "answer", "metadata", "reasoning_gym": {"name", "config", "entry"}}.
    The verifier is `score_answer(answer, entry)` of the dataset that name and config make.

    Raises:
        ConfigError: an unknown dataset, or a size or argument that it refuses.
    """

    generated = True

    def __init__(self, name: str, size: int, seed: int, config: dict[str, Any]) -> None:
        import reasoning_gym  # takes a second
        from reasoning_gym.factory import DATASETS

        if name not in DATASETS:
            raise ConfigError(unknown_name("reasoning-gym dataset", name, DATASETS), key=".path")
        fields = {field.name for field in dataclasses.fields(DATASETS[name][1])}
        for key in config:
            if key not in fields:
                message = unknown_name(f"argument of reasoning-gym dataset '{name}'", key, fields)
                raise ConfigError(message, key=f".args.{key}")
        try:
            self._dataset = reasoning_gym.create_dataset(name, size=size, seed=seed, **config)
        except _REFUSALS as error:
            raise ConfigError(f"reasoning-gym dataset '{name}' refuses its arguments: {error}", key=".args") from error
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
        """Checksum of an entry, or of its dataset's settings if entries may differ between processes."""
        content = [self._name, self._config, self._seed + index] if self._name in BY_HASH_SEED else self[index]
        return zlib.crc32(json.dumps(content, sort_keys=True, default=str).encode())

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int, /) -> dict[str, Any]:
        try:
            with _drawing_from(self._seed + index):
                entry = self._dataset[index]
        except _REFUSALS as error:  # arguments that contradict each other pass its validation and fail here
            raise ConfigError(
                f"reasoning-gym dataset '{self._name}' cannot make this entry: {error}", key=".args"
            ) from error
        return {
            "prompt": entry["question"],
            "answer": entry["answer"],
            "metadata": entry["metadata"],
            "reasoning_gym": {"name": self._name, "config": self._config, "entry": entry},
        }


@contextmanager
def _drawing_from(seed: int) -> Iterator[None]:
    """Seed Python's and NumPy's global generators, from which some datasets draw, and restore their states."""
    states = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
