"""The loss on examples that are not trained on, measured while a run on a dataset goes on."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import lightning as L
import numpy as np
import torch

from trinity_lightning.algorithm.policy_loss.policy_loss import combine_metrics
from trinity_lightning.buffer.dataset import content_of, examples_of
from trinity_lightning.common.alone import ranks_of
from trinity_lightning.common.experience import Experience
from trinity_lightning.common.optimizer_batch import OptimizerBatch
from trinity_lightning.config.schema import TrainConfig
from trinity_lightning.errors import ConfigError
from trinity_lightning.monitor.csv_logger import last_row, log_row, step_of
from trinity_lightning.trainer.layout import collate, trained_tokens

logger = logging.getLogger(__name__)

# What the loss measures, and what it is called of examples that are not trained on.
NAMES = {"rewards/accuracies": "eval/accuracy", "rewards/margins": "eval/margin"}


def held_out_of_run(
    config: TrainConfig, examples: list[Experience], pairs: bool
) -> tuple[list[Experience], list[Experience]]:
    """The examples that are trained on, and those that are not, which `buffer.dataset.held_out` asks for.

    Held-out examples that are trained on all the same, as of overlapping slices, are warned of.

    Args:
        config: of the run.
        examples: those of `buffer.path`.
        pairs: whether they are preference pairs.

    Raises:
        ConfigError: nothing would be left on one of the sides; or as `read_examples`.
    """
    trained, held_out = _parted(config, examples, pairs)
    contents = {hash(content_of(each)) for each in trained}
    if both := sum(hash(content_of(each)) in contents for each in held_out):
        logger.warning("%d of %d held-out examples (buffer.dataset.held_out) are trained on, too: eval/loss is not of "
                       "unseen examples alone.", both, len(held_out))  # fmt: skip
    return trained, held_out


def _parted(config: TrainConfig, examples: list[Experience], pairs: bool) -> tuple[list[Experience], list[Experience]]:
    dataset = config.buffer.dataset
    held_out = dataset.held_out
    if held_out.share is None:
        path, split = held_out.path or str(config.buffer.path), held_out.split or dataset.split
        return examples, examples_of(config.buffer, path, split, config.model.name, pairs)
    count = round(held_out.share * len(examples))
    if not 0 < count < len(examples):
        raise ConfigError(
            f"buffer.dataset.held_out.share is {held_out.share}, which is {count} of {len(examples)} examples: leave "
            "some on both sides."
        )
    chosen = set(np.random.default_rng([config.seed, count]).permutation(len(examples))[:count].tolist())
    trained = [each for index, each in enumerate(examples) if index not in chosen]
    return trained, [examples[index] for index in sorted(chosen)]


class HeldOutLoss(L.Callback):
    """Logs `eval/loss`, of preference pairs `eval/accuracy` and `eval/margin` too, every so many steps and at the end.

    Of several ranks each computes a share; rank 0 has read the examples, and logs.

    Args:
        examples: what it is of, all together one optimizer batch; on ranks other than 0 nothing.
        interval: optimizer steps, of which a step without rollouts is one, from one measurement to the next.
        total_steps: explore steps of the run.
        show: is given what was measured, or nothing, before the step's line is printed.
        max_response_length: as of the batches that are trained on.
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
        """Measure, if it is time to."""
        step = step_of(trainer)
        due = step % self._interval == 0 or step == self._total_steps
        measured = loss_of(pl_module, self._batch) if due else {}
        if not trainer.is_global_zero:
            return
        if due:
            log_row(trainer.loggers, measured, step, last_row(trainer))
        self._show(measured)


def loss_of(policy: Any, batch: OptimizerBatch) -> dict[str, float]:
    """What training on the batch would minimise, without dropout, by the names of `HeldOutLoss`.

    Args:
        policy: a PolicyModule within a fit.
        batch: its column of the reference is computed the first time.
    """
    policy.policy.eval()
    with torch.no_grad(), policy.trainer.precision_plugin.forward_context():
        if policy.objective.needs_reference and "ref_logprobs" not in batch.columns:
            batch.columns |= policy.reference_column(batch)
        policy.objective.add_columns(batch)
        passes, placement = policy.passes(), policy.placement
        shares = passes.shares(batch, passes.rows(batch), ranks_of(policy.trainer).size)
        parts = [part for share in shares for part in share]
        tokens = trained_tokens(batch, parts), trained_tokens(batch, parts, sampled=True)
        losses, metrics = [], []
        for part in placement.passes(shares):
            if part is None:
                passes.idle(policy.policy, placement)
                continue
            micro = collate(batch, part, policy.device)
            logprobs, entropies = passes.through(policy.policy, micro, placement)
            loss, measured = policy.objective(logprobs, entropies, micro, batch, *tokens)
            losses.append(loss)
            metrics.append(measured)
    policy.policy.train()
    losses, metrics = placement.from_all_ranks(losses, metrics)
    combined = combine_metrics(metrics)
    return {"eval/loss": sum(map(float, losses))} | {
        NAMES[name]: float(combined[name]) for name in NAMES if name in combined
    }
