"""A process that trains by itself: what several have to agree on (`common.ranks`), it decides."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

from torch import Tensor

T = TypeVar("T")


class Alone:
    """The only process that trains; `common.ranks.Ranks`, one of several, overrides these methods."""

    rank = 0
    size = 1
    hangs = False  # another rank, as far as this one knows

    def failure(self) -> BaseException | None:
        """What the run has to end with, as far as that is known of other processes."""

    def exchange(self, value: T, patient: bool = False, at: str = "an exchange") -> list[T]:
        """What every rank hands in, by rank."""
        return [value]

    def broadcast(self, value: T, source: int = 0) -> T:
        """What rank `source` hands in."""
        return value

    def add_up(self, tensors: Sequence[Tensor], at: str = "a sum") -> None:
        """Make each tensor the sum of those of all ranks."""

    def within(self, seconds: float) -> AbstractContextManager[None]:
        """Wait for others no longer than that from now on."""
        return nullcontext()

    def end(self, error: BaseException) -> None:
        """This rank fails: tell the others."""


ALONE = Alone()


def ranks_of(trainer: Any) -> Alone:
    """The processes that a Lightning Trainer trains with; one of another strategy than ReplicaStrategy is alone."""
    return getattr(trainer.strategy, "ranks", ALONE)
