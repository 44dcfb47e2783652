"""Turns experiences into the content of a payload, and back.

The payload's value has three entries. `count` is the number of experiences. `columns` has one list for each plain
field, and for each part of the identity ("eid.batch"); a field that no experience sets is left out. `rows` has for each
tensor field one chunk [dtype, indices, lengths] for each dtype: the experiences that have it (None: all), and the
lengths of their rows, whose numbers lie in the flat tensor "<field>.<dtype>".

Experiences with multi-modal inputs make a payload of version 3, in which equal tensors are once. It has two more
entries. `tensors` is a list of the tensors. `inputs` has each dict of inputs, as the indices of its tensors by name,
and the column "multi_modal_inputs" the index of each experience's dict. Tensors that are kept elsewhere are in
`tensors` by their hash.

Everything is checked in bulk, in both directions: fields may have been assigned since the constructor checked them.
"""

from collections.abc import Mapping, Sequence
from itertools import repeat
from operator import attrgetter, eq
from types import NoneType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from trinity_lightning.common.experience.fields import (
    EID,
    INTEGER_DTYPES,
    RESPONSE_FIELDS,
    TOKEN_FIELDS,
    CustomField,
    ExperienceError,
    ExperienceFormatError,
    reward_value,
)
from trinity_lightning.common.experience.inputs import InputTable, Key, misplaced
from trinity_lightning.common.experience.payload import (
    BODY,
    DTYPE_NAMES,
    EXTENDED,
    HEADER,
    VERSION,
    Reader,
    Writer,
    find_unencodable,
    format_errors,
    host_tensor,
    known_dtype,
)

if TYPE_CHECKING:
    from trinity_lightning.common.experience.experience import Experience

Columns = dict[str, list[Any]]

# Columns of the payload and the types that their values may have.
_EID_PARTS = ("batch", "task", "run", "step", "suffix")
_REQUIRED: dict[str, tuple[type, ...]] = {
    **{f"eid.{part}": (int, str) for part in _EID_PARTS},
    "experience_type": (str,),
    "prompt_length": (int,),
}
_OPTIONAL: dict[str, tuple[type, ...]] = {
    "reward": (float, NoneType),
    "truncate_status": (str, NoneType),
    "info": (dict,),
    "metrics": (dict,),
    "response_text": (str, NoneType),
    "prompt_text": (str, NoneType),
    "messages": (list, NoneType),
    "tools": (list, NoneType),
    "chosen_messages": (list, NoneType),
    "rejected_messages": (list, NoneType),
    "multi_modal_inputs": (dict, NoneType),
    "custom_fields": (list,),
}
COLUMN_TYPES = _REQUIRED | _OPTIONAL
TENSOR_FIELDS = (*TOKEN_FIELDS, *RESPONSE_FIELDS)


# -- writing -----------------------------------------------------------------------------------------------------------

_kind_of = attrgetter("dtype", "ndim", "is_cpu", "layout")
_Kind = tuple[torch.dtype, int, bool, torch.layout]


def write_payload(experiences: Sequence["Experience"], apart: InputTable | None = None) -> bytes:
    """A payload of experiences; see `Experience.serialize_many`.

    Args:
        experiences: any number.
        apart: takes the tensors of multi-modal inputs in place of the payload, which then names them by their hash.
    """
    columns, writer = _plain_columns(experiences), Writer()
    chunks, lengths = {}, {}
    for name in TENSOR_FIELDS:
        chunks[name], row_lengths = _add_field(experiences, name, writer)
        if chunks[name]:
            lengths[name] = row_lengths
    _refuse(_find_misfit(columns, lengths), experiences)
    value, version = {"count": len(experiences), "columns": columns, "rows": chunks}, VERSION
    if any(columns["multi_modal_inputs"]):
        masks = [experience.action_mask for experience in experiences]
        _refuse(_find_misplaced(columns, [experience.tokens for experience in experiences], masks), experiences)
        value, version = value | _separate_inputs(experiences, columns, apart), EXTENDED
    for name, kinds in _OPTIONAL.items():  # left out if all are None, or all empty where None is not allowed
        column = columns[name]
        if column.count(None) == len(column) if NoneType in kinds else not any(column):
            del columns[name]
    try:
        return writer.pack(value, version)
    except ExperienceError:
        _refuse(_find_unencodable(columns), experiences)
        raise


