"""Reads a run's folder while the run goes on, for another process: little at a time, and without torch."""

import csv
import io
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from trinity_lightning.config.checkpoints import checkpoints_in
from trinity_lightning.config.explain import LOCK
from trinity_lightning.monitor import rows
from trinity_lightning.monitor.folders import ENVIRONMENT, RUN_FILES, STEP_FILE, is_locked, is_run, runs_in
from trinity_lightning.monitor.presentation import STEP_TIMES, WAIT, times_in_turn
from trinity_lightning.monitor.progress import BEAT_SECONDS, Progress, read_progress, this_machine
from trinity_lightning.monitor.progress import FILE as PROGRESS
from trinity_lightning.monitor.rows import STEP_METRIC
from trinity_lightning.monitor.run_files import json_object, overrides_in, settings_in, text_of

# -- metrics.csv -------------------------------------------------------------------------------------------------------

# Metrics of the view, in its order, and their labels. Those of evaluations come behind the first one.
CURVES = {
    "reward/mean": "reward",
    "actor/pg_loss": "loss",
    "actor/rewards/accuracies": "accuracy",
    "eval/loss": "held-out loss",
    "response_length/mean": "length",
    "response_length/clip_ratio": "cut off",
    "frac_reward_zero_std": "equal rewards",
    "actor/logprob_diff/mean": "logprob diff",
    "sample/staleness/mean": "staleness",
    "actor/entropy": "entropy",
    "actor/grad_norm": "grad norm",
}
LOSSES = ("actor/pg_loss", "actor/rewards/accuracies")  # of runs without rewards; elsewhere they say little
HELD_OUT = re.compile(r"eval/([^/]+)/mean@\d+")
_EVAL_SECONDS = re.compile(r"eval/[^/]+/seconds")
_OTHERS = {STEP_METRIC, "time/step", *STEP_TIMES}

WHOLE_BYTES = 8 << 20  # a file of at most this size is read whole
TAIL_BYTES = 256 << 10  # of a larger one, this much of its end is read whole, and
PLACES = 400  # one row at each of so many places before it

Row = dict[str, float]


def is_read(name: str) -> bool:
    """True for a column that the view needs: runs have a hundred others."""
    return name in CURVES or name in _OTHERS or bool(HELD_OUT.fullmatch(name) or _EVAL_SECONDS.fullmatch(name))


