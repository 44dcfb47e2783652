"""What a W&B run is given beyond its metrics: the axis of its pictures, and the completions as a table."""

from collections.abc import Sequence
from typing import Any

import wandb

from trinity_lightning.monitor.metric_names import STEP_METRIC, metric_globs


def define_metrics(run: wandb.Run) -> None:
    """Draw all metrics over `explore_step`, whatever the optimizer's step is.

    Args:
        run: `WandbLogger.experiment`.
    """
    run.define_metric(STEP_METRIC)
    # WandbLogger has put "*" on trainer/global_step, and where several globs match, W&B takes any one of them.
    for glob in ("*", *metric_globs()):
        run.define_metric(glob, step_metric=STEP_METRIC, step_sync=True)


def log_completions(
    run: wandb.Run, rows: Sequence[dict[str, Any]], explore_step: int, name: str = "completions"
) -> None:
    """Log the rows that `CompletionsWriter.write` returned as the table `name`; no rows, no table.

    Args:
        run: `WandbLogger.experiment`.
        rows: dicts with one set of keys, the table's columns.
        explore_step: the step the rows belong to.
        name: the table; give evaluations one of their own.
    """
    if rows:
        table = wandb.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
        run.log({name: table, STEP_METRIC: explore_step})
