"""Makes the page of several runs. The template `comparison.html` has the looks."""

import os
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from trinity_lightning.monitor.presentation import find_metric, headline_metrics
from trinity_lightning.monitor.report.axes import chosen_axes, scale_of
from trinity_lightning.monitor.report.charts import comparison_chart, finite, parallel_coordinates
from trinity_lightning.monitor.report.comparison import Comparison
from trinity_lightning.monitor.report.differences import MISSING, differing
from trinity_lightning.monitor.report.groups import Group, groups_of
from trinity_lightning.monitor.report.page import FILE
from trinity_lightning.monitor.report.texts import ENVIRONMENT, short

# The metrics whose curves are drawn, behind the one that runs are compared by; `*` stands for the rest of a name.
_METRICS = (
    "eval/*/mean@*",
    "eval/*/pass@*",
    "eval/loss",
    "eval/accuracy",
    "reward/mean",
    "reward/*/mean",
    "actor/pg_loss",
    "frac_reward_zero_std",
    "response_length/mean",
    "response_length/clip_ratio",
    "actor/entropy",
    "actor/kl_loss",
    "actor/ppo_kl",
    "actor/pg_clipfrac",
    "actor/grad_norm",
    "actor/logprob_diff/mean",
    "actor/lr",
    "sample/staleness/mean",
    "rollout/tokens_per_second",
    "time/step",
    "perf/peak_memory_gb",
)
_MOST_CHARTS = 24
_MOST_COLUMNS = 6  # runs of a table of settings with a column for each; of more, the runs of each value are listed
_MOST_VALUES = 12  # of a setting, each with its runs


def comparison_page(folder: Path, comparison: Comparison, title: str) -> str:
    """The page, to be written as UTF-8 to the folder: links to the runs' own reports are relative to it."""
    groups = groups_of(comparison)
    numbers = {job.name: group for group in groups for job in group.jobs}
    sections = {
        "Runs": comparison.rows,
        "Curves": _curves(comparison, groups),
        "Settings against score": _parallel(comparison, numbers),
        "Settings that differ": _differences(comparison),
    }
    return ENVIRONMENT.get_template("comparison.html").render(
        title=title,
        comparison=comparison,
        groups=groups,
        group_of=numbers,
        links={job.name: link for job in comparison.jobs if (link := _link(folder, job.record.folder))},
        facts=_facts(comparison, groups),
        sections=[name for name, content in sections.items() if content],
        parts=sections,
    )


def _link(folder: Path, run: Path) -> str | None:
    """The address of a run's own report, seen from the folder; None if it has none."""
    return quote(os.path.relpath(run / FILE, folder)) if (run / FILE).is_file() else None


def _facts(comparison: Comparison, groups: Sequence[Group]) -> list[tuple[str, str]]:
    facts = [("runs", str(len(comparison.jobs)))]
    if len(groups) < len(comparison.jobs):
        facts.append(("experiments", str(len(groups))))
    if early := sum(bool(job.end) for job in comparison.jobs):
        facts.append(("not finished", str(early)))
    if groups[0].score is not None:
        facts += [(f"best {comparison.metric}", groups[0].result), ("best run", groups[0].name)]
    return facts


# -- curves ------------------------------------------------------------------------------------------------------------


class Curve(NamedTuple):
    """A picture of one metric of all runs."""

    title: str
    unit: str
    chart: str


def _curves(comparison: Comparison, groups: Sequence[Group]) -> list[Curve]:
    """A picture for each metric; those that never change, or have one value a run, are left out."""
    names = dict.fromkeys(name for job in comparison.jobs for name in job.record.names)
    headlines = headline_metrics(list(names))
    patterns = (comparison.metric or "", *_METRICS)
    chosen = dict.fromkeys(name for pattern in patterns for name in headlines if fnmatchcase(name, pattern))
    curves = [curve for name in chosen if (curve := _curve(name, groups)) is not None]
    return curves[:_MOST_CHARTS]


def _curve(metric: str, groups: Sequence[Group]) -> Curve | None:
    # The best are drawn last, so that they lie above the others.
    lines = [line for group in reversed(groups) if (line := group.line(metric)) is not None]
    points = [point for line in lines for point in finite(line.points)]
    if len({y for _, y in points}) < 2 or len(points) == len(lines):
        return None
    documented = find_metric(metric)
    ends = (f"{line.name} {short(finite(line.points)[-1][1])}" for line in list(reversed(lines))[:3])
    label = f"{metric} over explore steps, {len(lines)} lines; at the end {', '.join(ends)}"
    return Curve(metric, documented.unit if documented else "", comparison_chart(lines, label))


# -- settings ----------------------------------------------------------------------------------------------------------


def _parallel(comparison: Comparison, group_of: dict[str, Group]) -> str | None:
    """Parallel coordinates of the settings that differ against the score; None if fewer than two runs have a score."""
    finals = {name: score.final for name, score in comparison.scores.items() if score is not None}
    jobs = [job for job in reversed(comparison.jobs) if job.name in finals]
    if len({*finals.values()}) < 2:
        return None
    settings = {job.name: job.settings for job in jobs}
    keys = [*comparison.keys, *(key for key in differing([*settings.values()]) if key not in comparison.keys)]
    columns = {key: [job.setting(key) or MISSING for job in jobs] for key in keys}
    axes = chosen_axes(columns)
    if not axes:
        return None
    scores = {repr(final): final for final in finals.values()}
    score_axis = scale_of(str(comparison.metric), scores)
    if comparison.is_small:  # the best is at the top
        score_axis.places = {text: 1 - place for text, place in score_axis.places.items()}
        score_axis.ticks = {1 - place: text for place, text in score_axis.ticks.items()}
    lines = [
        (
            group_of[job.name].css,
            f"{job.name}: {short(finals[job.name])}",
            [*(columns[axis.name][index] for axis in axes), repr(finals[job.name])],
        )
        for index, job in enumerate(jobs)
    ]
    label = f"Values of {', '.join(axis.name for axis in axes)} of each run, and its final {comparison.metric}"
    return parallel_coordinates([*axes, score_axis], lines, label)


class Differences(NamedTuple):
    """A table of the settings that differ."""

    head: list[str]
    rows: list[list[str]]
    without_record: list[str]


def _differences(comparison: Comparison) -> Differences | None:
    """A column for each of a few runs; with many, each value and the runs that have it. None if nothing differs."""
    jobs = [job for job in comparison.jobs if job.config]
    settings = {job.name: job.settings for job in jobs}
    keys = differing([*settings.values()])
    if not keys:
        return None
    without = [job.name for job in comparison.jobs if not job.config]
    if len(jobs) <= _MOST_COLUMNS:
        rows = [[key, *(leaves.get(key, MISSING) for leaves in settings.values())] for key in keys]
        return Differences(["setting", *settings], rows, without)
    rows = []
    for key in keys:
        by_value: dict[str, list[str]] = {}
        for name, leaves in settings.items():
            by_value.setdefault(leaves.get(key, MISSING), []).append(name)
        if len(by_value) > _MOST_VALUES:
            rows.append([key, f"{len(by_value)} different values", "see the table of runs, or config.yaml"])
            continue
        lines = enumerate(by_value.items())
        rows += [[key if not index else "", value, ", ".join(names)] for index, (value, names) in lines]
    return Differences(["setting", "value", "runs"], rows, without)
