"""Examples of a dataset that are not trained on: a run measures the loss on them."""

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import lightning as L
import numpy as np
import torch

from trinity_lightning.buffer.dataset import Examples, examples_of
from trinity_lightning.common.experience import Experience
from trinity_lightning.common.optimizer_batch import OptimizerBatch
from trinity_lightning.config.run import TrainConfig
from trinity_lightning.errors import ConfigError, configured_at
from trinity_lightning.explorer.tasks.dataset import names_of
from trinity_lightning.monitor.csv_logger import last_row, log_row, step_of

logger = logging.getLogger(__name__)

# Names of metrics of the loss, and their names for examples that are not trained on.
NAMES = {"actor/rewards/accuracies": "eval/accuracy", "actor/rewards/margins": "eval/margin"}


def held_out_of_run(config: TrainConfig, examples: Examples, pairs: bool) -> tuple[Examples, Examples]:
    """The examples to train on, and the held-out ones (`buffer.dataset.held_out`).

    A warning counts held-out examples that are trained on, too, as from overlapping slices.

    Raises:
        ConfigError: nothing would be left on one of the sides; or as `read_examples`.
    """
    settings = config.buffer.dataset.held_out
    if settings.share is None:
        # Without a split of its own, another dataset is measured whole, in the splits that are trained on.
        split = settings.split or "+".join(names_of(config.buffer.dataset.split))
        path = settings.path or str(config.buffer.path)
        section = "buffer.dataset.held_out"
        with configured_at(f"{section}.{'split' if settings.path is None else 'path'}", section=section):
            trained, held_out = examples, examples_of(config, path, split, pairs)
    else:
        count = round(settings.share * len(examples))
        if not 0 < count < len(examples):
            raise ConfigError(
                f"buffer.dataset.held_out.share is {settings.share}, which is {count} of {len(examples)} examples",
                key="buffer.dataset.held_out.share",
                fix="leave some on both sides",
            )
        chosen = set(np.random.default_rng([config.seed, count]).permutation(len(examples))[:count].tolist())
        rest = (example for index, example in enumerate(examples) if index not in chosen)
        trained = Examples(rest, examples.pictures)
        held_out = Examples((examples[index] for index in sorted(chosen)), examples.pictures)
    if overlapping := _count_overlapping(trained, held_out):
        logger.warning("%d of %d held-out examples (buffer.dataset.held_out) are trained on, too: eval/loss is not of "
                       "unseen examples alone.", overlapping, len(held_out))  # fmt: skip
    return trained, held_out


def _count_overlapping(trained: Examples, held_out: Examples) -> int:
    """Number of held-out examples that are trained on, too; pictures are read of those that are alike without it."""
    alike: dict[int, list[Experience]] = {}  # trained examples by their content
    for example in trained:
        alike.setdefault(hash(trained.content(example)), []).append(example)
    checksums: dict[int, set[int]] = {}  # of their pictures
    count = 0
    for example in held_out:
        if (content := hash(held_out.content(example))) in alike:
            if content not in checksums:
                checksums[content] = set(map(trained.checksum, alike[content]))
            count += held_out.checksum(example) in checksums[content]
    return count


class HeldOutLoss(L.Callback):
    """Logs `eval/loss`, and for preference pairs `eval/accuracy` and `eval/margin`, at an interval and at the end.

    If there are several ranks, each computes a share; rank 0 has read the examples, and logs.

    Args:
        examples: measured as one optimizer batch; empty on ranks other than 0.
        interval: steps from one measurement to the next.
        total_steps: steps of the run.
        show: called with the measured metrics, perhaps none, before the step's line is printed.
        max_response_length: see `OptimizerBatch`.
    """

    def __init__(
        self,
        examples: Sequence[Experience],
        interval: int,
        total_steps: int,
        show: Callable[[dict[str, float]], None],
        max_response_length: int | None,
    ) -> None:
        self._examples, self._max_response_length = list(examples), max_response_length
        self._interval, self._total_steps, self._show = interval, total_steps, show

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Give the examples to all ranks."""
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        self._batch = OptimizerBatch.of(data.everywhere(lambda: self._examples), 0, self._max_response_length)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Measure, if a measurement is due."""
        step = step_of(trainer)
        due = step % self._interval == 0 or step == self._total_steps
        measured = loss_of(pl_module, self._batch) if due else {}
        if not trainer.is_global_zero:
            return
        if due:
            log_row(trainer.loggers, measured, step, last_row(trainer))
        self._show(measured)


def loss_of(policy: Any, batch: OptimizerBatch) -> dict[str, float]:
    """The loss and the metrics of a batch, without dropout, by the names of `HeldOutLoss`.

    Args:
        policy: a PolicyModule within a fit.
        batch: gets the column of the reference model the first time.
    """
    policy.policy.eval()
    try:
        with torch.no_grad(), policy.trainer.precision_plugin.forward_context():
            losses, metrics = policy.accumulate(batch, policy.shares(batch, policy.passes().rows(batch)))
    finally:
        policy.policy.train()
    return {"eval/loss": math.fsum(losses.tolist())} | {NAMES[name]: metrics[name] for name in NAMES if name in metrics}