def _refuse(problem: tuple[int, str] | None, experiences: Sequence["Experience"]) -> None:
    if problem is not None:
        raise ExperienceError(f"experience {experiences[problem[0]].eid.uid}: {problem[1]}") from None


def _plain_columns(experiences: Sequence["Experience"]) -> Columns:
    """The plain fields; ExperienceError if one has a type that it must not have."""
    columns = {name: list(map(attrgetter(name), experiences)) for name in COLUMN_TYPES}
    for name, column in columns.items():
        if not set(map(type, column)) <= set(COLUMN_TYPES[name]):  # assigned since, perhaps by numpy arithmetic
            plain = [value.item() if isinstance(value, np.generic) else value for value in column]
            columns[name] = list(map(reward_value, column)) if name == "reward" else plain
            _refuse(_find_wrong_type({name: columns[name]}), experiences)
    if any(columns["custom_fields"]):
        columns["custom_fields"] = list(map(custom_field_rows, columns["custom_fields"]))
    return columns


def _add_field(experiences: Sequence["Experience"], name: str, writer: Writer) -> tuple[list[Any], np.ndarray]:
    """Write a tensor field.

    Returns:
        Its chunks [dtype, indices of the experiences or None for all, lengths], and the length of every experience's
        row, int64 [B], -1 without one.
    """
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


def _group_by_kind(tensors: Sequence[Any]) -> list[tuple[_Kind | None, list[int] | None]]:
    """Indices of a field's values by kind (dtype, dimensions, place), without those that are None.

    The kind None stands for values that are no tensors. The indices None stand for all: the usual case, in bulk.
    """
    types = set(map(type, tensors))
    if types and all(issubclass(kind, Tensor) for kind in types):
        kinds = set(map(_kind_of, tensors))
        if len(kinds) == 1:
            return [(kinds.pop(), None)]
    groups: dict[_Kind | None, list[int]] = {}
    for index, tensor in enumerate(tensors if types != {NoneType} else ()):
        if tensor is not None:
            groups.setdefault(_kind_of(tensor) if isinstance(tensor, Tensor) else None, []).append(index)
    return list(groups.items())


def _separate_inputs(
    experiences: Sequence["Experience"], columns: Columns, apart: InputTable | None
) -> dict[str, list[Any]]:
    """The entries `inputs` and `tensors`; the column "multi_modal_inputs" then has indices."""
    table = apart or InputTable()
    keys: list[Key | None] = []
    for row, inputs in enumerate(columns["multi_modal_inputs"]):
        try:
            keys.append(None if inputs is None else table.key_of(inputs))
        except ExperienceError as error:
            _refuse((row, f"multi_modal_inputs{error}"), experiences)
    dicts = {key: index for index, key in enumerate(dict.fromkeys(key for key in keys if key is not None))}
    hashes = {hashed: index for index, hashed in enumerate(dict.fromkeys(h for key in dicts for _, h in key))}
    columns["multi_modal_inputs"] = [None if key is None else dicts[key] for key in keys]
    return {
        "inputs": [{name: hashes[hashed] for name, hashed in key} for key in dicts],
        "tensors": list(hashes) if apart is not None else [table.tensors[hashed] for hashed in hashes],
    }


def custom_field_rows(custom_fields: Sequence[CustomField]) -> list[list[str]]:
    """Custom fields as rows [source, destination, dtype name]."""
    for custom in custom_fields:
        if custom.data_type not in DTYPE_NAMES:
            raise ExperienceError(
                f"custom field {custom.destination_field!r}: {custom.data_type} cannot be serialized."
            )
    return [[c.source_field, c.destination_field, DTYPE_NAMES[c.data_type]] for c in custom_fields]


# -- reading -----------------------------------------------------------------------------------------------------------


