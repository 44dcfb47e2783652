"""Experiences to payloads and back: one flat tensor a field and dtype, one list a plain field, checked in bulk."""

import gc
from collections.abc import Sequence
from dataclasses import fields
from itertools import repeat
from operator import attrgetter, eq
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

import numpy as np
import torch
from torch import Tensor

from trinity_lightning.common.experience.codec import (
    DTYPE_NAMES,
    MAGIC,
    Reader,
    Writer,
    find_unencodable,
    host_tensor,
    known_dtype,
    unpack,
)
from trinity_lightning.common.experience.experience import (
    EID,
    INTEGER_DTYPES,
    RESPONSE_FIELDS,
    TOKEN_FIELDS,
    Buffer,
    CustomField,
    Experience,
    ExperienceError,
    ExperienceFormatError,
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


def find_wrong_type(columns: Columns) -> tuple[int, str] | None:
    """The first value whose type its column must not have, as (row, message)."""
    for name, column in columns.items():
        kinds = COLUMN_TYPES[name]
        for row, value in enumerate(column if not set(map(type, column)) <= set(kinds) else ()):
            if not isinstance(value, kinds):
                return row, f"{name}: expected {' or '.join(k.__name__ for k in kinds)}, got {type(value).__name__}."
    return None


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


# -- Writing and reading -----------------------------------------------------------------------------------------------

_TENSOR_FIELDS = (*TOKEN_FIELDS, *RESPONSE_FIELDS)
_kind_of = attrgetter("dtype", "ndim", "is_cpu", "layout")


def serialize_many(experiences: Sequence[Experience]) -> bytes:
    """See `Experience.serialize_many`."""
    columns, writer = _plain_columns(experiences), Writer()
    chunks, lengths = {}, {}
    for name in _TENSOR_FIELDS:
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
        for name, column in columns.items():
            for experience, value in zip(experiences, column, strict=True):
                if where := find_unencodable(value):
                    raise ExperienceError(f"experience {experience.eid.uid}: {name}{where}") from None
        raise


def _plain_columns(experiences: Sequence[Experience]) -> Columns:
    """The plain fields; ExperienceError if one has a type that it must not have."""
    columns = {name: list(map(attrgetter(name), experiences)) for name in COLUMN_TYPES}
    for name, column in columns.items():
        if not set(map(type, column)) <= set(COLUMN_TYPES[name]):  # assigned since, perhaps by numpy arithmetic
            plain = [each.item() if isinstance(each, np.generic) else each for each in column]
            columns[name] = list(map(reward_value, column)) if name == "reward" else plain
            if problem := find_wrong_type({name: columns[name]}):
                raise ExperienceError(f"experience {experiences[problem[0]].eid.uid}: {problem[1]}")
    if any(columns["custom_fields"]):
        columns["custom_fields"] = [custom_field_rows(each) for each in columns["custom_fields"]]
    return columns


def custom_field_rows(custom_fields: Sequence[CustomField]) -> list[list[str]]:
    """Custom fields as rows [source, destination, dtype name]."""
    for custom in custom_fields:
        if custom.data_type not in DTYPE_NAMES:
            raise ExperienceError(
                f"custom field {custom.destination_field!r}: {custom.data_type} cannot be serialized."
            )
    return [[c.source_field, c.destination_field, DTYPE_NAMES[c.data_type]] for c in custom_fields]


def read_custom_fields(rows: list[list[str]]) -> list[CustomField]:
    """The reverse of `custom_field_rows`."""
    return [CustomField(source, destination, known_dtype(dtype)) for source, destination, dtype in rows]


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


def deserialize_many(data: Buffer, allow_pickle: bool = False) -> list[Experience]:
    """See `Experience.deserialize_many`."""
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise ExperienceFormatError(f"expected bytes, got {type(data).__name__}.")
    view = memoryview(data)
    view = view.cast("B") if view.c_contiguous else memoryview(view.tobytes())
    if view[: len(MAGIC)] == MAGIC and view[len(MAGIC) :][:1] != b"\1":
        collects = gc.isenabled()
        gc.disable()  # thousands of new containers, none of them garbage, would set off a full collection
        try:
            return unpack(view, _read)
        finally:
            if collects:
                gc.enable()
    from trinity_lightning.common.experience import legacy  # seldom needed, and it knows of this module

    if view[: len(MAGIC)] == MAGIC:
        return legacy.read_version_1(view)
    if allow_pickle:
        return legacy.read_pickle(view)
    raise ExperienceFormatError(
        f"payload of {len(view)} bytes does not start with {MAGIC!r}. "
        "If it is a plain pickle that you wrote yourself, pass allow_pickle=True."
    )


def _read(reader: Reader) -> list[Experience]:
    """Experiences from what `serialize_many` packed; forged content raises an error of some kind."""
    count, columns, chunks = reader.value["count"], reader.value["columns"], reader.value["rows"]
    if len(reader.value) != 3 or not REQUIRED_COLUMNS.keys() <= columns.keys() <= COLUMN_TYPES.keys():
        raise ExperienceFormatError(f"metadata: unexpected fields {[*reader.value, *columns]!r:.300}.")
    for name, column in columns.items():
        if type(column) is not list or len(column) != count:
            raise ExperienceFormatError(f"metadata: {name} is not a list of {count!r:.40} values.")
    if problem := find_wrong_type(columns):
        raise ExperienceFormatError(f"experience {problem[0]}: {problem[1]}")
    for inputs in columns.get("multi_modal_inputs", ()):
        if inputs and not all(isinstance(k, str) and isinstance(v, Tensor) for k, v in inputs.items()):
            raise ExperienceFormatError("metadata: multi_modal_inputs: expected tensors by name.")
    if set(chunks) != set(_TENSOR_FIELDS):
        raise ExperienceFormatError(f"metadata: unexpected tensor fields {[*chunks]!r:.300}.")
    for name in COLUMN_TYPES.keys() - columns.keys():
        kinds = COLUMN_TYPES[name]
        columns[name] = [None if NoneType in kinds else kinds[0]() for _ in range(count)]
    columns["custom_fields"] = list(map(read_custom_fields, columns["custom_fields"]))
    lengths: dict[str, np.ndarray] = {}
    for name in _TENSOR_FIELDS:
        columns[name] = [None] * count
        if chunks[name]:
            columns[name], lengths[name] = _take_field(name, chunks[name], count, reader)
    if problem := find_misfit(columns, lengths):
        raise ExperienceFormatError(f"experience {problem[0]}: {problem[1]}")
    columns["eid"] = list(map(EID, *(columns[f"eid.{each.name}"] for each in fields(EID))))
    return list(map(_restore, zip(*map(columns.__getitem__, _STATE), strict=True)))


def _take_field(name: str, chunks: list[Any], count: int, reader: Reader) -> tuple[list[Any], np.ndarray]:
    """One tensor field and its lengths from its chunks."""
    field: list[Tensor | None] = [None] * count
    lengths = np.full(count, -1)
    for dtype, indices, row_lengths in chunks:
        if name in TOKEN_FIELDS and known_dtype(dtype) not in INTEGER_DTYPES:
            raise ExperienceFormatError(f"metadata: {name} of dtype {dtype}, which is no integer.")
        if type(row_lengths) is not list:  # bytes would be a list here, a number there
            raise ExperienceFormatError(f"metadata: the row lengths of {name} are no list.")
        if indices is None and len(chunks) == 1 and len(row_lengths) == count:  # the usual case, in bulk
            return reader.take_rows(f"{name}.{dtype}", row_lengths), np.array(row_lengths, dtype=np.int64)
        rows = np.arange(count) if indices is None else np.array(indices, dtype=np.int64)
        if len(rows) != len(row_lengths) or np.any(np.diff(rows, prepend=-1) <= 0):
            raise ExperienceFormatError(f"metadata: {name} has {len(row_lengths)} rows for {len(rows)} experiences.")
        if (lengths[rows] >= 0).any():
            raise ExperienceFormatError(f"metadata: {name} has two rows for one experience.")
        lengths[rows] = row_lengths
        for row, tensor in zip(rows.tolist(), reader.take_rows(f"{name}.{dtype}", row_lengths), strict=True):
            field[row] = tensor
    return field, lengths


_STATE = (*(each.name for each in fields(Experience)), "experience_type")


def _restore(state: Sequence[Any]) -> Experience:
    """The experience with these fields, in the order of `_STATE`, which must have been checked.

    Written out: several times as fast as a loop over names.
    """
    e = object.__new__(Experience)
    # fmt: off
    (
        e.eid, e.tokens, e.prompt_length, e.logprobs, e.reward, e.token_level_reward, e.advantages, e.returns,
        e.truncate_status, e.info, e.metrics, e.response_text, e.prompt_text, e.action_mask, e.messages, e.tools,
        e.chosen, e.rejected, e.chosen_messages, e.rejected_messages, e.multi_modal_inputs, e.teacher_logprobs,
        e.custom_fields, e.experience_type,
    ) = state
    # fmt: on
    return e
