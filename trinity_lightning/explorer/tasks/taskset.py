"""What to try: entries of a dataset as raw tasks, in a fixed order, with a cursor that a checkpoint can hold."""

from __future__ import annotations

import functools
import itertools
import json
import logging
import math
import random
import zlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any, Protocol

import numpy as np

from trinity_lightning.common.messages import without_none
from trinity_lightning.common.rows import MOST_NAMED, check_rows
from trinity_lightning.config.taskset import TASK_ORDERS, TasksetConfig
from trinity_lightning.config.values import one_of, unknown_name, whole_number
from trinity_lightning.errors import ConfigError
from trinity_lightning.explorer.tasks.task import ANSWER, MESSAGES, PROMPT

logger = logging.getLogger(__name__)

Format = Callable[[Mapping[str, Any]], dict[str, Any]]  # from an entry to a raw task

# -- entries -----------------------------------------------------------------------------------------------------------


MOST_GENERATED = 64  # of generated entries that are made again when a run is resumed
# Of the split between train and held-out sums, and of nothing else: no other seed may move a sum across it.
_SPLIT_SEED = 0


class Entries(Protocol):
    """Entries by position: a list of dicts, a Hugging Face dataset, or a generator of entries by index.

    A generator has an attribute `generated` that is true: only its first entry is looked at before a run begins. One
    whose entries differ between processes has a method `checksum(index)` of what makes them.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Mapping[str, Any]: ...


def place_of(entries: Any, index: int) -> str:
    """Where an entry is, for messages: its line if it is of a file with lines, from 1; otherwise its number, from 0."""
    return entries.place(index) if hasattr(entries, "place") else f"entry {index}"


def addition_entries(split: str, low: int, high: int, heldout: int) -> list[dict[str, Any]]:
    """The sums a + b of all low <= a, b <= high, shuffled once and for all; the first `heldout` are kept apart."""
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


# -- what the explorer asks for ---------------------------------------------------------------------------------------


class TaskSelection(ABC):
    """What the explorer trains on: raw tasks in some order, with a cursor for checkpoints."""

    name: str

    @property
    @abstractmethod
    def tasksets(self) -> Mapping[str, Taskset]:
        """What it selects from, by name."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Every raw task once."""

    @abstractmethod
    def next_batch(self, n: int) -> list[dict[str, Any]]:
        """The next n raw tasks; fewer, at last none, only when it is exhausted."""

    @abstractmethod
    def update(self, pass_rates: Mapping[str, Mapping[int, tuple[float, int]]]) -> None:
        """Take note of what tasks were worth: by taskset and index, the mean reward and the rollouts it is of."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """The cursor."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken."""


# -- the order of one taskset -----------------------------------------------------------------------------------------


class Order:
    """Which entries follow each other: `sequential` or `shuffled`. Others are in `selection`.

    Args:
        size: how many entries there are.
        seed: of the permutations, each of which depends on size, seed and epoch alone; None: as the source has them.
    """

    def __init__(self, size: int, seed: int | None) -> None:
        self._size, self._seed = size, seed

    def indices(self, begin: int, end: int) -> list[int]:
        """The entries at these positions, counted since the first epoch began."""
        return [self._at(*divmod(position, self._size)) for position in range(begin, end)]

    def _at(self, epoch: int, offset: int) -> int:
        return offset if self._seed is None else int(_permutation(self._size, self._seed, epoch)[offset])

    def update(self, pass_rates: Mapping[int, tuple[float, int]]) -> None:
        """Take note of mean rewards, and of how many rollouts, by entry; only `by_difficulty` makes use of it."""

    def state_dict(self) -> Any:
        """What is known besides the position."""

    def load_state_dict(self, state: Any) -> None:
        """Restore what `state_dict` returned."""


@functools.lru_cache(maxsize=8)
def _permutation(size: int, seed: int, epoch: int) -> np.ndarray:
    """The order of one epoch, as positions in the source, [size]."""
    return np.random.default_rng([seed, epoch]).permutation(size)


# -- one taskset ------------------------------------------------------------------------------------------------------


SOURCE_ARGS = {"addition": ("low", "high", "heldout"), "dataset": ("subset",)}


