"""Shows a run while it goes on: a bar of the tasks under way, one line for each step, completions, memory."""

import json
import logging
import math
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import lightning as L
import wandb
from lightning.pytorch.loggers import WandbLogger
from tqdm import tqdm

from trinity_lightning.common.experience import Experience
from trinity_lightning.common.files import write_atomically
from trinity_lightning.common.pictures.thumbnail_files import COLUMN, FOLDER, files_of
from trinity_lightning.common.pictures.thumbnails import names_in, side_by_side, write_thumbnails
from trinity_lightning.common.runs import UNTRAINED, written_tokens
from trinity_lightning.config.checkpoints import resume_command
from trinity_lightning.monitor.alerts import Alerts
from trinity_lightning.monitor.csv_logger import MetricsCSVLogger, last_row, log_row, next_row, step_of
from trinity_lightning.monitor.dashboard import HELD_OUT_BEST, HELD_OUT_LAST
from trinity_lightning.monitor.machine import (
    CPULoad,
    MemoryMeter,
    TrainingThreads,
    peak_gpu_memory,
    write_environment,
)
from trinity_lightning.monitor.presentation import (
    TRAINED,
    UNTRAINED_PREFIX,
    format_evaluation,
    format_step_line,
    metric_globs,
    step_seconds,
)
from trinity_lightning.monitor.progress import ProgressFile
from trinity_lightning.monitor.rows import STEP_METRIC
from trinity_lightning.monitor.wandb_logger import STATE, RunLogger, record_id

ALERTS, HELD_OUT, REASONS = "alerts", "held_out", "reasons"  # keys in RunMonitor's state in checkpoints, beside STATE
PACE_STEPS = 4  # steps whose mean says how long the next ones take: with groups under way, one in two has no rollouts
logger = logging.getLogger(__name__)
# Logs the lines that are printed too. conf/train.yaml sends them to train.log alone: a terminal would show them twice.
printed = logging.getLogger("trinity_lightning.printed")


def show(line: str) -> None:
    """Print a line, and log it to train.log."""
    print(line, flush=True)
    printed.info(line)


