"""Several tasksets at once, in fixed shares."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trinity_lightning.config.values import whole_number
from trinity_lightning.errors import ConfigError
from trinity_lightning.explorer.tasks.selection import TaskSelection
from trinity_lightning.explorer.tasks.taskset import Taskset


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
        self.tasksets = {taskset.name: taskset for taskset in tasksets}
        self._weights = dict(zip(names, weights, strict=True))
        self._taken = dict.fromkeys(names, 0)

    def __len__(self) -> int:
        return sum(map(len, self.tasksets.values()))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Every raw task once, one taskset after the other; the cursors stay where they are."""
        return (task for taskset in self.tasksets.values() for task in taskset)

    def next_batch(self, n: int) -> list[dict[str, Any]]:
        """The next n raw tasks; fewer only when all tasksets are exhausted."""
        whole_number(f"size of a batch of taskset '{self.name}'", n, least=1)
        shares = dict.fromkeys(self.tasksets, 0)
        open_ = dict(self._weights)
        batches: dict[str, list[dict[str, Any]]] = {name: [] for name in self.tasksets}
        while open_ and sum(map(len, batches.values())) < n:
            for _ in range(n - sum(map(len, batches.values()))):
                name = min(open_, key=lambda name: (self._taken[name] + 1) / self._weights[name])
                self._taken[name] += 1
                shares[name] += 1
            for name in [name for name in open_ if shares[name]]:
                got = self.tasksets[name].next_batch(shares[name])
                batches[name] += got
                if len(got) < shares[name]:
                    self._taken[name] -= shares[name] - len(got)
                    del open_[name]
                shares[name] = 0
        return [task for batch in batches.values() for task in batch]

    def update(self, pass_rates: Mapping[str, Mapping[int, tuple[float, int]]]) -> None:
        """See `TaskSelection.update`."""
        for taskset in self.tasksets.values():
            taskset.update(pass_rates)

    def state_dict(self) -> dict[str, Any]:
        """The cursor of every taskset, and how many tasks each has given."""
        cursors = {name: taskset.state_dict() for name, taskset in self.tasksets.items()}
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
            self.tasksets[name].load_state_dict(cursor)
        self._taken = dict(state["taken"])
