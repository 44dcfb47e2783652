"""The page of a run, which opens from disk: plain HTML with inline style and pictures, no script and no network.

Completions, prompts and configuration are other people's text: all of it is escaped.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from html import escape
from pathlib import Path
from typing import Any

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

# -- small pictures as inline SVG; their colours are classes of the style sheet (s0, s1, ...) --------------------------


Point = tuple[float, float]

_WIDTH, _HEIGHT = 360, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 8, 8, 22
# More points than pixels show nothing; neighbours are averaged.
_MOST_POINTS = 400
_MOST_DOTS = 60
# Beyond these, differences and powers of ten can no longer be distinguished in double precision.
_FINEST, _SMALLEST, _LARGEST = 1e-9, 1e-100, 1e100
COLOURS = 6


class _Frame:
    """Where values lie in a picture; round ticks on the y axis, the ends of the x axis, `margin` within the edges."""

    def __init__(self, x_values: Sequence[float], y_values: Sequence[float], margin: float = 0.0) -> None:
        self.x_low, self.x_high, self.margin = min(x_values), max(x_values), margin
        self.y_ticks = nice_ticks(min(y_values), max(y_values))
        self.y_low, self.y_high = self.y_ticks[0], self.y_ticks[-1]

    def x(self, value: float) -> float:
        span = self.x_high - self.x_low + 2 * self.margin
        share = (value - self.x_low + self.margin) / span if span else 0.5
        return round(_LEFT + share * (_WIDTH - _LEFT - _RIGHT), 1)

    def y(self, value: float) -> float:
        share = (value - self.y_low) / (self.y_high - self.y_low)
        return round(_HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM), 1)

    def axes(self) -> str:
        parts = []
        for tick in self.y_ticks:
            y = self.y(tick)
            parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>')
            parts.append(f'<text class="tick" x="{_LEFT - 5}" y="{y + 3.5}" text-anchor="end">{short(tick)}</text>')
        ends = {self.x_low: "start", self.x_high: "end"} if self.x_low < self.x_high else {self.x_low: "middle"}
        for value, anchor in ends.items():
            x = self.x(value)
            parts.append(f'<text class="tick" x="{x}" y="{_HEIGHT - 6}" text-anchor="{anchor}">{short(value)}</text>')
        return "".join(parts)


def line_chart(series: Mapping[str, Sequence[Point]], label: str) -> str:
    """Lines over explore steps; a value that is not finite (or beyond 1e100) interrupts its line.

    Args:
        series: points by name, in order of x; at least one finite point in all.
        label: what the picture shows, for those who do not see it.

    Raises:
        ValueError: no finite point.
    """
    finite = [point for points in series.values() for point in points if _drawable(point[1])]
    if not finite:
        raise ValueError("a chart needs at least one finite point.")
    frame = _Frame([x for x, _ in finite], [y for _, y in finite])
    drawn = [_line(frame, name, points, index) for index, (name, points) in enumerate(series.items())]
    return _svg(label, frame.axes() + "".join(drawn))


def stacked_bars(steps: Sequence[float], parts: Mapping[str, Sequence[float]], label: str) -> str:
    """One bar a step, made of its parts from the bottom up.

    Args:
        steps: x of each bar, at least one.
        parts: by name, a number of at least 0 for each step.
        label: as `line_chart`.
    """
    totals = [sum(values) for values in zip(*parts.values(), strict=True)]
    frame = _Frame(steps, [0.0, max(totals)], margin=0.5)
    width = max(round(0.8 * (frame.x(steps[0] + 1) - frame.x(steps[0])), 1), 0.5)
    bars, heights = [], [0.0] * len(steps)
    for index, (name, values) in enumerate(parts.items()):
        for column, (step, value) in enumerate(zip(steps, values, strict=True)):
            bottom, heights[column] = heights[column], heights[column] + value
            top, height = frame.y(heights[column]), round(frame.y(bottom) - frame.y(heights[column]), 1)
            x = round(frame.x(step) - width / 2, 1)
            title = f"<title>{escape(name)}, step {short(step)}: {short(value)}</title>"
            box = f'x="{x}" y="{top}" width="{width}" height="{max(height, 0)}"'
            bars.append(f'<rect class="b{index % COLOURS}" {box}>{title}</rect>')
    return _svg(label, frame.axes() + "".join(bars))


def legend(names: Sequence[str]) -> str:
    """Which colour is which, as HTML."""
    items = (f'<span><i class="k{i % COLOURS}"></i>{escape(name)}</span>' for i, name in enumerate(names))
    return f'<div class="legend">{"".join(items)}</div>'


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


def short(value: float) -> str:
    """A number in few characters."""
    if value != 0 and not 1e-3 <= abs(value) < 1e5:
        return f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e")
    return f"{value:.4g}"


def _line(frame: _Frame, name: str, points: Sequence[Point], index: int) -> str:
    parts, run = [], list[str]()
    points = thinned(points)
    for x, y in [*points, (math.nan, math.nan)]:
        if _drawable(y):
            run.append(f"{frame.x(x)},{frame.y(y)}")
        elif run:
            parts.append(f'<polyline class="s{index % COLOURS}" points="{" ".join(run)}"/>')
            run = []
    if len(points) <= _MOST_DOTS:
        parts += [
            f'<circle class="d{index % COLOURS}" cx="{frame.x(x)}" cy="{frame.y(y)}" r="2">'
            f"<title>{escape(name)}, step {short(x)}: {short(y)}</title></circle>"
            for x, y in points
            if _drawable(y)
        ]
    return "".join(parts)


def _drawable(value: float) -> bool:
    return abs(value) < _LARGEST  # not so of NaN


def thinned(points: Sequence[Point]) -> list[Point]:
    """At most 400 points, neighbours averaged."""
    size = math.ceil(len(points) / _MOST_POINTS)
    if size <= 1:
        return list(points)
    groups = (points[start : start + size] for start in range(0, len(points), size))
    return [(group[0][0], sum(y for _, y in group) / len(group)) for group in groups]


def _svg(label: str, content: str) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(label)}">{content}</svg>'


# -- completions ------------------------------------------------------------------------------------------------------


_EXAMPLES = 8
_MOST_CHARACTERS = 1500


def completions_section(run: RunRecord) -> str:
    """Of each taskset evaluated more than once the same tasks before and after; without any the first and last step.

    The first tasks are shown, as they come: nobody has chosen them.
    """
    evaluated = {name: steps for name, steps in run.completions.items() if name and len(steps) > 1}
    if evaluated:
        return "\n".join(_paired(name, steps) for name, steps in evaluated.items())
    steps = run.completions.get("") or next(iter(run.completions.values()), {})
    return _apart(steps) if any(steps.values()) else ""


def _paired(name: str, steps: Mapping[int, list[Completion]]) -> str:
    first, last = min(steps), max(steps)
    after = {_key(completion): completion for completion in reversed(steps[last])}
    before = {_key(completion): completion for completion in reversed(steps[first])}
    both = [key for key in reversed(before) if key in after][:_EXAMPLES]
    pairs = "".join(
        f'{_prompt(before[key])}<div class="pair">'
        f"<div>{_shown(before[key], first)}</div><div>{_shown(after[key], last)}</div></div>"
        for key in both
    )
    said = f"The first {len(both)} tasks of {escape(name)}, at explore steps {first} and {last}."
    return f'<h2>Before and after</h2>\n<p class="quiet">{said}</p>\n{pairs}' if both else ""


def _apart(steps: Mapping[int, list[Completion]]) -> str:
    """The first and the last step, whose tasks are not the same: the first response to each of some tasks."""
    columns = []
    for step, completions in sorted(steps.items()):
        firsts = list({_key(completion): completion for completion in reversed(completions)}.values())[::-1]
        shown = "<hr>".join(f"{_prompt(each)}{_shown(each, step)}" for each in firsts[:_EXAMPLES])
        columns.append(f"<div>{shown}</div>")
    said = "The first response to each of the first tasks; the tasks of the two steps differ."
    return f'<h2>Completions</h2>\n<p class="quiet">{said}</p>\n<div class="pair">{"".join(columns)}</div>'


def _key(completion: Completion) -> str:
    """What makes two completions answers to the same task."""
    return repr((completion.get("task"), completion.get("prompt")))


def _prompt(completion: Completion) -> str:
    return f"<pre>{_text(completion.get('prompt'))}</pre>"


def _shown(completion: Completion, step: int) -> str:
    reward = completion.get("reward")
    said = f", reward {short(reward)}" if isinstance(reward, int | float) else ""
    cut = ", cut off" if completion.get("truncated") is True else ""
    cut += f", not trained: {escape(str(completion.get('reason')))}" if completion.get("trained") is False else ""
    text = _text(completion.get("completion"))
    return f'<span class="quiet">step {step}{said}{cut}</span><pre>{text}</pre>'


def _text(value: Any) -> str:
    """Anybody's text, as text: markup in it is shown, not obeyed."""
    text = value if isinstance(value, str) else "" if value is None else repr(value)
    left = len(text) - _MOST_CHARACTERS
    return escape(text[:_MOST_CHARACTERS]) + (f" … ({left} more characters)" if left > 0 else "")


