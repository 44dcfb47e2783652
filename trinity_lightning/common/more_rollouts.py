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
        """The experiences of that many new tasks; nothing once no more are to be had.

        Tasks that all failed are replaced in turn, as long as the limit of such requests allows.
        """
        ...
