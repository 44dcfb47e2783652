"""The checkpoint of a run that stops early: what is whole is saved, and how to go on is said."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trinity_lightning.common.random_state import restore_random_state
from trinity_lightning.config.checkpoints import checkpoints_in
from trinity_lightning.errors import TrinityError
from trinity_lightning.explorer.interruption import (
    BeforeItem,
    CtrlC,
    StopCheckpoint,
    items_begun,
    loaders_of,
    optimizer_steps_begun,
)

if TYPE_CHECKING:
    from trinity_lightning.explorer.rollouts import TrainingRollouts

logger = logging.getLogger(__name__)

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
