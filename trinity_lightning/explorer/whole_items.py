"""Sets Lightning's counters and a run's loaders back to the items that were trained on, for a checkpoint of a stop."""

from collections.abc import Sequence
from typing import Any

from trinity_lightning.common.random_state import restore_random_state


def back_to_whole_items(
    trainer: Any, loaders: Sequence[Any], random_state: dict[str, Any] | None, loader_states: Sequence[tuple[Any, Any]]
) -> None:
    """Let counters and loaders say what was trained on: a resumed run would skip the rest.

    Args:
        trainer: Lightning's.
        loaders: of the training data; those that can, `rewind`.
        random_state: when the item under way began; None: none is under way.
        loader_states: loaders that cannot rewind, and where they stood before that item.
    """
    loop = trainer.fit_loop.epoch_loop
    epoch = trainer.fit_loop.epoch_progress
    items = loop.batch_progress
    if epoch.current.started > epoch.current.processed:  # within an epoch: the items counted are its own
        if items.current.processed < items.current.ready:
            if random_state is not None:
                restore_random_state(random_state)
            for loader, state in loader_states:
                loader.load_state_dict(state)
        for each in (items.total, items.current):
            each.ready = each.started = each.completed = each.processed
        for loader in loaders:
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
