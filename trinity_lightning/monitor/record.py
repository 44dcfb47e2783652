"""What a run left in its folder, read for a report: nothing has to be there, and what is torn is left out."""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from trinity_lightning.monitor.csv_logger import STEP_METRIC, read_rows
from trinity_lightning.monitor.machine import FILE as ENVIRONMENT_FILE

# -- without secrets --------------------------------------------------------------------------------------------------


HIDDEN = "***"

_PASSWORD_IN_URL = re.compile(r"(://[^\s:/@]*:)\S+(@)")
_SECRETS = "api_?key|access_?key|private_?key|password|passwd|passphrase|secret|credential|access_?token|auth_?token"
# Besides, what ends in `token`: max_tokens and stop_token_ids are no secrets, nor are the tokens of a tokenizer.
_NAME = rf"[\w.-]*(?:(?:{_SECRETS})\w*|(?<!pad_)(?<!eos_)(?<!bos_)(?<!unk_)token)"
_KEY = re.compile(_NAME, re.IGNORECASE)
_ASSIGNED = re.compile(rf"(?<![\w.-])({_NAME}(?:=|['\"]:\s*)).+$", re.IGNORECASE | re.DOTALL)


def without_secrets(config: str) -> str:
    """The text of a YAML file without passwords in URLs and the values of keys and NAME=value that name a secret."""
    try:
        tree = yaml.safe_load(config)
    except yaml.YAMLError:  # whose message would show some of it
        return "config.yaml is damaged: it is no YAML."
    return yaml.safe_dump(_hidden(tree), sort_keys=False, allow_unicode=True, width=math.inf)


def _hidden(node: Any) -> Any:
    if isinstance(node, dict):
        secret = {key for key, value in node.items() if value is not None and _KEY.fullmatch(str(key))}
        return {key: HIDDEN if key in secret else _hidden(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_hidden(each) for each in node]
    if isinstance(node, str):
        return _ASSIGNED.sub(rf"\1{HIDDEN}", _PASSWORD_IN_URL.sub(rf"\1{HIDDEN}\2", node))
    return node


# -- the record -------------------------------------------------------------------------------------------------------


Completion = dict[str, Any]

_TRAIN = re.compile(r"step_(\d+)\.jsonl")
_EVALUATION = re.compile(r"eval_(.+)_step_(\d+)\.jsonl")
# Of a file of completions: enough to pick from, and no more than a page of memory on a large run.
_MOST_LINES = 2000


@dataclass
class RunRecord:
    """A run's folder.

    Attributes:
        folder: it.
        config: the resolved configuration, as text.
        environment: versions and machine by name.
        rows: of metrics.csv, numbers by name.
        completions: by taskset ("" for training), the completions of the first and of the last file, by step.
        kept: rows of a table of the experiences kept; of some of the steps if there are many.
        kept_steps: how many steps were kept.
    """

    folder: Path
    config: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    rows: list[dict[str, float]] = field(default_factory=list)
    completions: dict[str, dict[int, list[Completion]]] = field(default_factory=dict)
    kept: Sequence[Sequence[object]] = ()
    kept_steps: int = 0

    def series(self, name: str) -> list[tuple[float, float]]:
        """(explore step, value) of a metric, the mean if an explore step has several; empty without it."""
        by_step: dict[float, list[float]] = {}
        for row in self.rows:
            if name in row and math.isfinite(row.get(STEP_METRIC, math.nan)):
                by_step.setdefault(row[STEP_METRIC], []).append(row[name])
        return [(step, sum(values) / len(values)) for step, values in sorted(by_step.items())]

    def totals(self, names: Sequence[str]) -> dict[float, float]:
        """By explore step, what these metrics (of a cost, in one unit) add up to; without what is not finite."""
        sums: dict[float, float] = {}
        for row in self.rows:
            values = [row[name] for name in names if math.isfinite(row.get(name, math.nan))]
            if values and math.isfinite(row.get(STEP_METRIC, math.nan)):
                sums[row[STEP_METRIC]] = sums.get(row[STEP_METRIC], 0.0) + sum(values)
        return sums

    def steps(self) -> list[float]:
        """The explore steps that there are metrics of, in order."""
        return sorted({row[STEP_METRIC] for row in self.rows if math.isfinite(row.get(STEP_METRIC, math.nan))})

    def names(self) -> list[str]:
        """The metrics there are, in order of their appearance."""
        return list(dict.fromkeys(name for row in self.rows for name in row))


def read_run(folder: str | Path) -> RunRecord:
    """Read a run's folder; what is missing stays empty. OSError: a file is there and cannot be read."""
    folder = Path(folder)
    record = RunRecord(folder)
    if (folder / "config.yaml").is_file():
        record.config = (folder / "config.yaml").read_text(encoding="utf-8", errors="replace")
    if (folder / ENVIRONMENT_FILE).is_file():
        found = _json((folder / ENVIRONMENT_FILE).read_text(encoding="utf-8", errors="replace"))
        record.environment = {str(name): str(value) for name, value in (found or {}).items()}
    if (folder / "metrics.csv").is_file():
        record.rows = [_numbers(row) for row in read_rows(folder / "metrics.csv")[1]]
    record.completions = _completions(folder / "completions")
    return record


def _numbers(row: dict[str, str]) -> dict[str, float]:
    numbers = {}
    for name, cell in row.items():
        try:
            numbers[name] = float(cell)
        except (TypeError, ValueError):  # a cell of a damaged line; the others may be whole
            numbers[name] = math.nan
    return numbers


def _completions(folder: Path) -> dict[str, dict[int, list[Completion]]]:
    """Of each taskset the first file and the last."""
    files: dict[str, dict[int, Path]] = {}
    for path in sorted(folder.glob("*.jsonl")):
        if match := _TRAIN.fullmatch(path.name):
            files.setdefault("", {})[int(match[1])] = path
        elif match := _EVALUATION.fullmatch(path.name):
            files.setdefault(match[1], {})[int(match[2])] = path
    return {
        taskset: {step: _read(by_step[step]) for step in sorted({min(by_step), max(by_step)})}
        for taskset, by_step in files.items()
    }


def _read(path: Path) -> list[Completion]:
    completions = []
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line, _ in zip(lines, range(_MOST_LINES), strict=False):
            if (completion := _json(line)) is not None:
                completions.append(completion)
    return completions


def _json(text: str) -> dict[str, Any] | None:
    """The object in a text; None for a torn one or anything else."""
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
