"""Explorer and Lightning meet here: fill the buffer before an epoch, sync and evaluate after it.

Everything is decided by state (which explore step the buffer holds, which weights the engine has), never by which
hooks ran: a resumed run may skip some of them.
"""

import asyncio
import logging
import math
import time
import warnings
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import lightning as L
from lightning.pytorch.utilities.exceptions import SIGTERMException

from trinity_lightning.buffer.datamodule import ExperienceDataModule
from trinity_lightning.common.config import SynchronizerConfig
from trinity_lightning.common.errors import ConfigError, WeightSyncError
from trinity_lightning.common.known_names import WEIGHT_GROUPS
from trinity_lightning.common.ports import free_port
from trinity_lightning.explorer.explorer import Explorer, Observer, Progress
from trinity_lightning.explorer.host import Host
from trinity_lightning.explorer.lookahead import Interval, LookAhead
from trinity_lightning.explorer.models.engine import Engine
from trinity_lightning.explorer.models.in_process import InProcessEngine
from trinity_lightning.explorer.models.transformers_engine import TransformersEngine
from trinity_lightning.explorer.watchers import CtrlC, Watchers, keep_sigterm
from trinity_lightning.trainer.policy import PolicyModule
from trinity_lightning.trainer.weight_sync import PROBE_TEXT, Synchronizer, Tolerance, weight_stream

logger = logging.getLogger(__name__)
T = TypeVar("T")

_OLDER = -1  # instead of a global_step: the engines were given weights of a step before
STOP_SECONDS = 20.0  # for rollouts in flight after SIGTERM: schedulers of clusters kill 30 s after it


