"""Small pictures as inline SVG. The template `pictures.html` has their markup, `page.css` their colours."""

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from trinity_lightning.monitor.report.axes import Axis
from trinity_lightning.monitor.report.texts import ENVIRONMENT, labels

Point = tuple[float, float]

# With more points than pixels, neighbours are averaged.
_MOST_POINTS = 400
_MOST_DOTS = 60
_MOST_BARS = 150
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
    drawn = finite([point for points in series.values() for point in points])
    if not drawn:
        raise ValueError("a chart needs at least one finite point.")
    frame = _Frame([x for x, _ in drawn], [y for _, y in drawn])
    lines = {name: thinned(points) for name, points in series.items()}
    pieces = {name: _pieces(points) for name, points in lines.items()}
    dotted = {name for name, points in lines.items() if len(points) <= _MOST_DOTS}
    return _pictures().line_chart(frame, pieces, dotted, label)


class Line(NamedTuple):
    """A line of a comparison.

    Attributes:
        css: its class in the style sheet.
        name: shown where the mouse points at it.
        points: in order of x.
        band: (x, lowest, highest) of the runs that the line is the mean of; empty for one run.
        mark: a short text at its end.
    """

    css: str
    name: str
    points: Sequence[Point]
    band: Sequence[tuple[float, float, float]] = ()
    mark: str = ""


_ALL_POINTS, _FEWEST_POINTS = 3000, 24  # of all lines of a comparison; and of each one
_MARK_HEIGHT, _NEAR = 10.0, 14.0  # pixels: of a mark, and between line ends whose marks would overlap


def comparison_chart(lines: Sequence[Line], label: str) -> str:
    """A picture of lines of several runs, each of which a page can hide; ValueError: there is no finite point.

    The more lines there are, the fewer points each of them has.
    """
    most = max(_FEWEST_POINTS, min(_MOST_POINTS, _ALL_POINTS // max(len(lines), 1)))
    edges = [(x, y) for line in lines for x, *ends in line.band for y in ends]
    drawn = finite([point for line in lines for point in (*line.points, *edges)])
    if not drawn:
        raise ValueError("a chart needs at least one finite point.")
    frame = _Frame([x for x, _ in drawn], [y for _, y in drawn])
    frame.right -= 12  # for the marks
    shown = [(line, _pieces(thinned(line.points, most))) for line in lines]
    shown = [(line, pieces, _outline(line.band, most)) for line, pieces in shown if pieces]
    ends = {line.css: pieces[-1][-1] for line, pieces, _ in shown}
    marked = [(line.css, frame.x(ends[line.css][0]), frame.y(ends[line.css][1])) for line, *_ in shown if line.mark]
    return _pictures().comparison_chart(frame, shown, ends, _marks_apart(marked), label)


def _pieces(points: Sequence[Point]) -> list[list[Point]]:
    """The parts of a line between values that cannot be drawn."""
    return [list(piece) for drawable, piece in itertools.groupby(points, _drawable) if drawable]


def _outline(band: Sequence[tuple[float, float, float]], most: int) -> list[Point]:
    """The lowest values from left to right, then the highest ones back."""
    whole = [row for row in band if _drawable((row[0], row[1])) and _drawable((row[0], row[2]))]
    low, high = (thinned([(row[0], row[place]) for row in whole], most) for place in (1, 2))
    return [*low, *reversed(high)]


def _marks_apart(ends: Sequence[tuple[str, float, float]]) -> dict[str, Point]:
    """The place of each mark, moved down where marks would lie on each other."""
    placed: dict[str, Point] = {}
    for css, x, y in sorted(ends, key=lambda end: end[2]):
        near = [other for other_x, other in placed.values() if abs(other_x - x) < _NEAR]
        placed[css] = x, max([y, *(other + _MARK_HEIGHT for other in near)])
    return placed


def parallel_coordinates(axes: Sequence[Axis], lines: Sequence[tuple[str, str, Sequence[str]]], label: str) -> str:
    """A picture with an upright axis for each setting, the last one for the score, and a line for each run.

    Args:
        axes: the axes, from left to right.
        lines: of each run its class in the style sheet, its name, and its value on each axis.
        label: as in `line_chart`.
    """
    apart = _FEW_AXES_APART if len(axes) <= _FEW_AXES else _AXES_APART
    x = [_AXIS_LEFT + apart * index for index in range(len(axes))]
    heights = [[_height(axis.places[values[index]]) for *_, values in lines] for index, axis in enumerate(axes)]
    by_line = zip(*map(_side_by_side, heights), strict=True)
    drawn = [(css, name, list(zip(x, ys, strict=True))) for (css, name, _), ys in zip(lines, by_line, strict=True)]
    ticks = [[(_height(place), text) for place, text in axis.ticks.items()] for axis in axes]
    return _pictures().parallel_coordinates(x[-1] + _AXIS_LEFT, list(zip(x, axes, ticks, strict=True)), drawn, label)


_AXIS_LEFT, _AXES_APART, _FEW_AXES_APART, _FEW_AXES = 90, 150, 220, 4
_AXIS_TOP, _AXIS_BOTTOM = 46, 246
_LINES_APART, _WIDEST_BUNDLE = 2.5, 14.0  # pixels between lines that meet at one value, and of all of them


def _height(place: float) -> float:
    return round(_AXIS_BOTTOM - place * (_AXIS_BOTTOM - _AXIS_TOP), 1)


def _side_by_side(heights: Sequence[float]) -> list[float]:
    """The heights with equal ones moved a little apart, so that lines which meet at a value can be told apart."""
    counts, seen = Counter(heights), Counter[float]()
    moved = []
    for height in heights:
        gap = min(_LINES_APART, _WIDEST_BUNDLE / counts[height])
        moved.append(round(height + gap * ((counts[height] - 1) / 2 - seen[height]), 1))
        seen[height] += 1
    return moved


def stacked_bars(steps: Sequence[float], parts: Mapping[str, Sequence[float]], label: str) -> str:
    """A picture with one bar for each step (at least one), made of parts; of many steps, neighbours are averaged.

    Args:
        steps: the explore steps.
        parts: heights of a part, one for each step, by the part's name; the first part is at the bottom.
        label: as in `line_chart`.
    """
    lines = {name: thinned(list(zip(steps, values, strict=True)), _MOST_BARS) for name, values in parts.items()}
    heights, bars = [0.0] * min(map(len, lines.values())), {}
    for name, points in lines.items():
        bars[name] = [(step, height, value) for (step, value), height in zip(points, heights, strict=True)]
        heights = [height + value for height, (_, value) in zip(heights, points, strict=True)]
    frame = _Frame(steps, [0.0, max(heights)], margin=0.5)
    steps_of_bar = math.ceil(len(steps) / _MOST_BARS)
    width = max(round(0.8 * (frame.x(steps[0] + steps_of_bar) - frame.x(steps[0])), 1), 0.5)
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


def finite(points: Sequence[Point]) -> list[Point]:
    """The points that can be drawn."""
    return [point for point in points if _drawable(point)]


def thinned(points: Sequence[Point], most: int = _MOST_POINTS) -> list[Point]:
    """At most so many points: neighbours are averaged."""
    size = math.ceil(len(points) / most)
    if size <= 1:
        return list(points)
    groups = (points[start : start + size] for start in range(0, len(points), size))
    return [(group[0][0], sum(y for _, y in group) / len(group)) for group in groups]
