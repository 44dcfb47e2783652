"""Tasksets: the entries of a source as raw tasks, in a fixed order, with a cursor that a checkpoint can hold."""

from __future__ import annotations

import json
import logging
import zlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

from trinity_lightning.common.messages import without_none
from trinity_lightning.common.pictures.picture import Picture
from trinity_lightning.common.rows import MOST_COMPARED, MOST_NAMED, check_rows, spread
from trinity_lightning.config.own_code import raised_by
from trinity_lightning.config.taskset import TASK_ORDERS, TasksetConfig, data_key
from trinity_lightning.config.values import one_of, whole_number
from trinity_lightning.errors import ConfigError, configured_at
from trinity_lightning.explorer.tasks.dataset import folder_of, undecoded
from trinity_lightning.explorer.tasks.files import SUFFIXES
from trinity_lightning.explorer.tasks.formatter import Formatter
from trinity_lightning.explorer.tasks.order import order_of
from trinity_lightning.explorer.tasks.sources import (
    Entries,
    EntryStream,
    addition,
    check_source,
    entries_of,
    place_of,
)
from trinity_lightning.explorer.tasks.task import IMAGES

logger = logging.getLogger(__name__)

MOST_CHECKED = 64  # number of generated entries, at most, that are compared when a run is resumed

Format = Callable[[Mapping[str, Any]], dict[str, Any]]  # from an entry to a raw task

# -- the interface for the explorer ------------------------------------------------------------------------------------


class TaskSelection(ABC):
    """Raw tasks to train on, in some order, with a cursor for checkpoints."""

    name: str

    @property
    @abstractmethod
    def tasksets(self) -> Mapping[str, Taskset]:
        """The tasksets that tasks are selected from, by name."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Every raw task once."""

    @abstractmethod
    def next_batch(self, n: int) -> list[dict[str, Any]]:
        """The next n raw tasks; fewer, and finally none, only when the selection is exhausted."""

    @abstractmethod
    def update(self, pass_rates: Mapping[str, Mapping[int, tuple[float, int]]]) -> None:
        """Take note of the results of tasks.

        Args:
            pass_rates: mean reward and number of rollouts of each task, by taskset and index.
        """

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """The cursor."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from the cursor that `state_dict` returned."""


# -- one taskset ------------------------------------------------------------------------------------------------------


