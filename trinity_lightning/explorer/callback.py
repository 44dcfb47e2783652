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
from functools import partial
from typing import Any, TypeVar

import lightning as L
from lightning.pytorch.utilities.exceptions import SIGTERMException

from trinity_lightning.buffer.datamodule import ExperienceDataModule
from trinity_lightning.config.engines import WEIGHT_GROUPS, SynchronizerConfig, free_port
from trinity_lightning.config.values import check_version
from trinity_lightning.errors import ConfigError, WeightSyncError
from trinity_lightning.explorer.explorer import Explorer, Observer, Progress
from trinity_lightning.explorer.host import Host
from trinity_lightning.explorer.lookahead import Interval, LookAhead
from trinity_lightning.explorer.models.engine import Engine
from trinity_lightning.explorer.models.in_process import InProcessEngine
from trinity_lightning.explorer.models.transformers_engine import TransformersEngine
from trinity_lightning.explorer.sync_policy import SyncPolicy
from trinity_lightning.explorer.watchers import Watchers, keep_sigterm
from trinity_lightning.trainer.optim import HostMemory
from trinity_lightning.trainer.policy import PolicyModule
from trinity_lightning.trainer.stop_checkpoint import StopCheckpoint
from trinity_lightning.trainer.weight_sync import PROBE_TEXT, Synchronizer, Tolerance, parameter_stream, weight_stream

logger = logging.getLogger(__name__)
T = TypeVar("T")

STOP_SECONDS = 20.0  # for rollouts in flight where a run ends early: schedulers of clusters kill 30 s after SIGTERM


