"""Runs the explorer inside Lightning: fills the buffer before an epoch, syncs and evaluates after it.

All decisions follow from state (the explore step in the buffer, the weights of the engines), and not from the hooks
that were called, because a resumed run may skip some hooks.
"""

import copy
import logging
import math
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L

from trinity_lightning.buffer.datamodule import ExperienceDataModule
from trinity_lightning.common.ranks import ranks_of
from trinity_lightning.config.engines import SynchronizerConfig
from trinity_lightning.config.sections import section_of
from trinity_lightning.config.values import check_version
from trinity_lightning.errors import ConfigError
from trinity_lightning.explorer.async_rollouts import AsyncRollouts
from trinity_lightning.explorer.explorer import NOBODY, Explorer, Watcher
from trinity_lightning.explorer.groups import GroupBuffer
from trinity_lightning.explorer.interruption import StopCheckpoint
from trinity_lightning.explorer.rollouts import PendingSteps, TrainingRollouts, WeightVersions
from trinity_lightning.monitor.csv_logger import last_row, log_row, next_row, step_of
from trinity_lightning.trainer.host import HostMemory
from trinity_lightning.trainer.policy import PolicyModule

logger = logging.getLogger(__name__)


class ExplorerCallback(StopCheckpoint):
    """Runs an `Explorer` inside `Trainer.fit`: one explore step an epoch.

    A run that ends early is saved while the engines are still up; see `StopCheckpoint`.

    Args:
        explorer: the explorer to run.
        synchronizer: settings of the weight syncs and their checks, or a mapping of their values.
        folder, command: see `StopCheckpoint`.
        watcher: is shown the run while it goes on.
        offload: True: masters and moments are in the host's memory while the engines generate.

    Attributes:
        metrics: the metrics measured since the epoch began.
    """

    def __init__(
        self,
        explorer: Explorer,
        synchronizer: SynchronizerConfig | Mapping[str, Any] | None = None,
        *,
        folder: Path | None = None,
        command: Callable[[], str | None] = lambda: None,
        watcher: Watcher = NOBODY,
        offload: bool = False,
    ) -> None:
        super().__init__(folder, command)
        self.explorer = explorer
        self.metrics: dict[str, float] = {}
        self._synchronizer = section_of("synchronizer", SynchronizerConfig, synchronizer)
        self._watcher = watcher
        self._offload = offload
        self._pending = PendingSteps()
        self._versions = WeightVersions()
        self._running: TrainingRollouts | None = None
        self._step = 0  # the step that is ready to be trained on
        self._ended = 0  # the last step whose end, with its evaluation, is done
        self._step_began = 0.0

    # -- start and end ------------------------------------------------------------------------------------------------

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Refuse parts that cannot work, before anything is loaded; a Trainer that has not trained begins at step 1.

        Raises:
            ConfigError: no PolicyModule, no ExperienceDataModule, or a rank other than 0.
        """
        if not all(hasattr(type(pl_module), name) for name in ("prepare_step", "sequence_logprobs", "check_trainable")):
            raise ConfigError(f"ExplorerCallback trains a PolicyModule, not a {type(pl_module).__name__}.")
        if not isinstance(getattr(trainer, "datamodule", None), ExperienceDataModule):
            raise ConfigError("ExplorerCallback needs an ExperienceDataModule: trainer.fit(policy, datamodule).")
        ranks = ranks_of(trainer)
        if trainer.world_size != ranks.size or ranks.rank > 0:
            raise ConfigError(
                "ExplorerCallback is for rank 0 of a ReplicaStrategy", fix="give the others an ExplorerFollower"
            )
        if self.explorer.config.samples_older_weights:
            policy_of(pl_module).objective.expect_older_weights()
        if not epochs_of(trainer).ready:
            self._forget(trainer)

    def _forget(self, trainer: L.Trainer) -> None:
        """Forget the state that the fit of another Trainer left here. A checkpoint is loaded later."""
        self.explorer.restart()
        data_of(trainer).storage.clear()
        self.metrics = {}
        self._pending = PendingSteps()
        self._versions = WeightVersions(drill_scale=self._versions.drill_scale)
        self._ended = 0

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Load the engines and start the runners; the main thread drives them from now on.

        Raises:
            ModelLoadError, ConfigError: the policy cannot be trained; raised before an engine is loaded.
        """
        # Because of vLLM's process group, which has one process, Lightning gives advice for several devices.
        warnings.filterwarnings("ignore", ".*sync_dist=True.*")
        policy, data = policy_of(pl_module), data_of(trainer)
        policy.check_trainable()
        for engine in self.explorer.engines.models:
            engine.bind(policy.policy)
        self._step = 0
        super().on_fit_start(trainer, pl_module)
        memory = HostMemory(trainer.optimizers[0]) if self._offload else None
        stops = partial(self.reason, trainer)
        across_steps = self.explorer.groups is not None
        self._running = rollouts = (AsyncRollouts if across_steps else TrainingRollouts)(
            self.explorer, self._pending, self._synchronizer, policy, self._versions, memory, stops, self._watcher
        )
        rollouts.driver.run(data.prepare())
        rollouts.limit_steps(last_step_of(trainer))
        all_rows = policy.objective.needs_all_rows
        groups = GroupBuffer(
            partial(data.pipeline.tidy_group, all_rows=all_rows), partial(data.fill_groups, all_rows=all_rows)
        )
        rollouts.prepare(groups if across_steps else partial(data.fill, all_rows=all_rows))

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Put the handler of Ctrl-C back, stop the runners, and free the engines."""
        super().teardown(trainer, pl_module, stage)
        self._close()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Save whole items and rollouts, also those in flight, and free everything."""
        try:
            super().on_exception(trainer, pl_module, exception)
        finally:
            self._close()

    @property
    def has_rollouts(self) -> bool:  # type: ignore[override]
        """True if there are rollouts of a whole step, or of groups across steps, that were not trained on yet."""
        groups = self.explorer.groups
        return bool(self._pending.metrics) or (groups is not None and bool(groups.controller.outstanding))

    def settle(self) -> None:
        """Wait for rollouts in flight, for a limited time; see `TrainingRollouts.settle_shortly`."""
        if self._running is not None:
            self._running.settle_shortly(self.ctrl_c)

    def _close(self) -> None:
        """Free everything; an error is only logged: the trained model, or the run's own error, matters more."""
        rollouts, self._running = self._running, None
        if rollouts is not None:
            try:
                rollouts.close()
            except Exception as error:
                logger.warning("the engines did not end as they should: %s: %s", type(error).__name__, error)

    # -- steps --------------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Evaluate the untrained policy, then fill: Lightning may skip `on_train_epoch_start` when it resumes."""
        super().on_train_start(trainer, pl_module)
        self._end_step(trainer)  # the end of the previous step, if the run stopped within it
        if self.explorer.step == 0 and self.explorer.config.eval_on_startup and self.explorer.evaluates:
            self._evaluate(trainer, trained=0, row=0)
        self._fill(trainer)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Fill the buffer for this epoch, unless it holds the step already."""
        self._fill(trainer)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Measure the duration of the step so far; the step ends with its last item."""
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        self.metrics["time/step"] = time.perf_counter() - self._step_began
        self._watcher.keep_metrics(self.metrics)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Evaluate if an evaluation is due. ModelCheckpoint saves afterwards, so that it has the evaluated weights."""
        log_row(trainer.loggers, {"time/step": self.metrics["time/step"]}, step_of(trainer), last_row(trainer))
        self._end_step(trainer)
        let_monitor(trainer, pl_module, self.metrics)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Evaluate the last step, if a resumed run had nothing else left to do.

        Lightning restores its loops after `on_fit_start`, so that only this hook knows that there is no training. By
        now Lightning has moved the policy to the CPU.
        """
        if trainer.strategy.broadcast(self._ended < epochs_of(trainer).processed):
            trainer.strategy.model_to_device()
            self._end_step(trainer)
            trainer.strategy.barrier()  # until here, other ranks may be asked for their shares of the weights
            trainer.strategy.teardown()  # again: the policy moves to the host

    def _fill(self, trainer: L.Trainer) -> None:
        """Make the step of this epoch ready to be trained on, unless it is; log its metrics as one row."""
        step, rollouts = step_of(trainer), self._rollouts
        if (reason := self.reason(trainer)) is not None:
            raise reason
        if self._step == step:
            return
        self._step_began = time.perf_counter()
        handed_over = data_of(trainer).storage.batch == step  # True if the run is resumed within the step
        if not handed_over:
            self.metrics = rollouts.obtain(step, trainer.global_step, data_of(trainer).storage.is_ready)
        rollouts.trainers_turn()
        if not handed_over:
            self._hand_over(trainer, step)
        # Engines that take turns with the trainer roll out nothing ahead.
        self.metrics |= rollouts.explore_ahead(step, trainer.global_step)
        trainer.strategy.barrier()  # other ranks wait here without a limit: within a step they would not
        self._step = step
        if not _items_done(trainer):
            log_row(trainer.loggers, self.metrics, step, next_row(trainer))
        self._watcher.keep_metrics(self.metrics)

    def _hand_over(self, trainer: L.Trainer, step: int) -> None:
        """Give the trainer the experiences of a rolled-out step, with the columns that are computed before training."""
        data = data_of(trainer)
        self._versions.begin_step(trainer.global_step)
        start = time.perf_counter()
        columns = policy_of(trainer.lightning_module).prepare_step(data.share(step))
        self.metrics |= self._pending.metrics.pop(step) | {"time/prepare": time.perf_counter() - start}
        lag = self._versions.at(trainer.global_step) - self.metrics["sample/model_version/mean"]
        self.metrics["sample/lag/mean"] = lag
        data.storage.advance(step, columns)  # last, so that after an error the step is still ready

    def _end_step(self, trainer: L.Trainer) -> None:
        """Evaluate at the end of a step, if it is due and not done yet."""
        step = epochs_of(trainer).processed
        if self._ended >= step:
            return
        if self.explorer.need_eval(step, trainer.max_epochs if trainer.max_epochs != -1 else None):
            self._evaluate(trainer, step, row=last_row(trainer))
        self._ended = step

    def _evaluate(self, trainer: L.Trainer, trained: int, row: int) -> None:
        metrics = self._rollouts.evaluate(trained, trainer.global_step)
        self.metrics |= metrics
        log_row(trainer.loggers, metrics, trained, row)
        self._watcher.show_evaluation(metrics, trained, self.explorer.solved)

    @property
    def _rollouts(self) -> TrainingRollouts:
        if self._running is None:
            raise RuntimeError("the explorer runs only inside Trainer.fit.")
        return self._running

    # -- state --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The state of explorer, weight syncs and metrics, after the end of rollouts in flight.

        Lightning asks for this state before that of the DataModule, whose buffer then holds these rollouts too.
        """
        explorer = self.explorer.state_dict
        if self._running is not None:
            self._running.settle()
            explorer = self._running.state
        sync = asdict(self._versions)
        return {
            "drill_scale": sync.pop("drill_scale"),
            "sync": sync,
            # A resumed run repeats the rollouts of an unfinished step, with the weights that they had.
            "explorer": explorer(with_weights=self.explorer.step < self._pending.target),
            "ended": self._ended,
            "metrics": dict(self.metrics),
            "ahead": asdict(self._pending),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Raises:
            ConfigError: the checkpoint is of an earlier version.
        """
        check_version(state_dict, ("explorer", "sync", "ended", "metrics", "ahead"), "the explorer")
        check_version(state_dict["sync"], ("counted", "counted_at", "synced_for"), "weight syncs")
        self.explorer.load_state_dict(state_dict["explorer"])
        self._versions = WeightVersions(**state_dict["sync"], drill_scale=state_dict.get("drill_scale"))
        self._ended = state_dict["ended"]
        self.metrics = dict(state_dict["metrics"])
        self._pending = PendingSteps(**copy.deepcopy(state_dict["ahead"]))


