"""Saves a checkpoint when a run stops early: by an error, or by Ctrl-C or SIGTERM, which end it between two items."""

import copy
import logging
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import lightning as L
from lightning.pytorch.utilities.exceptions import SIGTERMException

from trinity_lightning.common.random_state import random_state, restore_random_state
from trinity_lightning.common.ranks import ranks_of
from trinity_lightning.config.checkpoints import checkpoints_in
from trinity_lightning.errors import TrinityError

logger = logging.getLogger(__name__)

FILE = "interrupted.ckpt"


@dataclass
class BeforeItem:
    """The run's state before the present item, to which the run returns if the item is not trained on completely.

    Attributes:
        optimizer_steps: number of optimizer steps begun before the item.
        loader_states: loaders that cannot rewind, with their states.
        random_state: states of the random generators when the item began; None: no item is under way.
    """

    optimizer_steps: int = 0
    loader_states: list[tuple[Any, Any]] = field(default_factory=list)
    random_state: dict[str, Any] | None = None

    @classmethod
    def of(cls, trainer: Any) -> "BeforeItem":
        """The state before the next item."""
        return cls(optimizer_steps_begun(trainer), _states_of_loaders(trainer))


def optimizer_steps_begun(trainer: Any) -> int:
    return trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress.total.ready


def items_begun(trainer: Any) -> int:
    return trainer.fit_loop.epoch_loop.batch_progress.total.ready


def loaders_of(trainer: Any) -> list[Any]:
    loaders = trainer.fit_loop._combined_loader
    return [] if loaders is None else list(loaders.flattened)


