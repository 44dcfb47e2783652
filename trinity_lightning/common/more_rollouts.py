"""What the buffer asks of the explorer where filters leave an explore step short."""

from typing import Protocol

from trinity_lightning.common.experience import Experience


class MoreRollouts(Protocol):
    """Rolls out further tasks for the step under way.

    Attributes:
        tasks: how many a step is meant to have.
    """

    tasks: int

    async def __call__(self, tasks: int) -> list[Experience]:
        """The experiences of that many new tasks; nothing once the limit of such requests is reached."""
        ...
