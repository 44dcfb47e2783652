"""The page of a run, which opens from disk: what is on it. How it looks is in the template `report.html`."""

import itertools
import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from trinity_lightning.monitor.presentation import (
    STEP_TIMES,
    UNTRAINED_PREFIX,
    WAIT,
    find_metric,
    format_seconds,
    headline_metrics,
    times_in_turn,
)
from trinity_lightning.monitor.record import Completion, RunRecord, without_secrets


def short(value: float) -> str:
    """A number in few characters."""
    if value != 0 and not 1e-3 <= abs(value) < 1e5:
        return f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e")
    return f"{value:.4g}"


_MOST_CHARACTERS = 1500


def _cut(value: Any) -> str:
    """The beginning of a text."""
    text = value if isinstance(value, str) else "" if value is None else repr(value)
    left = len(text) - _MOST_CHARACTERS
    return text[:_MOST_CHARACTERS] + (f" … ({left} more characters)" if left > 0 else "")


# Completions, prompts and configuration are other people's text: markup in it is shown, not obeyed.
_ENVIRONMENT = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_ENVIRONMENT.filters |= {"short": short, "cut": _cut}


def report_page(run: RunRecord) -> str:
    """The whole page, ASCII or not, to be written as UTF-8."""
    return _ENVIRONMENT.get_template("report.html").render(
        run=run,
        title=f"{run.folder.parent.name} {run.folder.name}".strip(),
        facts=_facts(run),
        curves=[figure for title, names in _PANELS if (figure := _figure(run, title, names)) is not None],
        times=_times(run),
        idle=_idle_steps(run),
        pairs=_pairs(run),
        apart=_apart(run),
        config=without_secrets(run.config) if run.config else "",
    )


# -- small pictures as inline SVG --------------------------------------------------------------------------------------


Point = tuple[float, float]

# More points than pixels show nothing; neighbours are averaged.
_MOST_POINTS = 400
_MOST_DOTS = 60
# Beyond these, differences and powers of ten can no longer be distinguished in double precision.
_FINEST, _SMALLEST, _LARGEST = 1e-9, 1e-100, 1e100


class _Frame:
    """Where values lie in a picture; round ticks on the y axis, the ends of the x axis, `margin` within the edges."""

    width, height = 360, 190
    left, right, top, bottom = 46, 352, 8, 168

    def __init__(self, x_values: Sequence[float], y_values: Sequence[float], margin: float = 0.0) -> None:
        self.x_low, self.x_high, self.margin = min(x_values), max(x_values), margin
        self.y_ticks = nice_ticks(min(y_values), max(y_values))

    def x(self, value: float) -> float:
        span = self.x_high - self.x_low + 2 * self.margin
        share = (value - self.x_low + self.margin) / span if span else 0.5
        return round(self.left + share * (self.right - self.left), 1)

    def y(self, value: float) -> float:
        share = (value - self.y_ticks[0]) / (self.y_ticks[-1] - self.y_ticks[0])
        return round(self.bottom - share * (self.bottom - self.top), 1)


def line_chart(series: Mapping[str, Sequence[Point]], label: str) -> str:
    """Lines over explore steps; a value that is not finite (or beyond 1e100) interrupts its line.

    Args:
        series: points by name, in order of x; at least one finite point in all.
        label: what the picture shows, for those who do not see it.

    Raises:
        ValueError: no finite point.
    """
    finite = [point for points in series.values() for point in points if _drawable(point)]
    if not finite:
        raise ValueError("a chart needs at least one finite point.")
    frame = _Frame([x for x, _ in finite], [y for _, y in finite])
    lines = {name: thinned(points) for name, points in series.items()}
    pieces = {
        name: [list(piece) for drawable, piece in itertools.groupby(points, _drawable) if drawable]
        for name, points in lines.items()
    }
    dotted = {name for name, points in lines.items() if len(points) <= _MOST_DOTS}
    return _pictures().line_chart(frame, pieces, dotted, label)


