"""Weights & Biases: one row of history for metrics that belong together, and one W&B run even after resumes."""

import math
import os
import re
import secrets
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.utilities import rank_zero_only

from trinity_lightning.common.checkpoints import contents
from trinity_lightning.common.files import write_atomically
from trinity_lightning.monitor.csv_logger import belongs
from trinity_lightning.monitor.rows import STEP_METRIC

FILE = "wandb_run_id.txt"  # a file in a run's folder, with the id of its run of W&B
STATE = "wandb_run_id"  # a key in RunMonitor's state in checkpoints, for the same id
# Statistics of a run that W&B's table of runs shows and sorts by, for the metrics that match in full: reward/mean.max.
SUMMARIES = (
    (r"reward/(.+/)?mean|eval/accuracy|eval/.+/(mean|pass)@\d+", "max,last"),
    (r"eval/loss", "min,last"),
    (
        r"actor/(logprob_diff|is_weight)/(mean|max)|actor/(grad_norm|pg_clipfrac)|sample/(lag|staleness)/mean",
        "max,last",
    ),
    (r"frac_reward_zero_std|time/step|(perf|rollout)/\w*tokens_per_second", "mean,last"),
    (r"response_length/(mean|clip_ratio)|sample/staleness/mean|perf/peak_\w+", "max,last"),
    (r"actor/entropy", "min,last"),
)


class RunLogger(WandbLogger):
    """Lightning's logger for W&B, with the rows of `metrics.csv` as its history, and an id that is known at once.

    A row is sent when the next one begins, by `flush`, or at the end of the run.

    Args:
        save_dir: folder of the run.
        tags: tags of the run of W&B.
        settings: arguments of Lightning's WandbLogger and of `wandb.init`.
    """

    def __init__(self, save_dir: str | Path = ".", tags: Sequence[str] = (), **settings: Any) -> None:
        # W&B's service may be that of the program that started this one (WANDB_SERVICE), and have another folder.
        super().__init__(save_dir=Path(save_dir).absolute(), tags=tuple(tags), **settings)
        self._wandb_init.pop("anonymous")  # W&B warns of it, and it has no effect any more
        if "weave" not in sys.modules:  # W&B would advise to install it if it finds, say, the package openai
            os.environ.setdefault("WANDB_DISABLE_WEAVE", "true")
        self._row: dict[str, Any] = {}
        self._known: set[str] = set()  # names whose summary is settled
        self._is_chosen = self._id is not None
        self._id = self._wandb_init["id"] = self._id or os.environ.get("WANDB_RUN_ID") or new_id()

    @property
    def id(self) -> str:
        """The id of the run of W&B."""
        return str(self._id)

    def adopt(self, id: str) -> None:
        """Go on in the run of W&B with this id, unless the settings chose one. Call it before anything is logged."""
        if not self._is_chosen:
            self._id = self._wandb_init["id"] = id

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Add metrics, tables or pictures to the last row if they belong to it, or else begin the next row."""
        cells = ({} if step is None else {"step": step}) | dict(metrics)
        if not belongs(cells, self._row):
            self.flush()
        self._row = self._row | cells | {key: self._row[key] for key in ("step",) if key in self._row}

    def log(self, data: Mapping[str, Any]) -> None:
        """Same as `log_metrics`, under the name that a run of W&B has for it."""
        self.log_metrics(data)

    def flush(self, before: float = math.inf) -> None:
        """Send the last row if its explore step is before `before`."""
        if self._row.get(STEP_METRIC, 0) >= before:
            return
        row, self._row = self._row, {}
        if row:
            self._define_summaries(row)
            super().log_metrics(row, row.pop("step", None))

    def _define_summaries(self, names: Iterable[str]) -> None:
        """Ask W&B for the statistics of metrics that appear for the first time: only now are all names known."""
        for name in set(names) - self._known:
            if summary := summary_of(name):
                self.experiment.define_metric(name, step_metric=STEP_METRIC, step_sync=True, summary=summary)
        self._known.update(names)

    def finalize(self, status: str) -> None:
        """Send the last row."""
        self.flush()
        super().finalize(status)


def summary_of(name: str) -> str | None:
    """The statistics of a metric in W&B's table of runs, as `define_metric` takes them; None: its last value alone."""
    return next((summary for pattern, summary in SUMMARIES if re.fullmatch(pattern, name)), None)


def new_id() -> str:
    """A fresh id of the form that W&B uses: eight letters and digits."""
    return secrets.token_hex(4)


def run_id(folder: Path, checkpoint: str | None) -> str | None:
    """The id of the run of W&B in which a run in this folder goes on; None: it begins one.

    The folder's id counts, or else the checkpoint's. If the checkpoint lies in the folder of another run that has an id
    there, this run branches off from it: it gets a run of W&B of its own.
    """
    if (file := folder / FILE).is_file():
        return file.read_text().strip()
    if checkpoint is None or (Path(checkpoint).absolute().parents[1] / FILE).is_file():
        return None
    return next((state[STATE] for state in contents(checkpoint).get("callbacks", {}).values() if STATE in state), None)


def record_id(folder: Path, id: str) -> None:
    """Write the id into a run's folder."""
    write_atomically(folder / FILE, f"{id}\n".encode())
