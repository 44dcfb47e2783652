"""Reads a run's folder."""

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from trinity_lightning.monitor.folders import ENVIRONMENT, TOKENS
from trinity_lightning.monitor.presentation import TRAINED, UNTRAINED_PREFIX
from trinity_lightning.monitor.rows import STEP_METRIC, read_rows
from trinity_lightning.monitor.run_files import json_object, settings_in, text_of

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
        tokens: responses of the first and of the last step with their tokens, by step; see monitor/tokens.py.
        kept: rows of a table of the experiences kept; if many steps were kept, only some of them.
        kept_steps: number of steps whose experiences were kept.
    """

    folder: Path
    config: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    rows: list[dict[str, float]] = field(default_factory=list)
    completions: dict[str, dict[int, list[Completion]]] = field(default_factory=dict)
    tokens: dict[int, list[Completion]] = field(default_factory=dict)
    kept: Sequence[Sequence[object]] = ()
    kept_steps: int = 0

    def series(self, name: str) -> list[tuple[float, float]]:
        """The (explore step, value) pairs of a metric, with the mean if a step has several values; empty without it.

        Earlier versions logged no count of responses that were not trained on if it was 0.
        """
        by_step: dict[float, list[float]] = {}
        for row in self.rows:
            if name in row:
                by_step.setdefault(row[STEP_METRIC], []).append(row[name])
        if by_step and name.startswith(UNTRAINED_PREFIX):
            zeros = {row[STEP_METRIC]: [0.0] for row in self.rows if TRAINED in row}
            by_step = zeros | by_step
        return [(step, sum(values) / len(values)) for step, values in sorted(by_step.items())]

    def totals(self, names: Sequence[str]) -> dict[float, float]:
        """The sum of these metrics (costs in one unit) by explore step, without values that are not finite."""
        sums: dict[float, float] = {}
        for row in self.rows:
            values = [row[name] for name in names if math.isfinite(row.get(name, math.nan))]
            if values:
                sums[row[STEP_METRIC]] = sums.get(row[STEP_METRIC], 0.0) + sum(values)
        return sums

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The resolved configuration; empty if it is missing or damaged."""
        return settings_in(self.config)

    @property
    def last_step(self) -> float:
        """The explore step of the last row; 0 without rows."""
        return max((row[STEP_METRIC] for row in self.rows), default=0.0)

    @cached_property
    def names(self) -> list[str]:
        """The names of all metrics, in order of appearance."""
        return list(dict.fromkeys(name for row in self.rows for name in row))


def read_run(folder: str | Path) -> RunRecord:
    """Read a run's folder; fields whose files are missing stay empty. OSError: a file cannot be read."""
    folder = Path(folder)
    environment = json_object(text_of(folder / ENVIRONMENT)) or {}
    metrics = folder / "metrics.csv"
    rows = map(_numbers, read_rows(metrics)[1] if metrics.is_file() else ())
    return RunRecord(
        folder,
        config=text_of(folder / "config.yaml"),
        environment={str(name): str(value) for name, value in environment.items()},
        rows=[row for row in rows if math.isfinite(row.get(STEP_METRIC, math.nan))],
        completions=_completions(folder / "completions"),
        tokens=_completions(folder / "completions" / TOKENS).get("", {}),
    )


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
        completions = map(json_object, itertools.islice(lines, _MOST_LINES))
        return [completion for completion in completions if completion is not None]
