"""Reads a run's folder, and makes its page, which opens from disk.

The template `report.html` has the looks.
"""

import itertools
import json
import math
import re
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from trinity_lightning.common.pictures.thumbnails import COLUMN, FOLDER, files_of
from trinity_lightning.common.solved import criterion_of
from trinity_lightning.monitor.csv_logger import STEP_METRIC, read_rows
from trinity_lightning.monitor.machine import FILE as ENVIRONMENT_FILE
from trinity_lightning.monitor.presentation import (
    STEP_TIMES,
    UNTRAINED_PREFIX,
    WAIT,
    find_metric,
    format_seconds,
    headline_metrics,
    times_in_turn,
)

# -- hiding secrets ----------------------------------------------------------------------------------------------------

HIDDEN = "***"

_PASSWORD_IN_URL = re.compile(r"(://[^\s:/@]*:)\S+(@)")
_SECRETS = "api_?key|access_?key|private_?key|password|passwd|passphrase|secret|credential|access_?token|auth_?token"
# Names that end in `token` are secrets too; max_tokens and stop_token_ids are none, nor are the tokens of a tokenizer.
_NAME = rf"[\w.-]*(?:(?:{_SECRETS})\w*|(?<!pad_)(?<!eos_)(?<!bos_)(?<!unk_)token)"
_KEY = re.compile(_NAME, re.IGNORECASE)
_ASSIGNED = re.compile(rf"(?<![\w.-])({_NAME}(?:=|['\"]:\s*)).+$", re.IGNORECASE | re.DOTALL)


def without_secrets(config: str) -> str:
    """The text of a YAML file with secrets hidden: passwords in URLs, and values whose key or NAME= names a secret."""
    try:
        tree = yaml.safe_load(config)
    except yaml.YAMLError:  # its message would show some of the text
        return "config.yaml is damaged: it is no YAML."
    return yaml.safe_dump(hidden(tree), sort_keys=False, allow_unicode=True, width=math.inf)


def hidden(node: Any) -> Any:
    """The same values with secrets hidden, as in `without_secrets`."""
    if isinstance(node, dict):
        secret = {key for key, value in node.items() if value is not None and _KEY.fullmatch(str(key))}
        return {key: HIDDEN if key in secret else hidden(value) for key, value in node.items()}
    if isinstance(node, list):
        return [hidden(item) for item in node]
    if isinstance(node, str):
        return _ASSIGNED.sub(rf"\1{HIDDEN}", _PASSWORD_IN_URL.sub(rf"\1{HIDDEN}\2", node))
    return node


# -- reading the run's folder ------------------------------------------------------------------------------------------

Completion = dict[str, Any]

_COMPLETIONS = re.compile(r"(?:eval_(.+)_)?step_(\d+)\.jsonl")  # the taskset of an evaluation, and the step
_MOST_LINES = 2000  # read from a file of completions: enough to choose from, and little memory on a large run


@dataclass
class RunRecord:
    """The content of a run's folder.

    Attributes:
        folder: its path.
        config: the resolved configuration, as text.
        environment: versions and hardware by name.
        rows: rows of metrics.csv, each with numbers by name, the explore step among them.
        completions: by taskset ("" for training), the completions of the first and of the last file, by step.
        kept: rows of a table of the experiences kept; if many steps were kept, only some of them.
        kept_steps: number of steps whose experiences were kept.
    """

    folder: Path
    config: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    rows: list[dict[str, float]] = field(default_factory=list)
    completions: dict[str, dict[int, list[Completion]]] = field(default_factory=dict)
    kept: Sequence[Sequence[object]] = ()
    kept_steps: int = 0

    def series(self, name: str) -> list[tuple[float, float]]:
        """The (explore step, value) pairs of a metric, with the mean if a step has several values; empty without it."""
        by_step: dict[float, list[float]] = {}
        for row in self.rows:
            if name in row:
                by_step.setdefault(row[STEP_METRIC], []).append(row[name])
        return [(step, sum(values) / len(values)) for step, values in sorted(by_step.items())]

    def totals(self, names: Sequence[str]) -> dict[float, float]:
        """The sum of these metrics (costs in one unit) by explore step, without values that are not finite."""
        sums: dict[float, float] = {}
        for row in self.rows:
            values = [row[name] for name in names if math.isfinite(row.get(name, math.nan))]
            if values:
                sums[row[STEP_METRIC]] = sums.get(row[STEP_METRIC], 0.0) + sum(values)
        return sums

    @property
    def last_step(self) -> float:
        """The explore step of the last row; 0 without rows."""
        return max((row[STEP_METRIC] for row in self.rows), default=0.0)

    def names(self) -> list[str]:
        """The names of all metrics, in order of appearance."""
        return list(dict.fromkeys(name for row in self.rows for name in row))


