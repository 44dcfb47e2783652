"""The tensors of one micro-batch, in either layout: made on the CPU, and moved to a GPU in one copy."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, islice
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
ALIGNMENT = 16  # bytes: of where a tensor begins in a buffer of several


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

    def to(self, device: torch.device) -> "MicroBatch":
        """The same with all of its tensors on the device."""
        own = {each.name: getattr(self, each.name) for each in fields(self)}
        fixed = {name: each for name, each in own.items() if isinstance(each, Tensor)}
        inputs = {name: each for name, each in self.inputs.items() if isinstance(each, Tensor)}
        moved = iter(moved_together([*fixed.values(), *inputs.values(), *self.columns.values()], device))
        fixed, inputs, columns = (dict(zip(each, moved, strict=False)) for each in (fixed, inputs, self.columns))
        return replace(self, **fixed, inputs=self.inputs | inputs, columns=columns)


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
    rows, offsets = action_mask.nonzero(as_tuple=True)
    index = torch.tensor([e.prompt_length for e in experiences])[rows] + offsets
    targets = tokens.inputs["input_ids"].flatten()[tokens.place(rows, index)]
    micro = MicroBatch(
        inputs=tokens.inputs,
        states=tokens.place(rows, index - 1),
        targets=targets,
        rows=rows,
        action_mask=action_mask,
        columns=columns,
        sampled=torch.tensor([e.logprobs is not None for e in experiences]),
        temperature=torch.tensor([float(e.info.get("temperature", 1.0)) for e in experiences]),
        expert=torch.tensor([is_expert(e) for e in experiences]),
    )
    return micro if device.type == "cpu" else micro.to(device)


def moved_together(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Tensors of the CPU, of any shapes and dtypes, on the device: one copy, out of pinned memory if it is a GPU.

    Nobody waits for it: what the device computes next comes after it.
    """
    ends = list(accumulate(-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors))
    packed = torch.empty(ends[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")

    def places(buffer: Tensor) -> list[Tensor]:
        return [
            buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for start, tensor in zip([0, *ends], tensors, strict=False)
        ]

    for place, tensor in zip(places(packed), tensors, strict=True):
        place.copy_(tensor)
    return places(packed.to(device, non_blocking=True))


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
