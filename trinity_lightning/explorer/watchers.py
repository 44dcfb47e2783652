"""Who watches rollouts from the main thread, and who stops them: observers, the progress bar, Ctrl-C and SIGTERM."""

import logging
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from trinity_lightning.common.experience import Experience
from trinity_lightning.explorer.explorer import Observer, Progress

logger = logging.getLogger(__name__)


class Watchers:
    """Passes on what rollouts show: observers at the main thread's leisure, progress only while it waits for them.

    Args:
        observer: shown the experiences of every step and evaluation.
        progress: told how many tasks of a batch have ended.
        waiting: whether the main thread waits for rollouts; while it trains the bar is the trainer's.
    """

    def __init__(self, observer: Observer | None, progress: Progress | None, waiting: Callable[[], bool]) -> None:
        self._waiting = waiting
        self._observer = observer
        self._progress = progress
        self._seen: list[tuple[list[Experience], int, str | None]] = []

    def observe(self, experiences: list[Experience], step: int, taskset: str | None) -> None:
        """Keep it for `flush`: the observer's loggers are the trainer's too, which may be logging just now."""
        self._seen.append((experiences, step, taskset))

    def flush(self) -> None:
        """Show the observer what was kept; on the main thread."""
        seen, self._seen = self._seen, []
        for each in seen:
            if self._observer is not None:
                self._observer(*each)

    def progress(self, batch: int | str, done: int, total: int) -> None:
        """Draw the progress of a batch."""
        if self._progress is not None and self._waiting():
            self._progress(batch, done, total)


def keep_sigterm() -> None:
    """Give SIGTERM back to the handler that Python knows: Ray puts one in its place that ends the process at once."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))


class CtrlC:
    """Counts Ctrl-C instead of raising at once: the first asks for an end with a checkpoint, the second for an end."""

    def __init__(self) -> None:
        self.count = 0
        self._previous: Any = None

    def install(self) -> None:
        """Handle Ctrl-C from now on; elsewhere than on the main thread Python lets nobody do that."""
        if threading.current_thread() is threading.main_thread():
            previous = signal.signal(signal.SIGINT, self._on_sigint)
            if self._previous is None:
                self._previous = previous

    def restore(self) -> None:
        """Give it back to whoever handled it before; twice is allowed."""
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
            self._previous = None

    def _on_sigint(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self.count > 1:
            raise KeyboardInterrupt
        logger.warning("Ctrl-C: stopping after the step under way, with a checkpoint; press again to stop at once.")