def read_fields(reader: Reader, apart: Mapping[str, Tensor]) -> Columns:
    """The values of every field of the experiences in a payload, `experience_type` included, by the field's name.

    Forged content raises an error of some kind: see `payload.unpack`.

    Args:
        reader: reads the payload.
        apart: tensors that the payload names by their hash.
    """
    count, columns, chunks = reader.value["count"], reader.value["columns"], reader.value["rows"]
    entries = 3 if reader.version == VERSION else 5
    if len(reader.value) != entries or not _REQUIRED.keys() <= columns.keys() <= COLUMN_TYPES.keys():
        raise ExperienceFormatError(f"metadata: unexpected fields {[*reader.value, *columns]!r:.300}.")
    for name, column in columns.items():
        if type(column) is not list or len(column) != count:
            raise ExperienceFormatError(f"metadata: {name} is not a list of {count!r:.40} values.")
    if reader.version == EXTENDED:
        columns["multi_modal_inputs"] = _take_inputs(reader.value, columns["multi_modal_inputs"], apart)
    _check(_find_wrong_type(columns))
    if reader.version == VERSION and any(columns.get("multi_modal_inputs", ())):
        columns["multi_modal_inputs"] = _take_own_inputs(columns["multi_modal_inputs"])
    if set(chunks) != set(TENSOR_FIELDS):
        raise ExperienceFormatError(f"metadata: unexpected tensor fields {[*chunks]!r:.300}.")
    for name in COLUMN_TYPES.keys() - columns.keys():
        kinds = COLUMN_TYPES[name]
        columns[name] = [None if NoneType in kinds else kinds[0]() for _ in range(count)]
    columns["custom_fields"] = list(map(read_custom_fields, columns["custom_fields"]))
    lengths: dict[str, np.ndarray] = {}
    for name in TENSOR_FIELDS:
        columns[name] = [None] * count
        if chunks[name]:
            columns[name], lengths[name] = _take_field(name, chunks[name], count, reader)
    _check(_find_misfit(columns, lengths))
    _check(_find_misplaced(columns, columns["tokens"], columns["action_mask"]))
    columns["eid"] = list(map(EID, *(columns.pop(f"eid.{part}") for part in _EID_PARTS)))
    return columns


def _check(problem: tuple[int, str] | None) -> None:
    if problem is not None:
        raise ExperienceFormatError(f"experience {problem[0]}: {problem[1]}")


def _take_field(name: str, chunks: list[Any], count: int, reader: Reader) -> tuple[list[Any], np.ndarray]:
    """A tensor field from its chunks: the rows, and their lengths, int64 [count], -1 where there is none."""
    field: list[Tensor | None] = [None] * count
    lengths = np.full(count, -1)
    for dtype, indices, row_lengths in chunks:
        if name in TOKEN_FIELDS and known_dtype(dtype) not in INTEGER_DTYPES:
            raise ExperienceFormatError(f"metadata: {name} of dtype {dtype}, which is no integer.")
        if type(row_lengths) is not list:  # bytes would pass as a list in one place, and as numbers in another
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


def _take_inputs(value: dict[str, Any], column: list[Any], apart: Mapping[str, Tensor]) -> list[dict[str, Any] | None]:
    """The column "multi_modal_inputs" of a payload of version 3, in which equal dicts, and equal tensors, are one."""
    dicts, tensors = value["inputs"], value["tensors"]
    if type(dicts) is not list or type(tensors) is not list:
        raise ExperienceFormatError("metadata: multi_modal_inputs: expected lists of dicts and of tensors.")
    for index, tensor in enumerate(tensors):
        if type(tensor) is str:
            if tensor not in apart:
                raise ExperienceFormatError(f"a tensor of its multi_modal_inputs, {tensor:.40}, is not in the payload.")
            tensors[index] = apart[tensor]
        elif not isinstance(tensor, Tensor):
            raise ExperienceFormatError("metadata: multi_modal_inputs: expected tensors.")
    _check_indices([index for indices in dicts for index in indices.values()], tensors, "tensor")
    _check_indices([index for index in column if index is not None], dicts, "dict")
    if not all(isinstance(name, str) for indices in dicts for name in indices):
        raise ExperienceFormatError("metadata: multi_modal_inputs: expected tensors by name.")
    dicts = [{name: tensors[index] for name, index in indices.items()} for indices in dicts]
    return [None if index is None else dicts[index] for index in column]


