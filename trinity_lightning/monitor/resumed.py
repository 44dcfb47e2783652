"""What a resumed run keeps of the metrics that are there."""

from collections.abc import Sequence
from pathlib import Path

from trinity_lightning.monitor.csv_logger import Row, damaged


def rows_known(rows: Sequence[Row], explore_step: int, step: int | None, path: Path) -> list[Row]:
    """The rows before the first one that a checkpoint does not know of; arguments as of `MetricsCSVLogger.resume_at`.

    Raises:
        StorageFormatError: the file, whose path is given, is damaged.
    """

    def beyond(row: Row) -> bool:
        late = "explore_step" in row and int(row["explore_step"]) > explore_step
        return late or (step is not None and "step" in row and int(row["step"]) >= step)

    try:
        return list(rows[: next((index for index, row in enumerate(rows) if beyond(row)), len(rows))])
    except ValueError as error:
        raise damaged(path, error) from error
