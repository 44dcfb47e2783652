"""Experiences to payloads: one flat tensor a field and dtype, one list a plain field, checked in bulk."""

from collections.abc import Sequence
from dataclasses import fields
from itertools import repeat
from operator import attrgetter, eq
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

import numpy as np
import torch
from torch import Tensor

from trinity_lightning.common.experience.codec import Writer
from trinity_lightning.common.experience.experience import (
    EID,
    RESPONSE_FIELDS,
    TOKEN_FIELDS,
    Experience,
    ExperienceError,
    reward_value,
)

# -- The rules of `Experience` for many at once, which were not made by its constructor or assigned to since -----------

Columns = dict[str, list[Any]]
REQUIRED_COLUMNS: dict[str, tuple[type, ...]] = {
    **{f"eid.{each.name}": (int, str) for each in fields(EID)},
    "experience_type": (str,),
    "prompt_length": (int,),
}


def _classes(declared: Any) -> tuple[type, ...]:
    """What a field's declaration allows: (list, NoneType) for `list[str] | None`."""
    kinds = get_args(declared) if isinstance(declared, UnionType) else (declared,)
    return tuple(get_origin(kind) or kind for kind in kinds)


_DECLARED = {each.name: _classes(each.type) for each in fields(Experience)}
COLUMN_TYPES = REQUIRED_COLUMNS | {
    name: kinds for name, kinds in _DECLARED.items() if not {Tensor, EID} & set(kinds) and name not in REQUIRED_COLUMNS
}
_LARGE = 2**62


def find_misfit(columns: Columns, lengths: dict[str, np.ndarray]) -> tuple[int, str] | None:
    """The first experience whose parts do not fit together, as (row, message).

    Args:
        columns: the plain fields.
        lengths: length of every tensor field that some experience has, int64 [B], -1 for those that lack it.
    """
    none = np.full(len(columns["prompt_length"]), -1)
    tokens, chosen, rejected, logprobs = (lengths.get(n, none) for n in ("tokens", "chosen", "rejected", "logprobs"))
    single, multi, pair = (_equal(columns["experience_type"], kind) for kind in ("single_turn", "multi_turn", "dpo"))
    truncated = single & _equal(columns["truncate_status"], "prompt_truncated")
    prompt = _integers(columns["prompt_length"])
    responses = np.where(truncated & (logprobs >= 0), logprobs, tokens - prompt)
    rules = {
        "experience_type: expected single_turn, multi_turn or dpo": single | multi | pair,
        "tokens: expected a tensor": tokens >= 0,
        "chosen, rejected: expected in a dpo experience": ~pair | ((chosen >= 0) & (rejected >= 0)),
        "prompt_length: expected within the tokens": (prompt >= single) & (prompt <= tokens - (single & ~truncated)),
    }
    for name in filter(lengths.__contains__, RESPONSE_FIELDS):
        rules[f"{name}: expected one value a response token"] = (lengths[name] < 0) | (lengths[name] == responses)
    for message, kept in rules.items():
        if not kept.all():
            row = int(np.flatnonzero(~kept.astype(bool))[0])
            found = {name: int(length[row]) for name, length in lengths.items() if length[row] >= 0}
            return row, f"{message}, got lengths {found} and prompt_length {prompt[row]}."
    return None


def _equal(column: list[str | None], value: str) -> np.ndarray:
    count = column.count(value)
    if count in (0, len(column)):
        return np.full(len(column), count > 0)
    return np.fromiter(map(eq, column, repeat(value)), bool, len(column))


def _integers(column: list[int]) -> np.ndarray:
    """The column as int64, or as Python's integers if differences could leave the range of those."""
    small = not column or (min(column) >= -_LARGE and max(column) <= _LARGE)
    return np.array(column, dtype=np.int64 if small else object)


# -- Writing -----------------------------------------------------------------------------------------------------------

TENSOR_FIELDS = (*TOKEN_FIELDS, *RESPONSE_FIELDS)
_kind_of = attrgetter("dtype", "ndim", "is_cpu", "layout")