class Taskset(TaskSelection):
    """The entries of a source as raw tasks.

    A raw task is the entry's fields with `prompt` or `messages`, `answer` and `images` if there are any (see
    `Formatter`), and `task_index` {"taskset_id": name of the taskset, "index": position in the source}.

    `taskset[i]` is the raw task of entry i in the source; `next_batch` follows the order and moves the cursor.

    Args:
        entries: entries by their index, such as a list of dicts; or a stream, which has no length, and for which the
            order has to be `sequential`.
        name: name of the taskset in metrics and in `task_index`.
        formatter: makes a raw task of an entry; None: a `Formatter` of the usual fields.
        order: `sequential`; `shuffled`: in each epoch a permutation that depends on size, seed and epoch alone;
            `easy_to_hard`: by the number in `difficulty_field`, lowest first; or `by_difficulty`: tasks that are solved
            half of the time, by the rates that `update` gets (see `DifficultySelector`).
        seed: seed of the order.
        epochs: number of times that the entries are handed out; None: without end.
        difficulty_field: an entry's field with a number, for `easy_to_hard`.
        key: the dotted key that the taskset stands under, for messages.
        data_key: the dotted key that names the entries, for an error about them; None: `key`.
        folder: the folder in which relative paths of pictures begin, unless the entries say otherwise.

    Attributes:
        most_pictures: largest number of pictures of an entry, among those that were checked before the run.

    Raises:
        ConfigError: no entries, an unknown order or one that a stream cannot have, a difficulty that is no number, or
            entries that the formatter refuses.
    """

    def __init__(
        self,
        entries: Entries | EntryStream,
        *,
        name: str = "taskset",
        formatter: Format | None = None,
        order: str = "shuffled",
        seed: int = 0,
        epochs: int | None = None,
        difficulty_field: str | None = None,
        key: str = "taskset",
        data_key: str | None = None,
        folder: Path = Path(),
    ) -> None:
        one_of(f"{key}.order", order, TASK_ORDERS, label="order of a taskset")
        whole_number(None, epochs, least=1, optional=True, label=f"epochs of taskset '{name}'")
        self._key, self._data_key = key, data_key or key
        self._stream = entries if isinstance(entries, EntryStream) else None
        self._size = None if isinstance(entries, EntryStream) else len(entries)
        if not (self._stream.reaches(0) if self._stream else self._size):
            raise ConfigError(f"taskset '{name}' has no entries.", key=self._data_key)
        if self._stream and (order != "sequential" or epochs is not None):
            needed = f"order={order} needs" if order != "sequential" else "an evaluation needs"
            fix = f"set {key}.order=sequential, or " * (order != "sequential") + "give the source a method __len__"
            raise ConfigError(
                f"{needed} a source with a length, and that of taskset '{name}' has none",
                key=f"{key}.order" if order != "sequential" else f"{key}.source",
                fix=fix,
            )
        whole_number(f"{key}.seed", seed, least=0, label=f"seed of taskset '{name}'")
        self.name = name
        self.order = order
        self.seed = seed
        self.epochs = epochs
        self._formatter, self._folder = formatter or Formatter(), folder
        self._entries: Any = undecoded(entries, getattr(self._formatter, "picture_fields", ()))
        self._position = 0  # raw tasks handed out since the first epoch began
        # Checksums of each entry that was handed out, and of the content of its pictures (0 without any), by its index.
        self._seen: dict[int, tuple[int, int]] = {}
        # A stream that saves its own state may hand out other entries after a resume, so that none are compared.
        self._compares = not (self._stream and self._stream.has_state)
        self.most_pictures = 0
        self.check_entries(self._check_pictures)  # a bad entry is refused now, not in the middle of a run
        self._order = order_of(name, order, self._entries, self._size, seed, difficulty_field, key)

    @classmethod
    def addition(
        cls,
        split: str = "train",
        low: int = 0,
        high: int = 20,
        heldout: int = 128,
        seed: int = 0,
        *,
        name: str = "addition",
        **options: Any,
    ) -> Taskset:
        """The sums a + b of all low <= a, b <= high, as questions; `heldout` of them are never in the train split.

        The held-out sums depend on low, high and heldout alone. `seed` is the order's seed, and `options` are further
        arguments of `Taskset`.

        Raises:
            ConfigError: an unknown split, low > high, or no sum left in the split.
        """
        with configured_at("taskset"):
            sums = addition(split, low, high, heldout)
        return cls(sums, name=name, seed=seed, **options)

    @classmethod
    def from_config(
        cls, config: TasksetConfig, epochs: int | None = None, answered: bool = False, key: str = "taskset"
    ) -> Taskset:
        """The taskset that a configuration describes.

        Args:
            config: the taskset's section of the configuration.
            epochs: number of times that the entries are handed out; None: without end.
            answered: True if conversations may end with the assistant's answer; see `Formatter`.
            key: the dotted key that the configuration stands under, for messages.

        Raises:
            ConfigError: as in `entries_of` and `Taskset`.
        """
        return cls(
            entries_of(config, key),
            name=config.name,
            formatter=Formatter(
                config.prompt_field,
                config.answer_field,
                config.messages_field,
                config.system_prompt,
                answered,
                config.images_field,
            ),
            order=config.order,
            seed=config.seed,
            epochs=epochs,
            difficulty_field=config.difficulty_field,
            key=key,
            data_key=data_key(config, key),
            folder=folder_of(config.path),
        )

    @property
    def tasksets(self) -> Mapping[str, Taskset]:
        return {self.name: self}

    def __len__(self) -> int:
        if self._size is None:
            raise ConfigError(f"the source of taskset '{self.name}' has no length.", key=self._key)
        return self._size

    def __getitem__(self, index: int) -> dict[str, Any]:
        """The raw task of entry `index`; a new dict each time, whose values are the entry's own."""
        index = index if self._size is None else range(self._size)[index]
        with self._whole_keys():
            try:
                return self._raw_task(index)
            except ConfigError as error:
                message = f"taskset '{self.name}', {self.place(index)}: {error}"
                raise ConfigError(message, key=error.key) from error

    def _whole_keys(self) -> AbstractContextManager[None]:
        return configured_at(self._data_key, section=self._key)

    def _entry(self, index: int) -> Mapping[str, Any]:
        with self._named_errors():
            return self._entries[index]

    def _named_errors(self) -> AbstractContextManager[None]:
        return raised_by("its source", partial(ConfigError, key=f"{self._key}.source"))

    def _raw_task(self, index: int) -> dict[str, Any]:
        entry = self._entry(index)
        if isinstance(self._formatter, Formatter):
            folder = self._entries.folder(index) if hasattr(self._entries, "folder") else self._folder
            task = self._formatter(entry, folder)
        else:
            task = self._formatter(entry)
        return task | {"task_index": {"taskset_id": self.name, "index": index}}

    def check_entries(self, check: Callable[[dict[str, Any]], object]) -> None:
        """Check the raw task of every entry, or of the first one if entries are generated.

        Args:
            check: raises a ConfigError for a raw task that cannot be used.

        Raises:
            ConfigError: the formatter or the check refuses entries; one message counts all of them.
        """
        count = len(self) if self.all_checked else 1
        with self._whole_keys():
            check_rows(f"taskset '{self.name}'", count, lambda index: check(self._raw_task(index)), self.place)

    @property
    def all_checked(self) -> bool:
        """True if every entry is checked before a run: none is generated."""
        return not getattr(self._entries, "generated", False)

    def _check_pictures(self, raw_task: Mapping[str, Any]) -> None:
        for picture in (pictures := _pictures_of(raw_task)):
            picture.check()
        self.most_pictures = max(self.most_pictures, len(pictures))

    def _checksums(self, index: int, raw_task: Mapping[str, Any]) -> tuple[int, int] | None:
        """Checksums of an entry and of its pictures; None if a picture cannot be read, which its rollouts will say."""
        try:
            of_pictures = _picture_checksum(raw_task)
        except ConfigError:
            return None
        return self._checksum(index, raw_task), of_pictures

    def _checksum(self, index: int, raw_task: Mapping[str, Any]) -> int:
        """Checksum of an entry: by the source's method `checksum`, or else of the values that are not null.

        Numbers count as text, because other entries decide whether a column of CSV is one of numbers. Pictures count by
        their outlines, wherever their files lie: `_picture_checksum` is of their content.
        """
        if (checksum := getattr(self._entries, "checksum", None)) is not None:
            with self._named_errors():
                return checksum(index)
        entry = without_none(self._entry(index))
        values = {name: str(value) if isinstance(value, int | float) else value for name, value in entry.items()}
        if pictures := _pictures_of(raw_task):
            fields = getattr(self._formatter, "picture_fields", ())
            values = {name: value for name, value in values.items() if name not in fields}
            values[IMAGES] = [picture.outline for picture in pictures]
        return zlib.crc32(json.dumps(values, default=lambda value: type(value).__name__, skipkeys=True).encode())

    def _check_seen(self, seen: Mapping[int, tuple[int, int]]) -> None:
        """Compare the entries that a saved run was handed; of generated entries only a few, evenly spread.

        The content of pictures is compared for `MOST_COMPARED` entries, evenly spread too: a run may have seen a
        hundred thousand files. Of all others the sizes are compared.
        """
        indices: Sequence[int] = sorted(index for index in seen if self._seen.get(index) != seen[index])
        if getattr(self._entries, "generated", False):
            indices = spread(indices, MOST_CHECKED)
        read = {*spread([index for index in indices if seen[index][1]], MOST_COMPARED)}

        def has_changed(index: int) -> bool:
            checksum, of_pictures = seen[index]
            task = self[index]
            return self._checksum(index, task) != checksum or (index in read and _picture_checksum(task) != of_pictures)

        changed = list(filter(has_changed, indices))
        if changed:
            places = ", ".join(map(self.place, changed[:MOST_NAMED])) + ", ..." * (len(changed) > MOST_NAMED)
            raise ConfigError(
                f"taskset '{self.name}' is not the one that was saved: of the entries that were tried {len(changed)} "
                f"have changed ({places}), so that its cursor would point at other tasks. Resume with these entries as "
                "they were (others may change), or start a new run.",
                key=self._key,
            )

    def place(self, index: int) -> str:
        """The place of entry `index`, for messages; see `place_of`."""
        return place_of(self._entries, index)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Every raw task once, in the source's order; the cursor stays where it is."""
        return (self[index] for index in range(len(self)))

    def next_batch(self, n: int) -> list[dict[str, Any]]:
        """The next n raw tasks; a batch runs on into the next epoch.

        There are fewer than n, and finally none, only when `epochs` are over, or a stream has ended.
        """
        whole_number(None, n, least=1, label=f"size of a batch of taskset '{self.name}'")
        end = self._position + n
        if self.epochs is not None:
            end = min(end, self.epochs * len(self))
        batch, seen = [], {}
        for index in self._order.indices(self._position, end):
            if self._stream and not self._stream.reaches(index):
                break
            batch.append(self[index])
            if self._compares and (checksums := self._checksums(index, batch[-1])) is not None:
                seen[index] = checksums
        self._seen |= seen
        self._position += len(batch)
        return batch

    def forget(self, index: int) -> None:
        """Forget that an entry was handed out: it gave no experience, and may be changed before the run is resumed."""
        self._seen.pop(index, None)

    def update(self, pass_rates: Mapping[str, Mapping[int, tuple[float, int]]]) -> None:
        self._order.update(pass_rates.get(self.name, {}))

    def state_dict(self) -> dict[str, Any]:
        """The cursor, the settings that it belongs to, and checksums of the entries that were handed out."""
        state = {
            "name": self.name,
            "size": self._size,
            "seed": self.seed,
            "order": self.order,
            "position": self._position,
            "seen": [list(self._seen), *self._seen_checksums()],
            "difficulty": self._order.state_dict(),
        }
        return state | {"stream": self._stream.state_dict(self._position)} if self._stream else state

    def _seen_checksums(self) -> list[list[int]]:
        """The checksums of entries, and, of a taskset with pictures, those of their pictures."""
        entries, pictures = ([pair[place] for pair in self._seen.values()] for place in (0, 1))
        return [entries, pictures] if self.most_pictures or any(pictures) else [entries]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the saved taskset stood; entries that were not handed out, or were forgotten, may have changed.

        Raises:
            ConfigError: the state belongs to another taskset; the message says what differs.
        """
        check_state(self.name, state, self.state_dict(), self._key)
        if self._stream:
            self._stream.load_state_dict(state["stream"], state["position"])
        if "seen" in state:
            indices, checksums, *of_pictures = state["seen"]
            pairs = zip(checksums, *(of_pictures or [[0] * len(indices)]), strict=True)
            seen = dict(zip(indices, pairs, strict=True)) if self._compares else {}
            self._check_seen(seen)
            self._seen = seen
        elif state["position"]:
            logger.warning(
                "taskset '%s': the checkpoint is of an earlier version and does not say which entries it was trained "
                "on, so that they may have changed since.",
                self.name,
            )
        self._position = state["position"]
        self._order.load_state_dict(state["difficulty"])


def _picture_checksum(raw_task: Mapping[str, Any]) -> int:
    """Checksum of the content of a raw task's pictures; 0 without any."""
    pictures = _pictures_of(raw_task)
    return zlib.crc32(" ".join(picture.fingerprint for picture in pictures).encode()) if pictures else 0


