"""Groups the runs of a comparison: those that differ in seeds alone are one experiment, and have one colour."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from trinity_lightning.monitor.report.charts import Line, finite
from trinity_lightning.monitor.report.comparison import Comparison, Job
from trinity_lightning.monitor.report.differences import differing, is_seed
from trinity_lightning.monitor.report.texts import short

COLOURS = 10  # of the style sheet; the groups behind the first ones are grey
_MOST_NAMED = 3  # settings in a group's name


@dataclass
class Group:
    """Runs that are shown as one line.

    Attributes:
        number: its place in the order by score, from 1.
        name: the run's, or the settings of several.
        jobs: its runs.
        score: the mean of the final scores of those that ended as planned, or else of all; None without one.
        spread: the standard deviation of these; None with less than two.
    """

    number: int
    name: str
    jobs: list[Job]
    score: float | None
    spread: float | None

    @property
    def css(self) -> str:
        """The classes of its lines: one of its own, which is hidden, and one of its colour."""
        return f"run-{self.number} {self.colour}"

    @property
    def colour(self) -> str:
        """The class of its colour."""
        return f"k{self.number - 1}" if self.number <= COLOURS else "rest"

    @property
    def result(self) -> str:
        """The score as text."""
        if self.score is None:
            return "no score"
        return short(self.score) + ("" if self.spread is None else f" ± {short(self.spread, 2)}")

    def line(self, metric: str) -> Line | None:
        """The mean of a metric over the runs, with their range; None if no run has it."""
        by_step: dict[float, list[float]] = {}
        for job in self.jobs:
            for step, value in job.record.series(metric):
                by_step.setdefault(step, []).append(value)
        steps = sorted(by_step.items())
        points = [(step, sum(values) / len(values)) for step, values in steps]
        if not finite(points):
            return None
        band = [(step, min(values), max(values)) for step, values in steps] if len(self.jobs) > 1 else []
        return Line(self.css, self.name, points, band, str(self.number) if self.number <= COLOURS else "")


def groups_of(comparison: Comparison) -> list[Group]:
    """The groups, the best first. Runs with names that somebody chose are alone; so are all if only seeds differ."""
    settings = {job.name: _settings(job) for job in comparison.jobs}
    keys = [key for key in differing([*settings.values()]) if not is_seed(key)]
    members: dict[tuple[str | None, ...], list[Job]] = {}
    for job in comparison.jobs:
        alone = job.name if job.is_named or not keys else None
        members.setdefault((alone, *(settings[job.name].get(key) for key in keys)), []).append(job)
    named = [key for key in comparison.keys if not is_seed(key)] or keys
    groups = [_group(jobs, comparison, named) for jobs in members.values()]
    sign = 1 if comparison.is_small else -1
    groups.sort(key=lambda group: (group.score is None, all(job.end for job in group.jobs), sign * (group.score or 0)))
    for number, group in enumerate(groups, start=1):
        group.number = number
    return groups


def _settings(job: Job) -> dict[str, str]:
    return job.settings or job.overrides


def _group(jobs: list[Job], comparison: Comparison, keys: Sequence[str]) -> Group:
    scored = [job for job in jobs if comparison.scores[job.name] is not None]
    whole = [job for job in scored if not job.end] or scored  # a run that died early has not reached its score
    finals = [score.final for job in whole if (score := comparison.scores[job.name]) is not None]
    name, first = jobs[0].name, jobs[0]
    if len(jobs) > 1:
        values = {key: first.setting(key) for key in keys[:_MOST_NAMED]}
        name = ", ".join(f"{key.rpartition('.')[2]}={value}" for key, value in values.items() if value)
        name = f"{name or jobs[0].name} ({len(jobs)} runs)"
    spread = statistics.stdev(finals) if len(finals) > 1 else None
    return Group(0, name, jobs, statistics.fmean(finals) if finals else None, spread)
