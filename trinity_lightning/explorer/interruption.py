"""A run that stops early: Ctrl-C and SIGTERM end it between two items, and what is whole is saved."""

import copy
import logging
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import lightning as L
from lightning.pytorch.utilities.exceptions import SIGTERMException

from trinity_lightning.common.random_state import random_state, restore_random_state
from trinity_lightning.common.ranks import ranks_of
from trinity_lightning.config.checkpoints import checkpoints_in
from trinity_lightning.errors import TrinityError

if TYPE_CHECKING:
    from trinity_lightning.explorer.rollouts import TrainingRollouts

logger = logging.getLogger(__name__)


@dataclass
class BeforeItem:
    """Where a run stood before the item under way, to which it goes back if that is not whole."""

    optimizer_steps: int = 0  # how many had begun
    loader_states: list[tuple[Any, Any]] = field(default_factory=list)  # of loaders that cannot rewind
    random_state: dict[str, Any] | None = None  # when the item began; None: none is under way

    @classmethod
    def of(cls, trainer: Any) -> "BeforeItem":
        """Of the next item."""
        return cls(optimizer_steps_begun(trainer), _states_of_loaders(trainer))


def optimizer_steps_begun(trainer: Any) -> int:
    return trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress.total.ready


def items_begun(trainer: Any) -> int:
    return trainer.fit_loop.epoch_loop.batch_progress.total.ready


def loaders_of(trainer: Any) -> list[Any]:
    loaders = trainer.fit_loop._combined_loader
    return [] if loaders is None else list(loaders.flattened)


def _states_of_loaders(trainer: Any) -> list[tuple[Any, Any]]:
    """Those of the training data whose state Lightning saves and which cannot rewind, each with a copy of its state."""
    others = [each for each in loaders_of(trainer) if not hasattr(each, "rewind")]
    stateful = [each for each in others if hasattr(each, "state_dict") and hasattr(each, "load_state_dict")]
    return [(each, copy.deepcopy(each.state_dict())) for each in stateful]


class StopCheckpoint(L.Callback):
    """Writes a checkpoint when training ends by an error, by Ctrl-C or by SIGTERM, and says how to resume.

    What is saved is whole: an item (an optimizer batch) that was handed out and not trained on is handed out again by
    the resumed run, with the random states that it began with. For that a loader goes back to an item by `rewind`, or
    else to the state that it had before (Lightning reads one item ahead of a loader without a length: that one is not
    handed out again). Nothing is saved if an error comes before there is anything new, if an optimizer step itself was
    cut short, or at a second Ctrl-C. Whatever goes wrong while it saves, the error that ended the run goes on.

    Ctrl-C is counted, and raised between two items, also while a loader waits for data there.

    Args:
        folder: where the checkpoint goes; None: with those of ModelCheckpoint.
        command: called when the run stops; returns the command line that resumes it, or None if there is none.

    Attributes:
        ctrl_c: how often it was pressed.
        before: where the run stood before the item under way.
        items: how many had begun before this fit.
        has_rollouts: whether there are some that were not trained on yet, which a checkpoint would hold.
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
        """From here on there is a state worth saving: a resumed run's is restored."""
        self._started = True
        loop = trainer.fit_loop
        epoch: Any = loop.epoch_progress.current
        if loop.restarted_mid_epoch and epoch.started == epoch.processed:
            # Saved after the last item of an epoch: the next one begins. Lightning would not count it, and would take
            # checkpoints within it for those of a finished epoch.
            loop.reset_restart_stage()
        self.before, self.items = BeforeItem.of(trainer), items_begun(trainer)

    def reason(self, trainer: L.Trainer) -> BaseException | None:
        """What the run is to end with, if it was asked to end, or if another of its processes has failed or died."""
        if self.ctrl_c.count:
            return KeyboardInterrupt()
        if trainer.received_sigterm:  # first: the other ranks know of it
            return SIGTERMException()
        return ranks_of(trainer).failure()

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Between two items, Ctrl-C stops the run."""
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
        """Wait for what is under way beside training, for it to be saved, too."""

    def _end(self) -> None:
        self._started = False  # what fails from here on, a test say, has nothing to be saved
        self.ctrl_c.restore()

    @property
    def wanted(self) -> bool:
        """Whether a run that ends now leaves a checkpoint: not before training began, nor at a second Ctrl-C."""
        return self._started and self.ctrl_c.count <= 1


class CtrlC:
    """Counts Ctrl-C instead of raising at once: the first asks for an end with a checkpoint, the second for an end."""

    def __init__(self) -> None:
        self.count = 0
        self._previous: Any = None

    def install(self) -> None:
        """Handle Ctrl-C from now on; Python allows that on the main thread only."""
        if threading.current_thread() is threading.main_thread():
            previous = signal.signal(signal.SIGINT, self._on_sigint)
            if self._previous is None:
                self._previous = previous

    def restore(self) -> None:
        """Give it back to the handler of before; twice is allowed."""
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
            self._previous = None

    def stopping(self) -> None:
        """The run is ending: the next Ctrl-C ends it at once."""
        self.count = max(self.count, 1)
        self.install()  # again: Lightning ignores Ctrl-C from the first one on

    def _on_sigint(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self.count > 1:
            raise KeyboardInterrupt
        logger.warning("Ctrl-C: stopping after what is under way, with a checkpoint; press again to stop at once.")


def keep_sigterm() -> None:
    """Give SIGTERM back to the handler that Python knows: Ray puts one in its place that ends the process at once."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))


