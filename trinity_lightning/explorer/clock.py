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
        # When it was stopped, and the seconds in which it stood still before. Another thread reads both at once.
        self._state: tuple[float | None, float] = (None, 0.0)

    def time(self) -> float:
        """Seconds since some moment."""
        stopped_at, lost = self._state
        return (self.now() if stopped_at is None else stopped_at) - lost

    def stop(self) -> None:
        """Stand still until `go`; calling it twice is allowed."""
        stopped_at, lost = self._state
        if stopped_at is None:
            self._state = self.now(), lost

    def go(self) -> None:
        """Go on, if it stands still."""
        stopped_at, lost = self._state
        if stopped_at is not None:
            self._state = None, lost + self.now() - stopped_at


# The clock of the scheduler that runs the present asyncio task; one that always runs, outside a scheduler.
CLOCK: ContextVar[EngineClock] = ContextVar("CLOCK", default=EngineClock())  # noqa: B039 - never stopped
