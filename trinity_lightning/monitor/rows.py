"""Reads rows of metrics.csv, without torch: for the logger that writes them, for reports, and for other processes."""

import csv
import io
from pathlib import Path

from trinity_lightning.errors import StorageFormatError

Row = dict[str, str]

FILE = "metrics.csv"
STEP_METRIC = "explore_step"  # the axis over which all metrics are drawn
# Columns that say where a row belongs; every other column is a measurement.
KEYS = ("step", STEP_METRIC, "epoch")


def damaged(path: Path, error: Exception) -> StorageFormatError:
    """The error for a file that cannot be read, with the fix."""
    return StorageFormatError(f"'{path}' is damaged ({error}): move it away, and the metrics begin again.")


def read_rows(path: Path, size: int = -1) -> tuple[list[str], list[Row]]:
    """Columns and rows in the first `size` bytes (-1: all) of a file, without empty cells and a torn last line.

    Raises:
        StorageFormatError: the file is no table.
    """
    with path.open("rb") as file:
        content = file.read(size)
    try:
        reader = csv.DictReader(io.StringIO(content[: content.rfind(b"\n") + 1].decode()))
        rows = [{name: cell for name, cell in row.items() if cell} for row in reader]
    except (UnicodeDecodeError, csv.Error) as error:
        raise damaged(path, error) from error
    return list(reader.fieldnames or []), rows