class RunMonitor(L.Callback):
    """Draws progress within a step, and prints one line when it is done; keeps completions and peak memory.

    The bar is drawn on a terminal only. Lines are always printed, and are in train.log.

    Args:
        folder: folder of the run.
        total_steps: explore steps of the run.
        load: a load started together with the run, for `TrainingThreads`.

    Attributes:
        memory: peak memory of the run's processes, by part of the work.
    """

    def __init__(self, folder: str | Path, total_steps: int, load: CPULoad | None = None) -> None:
        self.memory = MemoryMeter()
        self._total_steps = total_steps
        self._explored: dict[str, float] = {}  # the explorer's metrics of the step under way
        self._folder = Path(folder)
        self._progress = ProgressFile(self._folder)
        self._wandb: WandbLogger | None = None
        self._bar: tqdm[Any] | None = None
        self._seconds: deque[float] = deque(maxlen=PACE_STEPS)  # of the last steps
        self._trained_at = -1  # global_step at the end of the last explore step
        self._load = CPULoad()
        self._threads = TrainingThreads(load)
        self._alerts = Alerts()
        self._best_held_out = -math.inf
        self._reasons: set[str] = set()  # metrics of reasons for which responses were not trained on so far

    # -- called by the explorer ----------------------------------------------------------------------------------------

    def count_tasks(self, batch: int | str, done: int, total: int) -> None:
        """Note, for other processes, how many tasks of a batch have ended."""
        self._progress.count(batch, done, total)

    def show_tasks(self, batch: int | str, done: int, total: int) -> None:
        """Draw how many tasks of a batch have ended."""
        part = "rollout" if isinstance(batch, int) else "evaluation"
        self._progress.enter(part, int(str(batch).partition("/")[0]))
        if self._bar is None or done == 0:
            self._close_bar()
            title = f"step {batch}" if isinstance(batch, int) else f"evaluating {batch.partition('/')[2]}"
            self._bar = tqdm(total=total, desc=title, unit="task", leave=False, disable=not sys.stderr.isatty())
        self._bar.update(done - self._bar.n)
        if done == total:
            self._close_bar()

    def keep_completions(self, experiences: list[Experience], step: int, taskset: str | None) -> None:
        """Write the completions of a step or an evaluation, and log the first of them as a W&B table."""
        folder = self._folder / "completions"
        rows = write_completions(folder, step, experiences, taskset)
        if self._wandb is not None:
            show_pictures(rows, folder / FOLDER)
            name = "completions" if taskset is None else f"completions_{taskset}"
            run = self._wandb if isinstance(self._wandb, RunLogger) else self._wandb.experiment
            log_completions(run, rows, step, name)

    def keep_thumbnails(self, thumbnails: Mapping[str, bytes]) -> None:
        """Write small copies of pictures beside the completions, each once."""
        write_thumbnails(self._folder / "completions" / FOLDER, thumbnails)

    def keep_metrics(self, metrics: dict[str, float]) -> None:
        """Keep the explorer's metrics of the step under way, for the step's line."""
        self._explored = metrics
        self._reasons |= {name for name in metrics if name.startswith(UNTRAINED_PREFIX)}

    def show_evaluation(self, metrics: Mapping[str, float], step: int, solved: Mapping[str, str]) -> None:
        """Print a line for each taskset of an evaluation; `solved`: see `format_evaluation`."""
        for line in format_evaluation(metrics, step, self._total_steps, solved):
            show(line)
        if (score := held_out_score(metrics)) is not None and self._wandb is not None:
            self._best_held_out = max(self._best_held_out, score)
            self._wandb.experiment.summary.update({HELD_OUT_BEST: self._best_held_out, HELD_OUT_LAST: score})

    def _close_bar(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    # -- Lightning's hooks --------------------------------------------------------------------------------------------

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Choose the number of threads, and set up W&B's axis."""
        self._progress.start(resume_command(self._folder) or "")
        alone = trainer.world_size == 1  # several processes share the cores already
        if trainer.strategy.root_device.type == "cpu" and alone:
            self._threads.choose()
        self.memory.start()
        self.memory.mark("load")
        self._wandb = next((logs for logs in trainer.loggers if isinstance(logs, WandbLogger)), None)
        if self._wandb is not None:
            define_metrics(self._wandb.experiment)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write down the machine; drop rows that were logged beyond the checkpoint that is resumed."""
        write_environment(self._folder)
        row = next_row(trainer)
        for run_logger in trainer.loggers:
            if isinstance(run_logger, MetricsCSVLogger) and row > 0:
                run_logger.resume_at(step_of(trainer), row)
        if isinstance(self._wandb, RunLogger):
            record_id(self._folder, self._wandb.id)
        self._trained_at = trainer.global_step
        self.memory.mark("rollout")

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Send W&B the last row of the step before, while the next step rolls out."""
        if isinstance(self._wandb, RunLogger):
            self._wandb.flush(before=step_of(trainer))

    def state_dict(self) -> dict[str, Any]:
        """The id of the run of W&B, for a resumed run to go on in it, and what the monitor remembers of all steps."""
        id = {STATE: self._wandb.id} if isinstance(self._wandb, RunLogger) else {}
        return id | {
            ALERTS: self._alerts.state_dict(),
            HELD_OUT: self._best_held_out,
            REASONS: sorted(self._reasons),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; checkpoints of earlier versions lack some of it."""
        if ALERTS in state_dict:
            self._alerts.load_state_dict(state_dict[ALERTS])
        self._best_held_out = state_dict.get(HELD_OUT, -math.inf)
        self._reasons = set(state_dict.get(REASONS, ()))

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Count memory towards training, and measure other programs' load on a CPU that trains."""
        self._progress.enter("training", step_of(trainer))
        self.memory.mark("train")
        if pl_module.device.type == "cpu":
            self._load.start()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count memory towards rollouts again."""
        self._load.stop()
        self.memory.mark("rollout")

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log peak memory, other programs' load and counts that are 0, and print the step's line."""
        step = step_of(trainer)
        self._progress.enter("between steps", step)
        resources = {"perf/peak_memory_gb": self.memory.peak_gb} | self._load_of_others()
        resources |= peak_gpu_memory(pl_module.device)
        log_row(trainer.loggers, resources | self._zero_counts(), step, last_row(trainer))
        logged = {name: float(value) for name, value in trainer.logged_metrics.items()}
        if trainer.global_step == self._trained_at:  # nothing was trained: Lightning still holds the last step's values
            logged = {n: value for n, value in logged.items() if not n.startswith(("actor/", "time/", "perf/"))}
        self._trained_at = trainer.global_step
        self._tell_alerts(logged | self._explored, step)
        self._seconds.append(step_seconds(logged | self._explored))
        show(format_step_line(logged | self._explored, step, self._total_steps, fmean(self._seconds)))

    def _tell_alerts(self, metrics: Mapping[str, float], step: int) -> None:
        """Warn of signs that the run goes wrong, in the terminal and by W&B, which sends them on to its user."""
        for alert in self._alerts.check(metrics):
            text = f"explore step {step}: {alert.text}"
            logger.warning(text)
            if self._wandb is not None:
                self._wandb.experiment.alert(title=alert.title, text=text, level="WARN")

    def _zero_counts(self) -> dict[str, float]:
        """The reasons of earlier steps that left out none of this step: a chart would draw a line over the gap."""
        absent = self._reasons - self._explored.keys() if TRAINED in self._explored else ()
        return dict.fromkeys(sorted(absent), 0.0)

    def _load_of_others(self) -> dict[str, float]:
        """The metric of other programs' load, if it could be measured; warns once if it is too high."""
        others = self._load.take()
        if others is None:
            return {}
        self._threads.advise(others)
        return {"perf/other_cores": others}

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Stop measuring, and give threads back."""
        self._close_bar()
        self._progress.stop()
        self.memory.stop()
        self._threads.give_back()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Tear down if training ends with an error."""
        self.teardown(trainer, pl_module, "fit")


# -- completions -------------------------------------------------------------------------------------------------------

TABLE_ROWS = 64  # rows of W&B's table: the step's first completions, so that groups stay together
REWARD_PREFIX = "reward/"
# Columns of the table; `reward/<function>` come after `reward`.
_BEFORE_REWARDS = ("step", "prompt", "completion", "reward")
_AFTER_REWARDS = ("advantage", "length", "truncated")
_OF_TRAINING = ("trained", "reason")  # only in training rollouts, not in evaluations


def write_completions(
    folder: Path, step: int, experiences: Sequence[Experience], taskset: str | None = None
) -> list[dict[str, Any]]:
    """Write `step_<step>.jsonl`, or `eval_<taskset>_step_<step>.jsonl`, in place of an earlier file.

    There is one JSON object for each completion, with step, task, run, prompt, completion, reward, `reward/<function>`
    for each reward among the experience's metrics, advantage (of the first response token), length (tokens that the
    policy wrote) and truncated. If the prompt has pictures, `pictures` names their thumbnails in the folder `images`.
    In training it also has `trained`, and the `reason` why it is not trained on (null if it is). Numbers that are not
    finite are null: JSON cannot hold them.

    Args:
        folder: folder of the files, made with the first one.
        step: the explore step.
        experiences: the step's experiences, with advantages once an add strategy has set them.
        taskset: the taskset of an evaluation; None for training.

    Returns:
        The first rows of a table, all with the same columns: the keys above but task and run.
    """
    records = [_record(step, experience, of_training=taskset is None) for experience in experiences]
    name = f"step_{step}" if taskset is None else f"eval_{taskset.replace('/', '_')}_step_{step}"
    lines = (json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n" for record in records)
    write_atomically(folder / f"{name}.jsonl", "".join(lines).encode())

    shown = records[:TABLE_ROWS]
    rewards = dict.fromkeys(name for record in shown for name in record if name.startswith(REWARD_PREFIX))
    pictures = (COLUMN,) * any(COLUMN in record for record in shown)
    of_training = _OF_TRAINING if taskset is None else ()
    columns = (*_BEFORE_REWARDS, *rewards, *_AFTER_REWARDS, *of_training, *pictures)
    return [{column: record.get(column) for column in columns} for record in shown]


def show_pictures(rows: Sequence[dict[str, Any]], folder: Path) -> None:
    """In a table's rows put W&B's picture of thumbnails in the place of their names, one object for equal names."""
    images: dict[str, wandb.Image] = {}
    for row in rows:
        if names := row.get(COLUMN):
            files, key = files_of(folder, names), " ".join(names)
            if files and key not in images:
                images[key] = wandb.Image(side_by_side(files))
            row[COLUMN] = images.get(key)


def _record(step: int, experience: Experience, of_training: bool) -> dict[str, Any]:
    rewards = {name: _number(v) for name, v in (experience.metrics or {}).items() if name.startswith(REWARD_PREFIX)}
    advantages, reason = experience.advantages, experience.info.get(UNTRAINED)
    return {
        "step": step,
        "task": experience.eid.task,
        "run": experience.eid.run,
        "prompt": experience.prompt_text,
        **({COLUMN: names} if (names := names_in(experience)) else {}),
        "completion": experience.response_text,
        "reward": _number(experience.reward),
        **rewards,
        "advantage": _number(advantages[0]) if advantages is not None and len(advantages) else None,
        "length": written_tokens(experience),
        "truncated": experience.truncate_status is not None,
        **({"trained": reason is None, "reason": reason} if of_training else {}),
    }


def _number(value: Any) -> float | None:
    return float(value) if value is not None and math.isfinite(value) else None


# -- W&B's axes and tables ---------------------------------------------------------------------------------------------


def held_out_score(metrics: Mapping[str, float]) -> float | None:
    """Mean reward of the first taskset of an evaluation, by which a sweep compares runs; None if there is none."""
    first = next((name for name in metrics if name.startswith("eval/") and name.endswith("/seconds")), "")
    mean = first.removesuffix("seconds") + "mean@"
    return next((value for name, value in metrics.items() if first and name.startswith(mean)), None)


def define_metrics(run: wandb.Run) -> None:
    """Draw all metrics of a run over `explore_step`, not over the optimizer's step."""
    run.define_metric(STEP_METRIC)
    # WandbLogger has put "*" on trainer/global_step, and if several globs match, W&B takes any one of them.
    for glob in ("*", *metric_globs()):
        run.define_metric(glob, step_metric=STEP_METRIC, step_sync=True)


def log_completions(
    run: wandb.Run | RunLogger, rows: Sequence[dict[str, Any]], explore_step: int, name: str = "completions"
) -> None:
    """Log the rows from `write_completions`, if any, as a table; each evaluation has a table of another name."""
    if rows:
        table = wandb.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
        run.log({name: table, STEP_METRIC: explore_step})