def stacked_bars(steps: Sequence[float], parts: Mapping[str, Sequence[float]], label: str) -> str:
    """One bar a step, made of its parts from the bottom up.

    Args:
        steps: x of each bar, at least one.
        parts: by name, a number of at least 0 for each step.
        label: as `line_chart`.
    """
    heights, bars = [0.0] * len(steps), {}
    for name, values in parts.items():
        bars[name] = list(zip(steps, heights, values, strict=True))
        heights = [height + value for height, value in zip(heights, values, strict=True)]
    frame = _Frame(steps, [0.0, max(heights)], margin=0.5)
    width = max(round(0.8 * (frame.x(steps[0] + 1) - frame.x(steps[0])), 1), 0.5)
    return _pictures().stacked_bars(frame, bars, width, label)


def _pictures() -> Any:
    return _ENVIRONMENT.get_template("pictures.html").module


def nice_ticks(low: float, high: float) -> list[float]:
    """Three to seven round numbers, the first at or below `low`, the last at or above `high`."""
    size = max(abs(low), abs(high))
    if high - low <= _FINEST * size or size < _SMALLEST:
        margin = size / 10 if size >= _SMALLEST else 1.0
        low, high = low - margin, high + margin
    raw = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{index * step:.12g}") for index in range(first, last + 1)]


def _drawable(point: Point) -> bool:
    return abs(point[1]) < _LARGEST  # not so of NaN


def thinned(points: Sequence[Point]) -> list[Point]:
    """At most 400 points, neighbours averaged."""
    size = math.ceil(len(points) / _MOST_POINTS)
    if size <= 1:
        return list(points)
    groups = (points[start : start + size] for start in range(0, len(points), size))
    return [(group[0][0], sum(y for _, y in group) / len(group)) for group in groups]


# -- curves, and where the time went -----------------------------------------------------------------------------------


class Figure(NamedTuple):
    """A picture, and what it shows: the names of its colours, and their unit."""

    title: str
    unit: str
    chart: str
    names: list[str]


# Title, and the metrics in one picture; `*` stands for the rest of a name.
_PANELS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Reward", ("reward/mean", "reward/std")),
    ("Held-out", ("eval/*/mean@*",)),
    ("Held-out, solved", ("eval/*/pass@*",)),
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
    ("Failed tasks", ("rollout/failed_tasks",)),
    ("Memory", ("perf/peak_memory_gb",)),
)


def _figure(run: RunRecord, title: str, patterns: Sequence[str]) -> Figure | None:
    """A panel; None if there is nothing to see: what never changes (no failed task, a constant rate) is left out."""
    headlines = headline_metrics(run.names())
    names = dict.fromkeys(name for pattern in patterns for name in headlines if fnmatchcase(name, pattern))
    series = {name: points for name in names if _finite(points := run.series(name))}
    values = [y for points in series.values() for _, y in _finite(points)]
    if not values or (len(values) > 1 and len(set(values)) == 1):
        return None
    metric = find_metric(next(iter(series)))
    chart = line_chart(series, f"{title} over explore steps: {', '.join(series)}")
    return Figure(title, metric.unit if metric else "", chart, list(series))


def _finite(points: Sequence[Point]) -> list[Point]:
    return [point for point in points if _drawable(point)]


def _step_times(run: RunRecord) -> dict[str, dict[float, float]]:
    """Seconds by part and explore step, of the parts that follow one another and so add up."""
    ahead = run.totals([WAIT]).keys()  # rolled out while the step before was trained on
    return {
        name: {step: seconds for step, seconds in run.totals([name]).items() if name in times_in_turn(step in ahead)}
        for name in STEP_TIMES
    }