class MetricsFile:
    """Follows metrics.csv: the first look reads it, or samples of it, and each later one only what is new.

    Args:
        path: the file, which need not exist yet.

    Attributes:
        rows: numbers of the rows by name, without missing ones.
        columns: all columns of the file, in its order.
        one_in: of the rows before the end, one in so many was read; 1: all were.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._identity: tuple[int, int] | None = None
        self._begin(b"")

    def _begin(self, header: bytes) -> None:
        """Forget everything. A header that is not whole has no columns."""
        self.rows: list[Row] = []
        self.columns = _cells(header) if header.endswith(b"\n") else []
        self.one_in = 1
        self._header = header
        self._places = [(place, name) for place, name in enumerate(self.columns) if is_read(name)]
        self._last_row = len(header)  # the place of the last row in the file: the run may still change it
        self._settled = 0  # number of rows before that one

    def refresh(self) -> None:
        """Read what is new. A missing file is an empty one; a line that is not whole waits for the next look."""
        try:
            with self._path.open("rb") as file:
                stat, header = os.fstat(file.fileno()), file.readline()
                identity = stat.st_dev, stat.st_ino
                # The header too: a file that was replaced twice may have the first one's number.
                if identity == self._identity and header == self._header and stat.st_size >= self._last_row:
                    file.seek(self._last_row)
                    del self.rows[self._settled :]
                else:
                    self._begin(header)
                    self._identity = identity
                    if stat.st_size > WHOLE_BYTES:
                        self._sample(file, stat.st_size)
                self._read_on(file)
        except FileNotFoundError:
            self._begin(b"")
            self._identity = None

    def _sample(self, file: IO[bytes], size: int) -> None:
        """Read rows from all over a large file, and go to the beginning of its last rows."""
        begin, end = file.tell(), size - TAIL_BYTES
        read = 0
        for place in range(begin, end, (end - begin) // PLACES):
            file.seek(place)
            file.readline()  # the rest of a row
            read += len(line := file.readline())
            self._add(line)
        self.one_in = max(round((end - begin) / read), 1)
        file.seek(end)
        file.readline()

    def _read_on(self, file: IO[bytes]) -> None:
        """Read from here to the last whole line."""
        place = file.tell()
        for line in file:
            if line.endswith(b"\n"):
                self._last_row, self._settled = place, len(self.rows)
                self._add(line)
                place += len(line)

    def _add(self, line: bytes) -> None:
        """Add a row, unless it has no step, as a damaged one."""
        cells, row = _cells(line), {}
        for place, name in self._places:
            if place < len(cells) and cells[place]:
                row[name] = _number(cells[place])
        if math.isfinite(row.get(STEP_METRIC, math.nan)):
            self.rows.append(row)

    def series(self, name: str) -> list[tuple[float, float]]:
        """The (explore step, value) pairs of a metric, with the mean if a step has several values."""
        by_step: dict[float, list[float]] = {}
        for row in self.rows:
            if math.isfinite(value := row.get(name, math.nan)):
                by_step.setdefault(row[STEP_METRIC], []).append(value)
        return [(step, sum(values) / len(values)) for step, values in sorted(by_step.items())]

    @property
    def steps_done(self) -> int:
        """The last explore step that was trained on; 0 before the first."""
        ended = "time/step" if "time/step" in self.columns else "time/train"
        return int(next((row[STEP_METRIC] for row in reversed(self.rows) if ended in row), 0))

    def last_times(self) -> dict[str, float]:
        """Seconds of the parts of the last step that has ended, in turn, and the rest as "other"; {} before the first.

        An evaluation at the end of the step counts as "evaluation", beside the step's own time.
        """
        step = self.steps_done
        own = [row for row in self.rows[-1000:] if row[STEP_METRIC] == step]
        names = times_in_turn(ahead=any(WAIT in row for row in own))
        times = {name.partition("/")[2]: total for name in names if (total := _total(own, name))}
        if whole := _total(own, "time/step"):
            times["other"] = max(whole - sum(times.values()), 0.0)
        if evaluated := sum(_evaluations(row) for row in own):
            times["evaluation"] = evaluated
        return times if step else {}

    def pace(self, steps: int = 10) -> float | None:
        """Mean seconds of the last steps, their evaluations included; None before the first."""
        last = {step: 0.0 for step, _ in self.series("time/step")[-steps:]}
        for row in self.rows[-1000:]:
            if row[STEP_METRIC] in last:
                last[row[STEP_METRIC]] += row.get("time/step", 0.0) + _evaluations(row)
        if last:
            return sum(last.values()) / len(last)
        return sum(self.last_times().values()) or None  # of runs without rollouts


def _cells(line: bytes) -> list[str]:
    try:
        return next(csv.reader(io.StringIO(line.decode(errors="replace"))), [])
    except csv.Error:  # a damaged line
        return []


def _number(cell: str) -> float:
    try:
        return float(cell)
    except ValueError:  # a damaged line
        return math.nan


def _total(read: Iterable[Row], name: str) -> float:
    return sum(value for row in read if math.isfinite(value := row.get(name, 0.0)))


def _evaluations(row: Row) -> float:
    return sum(value for name, value in row.items() if name.endswith("/seconds") and math.isfinite(value))


# -- train.log ---------------------------------------------------------------------------------------------------------

_LOG_BYTES = 64 << 10
_RECORD = re.compile(r"^\[(?P<time>[^]]*)\] (?P<level>[A-Z]+) (?P<logger>[\w.]+): (?P<text>.*)$")
_DIGITS = re.compile(r"\d+")


@dataclass
class Record:
    """A record of the log.

    Attributes:
        time: its time, as in the log.
        level: INFO, WARNING or ERROR.
        text: its first line.
        count: number of records like it, which differ in numbers alone.
    """

    time: str
    level: str
    text: str
    count: int = 1


def end_of_log(path: Path) -> list[Record]:
    """The records at the end of a log, without the lines of tracebacks."""
    with path.open("rb") as file:
        file.seek(max(os.fstat(file.fileno()).st_size - _LOG_BYTES, 0))
        text = file.read(_LOG_BYTES).decode(errors="replace")
    matches = map(_RECORD.match, text.splitlines())
    return [Record(match["time"], match["level"], match["text"]) for match in matches if match]


def warnings_of(records: Iterable[Record]) -> list[Record]:
    """Warnings and errors, each kind once with the last one's time and text, the newest last."""
    kinds: dict[str, Record] = {}
    for record in records:
        if record.level in ("WARNING", "ERROR", "CRITICAL"):
            kind = _DIGITS.sub("#", record.text)
            before = kinds.pop(kind, None)
            kinds[kind] = Record(record.time, record.level, record.text, 1 + (before.count if before else 0))
    return list(kinds.values())


