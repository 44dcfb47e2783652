"""Who watches rollouts from the main thread: observers and the progress bar."""

import signal
import threading
from collections import deque
from collections.abc import Callable

from trinity_lightning.common.experience import Experience
from trinity_lightning.explorer.explorer import Observer, Progress


class Watchers:
    """Passes on what rollouts show: observers at the main thread's leisure, progress only while it waits for them.

    Args:
        observer: shown the experiences of every step and evaluation.
        progress: called with how many tasks of a batch have ended.
        waiting: whether the main thread waits for rollouts; while it trains the bar is the trainer's.
    """

    def __init__(self, observer: Observer | None, progress: Progress | None, waiting: Callable[[], bool]) -> None:
        self._waiting = waiting
        self._observer = observer
        self._progress = progress
        self._seen: deque[tuple[list[Experience], int, str | None]] = deque()  # of which both ends are safe in threads

    def observe(self, experiences: list[Experience], step: int, taskset: str | None) -> None:
        """Keep it for `flush`: the observer's loggers are the trainer's too, which may be logging just now."""
        self._seen.append((experiences, step, taskset))

    def flush(self) -> None:
        """Show the observer what was kept; on the main thread."""
        while self._seen:
            each = self._seen.popleft()
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
