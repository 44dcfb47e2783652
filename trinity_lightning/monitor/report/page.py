"""Makes the page of a run, which opens from disk. The template `run.html` has the looks."""

from base64 import b64encode
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from trinity_lightning.common.criterion import criterion_of
from trinity_lightning.common.pictures.thumbnail_files import COLUMN, FOLDER, files_of
from trinity_lightning.monitor.presentation import (
    STEP_TIMES,
    TRAINED,
    UNTRAINED_PREFIX,
    WAIT,
    find_metric,
    format_seconds,
    headline_metrics,
    times_in_turn,
)
from trinity_lightning.monitor.report.charts import Point, finite, line_chart, stacked_bars
from trinity_lightning.monitor.report.hiding import without_secrets
from trinity_lightning.monitor.report.record import Completion, RunRecord
from trinity_lightning.monitor.report.texts import ENVIRONMENT, short
from trinity_lightning.monitor.report.token_view import token_view

FILE = "report.html"  # in the folder of a run, or of several


def report_page(run: RunRecord) -> str:
    """The whole page, to be written as UTF-8."""
    sections: dict[str, Any] = {
        "Curves": [figure for title, names in _PANELS if (figure := _figure(run, title, names)) is not None],
        "Where the time went": _times(run),
        "Steps that trained on no rollout": _idle_steps(run),
        "Before and after": _pairs(run),
        "Completions": _apart(run),
        "Tokens": token_view(run.tokens),
        "Experiences kept": run.kept,
        "Environment": run.environment,
        "Configuration": without_secrets(run.config) if run.config else "",
    }
    return ENVIRONMENT.get_template("run.html").render(
        run=run,
        title=f"{run.folder.parent.name} {run.folder.name}".strip(),
        most_idle=MOST_IDLE,
        several_processes=_at(run.settings, ("trainer", "devices")) not in (None, 1, "1"),
        subtitle=_subtitle(run),
        facts=_facts(run),
        sections=[name for name, content in sections.items() if content],
        parts=sections,
        thumbnails=partial(_thumbnails, run.folder / "completions" / FOLDER),
    )


def _subtitle(run: RunRecord) -> str:
    """The run's model, algorithm, tasks and seed, as far as its configuration says."""
    places = {"model": ("model", "name"), "tasks": ("taskset", "name"), "learning rate": ("optimizer", "lr")}
    words = {name: _at(run.settings, place) for name, place in (places | {"seed": ("seed",)}).items()}
    return ", ".join(f"{name} {value}" for name, value in words.items() if isinstance(value, str | int | float))


def _at(node: object, place: Sequence[str]) -> object:
    for key in place:
        node = node.get(key) if isinstance(node, dict) else None
    return node


_LARGEST_THUMBNAIL = 2**16  # bytes of a file that the page takes in


def _thumbnails(folder: Path, completion: Completion) -> list[str]:
    """The pictures of a completion's prompt, as data URLs; those whose files are missing are left out."""
    files = (file for file in files_of(folder, completion.get(COLUMN)) if file.stat().st_size <= _LARGEST_THUMBNAIL)
    return [f"data:image/jpeg;base64,{b64encode(file.read_bytes()).decode()}" for file in files]


# -- curves, and where the time went -----------------------------------------------------------------------------------


class Figure(NamedTuple):
    """A picture with its title, the names of its colours, each with first and last value as text, and their unit."""

    title: str
    unit: str
    chart: str
    names: dict[str, str]


