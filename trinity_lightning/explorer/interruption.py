"""A run that stops early: what is whole is saved, and how to go on is said."""

import copy
import logging
import signal
import threading
import time
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import lightning as L
from lightning.pytorch.utilities.exceptions import SIGTERMException

from trinity_lightning.common.alone import ranks_of
from trinity_lightning.common.random_state import random_state
from trinity_lightning.errors import TrinityError
from trinity_lightning.explorer.whole_items import back_to_whole_items

logger = logging.getLogger(__name__)

FILE = "interrupted.ckpt"


class StopCheckpoint(L.Callback):
    """Writes a checkpoint when training ends by an error, by Ctrl-C or by SIGTERM, and says how to resume.

    What is saved is whole: an item (an optimizer batch) that was handed out and not trained on is handed out again by
    the resumed run, with the random states that it began with. For that a loader goes back to an item by `rewind`, or
    else to the state that it had before (Lightning reads one item ahead of a loader without a length: that one is not
    handed out again). Nothing is saved if an optimizer step itself was cut short, nor at a second Ctrl-C. Whatever goes
    wrong while it saves, the error that ended the run goes on.

    Ctrl-C is counted, and raised between two items, also while a loader waits for data there.

    Args:
        folder: where the checkpoint goes; None: with those of ModelCheckpoint.
        command: what resumes the run on the command line, to be pasted.

    Attributes:
        ctrl_c: how often it was pressed.
    """

    def __init__(self, folder: Path | None = None, command: str | None = None) -> None:
        self.ctrl_c = CtrlC()
        self._folder = folder
        self._command = command
        self._started = False
        self._steps_before = 0  # optimizer steps begun before the item under way
        self._random_state: dict[str, Any] | None = None  # when the item under way began
        self._loader_states: list[tuple[Any, Any]] = []  # loaders that cannot rewind, and where they stood before it
        self._pauses: list[tuple[Any, Any]] = []  # loaders that wait by `_pause`, and how they did before

    # -- Lightning's hooks --------------------------------------------------------------------------------------------

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Count Ctrl-C from now on."""
        self._started, self._random_state, self.ctrl_c.count = False, None, 0
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
        self._steps_before = _optimizer_steps_begun(trainer)
        self._loader_states = _states_of_loaders(trainer)
        self._give_back_pauses()
        for loader in _loaders(trainer):
            if hasattr(loader, "pause"):
                self._pauses.append((loader, loader.pause))
                loader.pause = partial(self._pause, trainer)

    def reason(self, trainer: L.Trainer) -> BaseException | None:
        """What the run is to end with, if it was asked to end, or if another of its processes has failed or died."""
        if self.ctrl_c.count:
            return KeyboardInterrupt()
        if trainer.received_sigterm:  # first: the other ranks know of it
            return SIGTERMException()
        return ranks_of(trainer).failure()

    def _pause(self, trainer: L.Trainer, seconds: float) -> None:
        """Sleep while a loader waits for data: no item is under way, and the run may end."""
        if (reason := self.reason(trainer)) is not None:
            raise reason
        time.sleep(seconds)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Between two items, Ctrl-C stops the run."""
        if self.ctrl_c.count:
            raise KeyboardInterrupt
        self._random_state = random_state()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """The item is done."""
        self._steps_before, self._random_state = _optimizer_steps_begun(trainer), None
        self._loader_states = _states_of_loaders(trainer)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Save what is whole."""
        try:
            if self.wanted:
                self._save(trainer)
        except Exception as error:  # the one that ended the run is on its way to the user
            earlier = self._earlier(self._path(trainer))
            why = error if isinstance(error, TrinityError) else f"{type(error).__name__}: {error}."
            logger.error("the checkpoint could not be written: %s %s", why, earlier)
        finally:
            self._end()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Give Ctrl-C back."""
        self._end()

    def _end(self) -> None:
        self._started = False  # what fails from here on, a test say, has nothing to be saved
        self.ctrl_c.restore()
        self._give_back_pauses()

    def _give_back_pauses(self) -> None:
        while self._pauses:
            loader, pause = self._pauses.pop()
            loader.pause = pause

    # -- saving -------------------------------------------------------------------------------------------------------

    @property
    def wanted(self) -> bool:
        """Whether a run that ends now leaves a checkpoint: not before training began, nor at a second Ctrl-C."""
        return self._started and self.ctrl_c.count <= 1

    def _save(self, trainer: L.Trainer) -> None:
        path = self._path(trainer)
        if path is None:
            logger.warning("stopped without a checkpoint: there is no ModelCheckpoint.")
            return
        if self._cut_short(trainer):
            earlier = self._earlier(path)
            logger.error("stopped within an optimizer step: the weights are not whole, and not saved. %s", earlier)
            return
        back_to_whole_items(trainer, _loaders(trainer), self._random_state, self._loader_states)
        trainer.save_checkpoint(path)
        logger.warning("stopped in step %d, with a checkpoint. %s", trainer.current_epoch + 1, self._resume(path))

    def _path(self, trainer: L.Trainer) -> Path | None:
        folder = self._folder or getattr(trainer.checkpoint_callback, "dirpath", None)
        return None if folder is None else Path(str(folder)) / FILE

    def _resume(self, path: Path) -> str:
        return f"Resume with: {self._command}" if self._command else f"Resume with ckpt_path='{path}'."

    def _earlier(self, path: Path | None) -> str:
        """What to go on with if nothing was saved now; nothing if there is none."""
        from trinity_lightning.config.checkpoints import checkpoints_in

        checkpoints = [] if path is None else checkpoints_in(path.parent)
        return f"The last checkpoint before it stands. {self._resume(checkpoints[-1])}" if checkpoints else ""

    def _cut_short(self, trainer: L.Trainer) -> bool:
        """Whether the item under way has begun to change the weights, and did not come to its end."""
        items: Any = trainer.fit_loop.epoch_loop.batch_progress.current
        return items.processed < items.ready and _optimizer_steps_begun(trainer) > self._steps_before


def _optimizer_steps_begun(trainer: L.Trainer) -> int:
    return trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress.total.ready


def _loaders(trainer: L.Trainer) -> list[Any]:
    loaders = trainer.fit_loop._combined_loader
    return [] if loaders is None else list(loaders.flattened)


def _states_of_loaders(trainer: L.Trainer) -> list[tuple[Any, Any]]:
    """Those of the training data whose state Lightning saves and which cannot rewind, each with a copy of its state."""
    stateful = [each for each in _loaders(trainer) if hasattr(each, "state_dict") and hasattr(each, "load_state_dict")]
    return [(each, copy.deepcopy(each.state_dict())) for each in stateful if not hasattr(each, "rewind")]


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
