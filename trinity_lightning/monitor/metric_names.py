"""Every metric by name, with its unit and meaning: the table `metric_names.txt`.

`scripts/metrics_docs.py` writes `docs/metrics.md` from it.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trinity_lightning.monitor.csv_logger import STEP_METRIC

# Before the reason, of the metrics that count what is not trained on.
UNTRAINED_PREFIX = "experience_pipeline/untrained/"


@dataclass(frozen=True, slots=True)
class Metric:
    """One line of the table.

    Attributes:
        pattern: the name; `{a,b}` stands for each of the alternatives, `<x>` for a name given by the configuration.
        unit: "" for a ratio or a plain number.
        meaning: one sentence.
    """

    pattern: str
    unit: str
    meaning: str

    def matches(self, name: str) -> bool:
        """Whether `name` is a metric of this line."""
        parts = re.split(r"(\{[^}]*\}|<[^>]*>)", self.pattern)
        return re.fullmatch("".join(map(_part_regex, parts)), name) is not None


def _part_regex(part: str) -> str:
    if part.startswith("{"):
        return "(?:" + "|".join(map(re.escape, part[1:-1].split(","))) + ")"
    return r".+" if part.startswith("<") else re.escape(part)


def _table(text: str) -> tuple[Metric, ...]:
    return tuple(Metric(*line.split(" | ")) for line in text.splitlines() if not line.startswith("#"))


METRICS = _table(Path(__file__).with_suffix(".txt").read_text(encoding="utf-8"))


def find_metric(name: str) -> Metric | None:
    """The first line of the table that a metric's name fits, or None: then it is not documented."""
    return next((metric for metric in METRICS if metric.matches(name)), None)


def headline_metrics(names: Sequence[str]) -> list[str]:
    """Names without the statistics of an evaluation's other metrics: those of the reward have a pass@k beside them."""
    rewards = {name.rpartition("/")[0] for name in names if "/pass@" in name}
    return [name for name in names if "@" not in name or name.rpartition("/")[0] in rewards]


def metric_globs() -> list[str]:
    """What the names come down to when everything below a group is one: `rollout/*`, `frac_reward_zero_std`, ..."""
    globs = (re.sub("/.*", "/*", metric.pattern) for metric in METRICS if metric.pattern != STEP_METRIC)
    return list(dict.fromkeys(globs))
