"""Shows how a training step spends its time: torch's profiler over one explore step."""

import logging
from pathlib import Path
from typing import Any

import lightning as L
from torch.profiler import profile

from trinity_lightning.config.values import whole_number
from trinity_lightning.errors import ConfigError
from trinity_lightning.monitor.csv_logger import step_of

logger = logging.getLogger(__name__)

_ROWS = 40  # in the table


class StepProfiler(L.Callback):
    """Profiles the first optimizer step of one explore step: forward, backward and update.

    Writes `step_<n>.json.gz`, a trace that chrome://tracing and https://ui.perfetto.dev show, and `step_<n>.txt`, a
    table of the operators that took longest, with the shapes of their inputs.

    Args:
        folder: folder for the files.
        step: the explore step; the first one also allocates memory, and compiles primitives.
    """

    def __init__(self, folder: str | Path, step: int = 2) -> None:
        self._folder = Path(folder)
        self._step = whole_number("callbacks.profiler.step", step, least=1)
        self._profile: profile | None = None
        self._done = False

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Refuse a run that ends before the step, before anything is loaded; a ConfigError."""
        last = trainer.max_epochs
        if last is not None and 0 <= last < self._step:
            raise ConfigError(
                f"callbacks.profiler.step is {self._step}, and the run ends with step {last}",
                key="callbacks.profiler.step",
                fix="give less",
            )

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Warn if a resumed run is past the step."""
        if step_of(trainer) > self._step:
            goes_on = f"goes on with step {step_of(trainer)}"
            logger.warning("callbacks.profiler.step is %d, and this run %s: nothing is profiled.", self._step, goes_on)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Start if this is the step; on rank 0 alone, as each process would write the same files."""
        if trainer.is_global_zero and batch.explore_step == self._step and not self._done:
            self._profile = profile(record_shapes=True)
            self._profile.start()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Stop, and write the files."""
        if self._profile is None:
            return
        finished, self._profile, self._done = self._profile, None, True
        finished.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        finished.export_chrome_trace(str(self._folder / f"step_{self._step}.json.gz"))
        sort_by = "self_cuda_time_total" if pl_module.device.type == "cuda" else "self_cpu_time_total"
        averages = finished.key_averages(group_by_input_shape=True)
        (self._folder / f"step_{self._step}.txt").write_text(averages.table(sort_by=sort_by, row_limit=_ROWS))

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Stop and write nothing: the step was not finished, and torch has one profiler for the whole process."""
        if self._profile is not None:
            unfinished, self._profile = self._profile, None
            unfinished.stop()
