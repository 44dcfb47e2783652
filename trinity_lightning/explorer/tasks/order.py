"""The orders in which a taskset hands out its entries."""

import functools
import math
from collections.abc import Mapping
from functools import partial
from numbers import Real
from typing import Any

import numpy as np

from trinity_lightning.config.own_code import raised_by
from trinity_lightning.errors import ConfigError
from trinity_lightning.explorer.tasks.sources import Entries, place_of


class Order:
    """The order of entries: `sequential` or `shuffled`.

    Args:
        size: number of entries; None: the entries do not end, and are not shuffled.
        seed: seed of the permutations, which depend on size, seed and epoch alone; None: the source's order.
    """

    def __init__(self, size: int | None, seed: int | None) -> None:
        self._size, self._seed = size, seed

    def indices(self, begin: int, end: int) -> list[int]:
        """Indices of the entries at positions `begin` to `end`, counted since the first epoch began."""
        if self._size is None:
            return list(range(begin, end))
        return [self._at(*divmod(position, self._size)) for position in range(begin, end)]

    def _at(self, epoch: int, offset: int) -> int:
        return offset if self._seed is None else int(_permutation(self._size or 0, self._seed, epoch)[offset])

    def update(self, pass_rates: Mapping[int, tuple[float, int]]) -> None:
        """Take note of the mean reward and the number of rollouts of entries; only `by_difficulty` uses it."""

    def state_dict(self) -> Any:
        """The state besides the position."""

    def load_state_dict(self, state: Any) -> None:
        """Restore what `state_dict` returned."""


@functools.lru_cache(maxsize=8)
def _permutation(size: int, seed: int, epoch: int) -> np.ndarray:
    """The order of one epoch, as positions in the source, [size]."""
    return np.random.default_rng([seed, epoch]).permutation(size)


class Ranking(Order):
    """The order `easy_to_hard`: the entries by the number in a field, lowest first.

    Raises:
        ConfigError: no field is given, or an entry has no number there.
    """

    def __init__(self, entries: Entries, name: str, field: str | None, key: str) -> None:
        super().__init__(len(entries), None)
        if field is None:
            raise ConfigError(
                f"taskset '{name}': order 'easy_to_hard' needs difficulty_field, a field with a number.",
                key=f"{key}.difficulty_field",
            )
        difficulties: list[float] = []
        for index in range(len(entries)):
            with raised_by(f"taskset '{name}': its source", partial(ConfigError, key=f"{key}.source")):
                value = entries[index].get(field)
            if not isinstance(value, Real) or not math.isfinite(value):
                where = place_of(entries, index)
                raise ConfigError(
                    f"taskset '{name}', {where}: '{field}' is {value!r}, expected a finite number.",
                    key=f"{key}.difficulty_field",
                )
            difficulties.append(float(value))
        self._ranking = sorted(range(len(difficulties)), key=lambda index: difficulties[index])

    def _at(self, epoch: int, offset: int) -> int:
        return self._ranking[offset]


TARGET_PASS_RATE = 0.5  # here the rewards of a group vary most: p (1 - p) is largest
MEMORY = 0.8  # rollouts before the last k updates of a task count 0.8^k, because the policy has changed since


class DifficultySelector(Order):
    """The order `by_difficulty`, which picks the tasks whose pass rate is likely to be nearest to one half.

    Each task's pass rate has a Beta distribution, uniform at first, which its rollouts change. Each pick draws a rate
    for every task (Thompson sampling: Thompson, Biometrika 25, 1933) and takes the tasks nearest to one half, so that
    tasks which were not tried yet are picked, too.

    Args:
        size: number of tasks.
        seed: seed of the draws. A pick depends on the seed and on the number of tasks picked before.
    """

    def __init__(self, size: int, seed: int) -> None:
        super().__init__(size, None)
        self._draws = seed
        self._passes = np.zeros(size)
        self._fails = np.zeros(size)

    def indices(self, begin: int, end: int) -> list[int]:
        """Indices of `end - begin` tasks, different ones if there are enough; `begin` also seeds the draws."""
        rates = np.random.default_rng([self._draws, begin]).beta(1 + self._passes, 1 + self._fails)
        nearest = np.argsort(np.abs(rates - TARGET_PASS_RATE), kind="stable").tolist()
        return [nearest[i % len(nearest)] for i in range(end - begin)]

    def update(self, pass_rates: Mapping[int, tuple[float, int]]) -> None:
        """Take note of tried tasks, by index: the mean reward, clipped to [0, 1], and the number of rollouts."""
        for index, (mean, count) in sorted(pass_rates.items()):
            rate = min(max(mean, 0.0), 1.0)
            self._passes[index] = MEMORY * self._passes[index] + rate * count
            self._fails[index] = MEMORY * self._fails[index] + (1 - rate) * count

    def state_dict(self) -> dict[str, Any]:
        """The counts of the tasks that were tried, as plain lists."""
        tried = np.flatnonzero(self._passes + self._fails).tolist()
        return {"tried": tried, "passes": self._passes[tried].tolist(), "fails": self._fails[tried].tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._passes[:], self._fails[:] = 0.0, 0.0
        self._passes[state["tried"]], self._fails[state["tried"]] = state["passes"], state["fails"]


def order_of(name: str, order: str, entries: Any, size: int | None, seed: int, field: str | None, key: str) -> Order:
    """The order of a taskset, by its name `order` in the configuration."""
    if order == "easy_to_hard":
        return Ranking(entries, name, field, key)
    if order == "by_difficulty":
        return DifficultySelector(len(entries), seed)
    return Order(size, seed if order == "shuffled" else None)
