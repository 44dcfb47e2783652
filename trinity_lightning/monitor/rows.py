"""Which row of the loggers a measurement belongs to.

An explore step is an epoch, and each of its items is a row, numbered through the run from 0, as Lightning numbers what
the module logs. What is measured before a step's first item belongs to that item's row, what is measured after its last
item to the last one's.
"""

from collections.abc import Iterable, Mapping

import lightning as L
from lightning.pytorch.loggers import Logger

from trinity_lightning.monitor.metric_names import STEP_METRIC


def step_of(trainer: L.Trainer) -> int:
    """The explore step under way, from 1."""
    return trainer.current_epoch + 1


def last_row(trainer: L.Trainer) -> int:
    """The row of the item that began last; -1 before the first.

    Not global_step, which items without an optimizer step leave as it is; nor the loop's count of logged items, which
    is wrong in a resumed run until training has started.
    """
    return trainer.fit_loop.epoch_loop.total_batch_idx


def next_row(trainer: L.Trainer) -> int:
    """The row of the item that begins next."""
    return last_row(trainer) + 1


def log_row(loggers: Iterable[Logger], metrics: Mapping[str, float], step: int, row: int) -> None:
    """Log metrics of an explore step, as part of a row."""
    for logger in loggers:
        logger.log_metrics({**metrics, STEP_METRIC: float(step)}, step=row)
