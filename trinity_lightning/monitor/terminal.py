"""Draws a run, or the runs of a folder, as lines of a terminal of any width: curves, times, completions, warnings."""

import io
import itertools
import math
import os
import sys
import textwrap
import time
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console, Group
from rich.text import Text

from trinity_lightning.monitor.live import CURVES, HELD_OUT, LOSSES, Completion, View, differing_settings
from trinity_lightning.monitor.presentation import format_seconds

PLAIN_WIDTH = 100  # columns outside a terminal, unless COLUMNS says otherwise


def console_of_stdout() -> Console:
    """The console of the standard output. Signs that its encoding lacks become question marks."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    console = Console(highlight=False)
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(width=PLAIN_WIDTH, highlight=False)


# -- small parts -------------------------------------------------------------------------------------------------------

_BLOCKS = "▁▂▃▄▅▆▇█"
_HIDDEN = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")  # categories of characters that steer a terminal, or show nothing
_SIGNS = {"\n": "⏎", "\t": "→", "\r": "␍", "\x1b": "␛"}


def harmless(text: object) -> str:
    """A text of other people in one line: characters that would steer the terminal become signs."""
    return "".join(
        _SIGNS.get(character, "·") if unicodedata.category(character) in _HIDDEN else character
        for character in str(text)
    )


def sparkline(values: Sequence[float], width: int) -> str:
    """A curve of at most `width` characters, each for the mean of the values in its place; "" without values.

    A curve of equal values is a flat one of half height.
    """
    count = min(len(values), width)
    if not count:
        return ""
    cuts = [place * len(values) // count for place in range(count + 1)]
    parts = [values[begin:end] for begin, end in itertools.pairwise(cuts)]
    means = [sum(part) / len(part) for part in parts]
    low, high = min(means), max(means)
    if not high > low:
        return _BLOCKS[3] * count
    top = len(_BLOCKS) - 1
    return "".join(_BLOCKS[round(top * (mean - low) / (high - low))] for mean in means)


def number(value: float) -> str:
    """A number in at most nine characters."""
    if value != 0 and not 1e-3 <= abs(value) < 1e5:
        return f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e")
    return f"{value:.0f}" if abs(value) >= 1e4 else f"{value:.4g}"


def _title(name: str, width: int, more: str = "") -> Text:
    text = Text(f"── {name} ", "bold cyan")
    if more:
        text.append(f"{more} ", "dim")
    return text.append("─" * max(width - text.cell_len, 0), "cyan")


def _fitted(line: Text, width: int) -> Text:
    """The line cut to the width."""
    line.no_wrap = True
    line.truncate(width, overflow="ellipsis")
    return line


def _folded(text: str, width: int, style: str, rows: int = 6) -> Iterator[Text]:
    """The first rows of a sentence or a command, cut between words."""
    for line in textwrap.wrap(harmless(text), width, break_on_hyphens=False)[:rows]:
        yield Text(line, style)


def _padded(text: str, width: int) -> str:
    return text + " " * max(width - cell_len(text), 0)


# -- a run -------------------------------------------------------------------------------------------------------------

_STATES = {
    "running": ("●", "green"),
    "starting": ("◌", "yellow"),
    "silent": ("●", "yellow"),
    "ended": ("✔", "green"),
    "stopped": ("■", "yellow"),
    "died": ("✘", "bold red"),
    "unknown": ("?", "yellow"),
}
_SMALL = 30  # rows of a terminal in which some parts are shorter


def frame(view: View, width: int, height: int | None = None) -> Group:
    """The picture of a run.

    Args:
        view: the run.
        width: columns of the terminal.
        height: its rows; completions fill what the other parts leave. None: as many as there are, and some completions.
    """
    small = height is not None and height < _SMALL
    lines = [*_head(view, width), *_curves(view, width, 6 if small else None), *_times(view, width)]
    tail = list(_log(view, width, 2 if small else 5))
    room = None if height is None else max(height - len(lines) - len(tail), 0)
    lines += [*_completions(view, width, room), *tail]
    return Group(*(_fitted(line, width) for line in lines[:height]))


def _head(view: View, width: int) -> Iterator[Text]:
    """Name and state; steps and time left, with a bar; what the run does now."""
    sign, style = _STATES[view.state.name]
    folder = view.folder.resolve()
    yield Text.assemble(
        (f"{sign} {view.state.name}", style), "  ", (harmless(f"{folder.parent.name}/{folder.name}"), "bold")
    )
    yield from _folded(view.state.why, width, style)
    model, engine = view.setting("model.name"), view.setting("engine.name")
    facts = [f"model {model}" if model else "", f"engine {engine}" if engine else ""]
    facts += [
        str(view.machine.get("GPU") if view.machine.get("GPU", "none") != "none" else view.machine.get("CPU", ""))
    ]
    if any(facts):
        yield Text(harmless("  ".join(filter(None, facts))), "dim")
    done, steps = view.metrics.steps_done, view.steps
    line = Text(f"step {done}" + (f" of {steps}" if steps else ""), "bold")
    if steps:
        filled = round(20 * min(done / steps, 1))
        line.append("  ").append("━" * filled, "green").append("━" * (20 - filled), "bright_black")
    if (left := view.seconds_left) is not None:
        line.append(f"  {format_seconds(left)} left")
    if (pace := view.metrics.pace()) is not None:
        line.append(f"  {pace:.3g} s a step", "dim")
    yield line
    if view.progress and view.state.goes_on:
        yield _now(view)
    if view.resume:
        yield from _folded(f"resume with: {view.resume}", width, "yellow")


def _now(view: View) -> Text:
    """The part of the work that goes on, for how long, and the tasks in flight."""
    assert view.progress is not None
    progress, _ = view.progress
    now = time.time()
    line = Text("now: ").append(harmless(progress.part), "bold")
    if progress.step:
        line.append(f" {'after' if progress.part == 'between steps' else 'of'} step {progress.step}")
    line.append(f" for {format_seconds(max(now - progress.since, 0))}")
    if progress.total and (progress.done < progress.total or progress.part in ("rollout", "evaluation")):
        name = harmless(progress.batch.partition("/")[2] or f"step {progress.batch}")
        line.append(f"  tasks of {name}: {progress.done} of {progress.total} ended")
        across_steps = view.setting("explorer.max_staleness") and progress.part != "evaluation"
        if not across_steps:  # then those of later steps are in flight, too
            line.append(f", {progress.total - progress.done} in flight", "bold")
        if progress.done:
            line.append(f", the last {format_seconds(max(now - progress.last, 0))} ago", "dim")
    return line


def _curves(view: View, width: int, most: int | None) -> Iterator[Text]:
    """A line for each metric: its curve, and its first, last, least and largest value."""
    metrics = view.metrics
    shown = curves_of(metrics.columns)[:most]
    series = {name: points for name in shown if (points := metrics.series(name))}
    if not series:
        yield _title("curves", width, "no step has ended yet")
        return
    steps = [step for points in series.values() for step, _ in points]
    more = f"over steps {min(steps):g} to {max(steps):g}"
    if metrics.one_in > 1:
        more += f", 1 row in {metrics.one_in}"
    yield _title("curves", width, more)
    labels = labels_of(list(series))
    first = min(max(map(cell_len, labels.values())), max(width // 4, 12))
    wide = width >= 76
    numbers = 40 if wide else 20
    room = max(width - first - numbers - 4, 8)
    head = f"{'first':>9} {'last':>9} {'min':>9} {'max':>9}" if wide else f"{'first':>9} {'last':>9}"
    yield Text(" " * (first + room + 3) + head, "dim")
    for name, points in series.items():
        values = [value for _, value in points]
        ends = [values[0], values[-1], *([min(values), max(values)] if wide else [])]
        label = Text(labels[name])
        label.truncate(first, overflow="ellipsis", pad=True)
        line = label.append("  ").append(_padded(sparkline(values, room), room), "green").append(" ")
        for place, value in enumerate(ends):
            line.append(f"{number(value):>9} ", "bold" if place == 1 else "")
        yield line


def curves_of(columns: Sequence[str]) -> list[str]:
    """The metrics among the columns that are drawn, in their order: those of evaluations behind the first one."""
    shown = [name for name in CURVES if name in columns]
    if "reward/mean" in shown:
        shown = [name for name in shown if name not in LOSSES]
    held_out = [name for name in columns if HELD_OUT.fullmatch(name)]
    return [*shown[:1], *held_out, *shown[1:]]


def labels_of(names: Sequence[str]) -> dict[str, str]:
    """The labels of metrics: a single evaluation is "held-out", and several have the names of their tasksets."""
    tasksets = {name: match[1] for name in names if (match := HELD_OUT.fullmatch(name))}
    if len(tasksets) == 1:
        tasksets = dict.fromkeys(tasksets, "held-out")
    return {name: harmless(tasksets[name]) if name in tasksets else CURVES[name] for name in names}


_FILLS = {  # signs differ too, for a terminal or a file without colours
    "rollout": ("█", "blue"),
    "operators": ("▞", "cyan"),
    "add_strategy": ("▚", "cyan"),
    "wait_for_rollout": ("▄", "magenta"),
    "train": ("▓", "green"),
    "sync_weight": ("▒", "yellow"),
    "other": ("░", "bright_black"),
    "evaluation": ("▌", "magenta"),
}
_LEAST_SHARE = 0.005  # of a step, to be named


def _times(view: View, width: int) -> Iterator[Text]:
    """The parts of the last step: a bar, and their seconds."""
    times = view.metrics.last_times()
    whole = sum(times.values())
    if not whole:
        return
    yield _title("time of the last step", width, format_seconds(whole) if whole >= 10 else f"{whole:.2g}s")
    bar, legend, ended = Text(), Text(), 0.0
    for name, seconds in times.items():
        fill, style = _FILLS.get(name, ("░", ""))
        begin, ended = round(width * ended / whole), ended + seconds
        bar.append(fill * (round(width * ended / whole) - begin), style)
        if seconds >= _LEAST_SHARE * whole:
            label = name.replace("_weight", "").replace("_for_rollout", "").replace("_", " ")
            legend.append(f"{fill} ", style).append(f"{label} {seconds:.2g}s ").append(
                f"{seconds / whole:.0%}  ", "dim"
            )
    yield bar
    yield legend


# -- completions and warnings ------------------------------------------------------------------------------------------

_SHOWN = 3  # completions of a picture without a height


def _completions(view: View, width: int, room: int | None) -> Iterator[Text]:
    """The best, the worst and other completions of the newest step, each with its prompt, reward and advantage.

    Args:
        view: the run.
        width: columns of the terminal.
        room: rows that are free; None: enough for some completions.
    """
    step, completions = view.completions
    if not completions or (room is not None and room < 3):
        return
    yield _title("completions", width, f"of step {step}: best, worst, and between, of {len(completions)}")
    left = None if room is None else room - 1
    shown = _spread(completions, _SHOWN if left is None else max(left // 3, 1))
    rows = 2 if left is None else max((left - len(shown)) // len(shown), 1)
    for completion in shown:
        head = Text()
        for name in ("reward", "advantage"):
            value = completion.get(name)
            text = number(value) if isinstance(value, int | float) else "-"
            head.append(f"{name} {text}  ", "bold")
        if completion.get("truncated"):
            head.append("cut off  ", "yellow")
        if completion.get("reason"):
            head.append(f"not trained: {harmless(completion['reason'])}  ", "yellow")
        yield head.append(_end_of(str(completion.get("prompt") or ""), width - head.cell_len), "dim")
        yield from _wrapped(str(completion.get("completion") or "(empty)"), width, rows)


def _spread(completions: Sequence[Completion], count: int) -> list[Completion]:
    """The completions with the largest and the smallest reward, and others between them."""
    rewards: Callable[[Completion], float] = lambda completion: _real(completion.get("reward"))  # noqa: E731
    ranked = sorted(completions, key=rewards, reverse=True)
    if count >= len(ranked):
        return ranked
    if count == 1:
        return ranked[:1]
    between = [ranked[place * (len(ranked) - 1) // (count - 1)] for place in range(1, count - 1)]
    return [ranked[0], ranked[-1], *between]


def _real(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else -math.inf


def _end_of(prompt: str, width: int) -> str:
    """The end of a prompt, where the question usually is."""
    text = harmless(prompt[-max(width, 1) :])
    if len(text) == len(prompt) and cell_len(text) <= width:
        return text
    while text and cell_len(text) > max(width - 1, 0):
        text = text[1:]
    return f"…{text}"


def _wrapped(completion: str, width: int, rows: int) -> Iterator[Text]:
    """The first rows of a completion, indented; the last one says how many characters are left out."""
    inner, begin = max(width - 2, 10), 0
    text = harmless(completion[: inner * rows + 1])
    for row in range(rows):
        end, cells = begin, 0
        while end < len(text) and cells + cell_len(text[end]) <= inner:
            cells += cell_len(text[end])
            end += 1
        if end == begin:
            return
        line = Text(f"  {text[begin:end]}")
        if row == rows - 1 and end < len(completion):
            more = f" … {len(completion) - end} more"
            line.truncate(max(width - len(more), 0))
            line.append(more, "dim")
        yield line
        begin = end


def _log(view: View, width: int, most: int) -> Iterator[Text]:
    """The last warnings and errors of the log."""
    if not view.warnings:
        return
    yield _title("warnings", width, "the newest last; all are in train.log")
    for record in view.warnings[-most:]:
        clock = record.time.partition(" ")[2].partition(",")[0]
        times = f" ({record.count} times)" if record.count > 1 else ""
        style = "red" if record.level != "WARNING" else "yellow"
        yield Text(f"{clock}{times} ", "dim").append(harmless(record.text), style)


# -- several runs ------------------------------------------------------------------------------------------------------


def frame_of_runs(views: Sequence[View], width: int, height: int | None = None) -> Group:
    """The picture of several runs, a line for each, with the settings in which they differ; `height` as of `frame`."""
    folder = views[0].folder.resolve().parent
    counts: dict[str, int] = {}
    for view in views:
        counts[view.state.name] = counts.get(view.state.name, 0) + 1
    summary = ", ".join(f"{count} {name}" for name, count in counts.items())
    lines = [Text.assemble((harmless(f"{folder.parent.name}/{folder.name}"), "bold"), f"  {summary}")]
    name_width = min(max(cell_len(harmless(view.folder.name)) for view in views), max(width // 4, 8))
    curve = max(min(width - name_width - 50, 40), 8)
    for view, settings in zip(views, differing_settings([view.overrides for view in views]), strict=True):
        lines.append(_line_of(view, settings, name_width, curve))
    hidden = 0 if height is None else len(lines) - height
    if height is not None and hidden > 0:
        lines = [*lines[: height - 1], Text(f"… and {hidden + 1} more runs", "dim")]
    return Group(*(_fitted(line, width) for line in lines))


def _line_of(view: View, settings: str, name_width: int, curve: int) -> Text:
    sign, style = _STATES[view.state.name]
    name = Text(harmless(view.folder.name))
    name.truncate(name_width, overflow="ellipsis", pad=True)
    steps = f"{view.metrics.steps_done}/{view.steps or '?'}"
    line = Text.assemble((f"{sign} ", style), name, f"  {steps:>9}  ")
    shown = curves_of(view.metrics.columns)
    values = [value for _, value in view.metrics.series(shown[0])] if shown else []
    line.append(_padded(sparkline(values, curve), curve), "green")
    line.append(f" {number(values[-1]) if values else '-':>8}  ", "bold")
    if (left := view.seconds_left) is not None:
        line.append(f"{format_seconds(left)} left  ")
    line.append(f"{harmless(settings)}  ", "dim")
    return line.append(harmless(view.state.why), style)