def _check_indices(indices: list[Any], values: list[Any], kind: str) -> None:
    """Refuse indices unless they are those of all values."""
    if any(type(index) is not int for index in indices) or set(indices) != set(range(len(values))):
        raise ExperienceFormatError(
            f"metadata: multi_modal_inputs: expected each {kind} of {len(values)} by its index, got {indices!r:.100}."
        )


def _take_own_inputs(column: list[Any]) -> list[dict[str, Tensor] | None]:
    """The column "multi_modal_inputs" of a payload of version 2: equal dicts become one, and equal tensors too."""
    table = InputTable()
    try:
        return [table.shared(inputs) if inputs else inputs for inputs in column]
    except ExperienceError as error:
        raise ExperienceFormatError(f"metadata: multi_modal_inputs{error}") from error


def names_apart(view: memoryview) -> list[str]:
    """Hashes of the tensors that a payload names without having them.

    Raises:
        ExperienceFormatError: it is damaged.
    """
    if len(view) < BODY or HEADER.unpack_from(view)[1] != EXTENDED:
        return []
    with format_errors():
        return [tensor for tensor in Reader(view).value["tensors"] if type(tensor) is str]


def read_custom_fields(rows: list[list[str]]) -> list[CustomField]:
    """The custom fields of rows that `custom_field_rows` made."""
    return [CustomField(source, destination, known_dtype(dtype)) for source, destination, dtype in rows]


# -- checks in bulk: each returns the first problem as (row, message), or None -----------------------------------------

_LARGE = 2**62


def _find_wrong_type(columns: Columns) -> tuple[int, str] | None:
    """The first value whose type its column must not have."""
    for name, column in columns.items():
        kinds = COLUMN_TYPES[name]
        for row, value in enumerate(column if not set(map(type, column)) <= set(kinds) else ()):
            if not isinstance(value, kinds):
                return row, f"{name}: expected {' or '.join(k.__name__ for k in kinds)}, got {type(value).__name__}."
    return None


def _find_unencodable(columns: Columns) -> tuple[int, str] | None:
    """The first value that cannot be encoded."""
    for name, column in columns.items():
        for row, value in enumerate(column):
            if where := find_unencodable(value):
                return row, f"{name}{where}"
    return None


def _find_misfit(columns: Columns, lengths: dict[str, np.ndarray]) -> tuple[int, str] | None:
    """The first experience whose fields do not fit together.

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
    for message, holds in rules.items():
        if not holds.all():
            row = int(np.flatnonzero(~holds.astype(bool))[0])
            of_row = {name: int(length[row]) for name, length in lengths.items() if length[row] >= 0}
            return row, f"{message}, got lengths {of_row} and prompt_length {prompt[row]}."
    return None


def _find_misplaced(columns: Columns, tokens: list[Any], masks: list[Any]) -> tuple[int, str] | None:
    """The first experience whose pictures have wrong places; all must have tokens."""
    for row, inputs in enumerate(columns["multi_modal_inputs"]):
        if inputs and (problem := misplaced(inputs, len(tokens[row]), columns["prompt_length"][row], masks[row])):
            return row, problem
    return None


def _equal(column: list[str | None], value: str) -> np.ndarray:
    """True for each item that equals the value, bool [B]."""
    count = column.count(value)
    if count in (0, len(column)):
        return np.full(len(column), count > 0)
    return np.fromiter(map(eq, column, repeat(value)), bool, len(column))


def _integers(column: list[int]) -> np.ndarray:
    """The column as int64, or as Python's integers if differences could leave the range of int64."""
    small = not column or (min(column) >= -_LARGE and max(column) <= _LARGE)
    return np.array(column, dtype=np.int64 if small else object)
