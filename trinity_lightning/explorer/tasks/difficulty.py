"""Tasks by how often they are solved: those that are solved half of the time teach the most."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

# The reward of a group of n Bernoulli rollouts varies most at this pass rate, p (1 - p) being largest.
TARGET_PASS_RATE = 0.5
# What was seen k updates of a task ago counts 0.8^k: the policy has changed since.
MEMORY = 0.8


class DifficultySelector:
    """Picks the tasks whose pass rate is likely to be nearest to one half.

    Every task's pass rate has a Beta distribution, uniform at first, of its rollouts so far; each pick draws a rate for
    every task (Thompson sampling: Thompson, Biometrika 25, 1933) and takes the nearest ones, so that tasks which nobody
    has tried get their turn.

    Args:
        size: number of tasks.
        seed: of the draws; with the number of tasks picked before it decides a pick.
    """

    def __init__(self, size: int, seed: int) -> None:
        self._seed = seed
        self._passes = np.zeros(size)
        self._fails = np.zeros(size)

    def pick(self, n: int, position: int) -> list[int]:
        """n tasks, each once where there are as many.

        Args:
            n: how many.
            position: tasks picked before, for draws of its own.
        """
        rates = np.random.default_rng([self._seed, position]).beta(1 + self._passes, 1 + self._fails)
        nearest = np.argsort(np.abs(rates - TARGET_PASS_RATE), kind="stable").tolist()
        return [nearest[i % len(nearest)] for i in range(n)]

    def update(self, indices: Sequence[int], pass_rates: Sequence[float], rollouts: Sequence[int]) -> None:
        """Take note of tried tasks.

        Args:
            indices: which tasks.
            pass_rates: mean reward of each, clipped to [0, 1].
            rollouts: how many rollouts each mean is of.
        """
        for index, rate, count in zip(indices, pass_rates, rollouts, strict=True):
            rate = min(max(rate, 0.0), 1.0)
            self._passes[index] = MEMORY * self._passes[index] + rate * count
            self._fails[index] = MEMORY * self._fails[index] + (1 - rate) * count

    def state_dict(self) -> dict[str, Any]:
        """What is known of the tasks that were tried, as plain lists."""
        tried = np.flatnonzero(self._passes + self._fails).tolist()
        return {"tried": tried, "passes": self._passes[tried].tolist(), "fails": self._fails[tried].tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._passes[:], self._fails[:] = 0.0, 0.0
        self._passes[state["tried"]], self._fails[state["tried"]] = state["passes"], state["fails"]