def read_run(folder: str | Path) -> RunRecord:
    """Read a run's folder; fields whose files are missing stay empty. OSError: a file cannot be read."""
    folder = Path(folder)
    environment = _json(_text(folder / ENVIRONMENT_FILE)) or {}
    metrics = folder / "metrics.csv"
    rows = map(_numbers, read_rows(metrics)[1] if metrics.is_file() else ())
    return RunRecord(
        folder,
        config=_text(folder / "config.yaml"),
        environment={str(name): str(value) for name, value in environment.items()},
        rows=[row for row in rows if math.isfinite(row.get(STEP_METRIC, math.nan))],
        completions=_completions(folder / "completions"),
    )


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _numbers(row: dict[str, str]) -> dict[str, float]:
    numbers = {}
    for name, cell in row.items():
        try:
            numbers[name] = float(cell)
        except (TypeError, ValueError):  # a cell of a damaged line; the others may be whole
            numbers[name] = math.nan
    return numbers


def _completions(folder: Path) -> dict[str, dict[int, list[Completion]]]:
    """The completions of the first and the last file of each taskset, by step."""
    files: dict[str, dict[int, Path]] = {}
    for path in sorted(folder.glob("*.jsonl")):
        if match := _COMPLETIONS.fullmatch(path.name):
            files.setdefault(match[1] or "", {})[int(match[2])] = path
    return {
        taskset: {step: _read(by_step[step]) for step in sorted({min(by_step), max(by_step)})}
        for taskset, by_step in files.items()
    }


def _read(path: Path) -> list[Completion]:
    with path.open(encoding="utf-8", errors="replace") as lines:
        completions = map(_json, itertools.islice(lines, _MOST_LINES))
        return [completion for completion in completions if completion is not None]


def _json(text: str) -> dict[str, Any] | None:
    """The JSON object in a text; None if it is torn, or something else."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


# -- the page ----------------------------------------------------------------------------------------------------------


def short(value: float, digits: int = 4) -> str:
    """A number in few characters; a very small or large one with fewer digits."""
    if value != 0 and not 1e-3 <= abs(value) < 1e5:
        return f"{value:.{digits - 3}e}".replace("e-0", "e-").replace("e+0", "e")
    return f"{value:.{digits}g}"


def labels(values: Sequence[float]) -> dict[float, str]:
    """Short texts for different numbers, with just enough digits to tell them apart."""
    texts = (dict(zip(values, (short(value, digits) for value in values), strict=True)) for digits in range(4, 18))
    return next(
        (text for text in texts if len({*text.values()}) == len(text)), {value: repr(value) for value in values}
    )


_MOST_CHARACTERS = 1500
_BLANK_LINES = re.compile(r"(?:[^\S\n]*\n){4,}")


def visible(text: str) -> str:
    """The text with long runs of blank lines, or nothing but blanks, replaced by their number in words."""
    if text and not text.strip():
        newlines = text.count("\n")
        others = len(text) - newlines
        counts = [(newlines, "newlines"), (others, "other blank characters" if newlines else "blank characters")]
        return f"⟨{', '.join(f'{count} {kind}' for count, kind in counts if count)}⟩"
    return _BLANK_LINES.sub(lambda lines: f"\n⟨{lines[0].count(chr(10))} newlines⟩\n", text)


def _cut(value: Any) -> str:
    """The beginning of a text, and the number of characters that follow."""
    text = visible(value) if isinstance(value, str) else "" if value is None else repr(value)
    left = len(text) - _MOST_CHARACTERS
    return text[:_MOST_CHARACTERS] + (f" … ({left} more characters)" if left > 0 else "")


# Completions, prompts and configuration are other people's text: markup in them is shown as text.
ENVIRONMENT = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
ENVIRONMENT.filters |= {"short": short, "cut": _cut}


def report_page(run: RunRecord) -> str:
    """The whole page, to be written as UTF-8."""
    return ENVIRONMENT.get_template("report.html").render(
        run=run,
        title=f"{run.folder.parent.name} {run.folder.name}".strip(),
        facts=_facts(run),
        curves=[figure for title, names in _PANELS if (figure := _figure(run, title, names)) is not None],
        times=_times(run),
        idle=_idle_steps(run),
        pairs=_pairs(run),
        thumbnails=partial(_thumbnails, run.folder / "completions" / FOLDER),
        apart=_apart(run),
        config=without_secrets(run.config) if run.config else "",
    )


_LARGEST_THUMBNAIL = 2**16  # bytes of a file that the page takes in


def _thumbnails(folder: Path, completion: Completion) -> list[str]:
    """The pictures of a completion's prompt, as data URLs; those whose files are missing are left out."""
    files = (file for file in files_of(folder, completion.get(COLUMN)) if file.stat().st_size <= _LARGEST_THUMBNAIL)
    return [f"data:image/jpeg;base64,{b64encode(file.read_bytes()).decode()}" for file in files]