class ExplorerCallback(L.Callback):
    """Runs an `Explorer` inside `Trainer.fit`: one explore step an epoch.

    Args:
        explorer: what to run.
        synchronizer: how weights reach the engines and how that is checked.
        observer: shown the experiences of every step and evaluation: (experiences, step, taskset or None for training).
        progress: told how many tasks of a batch have ended: (batch, done, all).

    Attributes:
        metrics: what was measured since the epoch began.
    """

    def __init__(
        self,
        explorer: Explorer,
        synchronizer: SynchronizerConfig | None = None,
        *,
        observer: Observer | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.explorer = explorer
        self.metrics: dict[str, float] = {}
        self._sync_config = synchronizer or SynchronizerConfig()
        self._watchers = Watchers(observer, progress, waiting=lambda: not self._ahead.under_way)
        self._ctrl_c = CtrlC()
        self._host: Host | None = None
        self._synced_at: int | None = None  # global_step of the weights that the engines were last synced to
        self._trained = 0  # explore steps trained in them
        self._ahead = LookAhead(explorer)
        self._started = False
        self._filling = False
        self._step_began = 0.0

    # -- start and end ------------------------------------------------------------------------------------------------

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Refuse what cannot work, before anything is loaded."""
        if not isinstance(pl_module, PolicyModule):
            raise ConfigError(f"ExplorerCallback trains a PolicyModule, not a {type(pl_module).__name__}.")
        if not isinstance(getattr(trainer, "datamodule", None), ExperienceDataModule):
            raise ConfigError("ExplorerCallback needs an ExperienceDataModule: trainer.fit(policy, datamodule).")
        if trainer.world_size > 1:
            raise ConfigError("one device only: with an in-process engine set trainer.devices=1.")
        if not all(isinstance(model, Engine) for model in self.explorer.engines.models):
            raise ConfigError("ExplorerCallback needs engines that take weights: VLLMEngine, VLLMServerEngine or so.")

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Load the engines and start the runners; the main thread drives them from now on."""
        # vLLM's process group of one makes Lightning believe in several devices, and advise what they would need.
        warnings.filterwarnings("ignore", ".*sync_dist=True.*")
        policy, data = self._parts(trainer)
        engines = [model for model in self.explorer.engines.models if isinstance(model, Engine)]
        for engine in engines:
            if isinstance(engine, TransformersEngine):
                engine.bind(policy.policy)
        self._ctrl_c.count, self._synced_at, self._started, self._filling = 0, None, False, False
        driven = [engine for engine in engines if isinstance(engine, InProcessEngine)]
        self._host = Host(driven, lambda: self._interruption(trainer))
        self._ctrl_c.install()
        watchers = self._watchers
        self.explorer.connect(data.fill, lambda: weight_stream(policy.policy), watchers.observe, watchers.progress)
        self._run(data.prepare())
        self._run(self.explorer.prepare())
        keep_sigterm()
        if self._sync_config.method in WEIGHT_GROUPS:
            address = self._sync_config.address
            self._run_in_time(self.explorer.setup_weight_sync_group(address, free_port(address)))
        self._synchronizer = self._make_synchronizer(policy, engines)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Stop the runners, free the engines, give Ctrl-C back."""
        self._close()

    def _close(self) -> None:
        self._ctrl_c.restore()
        if self._host is not None:
            host, self._host = self._host, None
            self._ahead.cancel()
            try:
                host.run(self.explorer.shutdown(), interruptible=False)
            finally:
                host.close()

    def _make_synchronizer(self, policy: PolicyModule, engines: list[Engine]) -> Synchronizer:
        token_ids = policy.tokenizer.encode(PROBE_TEXT)[: min(engine.max_model_len for engine in engines) - 1]
        return Synchronizer(
            policy.policy,
            send=lambda: self._run_in_time(self.explorer.sync_weight(self._trained)),
            trainer_logprobs=lambda: policy.sequence_logprobs(token_ids),
            engine_logprobs=lambda: [self._run_in_time(engine.logprobs(token_ids)) for engine in engines],
            tolerance=Tolerance.of(policy.policy.dtype, *[engine.dtype for engine in engines]),
            check_interval=self._sync_config.check_interval,
            with_drill=self._sync_config.drill and not any(engine.shares_weights for engine in engines),
        )

    # -- steps --------------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Evaluate the untrained policy, then fill: a resumed run may not come by `on_train_epoch_start`."""
        self._started = True
        if self.explorer.step == 0 and self.explorer.config.eval_on_startup and self.explorer.evaluates:
            self._evaluate(trainer, trained=0, row=0)
        self._fill(trainer)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Fill the buffer for this epoch, if it does not hold it already."""
        self._fill(trainer)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Evaluate where due: after the sync and before ModelCheckpoint, so that both are of the same weights."""
        now = time.perf_counter()
        self._ahead.training = replace(self._ahead.training, end=now)
        step, config = trainer.current_epoch + 1, self.explorer.config
        self.metrics["time/step"] = now - self._step_began
        row = trainer.fit_loop.epoch_loop.total_batch_idx
        self._log(trainer, {"time/step": now - self._step_began}, row, step)
        last = step == trainer.max_epochs
        if self.explorer.need_eval(step) or (last and config.eval_interval > 0 and self.explorer.evaluates):
            # Not to be interrupted: a resumed run would take this epoch's end as done.
            self._evaluate(trainer, step, row, interruptible=False)
        # For ModelCheckpoint and EarlyStopping to monitor; the loggers have them already.
        pl_module.log_dict(self.metrics, on_step=False, on_epoch=True, logger=False, batch_size=1)

    def _fill(self, trainer: L.Trainer) -> None:
        policy, data = self._parts(trainer)
        step = trainer.current_epoch + 1
        self._filling, self._step_began = True, time.perf_counter()
        if (reason := self._interruption(trainer)) is not None:
            raise reason
        if data.batch != step:
            self.metrics = {}
            self._obtain(trainer, data, step)
            data.advance(step)
            self.metrics |= self._ahead.take(step)
            start = time.perf_counter()
            data.storage.columns = policy.prepare_step(data.experiences)
            self.metrics["time/prepare"] = time.perf_counter() - start
            self._log(trainer, self.metrics, trainer.fit_loop.epoch_loop.total_batch_idx + 1, step)
        self._explore_ahead(trainer, step)
        self._filling = False
        self._ahead.training = Interval(time.perf_counter())

    def _obtain(self, trainer: L.Trainer, data: ExperienceDataModule, step: int) -> None:
        """Have the experiences of a step ready: wait for those begun ahead, or roll them out now."""
        start = time.perf_counter()
        self._wait_ahead()
        if data.storage.is_ready(step):
            self.metrics["time/wait_for_rollout"] = time.perf_counter() - start
            return
        self.explorer.step = step - 1
        self._sync_if_due(trainer, step - 1)
        self._run(self._ahead.explore(step))

    def _explore_ahead(self, trainer: L.Trainer, step: int) -> None:
        """With sync_offset, begin the rollouts that go on while `step` is trained on, unless that is done."""
        limit = trainer.max_epochs if trainer.max_epochs is not None and trainer.max_epochs > 0 else math.inf
        target = min(step + self.explorer.config.sync_offset, limit)
        if self.explorer.step < target and not self._ahead.under_way:
            self._sync_if_due(trainer, step - 1)
            self._ahead.begin(self._running_host(), int(target))

    def _wait_ahead(self) -> None:
        self._ahead.wait()
        self._watchers.flush()

    def _evaluate(self, trainer: L.Trainer, trained: int, row: int, interruptible: bool = True) -> None:
        self._ahead.settle()  # an error of theirs comes when they are needed: this step is to be saved first
        self._watchers.flush()
        self._sync(trainer, trained)
        metrics = self._run(self.explorer.eval(trained), interruptible)
        self.metrics |= metrics
        self._log(trainer, metrics, row, trained)

    def _sync_if_due(self, trainer: L.Trainer, trained: int) -> None:
        """Before rollouts: fresh engines are always synced, and then given what they had, where that was older."""
        fresh, due = self._synced_at is None, self.explorer.need_sync()
        if fresh or due:
            self._sync(trainer, trained)
        if fresh and not due:
            self._run_in_time(self.explorer.engines.restore())
            self._synced_at = _OLDER
        elif fresh:
            self.explorer.engines.forget_restored()

    def _sync(self, trainer: L.Trainer, trained: int) -> None:
        """Send the weights, unless the engines have them: an item that trained nothing changed none."""
        if self._synced_at != trainer.global_step:
            self._trained = trained
            metrics = self._synchronizer.sync()
            self._synced_at = trainer.global_step
            self.metrics |= metrics
            self._log(trainer, metrics, max(trainer.fit_loop.epoch_loop.total_batch_idx, 0), trained)

    # -- bits ---------------------------------------------------------------------------------------------------------

    def _parts(self, trainer: L.Trainer) -> tuple[PolicyModule, ExperienceDataModule]:
        return trainer.lightning_module, trainer.datamodule  # type: ignore[return-value,attr-defined]

    def _run(self, coroutine: Coroutine[Any, Any, T], interruptible: bool = True) -> T:
        try:
            host = self._running_host()
        except RuntimeError:
            coroutine.close()
            raise
        try:
            return host.run(coroutine, interruptible)
        finally:
            self._watchers.flush()

    def _run_in_time(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Part of a weight sync: it must end within `sync_timeout`. Ctrl-C waits: servers would have half of it."""
        limit = self._sync_config.sync_timeout
        try:
            return self._run(asyncio.wait_for(coroutine, limit), interruptible=False)
        except TimeoutError as error:
            raise WeightSyncError(
                f"a weight sync did not end within {limit:g} s (synchronizer.sync_timeout): does every engine live? "
                "Start servers of engine.urls anew: they may hold half of the weights."
            ) from error

    def _running_host(self) -> Host:
        if self._host is None:
            raise RuntimeError("the explorer runs only inside Trainer.fit.")
        return self._host

    def _log(self, trainer: L.Trainer, metrics: dict[str, float], row: int, step: int) -> None:
        for each in trainer.loggers:
            each.log_metrics(metrics | {"explore_step": float(step)}, step=row)

    # -- interruption -------------------------------------------------------------------------------------------------

    def _interruption(self, trainer: L.Trainer) -> BaseException | None:
        if self._ctrl_c.count:
            return KeyboardInterrupt()
        if trainer.received_sigterm:
            return SIGTERMException()
        return None

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """On a single Ctrl-C or SIGTERM write a checkpoint and say how to go on; free everything in any case."""
        try:
            if isinstance(exception, KeyboardInterrupt | SIGTERMException) and self._ctrl_c.count <= 1:
                self._save_interrupted(trainer, limited=isinstance(exception, SIGTERMException))
        finally:
            self._close()

    def _save_interrupted(self, trainer: L.Trainer, limited: bool) -> None:
        folder = getattr(trainer.checkpoint_callback, "dirpath", None)
        if not self._started:  # a resumed run's state is not restored yet: nothing worth saving
            logger.warning("stopped before training began; there is no new checkpoint.")
            return
        if folder is None:
            logger.warning("stopped at explore step %d without a checkpoint: no ModelCheckpoint.", self.explorer.step)
            return
        self._settle(limited)
        if self._filling:
            # The loop still counts the items of the epoch before, and would take this epoch's as done on resume.
            trainer.fit_loop.epoch_loop.batch_progress.reset_on_run()
        trainer.save_checkpoint(Path(str(folder)) / "interrupted.ckpt")
        logger.warning("stopped at explore step %d. Resume with ckpt_path=last", self.explorer.step)

    def _settle(self, limited: bool) -> None:
        """Wait for rollouts in flight, which a checkpoint then holds; after SIGTERM not for long."""
        if not self._ahead.under_way:
            return
        logger.warning("waiting for the rollouts in flight; Ctrl-C stops without a checkpoint.")
        self._ctrl_c.install()  # again: Lightning ignores Ctrl-C from here on
        self._ahead.settle(STOP_SECONDS if limited else math.inf)
        if not self._ahead.complete:
            logger.warning("the next step's rollouts are not in the checkpoint: newer weights will make them anew.")

    # -- state --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Steps done, the taskset's cursor, and what was measured; rollouts in flight are waited for.

        Lightning asks for it before it asks the DataModule, whose buffer then holds those rollouts too.
        """
        self._ahead.settle()
        self._watchers.flush()
        ahead = self._ahead.state_dict()
        return {"explorer": self.explorer.state_dict(), "metrics": dict(self.metrics), "ahead": ahead}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.explorer.load_state_dict(state_dict["explorer"])
        self.metrics = dict(state_dict["metrics"])
        self._ahead.load_state_dict(state_dict["ahead"])