def let_monitor(trainer: L.Trainer, pl_module: L.LightningModule, metrics: dict[str, float]) -> None:
    """Let ModelCheckpoint and EarlyStopping see the metrics of rank 0; the loggers have them already."""
    metrics = trainer.strategy.broadcast(metrics)
    pl_module.log_dict(metrics, on_step=False, on_epoch=True, logger=False, batch_size=1)


def last_step_of(trainer: L.Trainer) -> float:
    """The number of the last step; infinite without a limit."""
    return trainer.max_epochs if trainer.max_epochs is not None and trainer.max_epochs > 0 else math.inf


def data_of(trainer: L.Trainer) -> ExperienceDataModule:
    return trainer.datamodule  # type: ignore[return-value,attr-defined]


def policy_of(module: Any) -> PolicyModule:
    return module


def _items_done(trainer: L.Trainer) -> int:
    """Number of items of the present epoch that were trained on.

    Between two epochs it is 0, and Lightning still counts the items of the epoch before.
    """
    items: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    within = epochs_of(trainer).started > epochs_of(trainer).processed
    return items.processed if within else 0


def epochs_of(trainer: L.Trainer) -> Any:
    """Lightning's counts of epochs, which it declares narrower than they are."""
    return trainer.fit_loop.epoch_progress.current
