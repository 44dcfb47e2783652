"""What each of several ranks computes of an optimizer batch."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trinity_lightning.common.alone import Alone
from trinity_lightning.common.experience import Experience
from trinity_lightning.common.optimizer_batch import OptimizerBatch
from trinity_lightning.config.training import Layout
from trinity_lightning.trainer.layout import PrefixGroup, cut, group_of, pieces_of, prefix_groups, units_of
from trinity_lightning.trainer.micro_batch import collate
from trinity_lightning.trainer.passes import Passes
from trinity_lightning.trainer.placement import Whole


def deal(batch: OptimizerBatch, rows: Sequence[int], size: int, max_tokens: int, layout: Layout) -> list[list[int]]:
    """Rows dealt to `size` ranks for each to compute about as many tokens; none, for some, if there are few.

    Rows that share a prefix stay together, unless there is too much of them for one rank; a pair always does.
    Arguments as of `cut`.
    """
    lengths = [len(e.tokens) for e in batch.experiences]
    groups = [group_of(unit, 0, lengths) for unit in units_of(rows, lengths, batch.unit)]
    if layout is Layout.shared_prefix:
        whole, groups = prefix_groups(batch.experiences, rows, max_tokens), []
        share = -(-sum(group.tokens for group in whole) // size)
        for group in whole:
            most = max(share, group.prefix - (group.prefix - group.tokens) // size)
            groups += [group] if group.tokens <= share else pieces_of(group, lengths, most, batch.unit)
    dealt: list[list[PrefixGroup]] = [[] for _ in range(size)]
    for group in sorted(groups, key=lambda group: -group.tokens):
        min(dealt, key=lambda rank: sum(each.tokens for each in rank)).append(group)
    return [sorted(row for group in rank for row in group.rows) for rank in dealt]


def idle(passes: Passes, model: Any, placement: Whole) -> Tensor:
    """The sum of log-probabilities of nothing in particular, for other ranks' passes."""
    batch = OptimizerBatch.of([Experience(tokens=[0, 0], prompt_length=1)], explore_step=0)
    (part,) = cut(batch, [0], 2, Layout.padded)
    return passes.through(model, collate(batch, part, model.device), placement)[0].sum()


def added_up(columns: Sequence[Sequence[Tensor]], ranks: Alone) -> list[list[Tensor]]:
    """The sum of each column of all ranks, of which each has computed some rows."""
    together = [torch.cat([*column, torch.zeros(0)]) for column in columns]
    ranks.add_up(together)
    lengths = [len(row) for row in columns[0]]
    return [list(each.split(lengths)) for each in together]
