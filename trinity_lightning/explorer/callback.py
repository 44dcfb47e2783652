"""Explorer and Lightning meet here: fill the buffer before an epoch, sync and evaluate after it.

Everything is decided by state (which explore step the buffer holds, which weights the engine has), never by which
hooks ran: a resumed run may skip some of them.
"""

import logging
import signal
import threading
import time
import warnings
from collections.abc import Coroutine
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import lightning as L
from lightning.pytorch.utilities.exceptions import SIGTERMException

from trinity_lightning.buffer.datamodule import ExperienceDataModule
from trinity_lightning.common.config import SynchronizerConfig
from trinity_lightning.common.errors import ConfigError
from trinity_lightning.explorer.explorer import Explorer, Observer, Progress
from trinity_lightning.explorer.host import Host
from trinity_lightning.explorer.models.in_process import InProcessEngine
from trinity_lightning.explorer.models.transformers_engine import TransformersEngine
from trinity_lightning.trainer.policy import PolicyModule
from trinity_lightning.trainer.weight_sync import PROBE_TEXT, Synchronizer, Tolerance, weight_stream

logger = logging.getLogger(__name__)
T = TypeVar("T")


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
        self._observer = observer
        self._progress = progress
        self._host: Host | None = None
        self._synced_at: int | None = None  # global_step of the weights that the engines have
        self._started = False
        self._filling = False
        self._interrupts = 0
        self._previous_handler: Any = None

    # -- start and end ------------------------------------------------------------------------------------------------

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Refuse what cannot work, before anything is loaded."""
        if not isinstance(pl_module, PolicyModule):
            raise ConfigError(f"ExplorerCallback trains a PolicyModule, not a {type(pl_module).__name__}.")
        if not isinstance(getattr(trainer, "datamodule", None), ExperienceDataModule):
            raise ConfigError("ExplorerCallback needs an ExperienceDataModule: trainer.fit(policy, datamodule).")
        if trainer.world_size > 1:
            raise ConfigError("one device only: with an in-process engine set trainer.devices=1.")
        if not all(isinstance(model, InProcessEngine) for model in self.explorer.models):
            raise ConfigError("ExplorerCallback drives engines in this process: VLLMEngine or TransformersEngine.")

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Load the engines and start the runners; the main thread drives them from now on."""
        # vLLM's process group of one makes Lightning believe in several devices, and advise what they would need.
        warnings.filterwarnings("ignore", ".*sync_dist=True.*")
        policy, data = self._parts(trainer)
        engines = [model for model in self.explorer.models if isinstance(model, InProcessEngine)]
        for engine in engines:
            if isinstance(engine, TransformersEngine):
                engine.bind(policy.policy)
        self._interrupts, self._synced_at, self._started, self._filling = 0, None, False, False
        self._host = Host(engines, lambda: self._interruption(trainer))
        if threading.current_thread() is threading.main_thread():  # elsewhere Python lets nobody handle signals
            self._previous_handler = signal.signal(signal.SIGINT, self._on_sigint)
        self.explorer.connect(data.fill, lambda: weight_stream(policy.policy), self._observer, self._progress)
        self._run(data.prepare())
        self._run(self.explorer.prepare())
        self._synchronizer = self._make_synchronizer(policy, engines)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Stop the runners, free the engines, give Ctrl-C back."""
        self._close()

    def _close(self) -> None:
        if self._previous_handler is not None:
            signal.signal(signal.SIGINT, self._previous_handler)
            self._previous_handler = None
        if self._host is not None:
            host, self._host = self._host, None
            host.run(self.explorer.shutdown(), interruptible=False)
            host.close()

    def _make_synchronizer(self, policy: PolicyModule, engines: list[InProcessEngine]) -> Synchronizer:
        token_ids = policy.tokenizer.encode(PROBE_TEXT)[: min(engine.max_model_len for engine in engines) - 1]
        return Synchronizer(
            policy.policy,
            send=lambda: self._run(self.explorer.sync_weight()),
            trainer_logprobs=lambda: policy.sequence_logprobs(token_ids),
            engine_logprobs=lambda: [self._run(engine.logprobs(token_ids)) for engine in engines],
            tolerance=Tolerance.of(policy.policy.dtype, *[engine.dtype for engine in engines]),
            check_interval=self._sync_config.check_interval,
            with_drill=self._sync_config.drill and not any(engine.shares_weights for engine in engines),
        )

    # -- steps --------------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Evaluate the untrained policy, then fill: a resumed run may not come by `on_train_epoch_start`."""
        self._started = True
        if self.explorer.step == 0 and self.explorer.config.eval_on_startup and self.explorer.evaluates:
            self._evaluate(trainer, step=0)
        self._fill(trainer)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Fill the buffer for this epoch, if it does not hold it already."""
        self._fill(trainer)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Evaluate where due: after the sync and before ModelCheckpoint, so that both are of the same weights."""
        last = trainer.current_epoch + 1 == trainer.max_epochs
        if self.explorer.need_eval() or (last and self.explorer.config.eval_interval > 0 and self.explorer.evaluates):
            # Not to be interrupted: a resumed run would take this epoch's end as done.
            self._evaluate(trainer, trainer.fit_loop.epoch_loop.total_batch_idx, interruptible=False)
        # For ModelCheckpoint and EarlyStopping to monitor; the loggers have them already.
        pl_module.log_dict(self.metrics, on_step=False, on_epoch=True, logger=False, batch_size=1)

    def _fill(self, trainer: L.Trainer) -> None:
        policy, data = self._parts(trainer)
        self._filling = True
        if (reason := self._interruption(trainer)) is not None:
            raise reason
        if data.batch != trainer.current_epoch + 1:
            self._explore(trainer, policy, data)
        self._filling = False

    def _explore(self, trainer: L.Trainer, policy: PolicyModule, data: ExperienceDataModule) -> None:
        self.metrics = {}
        self._sync(trainer)
        self.explorer.step = trainer.current_epoch
        if not self._run(self.explorer.explore_step()):
            raise ConfigError(
                f"the taskset is exhausted after {self.explorer.step} explore steps; lower `steps`, or let it repeat."
            )
        self.metrics |= self.explorer.metrics
        start = time.perf_counter()
        data.storage.columns = policy.prepare_step(data.experiences)
        self.metrics["time/prepare"] = time.perf_counter() - start
        self._log(trainer, self.metrics, trainer.fit_loop.epoch_loop.total_batch_idx + 1)

    def _evaluate(self, trainer: L.Trainer, step: int, interruptible: bool = True) -> None:
        self._sync(trainer)
        metrics = self._run(self.explorer.eval(), interruptible)
        self.metrics |= metrics
        self._log(trainer, metrics, step)

    def _sync(self, trainer: L.Trainer) -> None:
        """Send the weights, unless the engines have them: an item that trained nothing changed none."""
        if self._synced_at != trainer.global_step:
            metrics = self._synchronizer.sync()
            self._synced_at = trainer.global_step
            self.metrics |= metrics
            self._log(trainer, metrics, max(trainer.fit_loop.epoch_loop.total_batch_idx, 0))

    # -- bits ---------------------------------------------------------------------------------------------------------

    def _parts(self, trainer: L.Trainer) -> tuple[PolicyModule, ExperienceDataModule]:
        return trainer.lightning_module, trainer.datamodule  # type: ignore[return-value,attr-defined]

    def _run(self, coroutine: Coroutine[Any, Any, T], interruptible: bool = True) -> T:
        if self._host is None:
            coroutine.close()
            raise RuntimeError("the explorer runs only inside Trainer.fit.")
        return self._host.run(coroutine, interruptible)

    def _log(self, trainer: L.Trainer, metrics: dict[str, float], step: int) -> None:
        for each in trainer.loggers:
            each.log_metrics(metrics | {"explore_step": float(self.explorer.step)}, step=step)

    # -- interruption -------------------------------------------------------------------------------------------------

    def _on_sigint(self, number: int, frame: FrameType | None) -> None:
        self._interrupts += 1
        if self._interrupts > 1:
            raise KeyboardInterrupt
        logger.warning("Ctrl-C: stopping after the step under way, with a checkpoint; press again to stop at once.")

    def _interruption(self, trainer: L.Trainer) -> BaseException | None:
        if self._interrupts:
            return KeyboardInterrupt()
        if trainer.received_sigterm:
            return SIGTERMException()
        return None

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """On a single Ctrl-C or SIGTERM write a checkpoint and say how to go on; free everything in any case."""
        asked_to_stop = isinstance(exception, KeyboardInterrupt | SIGTERMException) and self._interrupts <= 1
        folder = getattr(trainer.checkpoint_callback, "dirpath", None)
        if asked_to_stop and not self._started:  # a resumed run's state is not restored yet: nothing worth saving
            logger.warning("stopped before training began; there is no new checkpoint.")
        elif asked_to_stop and folder is None:
            logger.warning("stopped at explore step %d without a checkpoint: no ModelCheckpoint.", self.explorer.step)
        elif asked_to_stop:
            if self._filling:
                # The loop still counts the items of the epoch before, and would take this epoch's as done on resume.
                trainer.fit_loop.epoch_loop.batch_progress.reset_on_run()
            trainer.save_checkpoint(Path(str(folder)) / "interrupted.ckpt")
            logger.warning("stopped at explore step %d. Resume with ckpt_path=last", self.explorer.step)
        self._close()

    # -- state --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Steps done, the taskset's cursor, and what was measured of the step under way."""
        return {"explorer": self.explorer.state_dict(), "metrics": dict(self.metrics)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.explorer.load_state_dict(state_dict["explorer"])
        self.metrics = dict(state_dict["metrics"])
