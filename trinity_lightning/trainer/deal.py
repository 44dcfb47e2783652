"""Which rows each of several ranks computes."""

from collections.abc import Sequence

from trinity_lightning.common.optimizer_batch import OptimizerBatch
from trinity_lightning.config.training import Layout
from trinity_lightning.trainer.layout import PrefixGroup, group_of, pieces_of, prefix_groups, units_of


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
