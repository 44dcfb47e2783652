"""Compares several runs, such as those of a sweep, in a table: their settings that differ, and their scores."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from trinity_lightning.config.explain import LOCK
from trinity_lightning.monitor.folders import is_locked, runs_in
from trinity_lightning.monitor.presentation import PLAIN_WIDTH, headline_metrics
from trinity_lightning.monitor.report.differences import differing, flattened, is_place
from trinity_lightning.monitor.report.folders import common_folder
from trinity_lightning.monitor.report.hiding import hidden
from trinity_lightning.monitor.report.record import RunRecord, read_run
from trinity_lightning.monitor.report.texts import short
from trinity_lightning.monitor.rows import STEP_METRIC
from trinity_lightning.monitor.run_files import overrides_in, text_of

_ERROR = re.compile(r"^\[[^]]*\] ERROR [\w.]+: (.*)$", re.MULTILINE)


@dataclass
class Job:
    """One run of several.

    Attributes:
        record: the content of its folder.
        overrides: values by key, as in its command.
        config: its resolved configuration.
        failure: the last error in its log; empty without one.
        name: its name on the page, by default that of its folder.
        is_named: somebody chose the name.
        goes_on: a process on this machine is running it.
    """

    record: RunRecord
    overrides: dict[str, str]
    config: dict[str, Any]
    failure: str
    name: str
    is_named: bool = False
    goes_on: bool = False

    def setting(self, key: str) -> str:
        """The value of a key in its command or configuration; of a group, the name of the choice. Empty without one."""
        values = (self.settings.get(key), self.overrides.get(key), self.settings.get(f"{key}.name"), "")
        return next(value for value in values if value is not None)

    @cached_property
    def settings(self) -> dict[str, str]:
        """The values of its configuration by dotted key, see `flattened`."""
        return flattened(self.config)

    @property
    def steps(self) -> str:
        """The number of explore steps done, "4 of 9" if it ended early."""
        done, planned = self.record.last_step, self.config.get("steps")
        return f"{done:g}" if planned is None or done >= planned else f"{done:g} of {planned}"

    @property
    def end(self) -> str:
        """The reason why it ended early: the last error, or "not finished"; empty if it did all steps."""
        finished = self.record.rows and " of " not in self.steps
        if not finished and self.goes_on:
            return "goes on"
        return "" if finished else self.failure or "not finished"


def jobs_of(folder: Path) -> list[Job]:
    """The runs in the folders of a folder."""
    return [_job(run, run.name) for run in runs_in(folder)]


def jobs_in(runs: Mapping[Path, str]) -> list[Job]:
    """These runs, by the names that were chosen for them, or else by their paths in the folder that holds all."""
    common = common_folder(list(runs))
    return [_job(run, name or run.relative_to(common).as_posix(), bool(name)) for run, name in runs.items()]


def _job(folder: Path, name: str, is_named: bool = False) -> Job:
    record = read_run(folder)
    recorded = overrides_in(text_of(folder / ".hydra" / "overrides.yaml"))
    errors = _ERROR.findall(text_of(folder / "train.log"))
    overrides = {key: hidden(f"{key}={value}").partition("=")[2] for key, value in recorded.items()}
    failure = hidden(errors[-1]) if errors else ""
    return Job(record, overrides, record.settings, failure, name, is_named, bool(is_locked(folder / LOCK)))


# -- comparing their scores --------------------------------------------------------------------------------------------


@dataclass
class Comparison:
    """A table of runs, the best first; runs that did not finish come behind the others.

    Attributes:
        metric: the metric that they are compared by; None if they have no metrics.
        head: names of the columns.
        rows: cells, as text.
        jobs: the runs of the rows.
        scores: by the run's name; None for a run without one.
        keys: the overrides that differ.
    """

    metric: str | None
    head: list[str]
    rows: list[list[str]]
    jobs: list[Job]
    scores: "dict[str, Score | None]"
    keys: list[str]

    @property
    def is_small(self) -> bool:
        """True if the smallest score is the best."""
        return is_small(self.metric)


def compare(jobs: Sequence[Job]) -> Comparison:
    """A table of differing overrides, steps, final and best score, and the reasons why runs ended early."""
    metric = _metric(jobs)
    overridden = dict.fromkeys(key for job in jobs for key in job.overrides if not is_place(key))
    keys = differing([{key: job.setting(key) for key in overridden} for job in jobs])
    scores = {job.name: _score(job, metric) for job in jobs}
    ends = any(job.end for job in jobs)

    def rank(job: Job) -> tuple[bool, bool, float]:
        score = scores[job.name]
        return score is None, bool(job.end), 0.0 if score is None else score.final if is_small(metric) else -score.final

    ranked = sorted(jobs, key=rank)
    rows = []
    for job in ranked:
        score = scores[job.name]
        cells = [job.name, *(job.setting(key) for key in keys), job.steps]
        cells += ["", ""] if score is None else [score.last, f"{short(score.best)} (step {score.step:g})"]
        rows.append([*cells, job.end] if ends else cells)
    head = ["run", *keys, "steps", "final", "best", *(["ended by"] if ends else [])]
    return Comparison(metric, head, rows, ranked, scores, keys)


def is_small(metric: str | None) -> bool:
    """True for a metric whose smallest value is the best."""
    return metric is not None and metric.endswith("loss")


@dataclass
class Score:
    """The last finite value of a metric, and the best one with its explore step.

    Attributes:
        is_whole: no value that is not finite follows the last one.
    """

    final: float
    best: float
    step: float
    is_whole: bool = True

    @property
    def last(self) -> str:
        """The last value as text."""
        return short(self.final) + ("" if self.is_whole else ", then not finite")


def _score(job: Job, metric: str | None) -> Score | None:
    series = job.record.series(metric or "")
    points = [(step, value) for step, value in series if math.isfinite(value)]
    if not points:
        return None
    sign = -1 if is_small(metric) else 1
    step, best = max(points, key=lambda point: sign * point[1])
    return Score(points[-1][1], best, step, is_whole=series[-1] == points[-1])


def _metric(jobs: Sequence[Job]) -> str | None:
    """The metric by which runs are compared: their `sweep.metric`, or the first usual one that one of them has."""
    names = list(dict.fromkeys(name for job in jobs for name in job.record.names))
    for job in jobs:
        sweep = job.config.get("sweep")
        if isinstance(sweep, Mapping) and sweep.get("metric") in names:
            return str(sweep["metric"])
    tasksets = [name for job in jobs for name in _keys(job.config.get("eval_tasksets"))]
    held_out = [name for name in headline_metrics(names) if name.startswith("eval/") and "/mean@" in name]
    first = [name for taskset in tasksets for name in held_out if name.startswith(f"eval/{taskset}/mean@")]
    usual = (*first, *held_out, "eval/loss", "reward/mean", "actor/pg_loss")
    return next((name for name in usual if name in names and name != STEP_METRIC), None)


def _keys(node: Any) -> list[str]:
    return list(map(str, node)) if isinstance(node, Mapping) else []


# -- showing the comparison --------------------------------------------------------------------------------------------


def comparison_table(comparison: Comparison) -> str:
    """The table as text for the terminal."""
    console = Console(width=None if Console().is_terminal else PLAIN_WIDTH)
    table = Table(box=box.SIMPLE, pad_edge=False)
    for name in comparison.head:
        table.add_column(Text(name), overflow="fold")
    for row in comparison.rows:
        table.add_row(*map(Text, row))  # Text: brackets in an override are no markup
    with console.capture() as capture:
        console.print(f"final and best {comparison.metric}" if comparison.metric else "no metrics yet", markup=False)
        console.print(table)
    return "\n".join(line.rstrip() for line in capture.get().splitlines() if line.strip())