class Taskset(TaskSelection):
    """A source of raw tasks.

    A raw task is the entry's fields with `prompt` or `messages`, `answer` if there is one (see `Formatter`), and
    `task_index` {"taskset_id": name of the taskset, "index": position in the source}.

    `taskset[i]` is the raw task of entry i, whatever the order; `next_batch` follows the order and moves the cursor.

    Args:
        entries: a sequence of dicts.
        name: how the taskset is called in metrics and in `task_index`.
        formatter: which fields are prompt, answer and messages.
        order: `sequential`; `shuffled`: a permutation of each epoch that depends on size, seed and epoch alone;
            `easy_to_hard`: by the number in `difficulty_field`, lowest first; or `by_difficulty`: those that are
            solved half of the time, as `update` was given it (see `DifficultySelector`).
        seed: of the order.
        epochs: how often the entries are handed out; None for without end.
        difficulty_field: an entry's field with a number, for `easy_to_hard`.

    Raises:
        ConfigError: no entries, an unknown order, a difficulty that is no number, or entries that the formatter
            refuses.
    """

    def __init__(
        self,
        entries: Entries,
        *,
        name: str = "taskset",
        formatter: Format | None = None,
        order: str = "shuffled",
        seed: int = 0,
        epochs: int | None = None,
        difficulty_field: str | None = None,
    ) -> None:
        one_of("order of a taskset", order, TASK_ORDERS)
        whole_number(f"epochs of taskset '{name}'", epochs, least=1, optional=True)
        if len(entries) == 0:
            raise ConfigError(f"taskset '{name}' has no entries.", key="taskset")
        whole_number(f"seed of taskset '{name}'", seed, least=0)
        self.name = name
        self.order = order
        self.seed = seed
        self.epochs = epochs
        self._entries = entries
        if formatter is None:
            from trinity_lightning.explorer.tasks.sources import Formatter

            formatter = Formatter()
        self._formatter = formatter
        self._position = 0  # raw tasks handed out since the first epoch began
        self._seen: dict[int, int] = {}  # checksum of each entry that was handed out, by its index
        self.check_entries(lambda _: None)  # what is wrong shows now, not in the middle of a run
        if order in ("sequential", "shuffled"):
            self._order = Order(len(entries), seed if order == "shuffled" else None)
        else:
            self._order = order_by_difficulty(order, entries, name, seed, difficulty_field)

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

        Which sums are held out depends on low, high and heldout alone; `seed` is that of the order, and `options` are
        those of `Taskset`.

        Raises:
            ConfigError: an unknown split, low > high, or no sum left in the split.
        """
        return cls(addition_entries(split, low, high, heldout), name=name, seed=seed, **{"formatter": dict, **options})

    @classmethod
    def from_config(cls, config: TasksetConfig, epochs: int | None = None, answered: bool = False) -> Taskset:
        """The taskset that a configuration describes.

        Args:
            config: of the taskset.
            epochs: how often the entries are handed out; None for without end.
            answered: whether its conversations may end with the assistant's answer; see `Formatter`.

        Raises:
            ConfigError: an unknown source or argument, a path or size that is missing, or as the source says.
        """
        known = SOURCE_ARGS.get(config.source, config.args)
        for key in config.args:
            if key not in known:
                raise ConfigError(unknown_name(f"argument of source '{config.source}'", key, known))
        settings: dict[str, Any] = {"order": config.order, "seed": config.seed, "epochs": epochs}
        fields = (config.prompt_field, config.answer_field, config.messages_field, config.system_prompt)
        if config.source != "addition" or fields != (PROMPT, ANSWER, MESSAGES, None):
            from trinity_lightning.explorer.tasks.sources import Formatter

            settings["formatter"] = Formatter(*fields, answered)
        if config.source == "addition":
            return cls.addition(config.split, name=config.name, **settings, **config.args)
        from trinity_lightning.explorer.tasks.sources import taskset_of

        return taskset_of(config, settings)

    @property
    def tasksets(self) -> Mapping[str, Taskset]:
        return {self.name: self}

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """The raw task of entry `index`; a new dict each time, whose values are the entry's own."""
        index = range(len(self))[index]
        try:
            return self._raw_task(index)
        except ConfigError as error:
            raise ConfigError(f"taskset '{self.name}', {self.place(index)}: {error}", key="taskset") from error

    def _raw_task(self, index: int) -> dict[str, Any]:
        task = self._formatter(self._entries[index])
        return task | {"task_index": {"taskset_id": self.name, "index": index}}

    def check_entries(self, check: Callable[[dict[str, Any]], object]) -> None:
        """Look at the raw task of every entry, or of the first one if entries are generated.

        Args:
            check: raises a ConfigError for a raw task that cannot be used.

        Raises:
            ConfigError: entries that the formatter or the check refuses, all of them in one message.
        """
        count = 1 if getattr(self._entries, "generated", False) else len(self)
        check_rows(f"taskset '{self.name}'", count, lambda index: check(self._raw_task(index)), self.place)

    def _checksum(self, index: int) -> int:
        """Checksum of an entry: its own, if it has one, or of its values that are not null, those of columns as text.

        A column that only other entries have, or whose type in CSV another entry decides, changes nothing.
        """
        if (checksum := getattr(self._entries, "checksum", None)) is not None:
            return checksum(index)
        entry = without_none(self._entries[index])
        values = {name: str(value) if isinstance(value, int | float) else value for name, value in entry.items()}
        return zlib.crc32(json.dumps(values, default=lambda value: type(value).__name__, skipkeys=True).encode())

    def _check_seen(self, seen: Mapping[int, int]) -> None:
        """Compare entries with those that a saved run was handed; of generated ones a few, evenly spread."""
        indices = sorted(index for index in seen if self._seen.get(index) != seen[index])
        if getattr(self._entries, "generated", False):
            indices = indices[:: max(len(indices) // MOST_GENERATED, 1)]
        changed = [index for index in indices if self._checksum(index) != seen[index]]
        if changed:
            places = ", ".join(map(self.place, changed[:MOST_NAMED])) + ", ..." * (len(changed) > MOST_NAMED)
            raise ConfigError(
                f"taskset '{self.name}' is not the one that was saved: of the entries that were tried {len(changed)} "
                f"have changed ({places}), so that its cursor would point at other tasks. Resume with these entries as "
                "they were (others may change), or start a new run.",
                key="taskset",
            )

    def place(self, index: int) -> str:
        """Where entry `index` is, for messages; see `place_of`."""
        return place_of(self._entries, index)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Every raw task once, in the source's order; the cursor stays where it is."""
        return (self[index] for index in range(len(self)))

    def next_batch(self, n: int) -> list[dict[str, Any]]:
        """The next n raw tasks; a batch runs on into the next epoch.

        Fewer than n, at last none, only when `epochs` are over.
        """
        whole_number(f"size of a batch of taskset '{self.name}'", n, least=1)
        end = self._position + n
        if self.epochs is not None:
            end = min(end, self.epochs * len(self))
        indices = self._order.indices(self._position, end)
        batch = [self[index] for index in indices]
        self._seen |= {index: self._checksum(index) for index in indices}
        self._position = end
        return batch

    def forget(self, index: int) -> None:
        """Forget that an entry was handed out, as it gave nothing: a resumed run may have it repaired."""
        self._seen.pop(index, None)

    def update(self, pass_rates: Mapping[str, Mapping[int, tuple[float, int]]]) -> None:
        self._order.update(pass_rates.get(self.name, {}))

    def state_dict(self) -> dict[str, Any]:
        """The cursor, and what it is a cursor of: of the entries themselves those that were handed out."""
        return {
            "name": self.name,
            "size": len(self),
            "seed": self.seed,
            "order": self.order,
            "position": self._position,
            "seen": [list(self._seen), list(self._seen.values())],
            "difficulty": self._order.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the saved taskset stood. Entries that were not handed out, or gave nothing, may have changed.

        Raises:
            ConfigError: the state is that of another taskset; the message says what differs.
        """

        check_state(self.name, state, self.state_dict())
        if "seen" in state:
            self._check_seen(seen := dict(zip(*state["seen"], strict=True)))
            self._seen = seen
        elif state["position"]:
            logger.warning(
                "taskset '%s': the checkpoint is of an earlier version and does not say which entries it was trained "
                "on, so that they may have changed since.",
                self.name,
            )
        self._position = state["position"]
        self._order.load_state_dict(state["difficulty"])


class Ranking(Order):
    """`easy_to_hard`: the entries by the number in a field, lowest first; ConfigError: an entry has none."""

    def __init__(self, entries: Entries, name: str, field: str | None) -> None:
        super().__init__(len(entries), None)
        if field is None:
            raise ConfigError(
                f"taskset '{name}': order 'easy_to_hard' needs difficulty_field, a field with a number.", key="taskset"
            )
        difficulties: list[float] = []
        for index in range(len(entries)):
            value = entries[index].get(field)
            if not isinstance(value, Real) or not math.isfinite(value):
                where = place_of(entries, index)
                raise ConfigError(
                    f"taskset '{name}', {where}: '{field}' is {value!r}, expected a finite number.", key="taskset"
                )
            difficulties.append(float(value))
        self._ranking = sorted(range(len(difficulties)), key=lambda index: difficulties[index])

    def _at(self, epoch: int, offset: int) -> int:
        return self._ranking[offset]


# The reward of a group of n Bernoulli rollouts varies most at this pass rate, p (1 - p) being largest.
TARGET_PASS_RATE = 0.5

# What was seen k updates of a task ago counts 0.8^k: the policy has changed since.
MEMORY = 0.8


class DifficultySelector(Order):
    """`by_difficulty`: picks the tasks whose pass rate is likely to be nearest to one half.

    Every task's pass rate has a Beta distribution, uniform at first, of its rollouts so far; each pick draws a rate for
    every task (Thompson sampling: Thompson, Biometrika 25, 1933) and takes the nearest ones, so that tasks which were
    not tried yet get their turn.

    Args:
        size: number of tasks.
        seed: of the draws; with the number of tasks picked before it decides a pick.
    """

    def __init__(self, size: int, seed: int) -> None:
        super().__init__(size, None)
        self._draws = seed
        self._passes = np.zeros(size)
        self._fails = np.zeros(size)

    def indices(self, begin: int, end: int) -> list[int]:
        """`end - begin` tasks, each once if there are enough; `begin` seeds the draws, so each pick has its own."""
        rates = np.random.default_rng([self._draws, begin]).beta(1 + self._passes, 1 + self._fails)
        nearest = np.argsort(np.abs(rates - TARGET_PASS_RATE), kind="stable").tolist()
        return [nearest[i % len(nearest)] for i in range(end - begin)]

    def update(self, pass_rates: Mapping[int, tuple[float, int]]) -> None:
        """Take note of tried tasks: by entry the mean reward, clipped to [0, 1], and how many rollouts it is of."""
        for index, (mean, count) in sorted(pass_rates.items()):
            rate = min(max(mean, 0.0), 1.0)
            self._passes[index] = MEMORY * self._passes[index] + rate * count
            self._fails[index] = MEMORY * self._fails[index] + (1 - rate) * count

    def state_dict(self) -> dict[str, Any]:
        """What is known of the tasks that were tried, as plain lists."""
        tried = np.flatnonzero(self._passes + self._fails).tolist()
        return {"tried": tried, "passes": self._passes[tried].tolist(), "fails": self._fails[tried].tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._passes[:], self._fails[:] = 0.0, 0.0
        self._passes[state["tried"]], self._fails[state["tried"]] = state["passes"], state["fails"]


def order_by_difficulty(order: str, entries: Entries, name: str, seed: int, field: str | None) -> Order:
    """The order of that name, `easy_to_hard` or `by_difficulty`, of a taskset's entries."""
    return Ranking(entries, name, field) if order == "easy_to_hard" else DifficultySelector(len(entries), seed)


class TasksetMixture(TaskSelection):
    """Hands out the tasks of several tasksets, each in its share: weight / sum of weights of all tasks so far.

    A taskset that is exhausted leaves its share to the others.

    Args:
        tasksets: with different names.
        weights: above 0, one a taskset.
        name: how the mixture is called.

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
        whole_number(f"size of a batch of taskset '{self.name}'", n, least=1)
        open_ = dict(self._weights)
        batches: dict[str, list[dict[str, Any]]] = {name: [] for name in self._tasksets}
        while open_ and (missing := n - sum(map(len, batches.values()))) > 0:
            shares = Counter[str]()
            for _ in range(missing):
                name = min(open_, key=lambda name: (self._taken[name] + 1) / self._weights[name])
                self._taken[name] += 1
                shares[name] += 1
            for name, share in shares.items():
                got = self._tasksets[name].next_batch(share)
                batches[name] += got
                if len(got) < share:
                    self._taken[name] -= share - len(got)
                    del open_[name]
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
            ConfigError: the state is that of other tasksets or weights.
        """
        if state.get("weights") != self._weights:
            raise ConfigError(
                f"taskset '{self.name}' mixes {self._weights}, the saved one {state.get('weights')}: its cursor would "
                "point at other tasks. Resume with the saved tasksets, or start a new run.",
                key="taskset",
            )
        for name, cursor in state["tasksets"].items():
            self._tasksets[name].load_state_dict(cursor)
        self._taken = dict(state["taken"])


def mixture_of(configs: Iterable[TasksetConfig]) -> TasksetMixture:
    """The mixture that configurations describe; errors as of `Taskset.from_config` and `TasksetMixture`."""
    mixed = list(configs)
    return TasksetMixture([Taskset.from_config(each) for each in mixed], [each.weight for each in mixed])


# What a taskset was called if only its source and path were set, on top of the default choice taskset=addition.
NAME_OF_EARLIER_VERSIONS = "addition"


def check_state(name: str, state: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """ConfigError if a saved state is not of this taskset, whose `own` state is given; it says what differs."""
    if state.get("name") == NAME_OF_EARLIER_VERSIONS:
        state = {**state, "name": own["name"]}
    expected = own.keys() - {"seen"}  # which earlier versions lack: they had a checksum of everything, `content`
    if state.keys() - {"seen", "content"} != expected:
        raise ConfigError(f"not the state of a taskset: it has {sorted(state)}, expected {sorted(own)}.")
    different = [
        f"{key} {state[key]!r} -> {own[key]!r}"
        for key in own
        if key not in ("position", "difficulty", "seen") and state[key] != own[key]
    ]
    if different:
        raise ConfigError(
            f"taskset '{name}' is not the one that was saved ({', '.join(different)}): its cursor would point "
            "at other tasks. Resume with the saved taskset, or start a new run.",
            key="taskset",
        )