# -- curves -----------------------------------------------------------------------------------------------------------


# Title, and the metrics in one picture; `*` stands for the rest of a name.
_PANELS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Reward", ("reward/mean", "reward/std")),
    ("Held-out", ("eval/*/mean@*",)),
    ("Held-out, solved", ("eval/*/pass@*",)),
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


def curves_section(run: RunRecord) -> str:
    """Every panel with something to see: what never changes (no failed task, a constant rate) is left out."""
    figures = [figure for title, names in _PANELS if (figure := _figure(run, title, names))]
    return f'<h2>Curves</h2>\n<div class="grid-of">{"".join(figures)}</div>' if figures else ""


def _figure(run: RunRecord, title: str, patterns: Sequence[str]) -> str:
    headlines = headline_metrics(run.names())
    names = [name for pattern in patterns for name in headlines if fnmatchcase(name, pattern)]
    series = {name: run.series(name) for name in dict.fromkeys(names)}
    series = {name: points for name, points in series.items() if any(math.isfinite(y) for _, y in points)}
    values = [y for points in series.values() for _, y in points if math.isfinite(y)]
    if not values or (len(values) > 1 and len(set(values)) == 1):
        return ""
    metric = find_metric(next(iter(series)))
    unit = f' <span class="unit">{escape(metric.unit)}</span>' if metric and metric.unit else ""
    label = f"{title} over explore steps: {', '.join(series)}"
    return f"<figure><h3>{escape(title)}{unit}</h3>{line_chart(series, label)}{legend(list(series))}</figure>"