# -- completions -------------------------------------------------------------------------------------------------------

Completion = dict[str, Any]

_COMPLETIONS_BYTES = 4 << 20  # of a file; more is not shown
_AHEAD, _BEHIND = 8, 3  # steps around the last one of metrics.csv that are tried before the folder is listed


def newest_completions(folder: Path, step: int) -> int:
    """The step of the newest file of training completions; 0 without one.

    Args:
        folder: the run's folder.
        step: the last step that is known. A folder of a hundred thousand files is not listed if a file is near it.
    """
    completions = folder / "completions"
    near = (number for number in range(step + _AHEAD, max(step - _BEHIND, 0), -1))
    newest = next((number for number in near if (folder / completions_file(number)).is_file()), 0)
    if not newest and completions.is_dir():
        names = (STEP_FILE.fullmatch(entry.name) for entry in os.scandir(completions))
        newest = max((int(match[1]) for match in names if match), default=0)
    return newest


def completions_file(step: int) -> str:
    """The path of a step's completions in a run's folder."""
    return f"completions/step_{step}.jsonl"


def read_completions(path: Path) -> list[Completion]:
    """The completions in the first megabytes of a file."""
    with path.open(encoding="utf-8", errors="replace") as file:
        objects = map(json_object, file.read(_COMPLETIONS_BYTES).splitlines())
        return [completion for completion in objects if completion is not None]


# -- whether a run goes on ---------------------------------------------------------------------------------------------

# A run whose lock is not to be seen, as on some shared file systems, lives if it has written within so many seconds.
ALIVE_SECONDS = 6 * BEAT_SECONDS
_STOPPED = ("interrupted.", "stopped ")  # how a log ends after Ctrl-C or SIGTERM
_EARLY = "training stopped after step "
_STEP = re.compile(r"step \d+/\d+ ")  # how the line of a step begins


@dataclass
class State:
    """The state of a run.

    Attributes:
        name: "starting", "running", "silent" (it runs, and has written nothing for a minute), "ended", "stopped" (by
            Ctrl-C, SIGTERM or a callback), "died" (by an error or a kill) or "unknown".
        why: more about it, in words.
    """

    name: str
    why: str = ""

    @property
    def goes_on(self) -> bool:
        """True if the run's process lives."""
        return self.name in ("starting", "running", "silent")