SOLVED = "Held-out, solved"
# The title and the metrics of each picture; `*` stands for the rest of a name.
_PANELS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Reward", ("reward/mean", "reward/std")),
    ("Held-out", ("eval/*/mean@*",)),
    (SOLVED, ("eval/*/pass@*",)),
    ("Loss", ("actor/pg_loss", "eval/loss")),
    ("Pairs, accuracy", ("actor/rewards/accuracies", "eval/accuracy")),
    ("Pairs, margin", ("actor/rewards/margins", "eval/margin")),
    ("Reward functions", ("reward/*/mean",)),
    ("Groups with equal rewards", ("frac_reward_zero_std",)),
    ("Not trained on", ("experience_pipeline/untrained/*",)),
    ("Response length", ("response_length/mean", "response_length/max")),
    ("Responses cut off", ("response_length/clip_ratio",)),
    ("Entropy", ("actor/entropy",)),
    ("Clipped tokens", ("actor/pg_clipfrac",)),
    ("KL", ("actor/kl_loss", "actor/ppo_kl")),
    ("Expert data", ("actor/sft_loss",)),
    ("Gradient norm", ("actor/grad_norm",)),
    ("Engine against trainer", ("actor/logprob_diff/mean", "actor/logprob_diff/max")),
    ("Learning rate", ("actor/lr",)),
    ("Tokens a second", ("rollout/tokens_per_second", "perf/trained_tokens_per_second")),
    ("Age of groups", ("sample/staleness/mean", "sample/staleness/max")),
    ("Rollouts under way while training", ("rollout/suspended",)),
    ("Failed tasks", ("rollout/failed_tasks",)),
    ("Memory", ("perf/peak_memory_gb",)),
)


def _figure(run: RunRecord, title: str, patterns: Sequence[str]) -> Figure | None:
    """A picture of metrics; None if they never change (no failed task, a constant rate), or have one value each."""
    headlines = headline_metrics(run.names)
    names = dict.fromkeys(name for pattern in patterns for name in headlines if fnmatchcase(name, pattern))
    series = {name: points for name in names if finite(points := run.series(name))}
    values = [y for points in series.values() for _, y in finite(points)]
    if not values or (len(values) > 1 and len(set(values)) == 1) or (len(values) == len(series) and run.last_step > 1):
        return None
    metric = find_metric(next(iter(series)))
    chart = line_chart(series, f"{title} over explore steps: {', '.join(series)}")
    unit = _solved(run, series) if title == SOLVED else metric.unit if metric else ""
    unit = "" if unit == title.lower() else unit
    return Figure(title, unit, chart, {name: _change(points) for name, points in series.items()})


def _solved(run: RunRecord, names: Iterable[str]) -> str:
    """The criteria of solved tasks, in words, for the tasksets of these metrics, `eval/<taskset>/pass@<k>`."""
    thresholds = run.settings.get("reward_solved")
    tasksets_by_criterion: dict[str, list[str]] = {}
    for prefix in dict.fromkeys(name.rpartition("pass@")[0] for name in names):
        others = [name.removeprefix(prefix) for name in run.names if name.startswith(prefix) and "@" in name]
        metrics = dict.fromkeys(name.rpartition("/")[0] for name in others if "/" in name)
        criterion = criterion_of(metrics, thresholds if isinstance(thresholds, dict) else None)
        tasksets_by_criterion.setdefault(str(criterion), []).append(prefix.split("/", 1)[1].removesuffix("/"))
    if len(tasksets_by_criterion) == 1:
        return next(iter(tasksets_by_criterion))
    return "; ".join(f"{', '.join(tasksets)}: {criterion}" for criterion, tasksets in tasksets_by_criterion.items())


def _step_times(run: RunRecord) -> dict[str, dict[float, float]]:
    """Seconds by part and explore step, for the parts that follow one another and so add up."""
    ahead = run.totals([WAIT]).keys()  # steps that were rolled out while the step before was trained on
    return {
        name: {step: seconds for step, seconds in run.totals([name]).items() if name in times_in_turn(step in ahead)}
        for name in STEP_TIMES
    }


def _times(run: RunRecord) -> tuple[Figure, list[tuple[str, str, str]]] | None:
    """A picture of the seconds of each part and of evaluations by step, and rows (part, time in all, share)."""
    seconds = {name.removeprefix("time/"): by_step for name, by_step in _step_times(run).items()}
    seconds["prepare"] = run.totals(["time/prepare"])
    seconds["evaluation"] = run.totals([name for name in run.names if fnmatchcase(name, "eval/*/seconds")])
    seconds = {part: by_step for part, by_step in seconds.items() if any(by_step.values())}
    steps = sorted({step for by_step in seconds.values() for step in by_step})
    if not steps:
        return None
    columns = {part: [by_step.get(step, 0.0) for step in steps] for part, by_step in seconds.items()}
    whole = sum(map(sum, columns.values()))
    rows = [(part, format_seconds(sum(values)), f"{sum(values) / whole:.0%}") for part, values in columns.items()]
    chart = stacked_bars(steps, columns, "Seconds of each explore step by part")
    return Figure("Explore steps", "s", chart, dict.fromkeys(columns, "")), rows