def _pictures_of(raw_task: Mapping[str, Any]) -> list[Picture]:
    pictures = raw_task.get(IMAGES)
    return [picture for picture in pictures if isinstance(picture, Picture)] if isinstance(pictures, list) else []


# In earlier versions, the name of a taskset whose source and path were set on top of the default choice, addition.
NAME_OF_EARLIER_VERSIONS = "addition"


_COMPARED = ("name", "size", "seed", "order")  # parts of a state that must not change


def check_state(name: str, state: Mapping[str, Any], current: Mapping[str, Any], key: str = "taskset") -> None:
    """Refuse the saved state of another taskset than the one that has the state `current`; `key` is for messages.

    Raises:
        ConfigError: the message says what differs.
    """
    if state.get("name") == NAME_OF_EARLIER_VERSIONS:
        state = {**state, "name": current["name"]}
    expected = current.keys() - {"seen"}  # states of earlier versions have `content` instead, a checksum of all entries
    if state.keys() - {"seen", "content"} != expected:
        raise ConfigError(f"not the state of a taskset: it has {sorted(state)}, expected {sorted(current)}.", key=key)
    different = [f"{part} {state[part]!r} -> {current[part]!r}" for part in _COMPARED if state[part] != current[part]]
    if different:
        raise ConfigError(
            f"taskset '{name}' is not the one that was saved ({', '.join(different)}): its cursor would point "
            "at other tasks. Resume with the saved taskset, or start a new run.",
            key=key,
        )


