"""Small pictures as inline SVG. The template `pictures.html` has their markup, `page.css` their colours."""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from trinity_lightning.monitor.report.texts import ENVIRONMENT, labels

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
    drawn = finite([point for points in series.values() for point in points])
    if not drawn:
        raise ValueError("a chart needs at least one finite point.")
    frame = _Frame([x for x, _ in drawn], [y for _, y in drawn])
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


def finite(points: Sequence[Point]) -> list[Point]:
    """The points that can be drawn."""
    return [point for point in points if _drawable(point)]


def thinned(points: Sequence[Point]) -> list[Point]:
    """At most 400 points: neighbours are averaged."""
    size = math.ceil(len(points) / _MOST_POINTS)
    if size <= 1:
        return list(points)
    groups = (points[start : start + size] for start in range(0, len(points), size))
    return [(group[0][0], sum(y for _, y in group) / len(group)) for group in groups]
