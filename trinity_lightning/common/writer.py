"""The one thing an add strategy knows of the buffer."""

from abc import ABC, abstractmethod

from trinity_lightning.common.experience import Experience


class BufferWriter(ABC):
    """Takes finished experiences; what holds them is its own affair."""

    @abstractmethod
    def write(self, experiences: list[Experience]) -> None:
        """Store the experiences, in order, all or none."""

    async def write_async(self, experiences: list[Experience]) -> None:
        """Awaitable `write`, for storages that wait for a disk or a network."""
        self.write(experiences)


class ListWriter(BufferWriter):
    """Holds what is written.

    Attributes:
        calls: what each write was given, in order.
    """

    def __init__(self) -> None:
        self.calls: list[list[Experience]] = []

    def write(self, experiences: list[Experience]) -> None:
        self.calls.append(list(experiences))

    @property
    def experiences(self) -> list[Experience]:
        """All that was written."""
        return [experience for call in self.calls for experience in call]