# -- small pictures as inline SVG --------------------------------------------------------------------------------------

Point = tuple[float, float]

# With more points than pixels, neighbours are averaged.
_MOST_POINTS = 400
_MOST_DOTS = 60
# Beyond these limits, double precision cannot tell differences and powers of ten apart.
_FINEST, _SMALLEST, _LARGEST = 1e-9, 1e-100, 1e100


class _Frame:
    """Places of values in a picture, with round ticks on the y axis, and the ends of the x axis as its labels.

    `margin` is free space before the first and behind the last x value, in the unit of x.
    """

    width, height = 360, 190
    left, right, top, bottom = 46, 352, 8, 168

    def __init__(self, x_values: Sequence[float], y_values: Sequence[float], margin: float = 0.0) -> None:
        self.x_low, self.x_high, self.margin = min(x_values), max(x_values), margin
        self.x_labels = labels([*{self.x_low: None, self.x_high: None}])
        self.y_ticks = labels(nice_ticks(min(y_values), max(y_values)))

    def x(self, value: float) -> float:
        span = self.x_high - self.x_low + 2 * self.margin
        share = (value - self.x_low + self.margin) / span if span else 0.5
        return round(self.left + share * (self.right - self.left), 1)

    def y(self, value: float) -> float:
        low, *_, high = self.y_ticks
        share = (value - low) / (high - low)
        return round(self.bottom - share * (self.bottom - self.top), 1)


