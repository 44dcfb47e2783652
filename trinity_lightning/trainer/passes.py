"""Passes of micro-batches through the policy, or through another model of its architecture."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental import _config

from trinity_lightning.common.experience import Experience
from trinity_lightning.common.optimizer_batch import OptimizerBatch
from trinity_lightning.common.pictures.positions import PositionRule
from trinity_lightning.common.ranks import ALONE, Alone
from trinity_lightning.config.algorithm import Layout
from trinity_lightning.trainer.layers import OneRow, Rows
from trinity_lightning.trainer.layout import MicroBatch, Part, better_layout, collate, cut, deal, rows_to_train
from trinity_lightning.trainer.placement import Whole

# torch's settings of symbolic sizes. By default sizes that are the same when a graph is made are one: if there are as
# many tokens as a state has elements, the graph would hold for this number of tokens alone.
SHAPES: Any = _config

# (model, inputs, positions [n], targets [n], temperature [n]) -> log-probabilities and entropies, float32 [n]. Inputs
# are arguments of the forward pass, among them `input_ids` [B, S]. A position is the place, in the flattened tokens, of
# the state that predicts the target. With candidates there are 1 + k targets a position, and as many log-probabilities:
# [n, 1 + k].
LogprobFn = Callable[[Any, dict[str, Any], Tensor, Tensor, Tensor], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Compiled:
    """How rows go through compiled layers: as much alike as can be, since each kind of pass takes graphs of its own.

    Passes for columns build the graph for gradients too. Other graphs would round differently, and the first ratio
    would not be 1.

    Attributes:
        one_row: rows side by side become one row of all their tokens (`in_one_row`).
        has_dropout: columns are computed in evaluation mode, by graphs without dropout.
    """

    one_row: bool
    has_dropout: bool


def in_one_row(inputs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of the model's forward pass with all tokens in one row [1, B * S], as shared prefixes have them.

    The number of tokens is then all that differs between micro-batches, of either layout.
    """
    if "shared_prefix" in inputs:
        return inputs | {"shared_prefix": OneRow(inputs["shared_prefix"])}
    ids = inputs["input_ids"]
    rows, length = ids.shape
    positions = inputs.get("position_ids")  # by the model's own rule, [3, B, S]
    if positions is None:  # no view of other sizes, at which torch.compile also looks
        positions = torch.arange(length, device=ids.device).repeat(rows)[None]
    else:
        positions = positions.flatten(1)[:, None]
    return inputs | {
        "input_ids": ids.view(1, -1),
        "position_ids": positions,
        "attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool, device=ids.device),  # see `layout.NO_MASK`
        "shared_prefix": OneRow(Rows(rows)),
    }


@dataclass(frozen=True)
class Passes:
    """Settings of passes through a model on one device; none of them is auto any more, except `layout`.

    Attributes:
        device: where the model computes.
        layout: how rows lie in a micro-batch; `auto` is decided for each explore step.
        max_tokens: most computed tokens of a micro-batch.
        function: computes the results of the trained tokens; log-probabilities come first.
        all_rows: compute rows without advantage too.
        compiled: how rows go through compiled layers; None: the layers are not compiled.
        position_rule: the model's own rule for positions of rows with pictures; None: tokens are counted one by one.
    """

    device: torch.device
    layout: Layout
    max_tokens: int
    function: LogprobFn
    all_rows: bool
    compiled: "Compiled | None" = None
    position_rule: PositionRule | None = None

    @property
    def switches_mode(self) -> bool:
        """True if columns are computed in evaluation mode. Compiled layers have graphs for either mode."""
        return self.compiled is None or self.compiled.has_dropout

    def rows(self, batch: OptimizerBatch) -> list[int]:
        """Rows of the batch that are computed."""
        return rows_to_train(batch, skip_zero_advantage=not self.all_rows)

    def shares(self, batch: OptimizerBatch, rows: Sequence[int], ranks: int = 1) -> list[list[Part]]:
        """The micro-batches of every rank; each rank knows them all."""
        layout, tokens = self.layout, self.max_tokens
        if layout is Layout.auto:
            # The layout of `columns`, which sees the whole step: in bfloat16 the first ratio would not be 1 otherwise.
            step = replace(batch, experiences=batch.step or batch.experiences)
            layout = better_layout(step, self.rows(step), tokens)
        dealt = [list(rows)] if ranks == 1 else deal(batch, rows, ranks, tokens, layout)
        return [cut(batch, share, tokens, layout) for share in dealt]

    def through(self, model: Any, micro: MicroBatch, placement: Whole) -> tuple[Tensor, ...]:
        """The function's results for the computed tokens, each [B, R] (candidates: [B, R, 1 + k]); 0 elsewhere."""
        one_row = self.compiled is not None and self.compiled.one_row
        inputs = in_one_row(micro.inputs) if one_row else micro.inputs
        arguments = inputs, micro.states, micro.targets, micro.temperature[micro.rows]
        with nullcontext() if self.compiled is None else SHAPES.patch(use_duck_shape=False):
            results = placement.logprobs(self.function, model, *arguments)
        return tuple(map(micro.spread, results))

    def columns(
        self, model: Any, batch: OptimizerBatch, placement: Whole, results: Sequence[int] = (0,), shared: bool = True
    ) -> list[list[Tensor]]:
        """Some of the function's results for a whole batch, without dropout.

        Args:
            model: the policy, or another model of its architecture.
            batch: the experiences.
            placement: how the model lies in the processes.
            results: places of the wanted results; by default the log-probabilities alone.
            shared: each rank computes its share of the rows, and the shares are added up; otherwise all of them.

        Returns:
            A column for each wanted result: float32 CPU tensors [response], one an experience.
        """
        ranks = placement.ranks if shared else ALONE
        columns = [[torch.zeros(e.response_length) for e in batch.experiences] for _ in results]
        was_training = model.training
        if self.switches_mode:
            model.eval()  # without dropout
        shares = self.shares(batch, self.rows(batch), ranks.size)
        for part in placement.passes(shares) if ranks.size > 1 else shares[0]:
            if part is None:
                idle(self, model, placement)
                continue
            with torch.set_grad_enabled(self.compiled is not None):
                micro = collate(batch, part, model.device, self.position_rule)
                outputs = self.through(model, micro, placement)
            for column, values in zip(columns, (outputs[place].detach().cpu() for place in results), strict=True):
                for row, value in zip(part.rows, values, strict=True):
                    column[row] = value[: len(column[row])].clone()
        model.train(was_training)
        return added_up(columns, ranks) if ranks.size > 1 else columns


def idle(passes: Passes, model: Any, placement: Whole) -> Tensor:
    """Make an empty pass, because the other ranks make one; returns a sum of log-probabilities that nothing uses."""
    batch = OptimizerBatch.of([Experience(tokens=[0, 0], prompt_length=1)], explore_step=0)
    (part,) = cut(batch, [0], 2, Layout.padded)
    return passes.through(model, collate(batch, part, model.device), placement)[0].sum()


def added_up(columns: Sequence[Sequence[Tensor]], ranks: Alone) -> list[list[Tensor]]:
    """Each column with the rows of all ranks: every rank has computed some rows, and has zeros in the others."""
    together = [torch.cat([*column, torch.zeros(0)]) for column in columns]
    ranks.add_up(together)
    lengths = [len(row) for row in columns[0]]
    return [list(total.split(lengths)) for total in together]
