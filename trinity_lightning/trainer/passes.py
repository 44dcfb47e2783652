"""Forward passes: rows of an optimizer batch cut into micro-batches, and what a model makes of their trained tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from trinity_lightning.common.alone import ALONE, Alone
from trinity_lightning.common.optimizer_batch import OptimizerBatch
from trinity_lightning.config.training import Layout
from trinity_lightning.trainer.layout import Part, better_layout, cut, rows_to_train
from trinity_lightning.trainer.micro_batch import MicroBatch, collate
from trinity_lightning.trainer.model import LogprobFn
from trinity_lightning.trainer.placement import Whole


@dataclass(frozen=True)
class Passes:
    """How rows go through the policy, or a model of its architecture: what `auto` stands for on this device.

    Attributes:
        device: for which that is.
        layout: how rows lie in memory.
        max_tokens: most computed tokens of a micro-batch.
        function: what is computed of trained tokens; log-probabilities first.
        all_rows: whether rows without advantage are computed too.
        as_trained: whether columns are computed with a graph for gradients, too: compiled layers round otherwise
            without one, and the first ratio would not be 1.
    """

    device: torch.device
    layout: Layout
    max_tokens: int
    function: LogprobFn
    all_rows: bool
    as_trained: bool

    def rows(self, batch: OptimizerBatch) -> list[int]:
        """The rows that are worth computing."""
        return rows_to_train(batch, skip_zero_advantage=not self.all_rows)

    def shares(self, batch: OptimizerBatch, rows: Sequence[int], ranks: int = 1) -> list[list[Part]]:
        """The micro-batches of each rank, which each of them knows."""
        layout, tokens = self.layout, self.max_tokens
        if layout is Layout.auto and batch.step is not None:
            # That of `columns`, which sees the whole step: in bfloat16 the first ratio would not be 1 otherwise.
            step = replace(batch, experiences=batch.step)
            layout = better_layout(step, self.rows(step), tokens)
        elif layout is Layout.auto:
            layout = better_layout(batch, rows, tokens)
        dealt = [list(rows)]
        if ranks > 1:
            from trinity_lightning.trainer.shares import deal

            dealt = deal(batch, rows, ranks, tokens, layout)
        return [cut(batch, each, tokens, layout) for each in dealt]

    def through(self, model: Any, micro: MicroBatch, placement: Whole) -> tuple[Tensor, ...]:
        """What the function yields of the computed tokens, each [B, R] (candidates: [B, R, 1 + k]); 0 elsewhere."""
        values = placement.logprobs(
            self.function, model, micro.inputs, micro.states, micro.targets, micro.temperature[micro.rows]
        )
        return tuple(map(micro.spread, values))

    def columns(
        self,
        model: Any,
        batch: OptimizerBatch,
        placement: Whole,
        ranks: Alone = ALONE,
        kept: Sequence[int] = (0,),
    ) -> list[list[Tensor]]:
        """Of what the function yields, the kept ones (log-probabilities alone), each of every experience's response.

        Each rank computes its share of the rows, and they are added up.
        """
        columns = [[torch.zeros(e.response_length) for e in batch.experiences] for _ in kept]
        was_training = model.training
        model.eval()  # dropout would make them another model's
        shares = self.shares(batch, self.rows(batch), ranks.size)
        for part in placement.passes(shares) if ranks.size > 1 else shares[0]:
            if part is None:
                from trinity_lightning.trainer.shares import idle

                idle(self, model, placement)
                continue
            with torch.set_grad_enabled(self.as_trained):
                found = self.through(model, collate(batch, part, model.device), placement)
            for column, values in zip(columns, (found[each].detach().cpu() for each in kept), strict=True):
                for row, value in zip(part.rows, values, strict=True):
                    column[row] = value[: len(column[row])].clone()
        model.train(was_training)
        if ranks.size > 1:
            from trinity_lightning.trainer.shares import added_up

            columns = added_up(columns, ranks)
        return columns
