"""The tensors of one micro-batch, in either layout. Indices are made on the CPU and moved with the rest."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from trinity_lightning.common.experience import Experience, gather_response_attrs
from trinity_lightning.common.expert import is_expert
from trinity_lightning.common.optimizer_batch import OptimizerBatch, trained_mask
from trinity_lightning.trainer.flex_prefix import FlexSharedPrefix
from trinity_lightning.trainer.layout import Part
from trinity_lightning.trainer.shared_prefix import CpuSharedPrefix, Segments

# Masks of four dimensions are the caller's own to transformers: it makes none from positions that start again.
NO_MASK = torch.ones(1, 1, 1, 1, dtype=torch.bool)


@dataclass
class MicroBatch:
    """A part of an optimizer batch. B rows, R tokens of the longest response, n trained tokens in all.

    Attributes:
        inputs: keyword arguments of the model's forward pass: token ids, and where prefixes are shared what that needs.
        states: where in the flattened tokens the state is that predicts each trained token, int64 [n].
        targets: the trained tokens' ids, int64 [n].
        rows: the trained tokens' rows, int64 [n].
        action_mask: which response tokens are trained, bool [B, R], n of them true.
        columns: float32 [B, R] by name, 0 where padded: advantages, old_logprobs, ... and, where an engine made any of
            the rows, its logprobs.
        sampled: which rows have log-probabilities of an engine (expert data have none), bool [B].
        temperature: sampling temperature of each row, float32 [B].
        expert: which rows are an expert's, bool [B].
    """

    inputs: dict[str, Any]
    states: Tensor
    targets: Tensor
    rows: Tensor
    action_mask: Tensor
    columns: dict[str, Tensor]
    sampled: Tensor
    temperature: Tensor
    expert: Tensor


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
    columns = {name: _pad([values[row] for row in part.rows]).to(device) for name, values in batch.columns.items()}
    # Whether there is such a column is a matter of the whole batch: it must not depend on how that is cut.
    if any(e.advantages is not None for e in batch.experiences):
        columns["advantages"] = gather_response_attrs(experiences, "advantages", width, device=device).float()
    if any(e.logprobs is not None for e in batch.experiences):
        columns["logprobs"] = _pad([_logprobs(e) for e in experiences]).to(device)
    tokens = _shared(experiences, part, device) if part.groups else _padded(experiences)
    action_mask = _pad([trained_mask(e) for e in experiences])
    rows, offsets = action_mask.nonzero(as_tuple=True)
    index = torch.tensor([e.prompt_length for e in experiences])[rows] + offsets
    targets = tokens.inputs["input_ids"].flatten()[tokens.place(rows, index)]
    return MicroBatch(
        inputs={name: each.to(device) if isinstance(each, Tensor) else each for name, each in tokens.inputs.items()},
        states=tokens.place(rows, index - 1).to(device),
        targets=targets.to(device),
        rows=rows.to(device),
        action_mask=action_mask.to(device),
        columns=columns,
        sampled=torch.tensor([e.logprobs is not None for e in experiences], device=device),
        temperature=torch.tensor([float(e.info.get("temperature", 1.0)) for e in experiences], device=device),
        expert=torch.tensor([is_expert(e) for e in experiences], device=device),
    )


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
    attention = FlexSharedPrefix.of(segments, device) if device.type == "cuda" else CpuSharedPrefix.of(segments)
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


def _logprobs(experience: Experience) -> Tensor:
    return torch.zeros(experience.response_length) if experience.logprobs is None else experience.logprobs.float()


def _pad(rows: Sequence[Tensor]) -> Tensor:
    return pad_sequence(list(rows), batch_first=True)
