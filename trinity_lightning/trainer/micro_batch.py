"""The tensors of one micro-batch: made on the CPU, and moved to a GPU in one copy."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from trinity_lightning.common.experience import Experience, gather_response_attrs, gather_rows
from trinity_lightning.common.optimizer_batch import OptimizerBatch, is_expert, trained_mask
from trinity_lightning.trainer.attention import CpuSharedPrefix, Segments
from trinity_lightning.trainer.layout import Part

if TYPE_CHECKING:
    from trinity_lightning.trainer.flex_attention import FlexSharedPrefix

# Columns that say more than a number of each token: the weights of a stream, by its name, and further ids [response, k]
# whose log-probabilities are wanted.
STREAM, CANDIDATES = "stream:", "candidates"
# Masks of four dimensions are the caller's own to transformers: it makes none from positions that start again.
NO_MASK = torch.ones(1, 1, 1, 1, dtype=torch.bool)


@dataclass
class MicroBatch:
    """A part of an optimizer batch. B rows, R tokens of the longest response, n computed tokens in all.

    Attributes:
        inputs: keyword arguments of the model's forward pass: token ids, and where prefixes are shared what that needs.
        states: where in the flattened tokens the state is that predicts each computed token, int64 [n].
        targets: the computed tokens' ids, int64 [n]; with candidates those follow, [n, 1 + k].
        rows: the computed tokens' rows, int64 [n].
        action_mask: which response tokens are trained, bool [B, R].
        computed: of which response tokens log-probabilities are computed, bool [B, R], n of them true: the trained
            ones, and those of a stream.
        columns: float32 [B, R] by name, 0 where padded: advantages, old_logprobs, the weights of streams, ... and,
            where an engine made any of the rows, its logprobs; a teacher's top k [B, R, k].
        sampled: which rows have log-probabilities of an engine (expert data have none), bool [B].
        temperature: sampling temperature of each row, float32 [B].
        expert: which rows are an expert's, bool [B].
        pairs: the two rows of each preference pair, chosen and rejected, int64 [pairs, 2]; None: rows are no pairs.
    """

    inputs: dict[str, Any]
    states: Tensor
    targets: Tensor
    rows: Tensor
    action_mask: Tensor
    computed: Tensor
    columns: dict[str, Tensor]
    sampled: Tensor
    temperature: Tensor
    expert: Tensor
    pairs: Tensor | None = None

    def spread(self, values: Tensor) -> Tensor:
        """Values of the computed tokens [n, ...] as [B, R, ...]; 0 elsewhere."""
        spread = values.new_zeros(*self.computed.shape, *values.shape[1:])
        mask = self.computed if values.dim() == 1 else self.computed[..., None]
        return spread.masked_scatter(mask, values)


@dataclass
class _Tokens:
    """Where the rows' tokens are: the first `prefix` [B] from `prefix_start` on, the others from `own_start` on."""

    inputs: dict[str, Any]
    prefix: Tensor
    prefix_start: Tensor
    own_start: Tensor

    def place(self, rows: Tensor, index: Tensor) -> Tensor:
        """Places in the flattened tokens of the index-th tokens of these rows, int64 [n]."""
        prefix = self.prefix[rows]
        return torch.where(index < prefix, self.prefix_start[rows] + index, self.own_start[rows] + index - prefix)