def state_of(
    locked: bool | None, age: float | None, log: list[Record], done: int, steps: int | None, here: bool = False
) -> State:
    """The state of a run.

    Args:
        locked: as of `is_locked`.
        age: seconds since the run wrote its progress last; None: there is no such file, which a run removes at its end.
        log: the records at the end of its log.
        done: steps done.
        steps: steps of the whole run; None: unknown.
        here: True if the run last said that it is on this machine, which then sees its lock.
    """
    if locked or (age is not None and age < ALIVE_SECONDS and locked is None):
        if age is None:
            return State("starting")
        return State("running") if age < ALIVE_SECONDS else State("silent", "no sign of life for a minute or more")
    if age is not None and age < 2 * BEAT_SECONDS and not here:  # its machine holds a lock that this one cannot see
        return State("running")
    # An error from before a step's line is that of an earlier part of a resumed run.
    last = next((record for record in reversed(log) if record.level != "INFO" or _STEP.match(record.text)), None)
    if last is not None and last.level in ("ERROR", "CRITICAL"):
        return State("died", last.text)
    if steps is not None and done >= steps:
        return State("ended")
    if early := next((record.text for record in reversed(log) if record.text.startswith(_EARLY)), ""):
        return State("stopped", early)
    if any(record.level == "WARNING" and record.text.startswith(_STOPPED) for record in log[-3:]):
        return State("stopped", f"after step {done}")
    if not log and not done and age is None:
        return State("unknown", "it has written nothing, and no process is at work in its folder")
    killed = "its log does not say why" if age is None else "its process was killed, or the machine went down"
    return State("died", f"after step {done}: {killed}")


# -- the whole view ----------------------------------------------------------------------------------------------------


@dataclass
class View:
    """Everything that is shown of a run at one moment.

    Attributes:
        folder: its folder.
        settings: the resolved configuration; {} before it is written.
        machine: versions and hardware by name.
        metrics: the metrics so far.
        progress: what the run does now, and the time of its last sign of life; None if it has not said so.
        state: whether it goes on.
        warnings: kinds of warnings at the end of its log.
        completions: the step of the newest completions, and these.
        overrides: values that its command set, by key.
        resume: the command that resumes it; "" if it goes on or has ended, or has no checkpoint.
    """

    folder: Path
    settings: Mapping[str, Any] = field(default_factory=dict)
    machine: Mapping[str, Any] = field(default_factory=dict)
    metrics: MetricsFile = field(default_factory=lambda: MetricsFile(Path(os.devnull)))
    progress: tuple[Progress, float] | None = None
    state: State = field(default_factory=lambda: State("unknown"))
    warnings: list[Record] = field(default_factory=list)
    completions: tuple[int, list[Completion]] = (0, [])
    overrides: Mapping[str, str] = field(default_factory=dict)
    resume: str = ""

    @property
    def steps(self) -> int | None:
        """Steps of the whole run; None if they are not known yet."""
        steps = self.settings.get("steps")
        return steps if isinstance(steps, int) and not isinstance(steps, bool) else None

    def setting(self, key: str) -> Any:
        """The value of a dotted key; None without it."""
        node: Any = self.settings
        for name in key.split("."):
            node = node.get(name) if isinstance(node, Mapping) else None
        return node

    @property
    def seconds_left(self) -> float | None:
        """Seconds that the other steps take at the pace of the last ones; None if nothing is known of one."""
        pace = self.metrics.pace()
        if pace is None or self.steps is None or not self.state.goes_on:
            return None
        return max(self.steps - self.metrics.steps_done, 0) * pace