# -- several tasksets --------------------------------------------------------------------------------------------------


class TasksetMixture(TaskSelection):
    """Hands out the tasks of several tasksets. A taskset's share is its weight divided by the sum of weights.

    A taskset that is exhausted leaves its share to the others.

    Args:
        tasksets: tasksets with different names.
        weights: a number above 0 for each taskset.
        name: name of the mixture, for messages.

    Raises:
        ConfigError: no taskset, two of one name, or a weight that is not above 0.
    """

    def __init__(self, tasksets: Sequence[Taskset], weights: Sequence[float], name: str = "mixture") -> None:
        names = [taskset.name for taskset in tasksets]
        if not names or len(set(names)) < len(names):
            raise ConfigError(f"a mixture needs tasksets with different names, these are {names}.")
        if len(weights) != len(names) or not all(weight > 0 for weight in weights):
            raise ConfigError(f"the weights of tasksets {names} must be above 0, one for each: {list(weights)}.")
        self.name = name
        self._tasksets = {taskset.name: taskset for taskset in tasksets}
        self._weights = dict(zip(names, weights, strict=True))
        self._taken = dict.fromkeys(names, 0)

    @property
    def tasksets(self) -> Mapping[str, Taskset]:
        return self._tasksets

    def __len__(self) -> int:
        return sum(map(len, self._tasksets.values()))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Every raw task once, one taskset after the other; the cursors stay where they are."""
        return (task for taskset in self._tasksets.values() for task in taskset)

    def next_batch(self, n: int) -> list[dict[str, Any]]:
        """The next n raw tasks; fewer only when all tasksets are exhausted."""
        whole_number(None, n, least=1, label=f"size of a batch of taskset '{self.name}'")
        remaining = list(self._weights)  # names of the tasksets that are not exhausted
        batches: dict[str, list[dict[str, Any]]] = {name: [] for name in self._tasksets}
        while remaining and (missing := n - sum(map(len, batches.values()))) > 0:
            shares = Counter[str]()
            for _ in range(missing):
                name = min(remaining, key=lambda name: (self._taken[name] + 1) / self._weights[name])
                self._taken[name] += 1
                shares[name] += 1
            for name, share in shares.items():
                tasks = self._tasksets[name].next_batch(share)
                batches[name] += tasks
                if len(tasks) < share:
                    self._taken[name] -= share - len(tasks)
                    remaining.remove(name)
        return [task for batch in batches.values() for task in batch]

    def update(self, pass_rates: Mapping[str, Mapping[int, tuple[float, int]]]) -> None:
        for taskset in self._tasksets.values():
            taskset.update(pass_rates)

    def state_dict(self) -> dict[str, Any]:
        cursors = {name: taskset.state_dict() for name, taskset in self._tasksets.items()}
        return {"weights": dict(self._weights), "taken": dict(self._taken), "tasksets": cursors}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the saved mixture stood.

        Raises:
            ConfigError: the state belongs to other tasksets or weights.
        """
        if state.get("weights") != self._weights:
            raise ConfigError(
                f"taskset '{self.name}' mixes {self._weights}, the saved one {state.get('weights')}: its cursor would "
                "point at other tasks. Resume with the saved tasksets, or start a new run.",
                key="tasksets",
            )
        for name, cursor in state["tasksets"].items():
            self._tasksets[name].load_state_dict(cursor)
        self._taken = dict(state["taken"])


def mixture_of(configs: Mapping[str, TasksetConfig]) -> TasksetMixture:
    """The mixture of the tasksets under these keys; errors as in `Taskset.from_config` and `TasksetMixture`."""
    tasksets = [Taskset.from_config(config, key=f"tasksets.{name}") for name, config in configs.items()]
    with configured_at("tasksets"):
        return TasksetMixture(tasksets, [config.weight for config in configs.values()])


def check_tasksets(configs: Mapping[str, TasksetConfig]) -> None:
    """Check the sources of tasksets, their arguments, and files of rows, before anything heavy is imported.

    Args:
        configs: sections of tasksets by their dotted keys, such as `eval_tasksets.sums`.

    Raises:
        ConfigError: as in `check_source`, and as in `Taskset.from_config` for a file of rows.
    """
    for key, config in configs.items():
        check_source(config, key)
        file = Path(config.path or "").expanduser()
        if config.source == "dataset" and file.suffix in SUFFIXES and file.is_file():
            Taskset.from_config(config, key=key)