class ExplorerCallback(L.Callback):
    """Runs an `Explorer` inside `Trainer.fit`: one explore step an epoch.

    Args:
        explorer: what to run.
        synchronizer: how weights reach the engines and how that is checked.
        stop: saves a run that ends early; its hooks are called from here, while the engines are up.
        observer: shown the experiences of every step and evaluation: (experiences, step, taskset or None for training).
        progress: called with how many tasks of a batch have ended: (batch, done, all).
        offload: whether masters and moments are in the host's memory while the engines generate.

    Attributes:
        metrics: what was measured since the epoch began.
    """

    def __init__(
        self,
        explorer: Explorer,
        synchronizer: SynchronizerConfig | None = None,
        *,
        stop: StopCheckpoint | None = None,
        observer: Observer | None = None,
        progress: Progress | None = None,
        offload: bool = False,
    ) -> None:
        self.explorer = explorer
        self.metrics: dict[str, float] = {}
        self._sync_config = synchronizer or SynchronizerConfig()
        self._watchers = Watchers(observer, progress, waiting=lambda: not self._ahead.under_way)
        self._stop = stop or StopCheckpoint()
        self._host: Host | None = None
        self._offload = offload
        self._host_memory: HostMemory | None = None
        self._ahead = LookAhead(explorer)
        self._sync = SyncPolicy(explorer, self._run_in_time)
        self._step = 0  # what is prepared to be trained on
        self._ended = 0  # the last step whose end, with its evaluation, is done
        self._step_began = 0.0
        self._synchronizer: Synchronizer | None = None
        self._drill_scale: float | None = None  # that was enough before this run was resumed

    # -- start and end ------------------------------------------------------------------------------------------------

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Refuse what cannot work, before anything is loaded; a Trainer that has not trained begins at step 1."""
        if not isinstance(pl_module, PolicyModule):
            raise ConfigError(f"ExplorerCallback trains a PolicyModule, not a {type(pl_module).__name__}.")
        if not isinstance(getattr(trainer, "datamodule", None), ExperienceDataModule):
            raise ConfigError("ExplorerCallback needs an ExperienceDataModule: trainer.fit(policy, datamodule).")
        if trainer.world_size > 1:
            raise ConfigError("one device only: with an in-process engine set trainer.devices=1.")
        if not all(isinstance(model, Engine) for model in self.explorer.engines.models):
            raise ConfigError("ExplorerCallback needs engines that take weights: VLLMEngine, VLLMServerEngine or so.")
        if self.explorer.config.samples_older_weights:
            pl_module.objective.expect_older_weights()
        if not _epochs(trainer).ready:
            self._forget(trainer)

    def _forget(self, trainer: L.Trainer) -> None:
        """What another Trainer's fit left in these parts is not of this one; a checkpoint is loaded after this."""
        self.explorer.restart()
        self._data(trainer).storage.clear()
        self.metrics = {}
        self._ahead.forget()
        self._sync.forget()
        self._ended = 0

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Load the engines and start the runners; the main thread drives them from now on.

        Raises:
            ModelLoadError, ConfigError: the policy cannot be trained; known before an engine is loaded.
        """
        # vLLM's process group of one makes Lightning believe in several devices, and advise what they would need.
        warnings.filterwarnings("ignore", ".*sync_dist=True.*")
        policy, data = self._policy(trainer), self._data(trainer)
        policy.check_trainable()
        engines = [model for model in self.explorer.engines.models if isinstance(model, Engine)]
        for engine in engines:
            if isinstance(engine, TransformersEngine):
                engine.bind(policy.policy)
        self._step = 0
        self._sync.begin()
        driven = [engine for engine in engines if isinstance(engine, InProcessEngine)]
        self._host = Host(driven, lambda: self._interruption(trainer))
        self._stop.on_fit_start(trainer, pl_module)
        watchers = self._watchers
        stream = parameter_stream if all(engine.shares_weights for engine in engines) else weight_stream
        fill = partial(data.fill, all_rows=policy.objective.needs_all_rows)
        self.explorer.connect(fill, lambda: stream(policy.policy), watchers.observe, watchers.progress)
        self._run(data.prepare())
        self._host_memory = HostMemory(trainer.optimizers[0]) if self._offload else None
        self._engines_turn()
        self._run(self.explorer.prepare())
        self._host.limit_blocking(self.explorer.config.max_timeout)
        keep_sigterm()
        if self._sync_config.method in WEIGHT_GROUPS:
            address = self._sync_config.address
            self._run_in_time(self.explorer.setup_weight_sync_group(address, free_port(address)))
        self._synchronizer = self._make_synchronizer(policy, engines)
        self._sync.synchronize = self._synchronizer.sync

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Stop the runners, free the engines, give Ctrl-C back."""
        self._stop.teardown(trainer, pl_module, stage)
        self._close()

    def _close(self) -> None:
        self._stop.ctrl_c.restore()
        if self._host is not None:
            host, self._host = self._host, None
            self._ahead.cancel()
            try:
                host.end(self.explorer.shutdown())
            finally:
                host.close()

    def _make_synchronizer(self, policy: PolicyModule, engines: list[Engine]) -> Synchronizer:
        token_ids = policy.tokenizer.encode(PROBE_TEXT)[: min(engine.max_model_len for engine in engines) - 1]
        return Synchronizer(
            policy.policy,
            send=lambda: self._run_in_time(self._sync.send()),
            trainer_logprobs=lambda: policy.sequence_logprobs(token_ids),
            engine_logprobs=lambda: [self._run_in_time(engine.logprobs(token_ids)) for engine in engines],
            tolerance=Tolerance.of(
                policy.policy.dtype,
                *[engine.dtype for engine in engines],
                quantized=any(engine.quantized for engine in engines),
            ),
            check_interval=self._sync_config.check_interval,
            with_drill=self._sync_config.drill and not any(engine.shares_weights for engine in engines),
            drill_scale=self._drill_scale,
        )

    # -- steps --------------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Evaluate the untrained policy, then fill: a resumed run may not come by `on_train_epoch_start`."""
        self._stop.on_train_start(trainer, pl_module)
        self._evaluate_end(trainer)  # of the step before, where a run stopped within it
        if self.explorer.step == 0 and self.explorer.config.eval_on_startup and self.explorer.evaluates:
            self._evaluate(trainer, trained=0, row=0)
        self._fill(trainer)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Fill the buffer for this epoch, if it does not hold it already."""
        self._fill(trainer)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """An item begins, unless Ctrl-C was pressed."""
        self._stop.on_train_batch_start(trainer, pl_module, batch, batch_idx)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Measure the step up to here: it ends with its last item."""
        self._stop.on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        now = time.perf_counter()
        self._ahead.training = replace(self._ahead.training, end=now)
        self.metrics["time/step"] = now - self._step_began

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Evaluate where due: after the sync and before ModelCheckpoint, so that both are of the same weights."""
        step = trainer.current_epoch + 1
        self._log(trainer, {"time/step": self.metrics["time/step"]}, trainer.fit_loop.epoch_loop.total_batch_idx, step)
        self._evaluate_end(trainer)
        # For ModelCheckpoint and EarlyStopping to monitor; the loggers have them already.
        pl_module.log_dict(self.metrics, on_step=False, on_epoch=True, logger=False, batch_size=1)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Evaluate the last step, where a resumed run had only that left to do.

        Only now is it known that there is no training: Lightning restores its loops behind `on_fit_start`, and has
        taken the policy to the CPU.
        """
        if self._ended < _epochs(trainer).processed:
            trainer.strategy.model_to_device()
            self._evaluate_end(trainer)
            pl_module.cpu()

    def _evaluate_end(self, trainer: L.Trainer) -> None:
        """The evaluation at a step's end, where one is due and not done yet."""
        step = _epochs(trainer).processed
        if self._ended >= step:
            return
        last = step == trainer.max_epochs and self.explorer.config.eval_interval > 0 and self.explorer.evaluates
        if self.explorer.need_eval(step) or last:
            self._evaluate(trainer, step, row=trainer.fit_loop.epoch_loop.total_batch_idx)
        self._ended = step

    def _fill(self, trainer: L.Trainer) -> None:
        """Have the step of this epoch ready to be trained on, unless it is; its metrics are one row of the loggers."""
        step = trainer.current_epoch + 1
        if (reason := self._interruption(trainer)) is not None:
            raise reason
        if self._step != step:
            self._step_began = time.perf_counter()
            handed_over = self._data(trainer).batch == step  # of a run that is resumed within a step
            if not handed_over:
                self.metrics = {}
                self._obtain(trainer, step)
            self._trainers_turn()
            if not handed_over:
                self._hand_over(trainer, step)
            self._explore_ahead(trainer, step)  # engines that take turns with the trainer have nothing ahead
            self._step = step
            if not _items_done(trainer):
                self._log(trainer, self.metrics, trainer.fit_loop.epoch_loop.total_batch_idx + 1, step)
            self._ahead.training = Interval(time.perf_counter())

    def _obtain(self, trainer: L.Trainer, step: int) -> None:
        """Have the experiences of a step ready: wait for those begun ahead, or roll them out now."""
        start = time.perf_counter()
        self._wait_ahead()
        if self._data(trainer).storage.is_ready(step):
            self.metrics["time/wait_for_rollout"] = time.perf_counter() - start
        else:
            self.explorer.step = step - 1
            self._roll_out(trainer, step)

    def _roll_out(self, trainer: L.Trainer, target: int) -> None:
        """Explore the steps up to and with `target` now."""
        self._engines_turn()
        self.metrics |= self._sync.sync_if_due(trainer.global_step)
        self._run(self._ahead.explore(target))

    def _engines_turn(self) -> None:
        """Before the engines compute: give them the memory that they share with the trainer in turns, if any."""
        if self._host_memory is not None:
            self._host_memory.leave()
        self._run(self.explorer.engines.wake_up())

    def _trainers_turn(self) -> None:
        """Before the trainer computes: the same the other way round."""
        self._run(self.explorer.engines.sleep())
        if self._host_memory is not None:
            self._host_memory.come_back()

    def _hand_over(self, trainer: L.Trainer, step: int) -> None:
        """Give the trainer the experiences of a step that is ready, with the columns that are computed before it."""
        policy, data = self._policy(trainer), self._data(trainer)
        self._sync.begin_step(trainer.global_step)
        start = time.perf_counter()
        columns = policy.prepare_step(data.storage.ready(step))
        self.metrics |= self._ahead.take(step) | {"time/prepare": time.perf_counter() - start}
        lag = self._sync.version(trainer.global_step) - self.metrics["sample/model_version/mean"]
        self.metrics["sample/lag/mean"] = lag
        data.advance(step, columns)  # last: an error before it finds the step still ready

    def _explore_ahead(self, trainer: L.Trainer, step: int) -> None:
        """With sync_offset, begin the rollouts that go on while `step` is trained on, unless that is done."""
        offset = self.explorer.config.sync_offset
        limit = trainer.max_epochs if trainer.max_epochs is not None and trainer.max_epochs > 0 else math.inf
        target = min(step + offset, limit)
        if self.explorer.step >= target or self._ahead.under_way:
            return
        if self.explorer.step < (begun := min(step - 1 + offset, limit)):
            self._roll_out(trainer, int(begun))  # those before have weights of their own
        self.metrics |= self._sync.sync_if_due(trainer.global_step)
        self._ahead.begin(self._running_host(), int(target))

    def _wait_ahead(self) -> None:
        self._ahead.wait()
        self._watchers.flush()

    def _evaluate(self, trainer: L.Trainer, trained: int, row: int) -> None:
        self._wait_ahead()  # before a sync: were they to be done again, it would be with the weights of now
        self._engines_turn()
        metrics = self._sync.sync(trainer.global_step)
        metrics |= self._run(self.explorer.eval(trained))
        self.metrics |= metrics
        self._log(trainer, metrics, row, trained)

    # -- bits ---------------------------------------------------------------------------------------------------------

    def _policy(self, trainer: L.Trainer) -> PolicyModule:
        return trainer.lightning_module  # type: ignore[return-value]

    def _data(self, trainer: L.Trainer) -> ExperienceDataModule:
        return trainer.datamodule  # type: ignore[return-value,attr-defined]

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
                "Restart the servers of engine.urls: they may hold half of the weights."
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
        if self._stop.ctrl_c.count:
            return KeyboardInterrupt()
        if trainer.received_sigterm:
            return SIGTERMException()
        return None

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Save what is whole, rollouts in flight included, and free everything."""
        try:
            if self._stop.wanted:
                self._settle()
            self._stop.on_exception(trainer, pl_module, exception)
        finally:
            try:
                self._close()
            except Exception as error:  # the one that ended the run is on its way to the user
                logger.warning("the engines did not end as they should: %s: %s", type(error).__name__, error)

    def _settle(self) -> None:
        """Wait shortly for rollouts in flight, which a checkpoint then holds; a resumed run does the others again."""
        if not self._ahead.under_way:
            return
        logger.warning("waiting %g s for the rollouts in flight; Ctrl-C stops without a checkpoint.", STOP_SECONDS)
        self._stop.ctrl_c.stopping()
        self._running_host().hurry()
        self._ahead.settle(STOP_SECONDS)
        if not self._ahead.complete:
            logger.warning("the next step's rollouts are not in the checkpoint: a resumed run does them again.")

    # -- state --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Steps done, the taskset's cursor, and what was measured; rollouts in flight are waited for.

        Lightning asks for it before it asks the DataModule, whose buffer then holds those rollouts too.
        """
        self._ahead.settle()
        self._watchers.flush()
        ahead = self._ahead.state_dict()
        return {
            # Rollouts that are not whole are done again by a resumed run, with the weights that they had.
            "explorer": self.explorer.state_dict(with_weights=not self._ahead.complete),
            "sync": self._sync.state_dict(),
            "ended": self._ended,
            "metrics": dict(self.metrics),
            "ahead": ahead,
            "drill_scale": self._drill_scale if self._synchronizer is None else self._synchronizer.drill_scale,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Raises:
            ConfigError: the checkpoint is of an earlier version.
        """
        check_version(state_dict, ("explorer", "sync", "ended", "metrics", "ahead"), "the explorer")
        self.explorer.load_state_dict(state_dict["explorer"])
        self._sync.load_state_dict(state_dict["sync"])
        self._ended = state_dict["ended"]
        self.metrics = dict(state_dict["metrics"])
        self._ahead.load_state_dict(state_dict["ahead"])
        self._drill_scale = state_dict.get("drill_scale")


def _items_done(trainer: L.Trainer) -> int:
    """Items of the present epoch that were trained on; between two epochs Lightning counts those of the one before."""
    items: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    within = _epochs(trainer).started > _epochs(trainer).processed
    return items.processed if within else 0


def _epochs(trainer: L.Trainer) -> Any:
    """Lightning's counts of epochs, which it declares narrower than they are."""
    return trainer.fit_loop.epoch_progress.current