def collate(batch: OptimizerBatch, part: Part, device: torch.device) -> MicroBatch:
    """The micro-batch of these rows, each with a trained token, on the device.

    Raises:
        ExperienceError: some experiences have advantages and some have none; the message names one.
    """
    experiences = [batch.experiences[row] for row in part.rows]
    width = max(e.response_length for e in experiences)
    columns = {name: _pad([values[row] for row in part.rows]) for name, values in batch.columns.items()}
    # Whether there is such a column is a matter of the whole batch: it must not depend on how that is cut.
    if any(e.advantages is not None for e in batch.experiences):
        columns["advantages"] = gather_response_attrs(experiences, "advantages", width).float()
    if any(e.logprobs is not None for e in batch.experiences):
        columns["logprobs"] = _pad([_logprobs(e) for e in experiences])
    tokens = _shared(experiences, part, device) if part.groups else _padded(experiences)
    action_mask = _pad([trained_mask(e) for e in experiences])
    weights = [column != 0 for name, column in columns.items() if name.startswith(STREAM)]
    computed = torch.stack([action_mask, *weights]).any(0) if weights else action_mask
    rows, offsets = computed.nonzero(as_tuple=True)
    index = torch.tensor([e.prompt_length for e in experiences])[rows] + offsets
    targets = tokens.inputs["input_ids"].flatten()[tokens.place(rows, index)]
    if CANDIDATES in columns:
        targets = torch.cat([targets[:, None], columns.pop(CANDIDATES)[computed]], -1)
    micro = MicroBatch(
        inputs=tokens.inputs,
        states=tokens.place(rows, index - 1),
        targets=targets,
        rows=rows,
        action_mask=action_mask,
        computed=computed,
        columns=columns,
        sampled=torch.tensor([e.logprobs is not None for e in experiences]),
        temperature=torch.tensor([float(e.info.get("temperature", 1.0)) for e in experiences]),
        expert=torch.tensor([is_expert(e) for e in experiences]),
        pairs=torch.tensor(part.rows).argsort().view(-1, 2) if batch.unit == 2 else None,
    )
    if device.type == "cpu":
        return micro
    from trinity_lightning.trainer.transfer import moved

    return moved(micro, device)


def _padded(experiences: Sequence[Experience]) -> _Tokens:
    tokens = _pad([e.tokens.long() for e in experiences])
    none = torch.zeros(len(tokens), dtype=torch.int64)
    return _Tokens({"input_ids": tokens}, none, none, torch.arange(len(tokens)) * tokens.shape[1])


def _shared(experiences: Sequence[Experience], part: Part, device: torch.device) -> _Tokens:
    """All prefixes, then what each row has behind its own."""
    prefixes: list[Tensor] = []
    own: list[Tensor] = []
    behind: list[tuple[int, int]] = []  # of each row: length of its prefix, and where that starts
    rows, start = iter(experiences), 0
    for group in part.groups:
        members = list(islice(rows, len(group.rows)))
        prefixes += [members[0].tokens[: group.prefix]] if group.prefix else []
        own += [e.tokens[group.prefix :] for e in members]
        behind += [(group.prefix, start)] * len(members)
        start += group.prefix
    shared = [group for group in part.groups if group.prefix]
    segments = Segments([g.prefix for g in shared], [len(g.rows) for g in shared], [len(tokens) for tokens in own])
    attention = _attention(segments, device)
    padding = torch.zeros(attention.padding, dtype=torch.int64)
    prefix, prefix_start = torch.tensor(behind).unbind(1)
    positions = [torch.arange(len(tokens)) for tokens in prefixes]
    positions += [torch.arange(skip, skip + len(tokens)) for (skip, _), tokens in zip(behind, own, strict=True)]
    inputs = {
        "input_ids": torch.cat([tokens.long() for tokens in (*prefixes, *own, padding)])[None],
        "position_ids": torch.cat([*positions, padding])[None],
        "attention_mask": NO_MASK,
        "shared_prefix": attention,
    }
    return _Tokens(inputs, prefix, prefix_start, torch.tensor(segments.own_starts()[:-1]))


def _attention(segments: Segments, device: torch.device) -> "CpuSharedPrefix | FlexSharedPrefix":
    if device.type != "cuda":
        return CpuSharedPrefix.of(segments)
    from trinity_lightning.trainer.flex_attention import FlexSharedPrefix

    return FlexSharedPrefix.of(segments, device)


def _logprobs(experience: Experience) -> Tensor:
    return torch.zeros(experience.response_length) if experience.logprobs is None else experience.logprobs.float()


def _pad(rows: Sequence[Tensor]) -> Tensor:
    if rows[0].dim() > 1:
        return pad_sequence(list(rows), batch_first=True)
    return gather_rows(list(rows), max(map(len, rows)))