def line_chart(series: Mapping[str, Sequence[Point]], label: str) -> str:
    """A picture of lines over explore steps; a value that is not finite (or beyond 1e100) interrupts its line.

    Args:
        series: points by name, in order of x.
        label: a description of the picture for people who do not see it.

    Raises:
        ValueError: there is no finite point.
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
    """A picture with one bar for each step (at least one), made of parts.

    Args:
        steps: the explore steps.
        parts: heights of a part, one for each step, by the part's name; the first part is at the bottom.
        label: as in `line_chart`.
    """
    heights, bars = [0.0] * len(steps), {}
    for name, values in parts.items():
        bars[name] = list(zip(steps, heights, values, strict=True))
        heights = [height + value for height, value in zip(heights, values, strict=True)]
    frame = _Frame(steps, [0.0, max(heights)], margin=0.5)
    width = max(round(0.8 * (frame.x(steps[0] + 1) - frame.x(steps[0])), 1), 0.5)
    return _pictures().stacked_bars(frame, bars, width, label)


def _pictures() -> Any:
    return ENVIRONMENT.get_template("pictures.html").module


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
    return abs(point[1]) < _LARGEST  # false for NaN


def thinned(points: Sequence[Point]) -> list[Point]:
    """At most 400 points: neighbours are averaged."""
    size = math.ceil(len(points) / _MOST_POINTS)
    if size <= 1:
        return list(points)
    groups = (points[start : start + size] for start in range(0, len(points), size))
    return [(group[0][0], sum(y for _, y in group) / len(group)) for group in groups]


# -- curves, and where the time went -----------------------------------------------------------------------------------


class Figure(NamedTuple):
    """A picture with its title, the names of its colours, and their unit."""

    title: str
    unit: str
    chart: str
    names: list[str]


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
    ("Failed tasks", ("rollout/failed_tasks",)),
    ("Memory", ("perf/peak_memory_gb",)),
)


def _figure(run: RunRecord, title: str, patterns: Sequence[str]) -> Figure | None:
    """A picture of metrics; None if there are none, or if they never change (no failed task, a constant rate)."""
    headlines = headline_metrics(run.names())
    names = dict.fromkeys(name for pattern in patterns for name in headlines if fnmatchcase(name, pattern))
    series = {name: points for name in names if _finite(points := run.series(name))}
    values = [y for points in series.values() for _, y in _finite(points)]
    if not values or (len(values) > 1 and len(set(values)) == 1):
        return None
    metric = find_metric(next(iter(series)))
    chart = line_chart(series, f"{title} over explore steps: {', '.join(series)}")
    unit = _solved(run, series) if title == SOLVED else metric.unit if metric else ""
    return Figure(title, unit, chart, list(series))


def _solved(run: RunRecord, names: Iterable[str]) -> str:
    """The criteria of solved tasks, in words, for the tasksets of these metrics, `eval/<taskset>/pass@<k>`."""
    try:
        config = yaml.safe_load(run.config)
    except yaml.YAMLError:
        config = None
    thresholds = config.get("reward_solved") if isinstance(config, dict) else None
    tasksets_by_criterion: dict[str, list[str]] = {}
    for prefix in dict.fromkeys(name.rpartition("pass@")[0] for name in names):
        others = [name.removeprefix(prefix) for name in run.names() if name.startswith(prefix) and "@" in name]
        metrics = dict.fromkeys(name.rpartition("/")[0] for name in others if "/" in name)
        criterion = criterion_of(metrics, thresholds if isinstance(thresholds, dict) else None)
        tasksets_by_criterion.setdefault(str(criterion), []).append(prefix.split("/", 1)[1].removesuffix("/"))
    if len(tasksets_by_criterion) == 1:
        return next(iter(tasksets_by_criterion))
    return "; ".join(f"{', '.join(tasksets)}: {criterion}" for criterion, tasksets in tasksets_by_criterion.items())


def _finite(points: Sequence[Point]) -> list[Point]:
    return [point for point in points if _drawable(point)]


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


# -- facts, idle steps and completions ---------------------------------------------------------------------------------


def _facts(run: RunRecord) -> list[tuple[str, str]]:
    """The most important facts: held-out scores first, then reward and length (first and last value), time, memory."""
    evaluated = [name for name in headline_metrics(run.names()) if name.startswith("eval/") and "/mean@" in name]
    facts = [_ends(run, name) for name in (*evaluated, "eval/accuracy", "eval/loss")]
    if run.rows:
        facts.append(("explore steps", short(run.last_step)))
    facts += [_ends(run, name) for name in ("reward/mean", "response_length/mean")]
    facts = [fact for fact in facts if fact[1]]
    if (seconds := sum(sum(by_step.values()) for by_step in _step_times(run).values())) > 0:
        facts.append(("rollouts and training", format_seconds(seconds)))
    if memory := _finite(run.series("perf/peak_memory_gb")):
        facts.append(("peak memory", f"{memory[-1][1]:.1f} GB"))
    return facts


def _ends(run: RunRecord, name: str) -> tuple[str, str]:
    """A metric with its first and last value as text, which is empty if it has none."""
    points = _finite(run.series(name))
    return name, " → ".join(short(value) for _, value in dict.fromkeys((*points[:1], *points[-1:])))


def _idle_steps(run: RunRecord) -> list[tuple[str, str]]:
    """The steps without a response that was trained on, with the number of responses for each reason."""
    counts = {
        _reason(name.removeprefix(UNTRAINED_PREFIX)): dict(_finite(run.series(name)))
        for name in run.names()
        if name.startswith(UNTRAINED_PREFIX)
    }
    return [
        (
            short(step),
            ", ".join(f"{reason} ({short(count[step])})" for reason, count in counts.items() if step in count),
        )
        for step, trained in _finite(run.series("experience_pipeline/trained"))
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