class RunFolder:
    """Reads the folder of a run again and again; files that have not changed are not read again.

    Args:
        folder: the folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._metrics = MetricsFile(folder / rows.FILE)
        self._read: dict[str, tuple[Any, Any]] = {}  # what was made of each file, and the file's state then
        self._beat: tuple[float, float] | None = None  # the last sign of life, by the file's clock and by this one's

    def look(self, completions: bool = True) -> View:
        """The run as it is now; without `completions`, these are not read."""
        folder, metrics = self._folder, self._metrics
        metrics.refresh()
        settings = self._text_unless_changed("config.yaml", settings_in)
        settings = settings or self._text_unless_changed(".hydra/config.yaml", settings_in)
        log = self._unless_changed("train.log", end_of_log) or []
        progress = read_progress(folder)
        machine = self._text_unless_changed(ENVIRONMENT, json_object)
        view = View(folder, settings or {}, machine or {}, metrics, progress)
        age = None if progress is None else self._age(progress[1])
        here = progress is not None and progress[0].machine == this_machine() != ""
        view.state = state_of(is_locked(folder / LOCK), age, log, metrics.steps_done, view.steps, here)
        view.warnings = warnings_of(log)
        view.overrides = self._text_unless_changed(".hydra/overrides.yaml", overrides_in) or {}
        view.resume = self._resume(view, log)
        if completions:
            step = progress[0].step if progress else metrics.steps_done
            newest = newest_completions(folder, max(step, metrics.steps_done))
            completions_read = self._unless_changed(completions_file(newest), read_completions, "completions")
            view.completions = newest, completions_read or []
        return view

    def _resume(self, view: View, log: list[Record]) -> str:
        """The command that resumes a run, as its log has it or, after a kill, its progress; "" without one."""
        if view.state.goes_on or view.state.name == "ended":
            return ""
        logged = (record.text.partition("Resume with: ")[2] for record in reversed(log))
        if command := next(filter(None, logged), ""):
            return command
        if view.progress is None or not checkpoints_in(self._folder / "checkpoints"):
            return ""
        return view.progress[0].resume

    def _age(self, written: float) -> float:
        """Seconds since a run's last sign of life. The clock of another machine counts at the first look alone."""
        now = time.monotonic()
        if self._beat is None:
            self._beat = written, now - max(time.time() - written, 0.0)
        elif self._beat[0] != written:
            self._beat = written, now
        return now - self._beat[1]

    def _text_unless_changed(self, name: str, read: Callable[[str], Any]) -> Any:
        """Same as `_unless_changed`, for a `read` of the file's text."""
        return self._unless_changed(name, lambda path: read(text_of(path)))

    def _unless_changed(self, name: str, read: Callable[[Path], Any], place: str = "") -> Any:
        """The result of `read` for a file, made again only once the file has changed; None without the file.

        Args:
            name: path in the folder.
            read: reads it.
            place: files of one place replace each other, as those of the steps.
        """
        path = self._folder / name
        try:
            stat = path.stat()
        except OSError:
            return None
        now, place = (name, stat.st_ino, stat.st_size, stat.st_mtime_ns), place or name
        if place not in self._read or self._read[place][1] != now:
            try:
                self._read[place] = read(path), now
            except OSError:  # it was removed just now
                return None
        return self._read[place][0]


def differing_settings(runs: Sequence[Mapping[str, str]]) -> list[str]:
    """For each run, the settings of its command in which runs differ, as KEY=VALUE."""
    keys = dict.fromkeys(key for overrides in runs for key in overrides)
    differing = [key for key in keys if len({overrides.get(key) for overrides in runs}) > 1]
    return [" ".join(f"{key}={overrides[key]}" for key in differing if key in overrides) for overrides in runs]


# -- which run ---------------------------------------------------------------------------------------------------------


def newest_run(root: Path) -> Path | None:
    """The folder of a run, or of a sweep, in which something was written last; None without any.

    Args:
        root: the folder `outputs`, which has a folder for each name of a run, and these one for each run.
    """
    folders = [folder for folder in root.glob("*/*") if folder.is_dir()]
    written = {folder: newest for folder in folders if (newest := _last_written(folder)) is not None}
    return max(written, key=lambda folder: written[folder]) if written else None


def _last_written(folder: Path) -> float | None:
    runs = [folder] if is_run(folder) else runs_in(folder)
    files = (run / name for run in runs for name in (*RUN_FILES, PROGRESS))
    return max((path.stat().st_mtime for path in files if path.is_file()), default=None)