def step_times(run: RunRecord) -> dict[str, dict[float, float]]:
    """Seconds by part and explore step, of the parts that follow one another and so add up."""
    ahead = run.totals([WAIT]).keys()  # rolled out while the step before was trained on
    return {
        name: {step: seconds for step, seconds in run.totals([name]).items() if name in times_in_turn(step in ahead)}
        for name in STEP_TIMES
    }


def time_section(run: RunRecord) -> str:
    """The parts of an explore step that follow one another, and its evaluation: in all, and step by step."""
    seconds = {name.removeprefix("time/"): by_step for name, by_step in step_times(run).items()}
    seconds["prepare"] = run.totals(["time/prepare"])
    seconds["evaluation"] = run.totals([name for name in run.names() if fnmatchcase(name, "eval/*/seconds")])
    seconds = {part: by_step for part, by_step in seconds.items() if any(by_step.values())}
    steps = sorted({step for by_step in seconds.values() for step in by_step})
    if not steps:
        return ""
    columns = {part: [by_step.get(step, 0.0) for step in steps] for part, by_step in seconds.items()}
    whole = sum(map(sum, columns.values()))
    rows = [(part, format_seconds(sum(values)), f"{sum(values) / whole:.0%}") for part, values in columns.items()]
    chart = stacked_bars(steps, columns, "Seconds of each explore step by part")
    return (
        '<h2>Where the time went</h2>\n<div class="grid-of">'
        f'<figure><h3>Explore steps <span class="unit">s</span></h3>{chart}{legend(list(columns))}</figure>'
        f"{_table(('part', 'time', 'share'), rows, numbers=(1, 2))}</div>"
    )


# -- the page ---------------------------------------------------------------------------------------------------------


# What the browser is asked to forbid.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def report_page(run: RunRecord) -> str:
    """The whole page, ASCII or not, to be written as UTF-8."""
    title = escape(f"{run.folder.parent.name} {run.folder.name}".strip())
    style = Path(__file__).with_name("report.css").read_text(encoding="utf-8")
    sections = [
        _facts(run),
        curves_section(run),
        time_section(run),
        _untrained_section(run),
        completions_section(run),
        _kept_section(run),
        _environment_section(run),
        _config_section(run),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>\n{style}</style>\n</head>\n<body>\n<h1>{title}</h1>\n"
        + "\n".join(section for section in sections if section)
        + "\n</body>\n</html>\n"
    )


