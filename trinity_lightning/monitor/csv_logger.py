"""Rows of metrics: the rule by which measurements share a row, and the logger that writes rows to `metrics.csv`.

Lightning's own CSVLogger deletes the file of a run that is resumed, hence this one.
"""

import csv
import io
from argparse import Namespace
from collections.abc import Iterable, Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

from trinity_lightning.common.files import write_atomically
from trinity_lightning.monitor.rows import FILE, KEYS, STEP_METRIC, Row, damaged, read_rows

# -- the row of a measurement ------------------------------------------------------------------------------------------


def step_of(trainer: L.Trainer) -> int:
    """The explore step under way, from 1."""
    return trainer.current_epoch + 1


def last_row(trainer: L.Trainer) -> int:
    """The row of the item that began last; -1 before the first.

    It is neither global_step, which does not grow with items that take no optimizer step, nor the loop's count of
    logged items, which is wrong in a resumed run until training has started.
    """
    return trainer.fit_loop.epoch_loop.total_batch_idx


def next_row(trainer: L.Trainer) -> int:
    """The row of the item that begins next."""
    return last_row(trainer) + 1


def log_row(loggers: Iterable[Logger], metrics: Mapping[str, float], step: int, row: int) -> None:
    """Log metrics of an explore step as part of a row."""
    for logger in loggers:
        logger.log_metrics({**metrics, STEP_METRIC: float(step)}, step=row)


def belongs(cells: Mapping[str, Any], row: Mapping[str, Any]) -> bool:
    """True if these metrics belong to the last row.

    They do if both have the same `explore_step`, or, if one of them has none, the same trainer step. An explore step
    with several optimizer steps has a row for each: metrics of a later trainer step that would overwrite a measurement
    begin the next row.
    """
    same_step = cells.get("step") == row.get("step")
    if STEP_METRIC not in cells or STEP_METRIC not in row:
        return bool(row) and same_step
    overwrites = any(name in row for name in cells if name not in KEYS)
    return cells[STEP_METRIC] == row[STEP_METRIC] and (same_step or not overwrites)


# -- the file ----------------------------------------------------------------------------------------------------------


class MetricsCSVLogger(Logger):
    """Writes `<dir>/metrics.csv`; metrics are on disk as soon as they are logged.

    `belongs` decides which metrics share a row. A row's `step` is the trainer step of the metrics logged first.

    One write replaces the last row in place; a new column rewrites the whole file through a temporary one. So a killed
    process leaves every metric logged so far, and at worst a torn last line, which is dropped at the next start. Rows
    of an earlier run in the same folder are kept and continued; see `resume_at`.

    Args:
        dir: folder of the run, created when something is logged.

    Attributes:
        path: path of the file.
    """

    def __init__(self, dir: str | Path) -> None:
        super().__init__()
        self.path = Path(dir) / FILE
        self._columns: list[str] | None = None  # None: the file has not been looked at yet
        self._row: Row = {}
        self._row_start = 0  # size in bytes of the file before its last row

    @property
    def save_dir(self) -> str:
        """Folder of the run."""
        return str(self.path.parent)

    @property
    def name(self) -> str:
        """Empty, as the version is: Lightning then puts checkpoints directly into the folder of the run."""
        return ""

    version = name  # type: ignore[assignment]

    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Do nothing: hyperparameters are no metrics, and the run's resolved configuration has a file of its own."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Add metrics to the last row if they belong to it, or else begin the next row."""
        columns = self._load()
        values = metrics if step is None else {"step": step} | dict(metrics)
        # Keys are whole numbers, whatever type they were logged as: 3.0 and 3 are the same step.
        cells = {name: str(int(value)) if name in KEYS else str(value) for name, value in values.items()}
        if belongs(cells, self._row):
            first = {"step": self._row["step"]} if "step" in self._row else {}
            self._row = self._row | cells | first
        else:
            self._row_start = self.path.stat().st_size if columns else 0
            self._row = cells
        if new := [name for name in cells if name not in columns]:
            before = read_rows(self.path, self._row_start)[1] if self._row_start else []
            self._write_all([*before, self._row], [*columns, *new])
        else:
            with self.path.open("r+b") as file:
                file.seek(self._row_start)
                file.write(_line(self._row, columns))
                file.truncate()

    @rank_zero_only
    def resume_at(self, explore_step: int, step: int | None = None) -> None:
        """Drop the rows that an earlier run logged beyond the checkpoint that is resumed: they will be logged again.

        The first row beyond it is dropped, and all that follow.

        Args:
            explore_step: the last explore step that the checkpoint knows of.
            step: the trainer step that comes next; None: only explore steps are compared.

        Raises:
            StorageFormatError: the file is damaged.
        """
        columns = self._load()
        rows = read_rows(self.path)[1] if columns else []

        def known(row: Row) -> bool:
            late = int(row.get(STEP_METRIC, 0)) > explore_step
            return not late and (step is None or "step" not in row or int(row["step"]) < step)

        try:
            known_rows = list(takewhile(known, rows))
        except ValueError as error:
            raise damaged(self.path, error) from error
        if len(known_rows) < len(rows):
            self._write_all(known_rows, columns)

    def _load(self) -> list[str]:
        """The columns so far; the first call reads the file of an earlier run."""
        if self._columns is None:
            columns, rows = read_rows(self.path) if self.path.exists() else ([], [])
            if columns:
                self._write_all(rows, columns)
            self._columns = columns
        return self._columns

    def _write_all(self, rows: list[Row], columns: list[str]) -> None:
        """Write the whole file, atomically; its last row stays open for more metrics."""
        lines = [_line({name: name for name in columns}, columns), *(_line(row, columns) for row in rows)]
        write_atomically(self.path, b"".join(lines))
        self._columns = columns
        self._row = rows[-1] if rows else {}
        self._row_start = sum(map(len, lines[:-1] if rows else lines))


def _line(row: Row, columns: Iterable[str]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow([row.get(name, "") for name in columns])
    return text.getvalue().encode()
