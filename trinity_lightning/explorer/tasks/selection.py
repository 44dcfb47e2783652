"""Which tasks come next: by a number for their difficulty, by how often they are solved, or by shares of tasksets."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np

from trinity_lightning.config.schema import TasksetConfig
from trinity_lightning.config.values import whole_number
from trinity_lightning.errors import ConfigError
from trinity_lightning.explorer.tasks.taskset import Entries, Order, TaskSelection, Taskset, place_of

# -- tasks by how difficult their entries say they are ----------------------------------------------------------------


class Ranking(Order):
    """`easy_to_hard`: the entries by the number in a field, lowest first; ConfigError: an entry has none."""

    def __init__(self, entries: Entries, name: str, field: str | None) -> None:
        super().__init__(len(entries), None)
        if field is None:
            raise ConfigError(f"taskset '{name}': order 'easy_to_hard' needs difficulty_field, a field with a number.")
        difficulties: list[float] = []
        for index in range(len(entries)):
            value = entries[index].get(field)
            if not isinstance(value, Real) or not math.isfinite(value):
                where = place_of(entries, index)
                raise ConfigError(f"taskset '{name}', {where}: '{field}' is {value!r}, expected a finite number.")
            difficulties.append(float(value))
        self._ranking = sorted(range(len(difficulties)), key=lambda index: difficulties[index])

    def _at(self, epoch: int, offset: int) -> int:
        return self._ranking[offset]


# -- tasks by how often they are solved -------------------------------------------------------------------------------


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


# -- several of them --------------------------------------------------------------------------------------------------


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
                "point at other tasks. Resume with the saved tasksets, or start a new run."
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
            "at other tasks. Resume with the saved taskset, or start a new run."
        )
