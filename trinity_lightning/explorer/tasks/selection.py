"""What the explorer asks of what it trains on."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any


class TaskSelection(ABC):
    """What the explorer trains on: raw tasks in some order, with a cursor for checkpoints."""

    name: str

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
