"""The file `.progress.json` of a run that goes on: what it does now, and how many tasks have ended.

`trinity-lightning watch` reads it, in another process or on another machine. The run removes it when it ends, so that
a file without a run tells of a process that was killed.
"""

import json
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FILE = ".progress.json"
WRITE_SECONDS = 1.0  # shortest time between two writes
# Longest time between them: a file that is older belongs to a run that is stopped, or whose disk hangs.
BEAT_SECONDS = 10.0


@dataclass
class Progress:
    """The state of a run that goes on; times are seconds since 1970.

    Attributes:
        part: part of the work: "loading", "rollout", "evaluation", "training" or "between steps".
        since: time at which the part began.
        step: the explore step that the part belongs to.
        batch: name of the batch of tasks that was scheduled last; "" before the first. With explorer.sync_offset it may
            be of a later step than `step`.
        done: tasks of that batch that have ended, failed ones included.
        total: all tasks of that batch.
        last: time at which a task ended last, or else at which the batch was scheduled.
        machine: `this_machine` of the run.
        resume: the command that resumes the run once it has a checkpoint; "" without one.
    """

    part: str = "loading"
    since: float = 0.0
    step: int = 0
    batch: str = ""
    done: int = 0
    total: int = 0
    last: float = 0.0
    machine: str = ""
    resume: str = ""


class ProgressFile:
    """Writes a run's progress to its folder about once a second, in a thread of its own.

    The run itself only sets numbers: it never waits for a disk. The file is replaced whole, but not synced to the disk,
    since nobody needs it after a power failure.

    Args:
        folder: the run's folder.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self._progress = Progress()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, resume: str = "") -> None:
        """Begin to write, unless the thread runs already; `resume` is the command that resumes the run."""
        if self._thread is None:
            self._stop.clear()
            self._progress = Progress(since=time.time(), machine=this_machine(), resume=resume)
            self._thread = threading.Thread(target=self._run, name="progress-file", daemon=True)
            self._thread.start()

    def enter(self, part: str, step: int) -> None:
        """Note that a part of the work has begun."""
        progress = self._progress
        if (part, step) != (progress.part, progress.step):
            progress.part, progress.step, progress.since = part, step, time.time()

    def count(self, batch: int | str, done: int, total: int) -> None:
        """Note how many tasks of a batch have ended; any thread may call it."""
        progress = self._progress
        progress.batch, progress.done, progress.total, progress.last = str(batch), done, total, time.time()

    def stop(self) -> None:
        """End the thread, if it runs, and remove the file."""
        if self._thread is not None:
            self._stop.set()
            self._thread.join()
            self._thread = None
            with suppress(OSError):
                self._path.unlink(missing_ok=True)

    def _run(self) -> None:
        written, at = "", -BEAT_SECONDS
        while True:
            text = json.dumps(asdict(self._progress))
            if text != written or time.monotonic() - at >= BEAT_SECONDS:
                with suppress(OSError):  # a full disk ends the run where it matters, not here
                    temporary = self._path.with_name(f"{FILE}.tmp")
                    temporary.write_text(text, encoding="utf-8")
                    temporary.replace(self._path)
                    written, at = text, time.monotonic()
            if self._stop.wait(WRITE_SECONDS):
                return


def this_machine() -> str:
    """The id of this machine since it started, which another machine cannot have; "" if it has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def read_progress(folder: Path) -> tuple[Progress, float] | None:
    """The progress in a run's folder, and the time of its last write; None without a whole file."""
    path = folder / FILE
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        written = path.stat().st_mtime
    except (OSError, ValueError):
        return None
    return (_typed(values), written) if isinstance(values, dict) else None


def _typed(values: Mapping[str, Any]) -> Progress:
    """Progress of values of a file, which another version may have written: what does not fit is left out."""
    fitting = {}
    for name, default in asdict(Progress()).items():
        value = values.get(name)
        if isinstance(value, type(default)) or (isinstance(default, float) and isinstance(value, int)):
            fitting[name] = value
    return Progress(**fitting)
