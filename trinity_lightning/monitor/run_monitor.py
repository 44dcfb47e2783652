"""What one sees while a run goes on: a bar of the tasks under way, one line a step, completions, memory."""

import logging
import os
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import WandbLogger
from tqdm import tqdm

from trinity_lightning.common.experience import Experience
from trinity_lightning.monitor.completions import CompletionsWriter, define_metrics, log_completions
from trinity_lightning.monitor.csv_logger import MetricsCSVLogger, last_row, log_row, next_row, step_of
from trinity_lightning.monitor.machine import CPULoad, MemoryMeter, advice, write_environment
from trinity_lightning.monitor.step_line import format_step_line

logger = logging.getLogger(__name__)
# What is printed too: conf/train.yaml sends it to train.log alone, for the terminal not to show it twice.
printed = logging.getLogger("trinity_lightning.printed")


class RunMonitor(L.Callback):
    """Draws progress within a step and prints one line when it is done; keeps completions and peak memory.

    A bar is drawn on a terminal only; lines are always printed, and in train.log.

    Args:
        folder: of the run.
        total_steps: explore steps of the run.

    Attributes:
        memory: peak of the process tree, by part of the work.
    """

    def __init__(self, folder: str | Path, total_steps: int) -> None:
        self.memory = MemoryMeter()
        self._total_steps = total_steps
        self._explored: dict[str, float] = {}  # the explorer's metrics of the step under way
        self._folder = Path(folder)
        self._completions = CompletionsWriter(Path(folder) / "completions")
        self._wandb: WandbLogger | None = None
        self._bar: tqdm[Any] | None = None
        self._trained_at = -1  # global_step at the end of the last explore step
        self._load = CPULoad()
        self._advised = False

    # -- shown by the explorer ----------------------------------------------------------------------------------------

    def show_tasks(self, batch: int | str, done: int, total: int) -> None:
        """Draw how many tasks of a batch have ended."""
        if self._bar is None or done == 0:
            self._close_bar()
            what = f"step {batch}" if isinstance(batch, int) else f"evaluating {batch.partition('/')[2]}"
            self._bar = tqdm(total=total, desc=what, unit="task", leave=False, disable=not sys.stderr.isatty())
        self._bar.update(done - self._bar.n)
        if done == total:
            self._close_bar()

    def keep_completions(self, experiences: list[Experience], step: int, taskset: str | None) -> None:
        """Write the completions of a step or an evaluation, and log the first of them as a W&B table."""
        kind = "train" if taskset is None else f"eval/{taskset}"
        rows = self._completions.write(step, experiences, kind)
        if self._wandb is not None:
            name = "completions" if taskset is None else f"completions_{taskset}"
            log_completions(self._wandb.experiment, rows, step, name)

    def keep_metrics(self, metrics: dict[str, float]) -> None:
        """Keep what the explorer has measured of the step under way, for the step's line."""
        self._explored = metrics

    def _close_bar(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    # -- Lightning's hooks --------------------------------------------------------------------------------------------

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Set up W&B's axis."""
        self.memory.start()
        self.memory.mark("load")
        self._wandb = next((each for each in trainer.loggers if isinstance(each, WandbLogger)), None)
        if self._wandb is not None:
            define_metrics(self._wandb.experiment)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Say what the run runs on; drop what an earlier part of it logged beyond the checkpoint that is resumed."""
        write_environment(self._folder)
        row = next_row(trainer)
        for each in trainer.loggers:
            if isinstance(each, MetricsCSVLogger) and row > 0:
                each.resume_at(step_of(trainer), row)
        self._trained_at = trainer.global_step
        self.memory.mark("rollout")

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """From here on memory is the trainer's, and so is a CPU that it trains on."""
        self.memory.mark("train")
        if pl_module.device.type == "cpu":
            self._load.start()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Back to rollouts."""
        self._load.stop()
        self.memory.mark("rollout")

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log peak memory and what others computed, and print the step's line."""
        step = step_of(trainer)
        resources = {"perf/peak_memory_gb": self.memory.peak_gb} | self._load_of_others()
        log_row(trainer.loggers, resources, step, last_row(trainer))
        logged = {name: float(value) for name, value in trainer.logged_metrics.items()}
        if trainer.global_step == self._trained_at:  # nothing was trained: Lightning still holds the last step's values
            logged = {n: value for n, value in logged.items() if not n.startswith(("actor/", "time/", "perf/"))}
        self._trained_at = trainer.global_step
        line = format_step_line(logged | self._explored, step, self._total_steps)
        print(line, flush=True)
        printed.info(line)

    def _load_of_others(self) -> dict[str, float]:
        """The metric, if it could be measured; a warning, once, if it is too much."""
        others = self._load.take()
        if others is None:
            return {}
        advised = advice(others, torch.get_num_threads(), len(os.sched_getaffinity(0)))
        if advised is not None and not self._advised:
            self._advised = True
            logger.warning("%s", advised)
        return {"perf/other_cores": others}

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Stop measuring."""
        self._close_bar()
        self.memory.stop()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """The same if training ends with an error."""
        self.teardown(trainer, pl_module, "fit")
