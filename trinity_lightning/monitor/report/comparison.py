"""Compares the runs in a folder, such as a sweep's, in a table and a page: their settings that differ, their scores."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from trinity_lightning.monitor.csv_logger import STEP_METRIC
from trinity_lightning.monitor.presentation import PLAIN_WIDTH, headline_metrics
from trinity_lightning.monitor.report.hiding import hidden
from trinity_lightning.monitor.report.record import RunRecord, read_run
from trinity_lightning.monitor.report.texts import ENVIRONMENT, short

_RUN_FILES = ("metrics.csv", "config.yaml", ".hydra/overrides.yaml")
_ERROR = re.compile(r"^\[[^]]*\] ERROR [\w.]+: (.*)$", re.MULTILINE)


@dataclass
class Job:
    """One run of several.

    Attributes:
        record: the content of its folder.
        overrides: values by key, as in its command.
        config: its resolved configuration.
        failure: the last error in its log; empty without one.
    """

    record: RunRecord
    overrides: dict[str, str]
    config: dict[str, Any]
    failure: str

    @property
    def name(self) -> str:
        """The name of its folder."""
        return self.record.folder.name

    @property
    def steps(self) -> str:
        """The number of explore steps done, "4 of 9" if it ended early."""
        done, planned = self.record.last_step, self.config.get("steps")
        return f"{done:g}" if planned is None or done >= planned else f"{done:g} of {planned}"

    @property
    def end(self) -> str:
        """The reason why it ended early: the last error, or "not finished"; empty if it did all steps."""
        finished = self.record.rows and " of " not in self.steps
        return "" if finished else self.failure or "not finished"


def is_run(folder: Path) -> bool:
    """True if a run has written to the folder."""
    return any((folder / file).is_file() for file in _RUN_FILES)


def jobs_of(folder: Path) -> list[Job]:
    """The runs in the folders of a folder, in the order of their numbers or names."""
    runs = [path for path in folder.iterdir() if path.is_dir() and is_run(path)]
    return [_job(run) for run in sorted(runs, key=lambda run: (not run.name.isdigit(), run.name.zfill(9), run.name))]


def _job(folder: Path) -> Job:
    record = read_run(folder)
    recorded = _yaml(folder / ".hydra" / "overrides.yaml")
    texts = map(str, recorded if isinstance(recorded, list) else ())
    pairs = [text.lstrip("+").partition("=") for text in texts if "=" in text]
    config, log = _yaml(folder / "config.yaml"), folder / "train.log"
    errors = _ERROR.findall(log.read_text(encoding="utf-8", errors="replace")) if log.is_file() else []
    overrides = {key: hidden(f"{key}={value}").partition("=")[2] for key, _, value in pairs}
    return Job(record, overrides, config if isinstance(config, dict) else {}, hidden(errors[-1]) if errors else "")


def _yaml(path: Path) -> Any:
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8", errors="replace")) if path.is_file() else None
    except yaml.YAMLError:
        return None


# -- comparing their scores --------------------------------------------------------------------------------------------


@dataclass
class Comparison:
    """A table of runs, the best first; runs that did not finish come behind the others.

    Attributes:
        metric: the metric that they are compared by; None if they have no metrics.
        head: names of the columns.
        rows: cells, as text.
    """

    metric: str | None
    head: list[str]
    rows: list[list[str]]


def compare(jobs: Sequence[Job]) -> Comparison:
    """A table of differing overrides, steps, final and best score, and the reasons why runs ended early."""
    metric = _metric(jobs)
    keys = list(dict.fromkeys(key for job in jobs for key in job.overrides))
    differing = [key for key in keys if len({job.overrides.get(key) for job in jobs}) > 1]
    scores = {job.name: _score(job, metric) for job in jobs}
    small = metric is not None and metric.endswith("loss")
    ends = any(job.end for job in jobs)

    def rank(job: Job) -> tuple[bool, bool, float]:
        score = scores[job.name]
        return score is None, bool(job.end), 0.0 if score is None else score.final if small else -score.final

    rows = []
    for job in sorted(jobs, key=rank):
        score = scores[job.name]
        cells = [job.name, *(job.overrides.get(key, "") for key in differing), job.steps]
        cells += ["", ""] if score is None else [short(score.final), f"{short(score.best)} (step {score.step:g})"]
        rows.append([*cells, job.end] if ends else cells)
    head = ["run", *differing, "steps", "final", "best", *(["ended by"] if ends else [])]
    return Comparison(metric, head, rows)


@dataclass
class Score:
    """The last value of a metric, and the best one with its explore step."""

    final: float
    best: float
    step: float


def _score(job: Job, metric: str | None) -> Score | None:
    points = [(step, value) for step, value in job.record.series(metric or "") if math.isfinite(value)]
    if not points:
        return None
    sign = -1 if str(metric).endswith("loss") else 1
    step, best = max(points, key=lambda point: sign * point[1])
    return Score(points[-1][1], best, step)


def _metric(jobs: Sequence[Job]) -> str | None:
    """The metric by which runs are compared: their `sweep.metric`, or the first usual one that one of them has."""
    names = list(dict.fromkeys(name for job in jobs for name in job.record.names()))
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


def comparison_page(folder: Path, comparison: Comparison) -> str:
    """The table as a page that opens from disk."""
    reports = {path.parent.name for path in folder.glob("*/report.html")}
    title = f"{folder.parent.name} {folder.name}".strip()
    template = ENVIRONMENT.get_template("comparison.html")
    return template.render(title=title, comparison=comparison, reports=reports)
