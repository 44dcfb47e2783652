"""The clock of time-outs, which stops while engines do not generate."""

import asyncio
from collections.abc import Callable
from contextvars import ContextVar


class EngineClock:
    """Seconds in which engines could generate.

    Rollouts under way are suspended while the trainer computes on the device of their engine. A time-out must not count
    that time; it does count the time that rewards and tools take.

    Attributes:
        now: the time of the event loop; by default of the running one.
    """

    def __init__(self) -> None:
        self.now: Callable[[], float] = lambda: asyncio.get_running_loop().time()
        self._stopped_at: float | None = None
        self._lost = 0.0  # seconds in which it stood still

    def time(self) -> float:
        """Seconds since some moment."""
        return (self.now() if self._stopped_at is None else self._stopped_at) - self._lost

    def stop(self) -> None:
        """Stand still until `go`; calling it twice is allowed."""
        if self._stopped_at is None:
            self._stopped_at = self.now()

    def go(self) -> None:
        """Go on, if it stands still."""
        if self._stopped_at is not None:
            self._lost += self.now() - self._stopped_at
            self._stopped_at = None


# The clock of the scheduler that runs the present asyncio task; one that always runs, outside a scheduler.
CLOCK: ContextVar[EngineClock] = ContextVar("CLOCK", default=EngineClock())  # noqa: B039 - never stopped