def _states_of_loaders(trainer: Any) -> list[tuple[Any, Any]]:
    """Loaders that cannot rewind but have a state that Lightning saves, each with a copy of its state."""
    others = [loader for loader in loaders_of(trainer) if not hasattr(loader, "rewind")]
    stateful = [loader for loader in others if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")]
    return [(loader, copy.deepcopy(loader.state_dict())) for loader in stateful]


class StopCheckpoint(L.Callback):
    """Writes a checkpoint when an error, Ctrl-C or SIGTERM ends training, and logs the command that resumes the run.

    The checkpoint holds whole items (optimizer batches) only. If the present item was not trained on, the resumed run
    gets it again, with the random states that it began with. For that a loader returns to the item by `rewind`, or
    else to its state before the item. (From a loader without a length Lightning reads one item in advance; that item
    is not handed out again.)

    Nothing is saved if an error comes before anything new was trained, if an optimizer step was cut short, or at a
    second Ctrl-C. An error while saving is logged, and the error that ended the run is raised.

    The first Ctrl-C is counted, and raised between two items, also while a loader waits for data.

    Args:
        folder: where the checkpoint goes; None: to the checkpoints of ModelCheckpoint.
        command: called when the run stops; returns the command line that resumes it, or None if there is none.

    Attributes:
        ctrl_c: counts Ctrl-C.
        before: the run's state before the present item.
        items: number of items that had begun before this fit.
        has_rollouts: True if a checkpoint would hold rollouts that were not trained on yet.
    """

    has_rollouts = False

    def __init__(self, folder: Path | None = None, command: Callable[[], str | None] = lambda: None) -> None:
        self.ctrl_c = CtrlC()
        self.folder = folder
        self.command = command
        self._started, self.items = False, 0
        self.before = BeforeItem()

    # -- Lightning's hooks --------------------------------------------------------------------------------------------

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Count Ctrl-C from now on."""
        self._started, self.before, self.ctrl_c.count = False, BeforeItem(), 0
        self.ctrl_c.install()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Allow saving from now on: the state of a resumed run is restored."""
        self._started = True
        loop = trainer.fit_loop
        epoch: Any = loop.epoch_progress.current
        if loop.restarted_mid_epoch and epoch.started == epoch.processed:
            # The checkpoint was saved after the last item of an epoch, so that the next epoch begins now. Lightning
            # would not count it, and would take checkpoints within it for checkpoints of a finished epoch.
            loop.reset_restart_stage()
        self.before, self.items = BeforeItem.of(trainer), items_begun(trainer)

    def reason(self, trainer: L.Trainer) -> BaseException | None:
        """The exception to end the run with, if it was asked to end, or if another of its processes failed or died."""
        if self.ctrl_c.count:
            return KeyboardInterrupt()
        if trainer.received_sigterm:  # before `failure`, because the other ranks end by this signal too
            return SIGTERMException()
        return ranks_of(trainer).failure()

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Stop the run, between two items, if Ctrl-C was pressed."""
        if self.ctrl_c.count:
            raise KeyboardInterrupt
        self.before.random_state = random_state()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.before = BeforeItem.of(trainer)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        try:
            if self.wanted:
                save_stopped(trainer, self)
        finally:
            self._end()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._end()

    def settle(self) -> None:
        """Wait for work beside the training, so that the checkpoint has it, too."""

    def _end(self) -> None:
        self._started = False  # a later error, such as one in `Trainer.test`, saves nothing
        self.ctrl_c.restore()

    @property
    def wanted(self) -> bool:
        """True if a run that ends now leaves a checkpoint: not before training began, nor at a second Ctrl-C."""
        return self._started and self.ctrl_c.count <= 1


class CtrlC:
    """Counts Ctrl-C: the first one asks for an end with a checkpoint, the second one raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self.count = 0
        self._previous: Any = None

    def install(self) -> None:
        """Handle Ctrl-C from now on, if this is the main thread: Python allows no other."""
        if threading.current_thread() is threading.main_thread():
            previous = signal.signal(signal.SIGINT, self._on_sigint)
            if self._previous is None:
                self._previous = previous

    def restore(self) -> None:
        """Put the previous handler back; calling it twice is allowed."""
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
            self._previous = None

    def stopping(self) -> None:
        """Let the next Ctrl-C end the run at once, because it is ending already."""
        self.count = max(self.count, 1)
        self.install()  # again: Lightning ignores Ctrl-C after the first one

    def _on_sigint(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self.count > 1:
            raise KeyboardInterrupt
        logger.warning("Ctrl-C: stopping after what is under way, with a checkpoint; press again to stop at once.")


def keep_sigterm() -> None:
    """Install Python's present handler of SIGTERM again: Ray replaces it by one that ends the process at once."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))


def save_stopped(trainer: Any, callback: StopCheckpoint) -> None:
    """Write the checkpoint, unless nothing new was trained, or an optimizer step was cut short.

    An error is logged and not raised, because the error that ended the run is raised already.
    """
    folder = callback.folder or getattr(trainer.checkpoint_callback, "dirpath", None)
    if folder is None:
        logger.warning("stopped without a checkpoint: there is no ModelCheckpoint.")
        return
    path, command, before = Path(str(folder)) / FILE, callback.command(), callback.before
    was_asked = isinstance(callback.reason(trainer), KeyboardInterrupt | SystemExit)  # Ctrl-C, SIGTERM
    if not (was_asked or callback.has_rollouts or items_begun(trainer) > callback.items):
        logger.warning("stopped before anything new was trained, without a checkpoint. %s", _earlier(path, command))
        return
    callback.settle()
    try:
        if _cut_short(trainer, before):
            earlier = _earlier(path, command)
            logger.error("stopped within an optimizer step: the weights are not whole, and not saved. %s", earlier)
            return
        _back_to_whole_items(trainer, before)
        trainer.save_checkpoint(path)
        logger.warning("stopped in step %d, with a checkpoint. %s", trainer.current_epoch + 1, _resume(path, command))
    except Exception as error:
        why = error if isinstance(error, TrinityError) else f"{type(error).__name__}: {error}."
        logger.error("the checkpoint could not be written: %s %s", why, _earlier(path, command))


def _resume(path: Path, command: str | None) -> str:
    return f"Resume with: {command}" if command else f"Resume with ckpt_path='{path}'."


def _earlier(path: Path, command: str | None) -> str:
    """Advice to resume from the previous checkpoint; empty if there is none."""
    checkpoints = checkpoints_in(path.parent)
    return f"The previous checkpoint is intact. {_resume(checkpoints[-1], command)}" if checkpoints else ""


def _cut_short(trainer: Any, before: BeforeItem) -> bool:
    """True if the present item has begun an optimizer step, and is not finished."""
    items = trainer.fit_loop.epoch_loop.batch_progress.current
    return items.processed < items.ready and optimizer_steps_begun(trainer) > before.optimizer_steps


def _back_to_whole_items(trainer: Any, before: BeforeItem) -> None:
    """Set Lightning's counters and the loaders back to the items that were trained on, so that no other is skipped."""
    loop = trainer.fit_loop.epoch_loop
    epoch = trainer.fit_loop.epoch_progress
    items = loop.batch_progress
    if epoch.current.started > epoch.current.processed:  # within an epoch: the counted items are of this epoch
        if items.current.processed < items.current.ready:
            if before.random_state is not None:
                restore_random_state(before.random_state)
            for loader, state in before.loader_states:
                loader.load_state_dict(state)
        for count in (items.total, items.current):
            count.ready = count.started = count.completed = count.processed
        for loader in loaders_of(trainer):
            if hasattr(loader, "rewind"):
                loader.rewind(items.current.processed)
        items.is_last_batch = False
        if items.current.processed == trainer.num_training_batches:
            epoch.increment_processed()
    if epoch.current.started == epoch.current.processed:
        items.reset_on_run()
        # An epoch that was about to start is saved as not begun. Otherwise Lightning would continue this epoch, leave
        # `current.ready` one too low, and take checkpoints at the ends of later epochs for unfinished epochs.
        for count in (epoch.total, epoch.current):
            count.ready = count.started
    loop._batches_that_stepped = items.total.completed
