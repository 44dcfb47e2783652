"""Axes of parallel coordinates: the place of each value of a setting, and the labels."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trinity_lightning.monitor.report.texts import labels, short

_MOST_AXES = 7  # of settings; the score has one more
_MOST_VALUES = 8  # an axis with more different numbers has a scale
_LOGARITHMIC = 20.0  # the scale is logarithmic if the largest value is so many times the smallest
_LONGEST_LABEL = 16


@dataclass
class Axis:
    """One axis of a picture: a place between 0 (bottom) and 1 (top) by value, and the labels by place.

    Attributes:
        name: of the setting or metric.
        places: by the value as text.
        ticks: labels by place.
        is_logarithmic: the scale is.
    """

    name: str
    places: dict[str, float]
    ticks: dict[float, str]
    is_logarithmic: bool = False


def axis_of(name: str, values: Sequence[str]) -> Axis:
    """The axis of a setting. Few different values lie evenly, many numbers on a scale, if need be a logarithmic one.

    Numbers are in order of size; other values in order of appearance.
    """
    distinct = list(dict.fromkeys(values))
    numbers = {text: number for text in distinct if (number := _number(text)) is not None}
    if len(numbers) < len(distinct) or len(distinct) <= _MOST_VALUES:
        if len(numbers) == len(distinct):
            distinct.sort(key=lambda text: numbers[text])
        places = {text: index / max(len(distinct) - 1, 1) for index, text in enumerate(distinct)}
        shown = (
            places if len(places) <= 2 * _MOST_VALUES else {text: places[text] for text in (distinct[0], distinct[-1])}
        )
        return Axis(name, places, {place: _fitted(text) for text, place in shown.items()})
    return scale_of(name, numbers)


def scale_of(name: str, numbers: Mapping[str, float]) -> Axis:
    """The axis of numbers, which are not all the same, on a scale with three labels."""
    low, high = min(numbers.values()), max(numbers.values())
    logarithmic = low > 0 and high / low >= _LOGARITHMIC
    measure = math.log if logarithmic else float
    start, span = measure(low), measure(high) - measure(low)
    places = {text: (measure(number) - start) / span if span else 0.5 for text, number in numbers.items()}
    middle = math.sqrt(low * high) if logarithmic else (low + high) / 2
    ticks = labels([*dict.fromkeys((low, middle, high))])
    shares = {value: (measure(value) - start) / span if span else 0.5 for value in ticks}
    return Axis(name, places, {shares[value]: text for value, text in ticks.items()}, logarithmic)


def chosen_axes(columns: Mapping[str, Sequence[str]]) -> list[Axis]:
    """An axis for each of the first settings, without those that differ exactly as an earlier one does.

    Args:
        columns: by key, the value of each run.
    """
    axes, patterns = [], set[tuple[int, ...]]()
    for key, values in columns.items():
        order = {value: index for index, value in enumerate(dict.fromkeys(values))}
        pattern = tuple(order[value] for value in values)
        if len(order) > 1 and pattern not in patterns and len(axes) < _MOST_AXES:
            patterns.add(pattern)
            axes.append(axis_of(key, values))
    return axes


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _fitted(text: str) -> str:
    number = _number(text)
    if number is not None and len(text) > 8:
        return short(number)
    return text if len(text) <= _LONGEST_LABEL else text[: _LONGEST_LABEL - 1] + "…"
