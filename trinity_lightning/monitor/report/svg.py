"""Small pictures as inline SVG: no library, no script, colours from the page's style sheet (classes s0, s1, ...)."""

import math
from collections.abc import Mapping, Sequence
from html import escape

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