# -- facts, idle steps and completions ---------------------------------------------------------------------------------


def _facts(run: RunRecord) -> list[tuple[str, str]]:
    """The most important facts: held-out scores first, then reward and length (first and last value), time, memory."""
    evaluated = [name for name in headline_metrics(run.names) if name.startswith("eval/") and "/mean@" in name]
    facts = [_ends(run, name) for name in (*evaluated, "eval/accuracy", "eval/loss")]
    if run.rows:
        facts.append(("explore steps", short(run.last_step)))
    facts += [_ends(run, name) for name in ("reward/mean", "response_length/mean")]
    facts = [fact for fact in facts if fact[1]]
    if (seconds := sum(sum(by_step.values()) for by_step in _step_times(run).values())) > 0:
        facts.append(("rollouts and training", format_seconds(seconds)))
    if memory := finite(run.series("perf/peak_memory_gb")):
        facts.append(("peak memory", f"{memory[-1][1]:.1f} GB"))
    return facts


def _ends(run: RunRecord, name: str) -> tuple[str, str]:
    """A metric with its first and last value as text, which is empty if it has none."""
    return name, _change(finite(run.series(name)))


def _change(points: Sequence[Point]) -> str:
    """The first and the last value as text."""
    points = finite(points)
    return " → ".join(short(value) for _, value in dict.fromkeys((*points[:1], *points[-1:])))


MOST_IDLE = 50  # steps that are listed


def _idle_steps(run: RunRecord) -> list[tuple[str, str]]:
    """The steps without a response that was trained on, with the number of responses for each reason."""
    counts = {
        _reason(name.removeprefix(UNTRAINED_PREFIX)): dict(finite(run.series(name)))
        for name in run.names
        if name.startswith(UNTRAINED_PREFIX)
    }
    return [
        (
            short(step),
            ", ".join(f"{reason} ({short(count[step])})" for reason, count in counts.items() if count.get(step)),
        )
        for step, trained in finite(run.series(TRAINED))
        if trained == 0
    ]


def _reason(metric: str) -> str:
    """The reason in a metric's name as log and completions write it: an operator's name keeps its underscores."""
    words, filtered, name = metric.partition("filtered_by_")
    return words.replace("_", " ") + filtered.replace("_", " ") + name


_EXAMPLES = 8  # the first tasks in order: nobody has chosen them


def _pairs(run: RunRecord) -> list[tuple[str, dict[int, list[Completion]]]]:
    """Each taskset that was evaluated more than once, with the same tasks' completions in both evaluations, by step."""
    pairs = []
    for name, steps in run.completions.items():
        if name and len(steps) > 1:
            answers = {step: _first_of_each_task(steps[step]) for step in sorted(steps)}
            first, last = answers.values()
            if tasks := [task for task in first if task in last][:_EXAMPLES]:
                pairs.append((name, {step: [by_task[task] for task in tasks] for step, by_task in answers.items()}))
    return pairs


def _apart(run: RunRecord) -> dict[int, list[Completion]]:
    """The first response to each of the first tasks, in the first and the last step; empty if there are `_pairs`."""
    if any(name and len(steps) > 1 for name, steps in run.completions.items()):
        return {}
    steps = run.completions.get("") or next(iter(run.completions.values()), {})
    return {step: list(_first_of_each_task(done).values())[:_EXAMPLES] for step, done in sorted(steps.items()) if done}


def _first_of_each_task(completions: Sequence[Completion]) -> dict[str, Completion]:
    """The first completion of each task, by a text of the task's number and prompt."""
    firsts: dict[str, Completion] = {}
    for completion in completions:
        firsts.setdefault(repr((completion.get("task"), completion.get("prompt"))), completion)
    return firsts