def _facts(run: RunRecord) -> str:
    """First and last value of what matters most, and what it took."""
    facts = [
        (name, f"{short(points[0][1])} → {short(points[-1][1])}" if len(points) > 1 else short(points[0][1]))
        for name, points in ((name, _finite(run.series(name))) for name in _headline(run))
        if points
    ]
    if steps := run.steps():
        facts.insert(0, ("explore steps", short(max(steps))))
    if (seconds := sum(sum(by_step.values()) for by_step in step_times(run).values())) > 0:
        facts.append(("rollouts and training", format_seconds(seconds)))
    memory = _finite(run.series("perf/peak_memory_gb"))
    if memory:
        facts.append(("peak memory", f"{memory[-1][1]:.1f} GB"))
    if not facts:
        return '<p class="quiet">No metrics: this run logged none, or none yet.</p>'
    cells = (
        f'<div class="fact"><span class="quiet">{escape(name)}</span><b>{escape(v)}</b></div>' for name, v in facts
    )
    return f'<div class="facts">{"".join(cells)}</div>'


def _headline(run: RunRecord) -> list[str]:
    evaluated = [name for name in headline_metrics(run.names()) if name.startswith("eval/") and "/mean@" in name]
    return ["reward/mean", *evaluated, "response_length/mean"]


def _finite(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    return [point for point in points if math.isfinite(point[1])]


def _untrained_section(run: RunRecord) -> str:
    """The steps of which no response was trained on, with their number for each reason; nothing without any."""
    idle = [step for step, trained in _finite(run.series("experience_pipeline/trained")) if trained == 0]
    if not idle:
        return ""
    counts = {
        name.removeprefix(UNTRAINED_PREFIX).replace("_", " "): dict(_finite(run.series(name)))
        for name in run.names()
        if name.startswith(UNTRAINED_PREFIX)
    }
    rows = []
    for step in idle:
        reasons = ", ".join(f"{reason} ({short(steps[step])})" for reason, steps in counts.items() if step in steps)
        rows.append((short(step), reasons))
    return (
        "<h2>Steps that trained on no rollout</h2>\n"
        f'<p class="quiet">{len(idle)} of {len(run.steps())} steps, with the responses for each reason.</p>\n'
        + _table(("step", "reasons"), rows, numbers=(0,))
    )


def _kept_section(run: RunRecord) -> str:
    if not run.kept:
        return ""
    head = ("step", "experiences", "of an expert", "trained tokens", "mean reward", "MB")
    rows = [
        (
            kept.step,
            kept.experiences,
            kept.experts,
            kept.trained_tokens,
            "" if kept.reward is None else short(kept.reward),
            f"{kept.megabytes:.2f}",
        )
        for kept in run.kept
    ]
    some = f"{len(run.kept)} of {run.kept_steps} steps. " if len(run.kept) < run.kept_steps else ""
    how = "Train on them again: <code>+recipe=offline buffer.path=.../experiences</code>"
    return f'<h2>Experiences kept</h2>\n<p class="quiet">{some}{how}</p>\n' + _table(
        head, rows, numbers=range(len(head))
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[object]], numbers: Collection[int]) -> str:
    """A table as HTML; `numbers` are the columns that hold numbers, by their position."""

    def line(tag: str, cells: Sequence[object]) -> str:
        kinds = (f'{tag} class="n"' if column in numbers else tag for column in range(len(cells)))
        return "".join(f"<{kind}>{escape(str(cell))}</{tag}>" for kind, cell in zip(kinds, cells, strict=True))

    body = "".join(f"<tr>{line('td', cells)}</tr>" for cells in rows)
    return f'<div class="wide"><table><thead><tr>{line("th", head)}</tr></thead><tbody>{body}</tbody></table></div>'


def _environment_section(run: RunRecord) -> str:
    if not run.environment:
        return ""
    rows = "".join(f"<tr><th>{escape(n)}</th><td>{escape(v)}</td></tr>" for n, v in run.environment.items())
    return f'<h2>Environment</h2>\n<div class="wide"><table><tbody>{rows}</tbody></table></div>'


def _config_section(run: RunRecord) -> str:
    if not run.config:
        return ""
    text = escape(without_secrets(run.config))
    return f"<h2>Configuration</h2>\n<details><summary>config.yaml</summary><pre>{text}</pre></details>"
