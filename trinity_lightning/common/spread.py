"""Several values of a metric: their mean, their maximum and their minimum."""

import statistics
from collections.abc import Iterable, Mapping, Sequence


def spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """`<name>/mean`, `/max` and `/min`; nothing for no values."""
    if not values:
        return {}
    return {f"{name}/mean": statistics.fmean(values), f"{name}/max": max(values), f"{name}/min": min(values)}


def spread_of_each(metrics: Iterable[Mapping[str, float]], prefix: str) -> dict[str, float]:
    """The metrics of several tasks or groups as `<prefix>/<name>/{mean,max,min}`, each over those that have it."""
    columns: dict[str, list[float]] = {}
    for each in metrics:
        for name, value in each.items():
            columns.setdefault(name, []).append(float(value))
    spreads = [spread(f"{prefix}/{name}", values) for name, values in columns.items()]
    return {name: value for each in spreads for name, value in each.items()}