FILE = "interrupted.ckpt"

STOP_SECONDS = 20.0  # for rollouts in flight if a run ends early: schedulers of clusters kill 30 s after SIGTERM


def settle_shortly(rollouts: "TrainingRollouts", ctrl_c: CtrlC) -> None:
    """Wait for rollouts in flight: those finished then are in the checkpoint, a resumed run does the others again."""
    ctrl_c.stopping()
    logger.warning("waiting %g s for the rollouts in flight; Ctrl-C stops without a checkpoint.", STOP_SECONDS)
    rollouts.driver.hurry()
    rollouts.settle(STOP_SECONDS)
    if rollouts.explorer.step < rollouts.pending.target:
        logger.warning("the next step's rollouts are not in the checkpoint: a resumed run does them again.")


def save_stopped(trainer: Any, callback: StopCheckpoint) -> None:
    """Write the checkpoint, unless there is nothing new in it, or the weights are not whole.

    What goes wrong is logged: another error is on its way.
    """
    where = callback.folder or getattr(trainer.checkpoint_callback, "dirpath", None)
    if where is None:
        logger.warning("stopped without a checkpoint: there is no ModelCheckpoint.")
        return
    path, command, before = Path(str(where)) / FILE, callback.command(), callback.before
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
    """How to resume from the previous checkpoint; empty if there is none."""
    checkpoints = checkpoints_in(path.parent)
    return f"The previous checkpoint is intact. {_resume(checkpoints[-1], command)}" if checkpoints else ""


def _cut_short(trainer: Any, before: BeforeItem) -> bool:
    """Whether the item under way has begun to change the weights, and did not come to its end."""
    items = trainer.fit_loop.epoch_loop.batch_progress.current
    return items.processed < items.ready and optimizer_steps_begun(trainer) > before.optimizer_steps


def _back_to_whole_items(trainer: Any, before: BeforeItem) -> None:
    """Let Lightning's counters and the loaders say what was trained on: a resumed run would skip the rest."""
    loop = trainer.fit_loop.epoch_loop
    epoch = trainer.fit_loop.epoch_progress
    items = loop.batch_progress
    if epoch.current.started > epoch.current.processed:  # within an epoch: the items counted are its own
        if items.current.processed < items.current.ready:
            if before.random_state is not None:
                restore_random_state(before.random_state)
            for loader, state in before.loader_states:
                loader.load_state_dict(state)
        for each in (items.total, items.current):
            each.ready = each.started = each.completed = each.processed
        for loader in loaders_of(trainer):
            if hasattr(loader, "rewind"):
                loader.rewind(items.current.processed)
        items.is_last_batch = False
        if items.current.processed == trainer.num_training_batches:
            epoch.increment_processed()
    if epoch.current.started == epoch.current.processed:
        items.reset_on_run()
        # An epoch that was about to start is saved as not begun. Lightning would go on with it by leaving
        # `current.ready` one behind, and would then take checkpoints of later epochs' ends for unfinished epochs.
        for each in (epoch.total, epoch.current):
            each.ready = each.started
    loop._batches_that_stepped = items.total.completed