def _times(run: RunRecord) -> tuple[Figure, list[tuple[str, str, str]]] | None:
    """The parts of an explore step that follow one another, and its evaluation: step by step, and in all."""
    seconds = {name.removeprefix("time/"): by_step for name, by_step in _step_times(run).items()}
    seconds["prepare"] = run.totals(["time/prepare"])
    seconds["evaluation"] = run.totals([name for name in run.names() if fnmatchcase(name, "eval/*/seconds")])
    seconds = {part: by_step for part, by_step in seconds.items() if any(by_step.values())}
    steps = sorted({step for by_step in seconds.values() for step in by_step})
    if not steps:
        return None
    columns = {part: [by_step.get(step, 0.0) for step in steps] for part, by_step in seconds.items()}
    whole = sum(map(sum, columns.values()))
    rows = [(part, format_seconds(sum(values)), f"{sum(values) / whole:.0%}") for part, values in columns.items()]
    chart = stacked_bars(steps, columns, "Seconds of each explore step by part")
    return Figure("Explore steps", "s", chart, list(columns)), rows


# -- what is said in words ---------------------------------------------------------------------------------------------


def _facts(run: RunRecord) -> list[tuple[str, str]]:
    """First and last value of what matters most, and what it took."""
    evaluated = [name for name in headline_metrics(run.names()) if name.startswith("eval/") and "/mean@" in name]
    facts = [("explore steps", short(max(steps)))] if (steps := run.steps()) else []
    for name in ("reward/mean", *evaluated, "response_length/mean"):
        if points := _finite(run.series(name)):
            ends = points if len(points) == 1 else (points[0], points[-1])
            facts.append((name, " → ".join(short(value) for _, value in ends)))
    if (seconds := sum(sum(by_step.values()) for by_step in _step_times(run).values())) > 0:
        facts.append(("rollouts and training", format_seconds(seconds)))
    if memory := _finite(run.series("perf/peak_memory_gb")):
        facts.append(("peak memory", f"{memory[-1][1]:.1f} GB"))
    return facts


def _idle_steps(run: RunRecord) -> list[tuple[str, str]]:
    """The steps of which no response was trained on, with the number of responses for each reason."""
    counts = {
        _reason(name.removeprefix(UNTRAINED_PREFIX)): dict(_finite(run.series(name)))
        for name in run.names()
        if name.startswith(UNTRAINED_PREFIX)
    }
    return [
        (short(step), ", ".join(f"{reason} ({short(its[step])})" for reason, its in counts.items() if step in its))
        for step, trained in _finite(run.series("experience_pipeline/trained"))
        if trained == 0
    ]


def _reason(metric: str) -> str:
    """As the log and completions have it: the name of an operator keeps its underscores."""
    words, filtered, name = metric.partition("filtered_by_")
    return words.replace("_", " ") + filtered.replace("_", " ") + name


_EXAMPLES = 8  # the first tasks, as they come: nobody has chosen them


def _pairs(run: RunRecord) -> list[tuple[str, dict[int, list[Completion]]]]:
    """Of each taskset that was evaluated more than once, the same tasks' completions in both evaluations, by step."""
    pairs = []
    for name, steps in run.completions.items():
        if name and len(steps) > 1:
            first, last = (_first_of_each_task(steps[step]) for step in sorted(steps))
            both = [task for task in first if task in last][:_EXAMPLES]
            if both:
                found = dict(zip(sorted(steps), ([each[task] for task in both] for each in (first, last)), strict=True))
                pairs.append((name, found))
    return pairs


def _apart(run: RunRecord) -> dict[int, list[Completion]]:
    """Without such a taskset: the first response to each of the first tasks of the first and the last step."""
    if any(name and len(steps) > 1 for name, steps in run.completions.items()):
        return {}
    steps = run.completions.get("") or next(iter(run.completions.values()), {})
    shown = {step: list(_first_of_each_task(its).values())[:_EXAMPLES] for step, its in sorted(steps.items())}
    return shown if any(shown.values()) else {}


def _first_of_each_task(completions: Sequence[Completion]) -> dict[str, Completion]:
    """By what makes two completions answers to the same task."""
    firsts: dict[str, Completion] = {}
    for each in completions:
        firsts.setdefault(repr((each.get("task"), each.get("prompt"))), each)
    return firsts