def serialize_many(experiences: Sequence[Experience]) -> bytes:
    """See `Experience.serialize_many`."""
    columns, writer = _plain_columns(experiences), Writer()
    chunks, lengths = {}, {}
    for name in TENSOR_FIELDS:
        chunks[name], found = _add_field(experiences, name, writer)
        if chunks[name]:
            lengths[name] = found
    if problem := find_misfit(columns, lengths):
        raise ExperienceError(f"experience {experiences[problem[0]].eid.uid}: {problem[1]}")
    for name in COLUMN_TYPES.keys() - REQUIRED_COLUMNS.keys():  # all None or, if that is no choice, empty: left out
        column = columns[name]
        if column.count(None) == len(column) if NoneType in COLUMN_TYPES[name] else not any(column):
            del columns[name]
    try:
        return writer.pack({"count": len(experiences), "columns": columns, "rows": chunks})
    except ExperienceError:
        from trinity_lightning.common.experience.unencodable import refuse_unencodable

        refuse_unencodable(experiences, columns)
        raise


def _plain_columns(experiences: Sequence[Experience]) -> Columns:
    """The plain fields; ExperienceError if one has a type that it must not have."""
    columns = {name: list(map(attrgetter(name), experiences)) for name in COLUMN_TYPES}
    for name, column in columns.items():
        if not set(map(type, column)) <= set(COLUMN_TYPES[name]):  # assigned since, perhaps by numpy arithmetic
            from trinity_lightning.common.experience.unencodable import refuse_wrong_type

            plain = [each.item() if isinstance(each, np.generic) else each for each in column]
            columns[name] = list(map(reward_value, column)) if name == "reward" else plain
            refuse_wrong_type(experiences, {name: columns[name]})
    if any(columns["custom_fields"]):
        from trinity_lightning.common.experience.values import custom_field_rows

        columns["custom_fields"] = [custom_field_rows(each) for each in columns["custom_fields"]]
    return columns


def _add_field(experiences: Sequence[Experience], name: str, writer: Writer) -> tuple[list[Any], np.ndarray]:
    """Write a field: [dtype, indices of the experiences or None for all, lengths] a dtype; all lengths, -1 for none."""
    tensors = list(map(attrgetter(name), experiences))
    lengths, chunks = np.full(len(tensors), -1), []
    for kind, indices in _group_by_kind(tensors):
        rows = tensors if indices is None else [tensors[index] for index in indices]
        if kind is None or kind[1] != 1:
            uid = experiences[indices[0] if indices else 0].eid.uid
            raise ExperienceError(f"experience {uid}: {name}: expected a 1-D tensor, got {rows[0]!r:.80}.")
        row_lengths = list(map(Tensor.numel, rows))
        lengths[slice(None) if indices is None else indices] = np.fromiter(row_lengths, np.int64, len(rows))
        if kind[2:] != (True, torch.strided):
            from trinity_lightning.common.experience.values import host_tensor

            rows = list(map(host_tensor, rows))
        chunks.append([writer.add(name, kind[0], rows, row_lengths), indices, row_lengths])
    return chunks, lengths


def _group_by_kind(tensors: Sequence[Any]) -> list[tuple[tuple[Any, ...] | None, list[int] | None]]:
    """What is not None, by kind; a kind None is of no tensors. Indices None are all: the usual case, in bulk."""
    types = set(map(type, tensors))
    if types and all(issubclass(kind, Tensor) for kind in types):
        kinds = set(map(_kind_of, tensors))
        if len(kinds) == 1:
            return [(kinds.pop(), None)]
    groups: dict[tuple[Any, ...] | None, list[int]] = {}
    for index, tensor in enumerate(tensors if types != {NoneType} else ()):
        if tensor is not None:
            groups.setdefault(_kind_of(tensor) if isinstance(tensor, Tensor) else None, []).append(index)
    return list(groups.items())
