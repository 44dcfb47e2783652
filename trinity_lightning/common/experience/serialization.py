"""Experiences to bytes and back. Version 2 is columnar: one flat tensor a field and dtype, one list a plain field.

Nothing here is pickled, and a payload is checked before an experience is made of it: whatever is wrong with one is an
`ExperienceFormatError`. Payloads of version 1, Trinity-RFT's, are read by `legacy`.
"""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from types import NoneType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trinity_lightning.common.experience import columns as table
from trinity_lightning.common.experience import container, legacy
from trinity_lightning.common.experience.eid import EID
from trinity_lightning.common.experience.errors import ExperienceError, ExperienceFormatError
from trinity_lightning.common.experience.experience import RESPONSE_FIELDS, TOKEN_FIELDS, Buffer, Experience
from trinity_lightning.common.experience.state import ID_STATE, STATE, restore, split
from trinity_lightning.common.experience.streams import Stream, StreamWriter
from trinity_lightning.common.experience.validation import INTEGER_DTYPES
from trinity_lightning.common.experience.values import find_unencodable, host_tensor, known_dtype

_TENSOR_FIELDS = (*TOKEN_FIELDS, *RESPONSE_FIELDS)
_kind_of = attrgetter("dtype", "ndim", "is_cpu", "layout")
_PLAIN_HOST = (True, torch.strided)


def serialize_many(experiences: Sequence[Experience]) -> bytes:
    """Experiences as one payload of version 2.

    Raises:
        ExperienceError: a field holds what cannot be encoded, or has a type or length that it must not have (fields may
            be assigned unchecked); the message names experience and field.
    """
    fields = split(experiences)
    columns = table.plain_columns(experiences, fields)
    streams = StreamWriter()
    chunks, lengths = {}, {}
    for name in _TENSOR_FIELDS:
        chunks[name], found = _write_rows(experiences, name, fields[name], streams)
        if chunks[name]:
            lengths[name] = found
    problem = table.find_misfit(columns, lengths)
    if problem:
        raise ExperienceError(f"experience {experiences[problem[0]].eid.uid}: {problem[1]}")
    columns = table.drop_empty(columns)
    try:
        return container.pack({"count": len(experiences), "columns": columns, "rows": chunks}, streams)
    except ExperienceError as error:
        raise _explain(experiences, columns, error) from error


def _explain(experiences: Sequence[Experience], columns: table.Columns, error: ExperienceError) -> ExperienceError:
    """The error with the experience and the field that caused it."""
    for name, column in columns.items():
        for experience, value in zip(experiences, column, strict=True):
            if (problem := find_unencodable(value)) is not None:
                return ExperienceError(f"experience {experience.eid.uid}: {name}{problem}")
    return error


def _write_rows(
    experiences: Sequence[Experience], name: str, tensors: list[Any], streams: StreamWriter
) -> tuple[list[Any], np.ndarray]:
    """Add a tensor field to the streams, one a dtype.

    Returns:
        A chunk [dtype, indices of the experiences or None for all, lengths] a dtype; and all lengths, -1 for none.
    """
    lengths = np.full(len(tensors), -1)
    chunks = []
    for kind, indices in _group_by_kind(tensors):
        rows = tensors if indices is None else [tensors[index] for index in indices]
        if kind is None or kind[1] != 1:
            uid = experiences[indices[0] if indices else 0].eid.uid
            raise ExperienceError(f"experience {uid}: {name}: expected a 1-D tensor, got {rows[0]!r:.80}.")
        row_lengths = list(map(Tensor.numel, rows))
        lengths[slice(None) if indices is None else indices] = np.fromiter(row_lengths, np.int64, len(rows))
        if kind[2:] != _PLAIN_HOST:
            rows = list(map(host_tensor, rows))
        chunks.append([streams.add(name, kind[0], rows, row_lengths), indices, row_lengths])
    return chunks, lengths


def _group_by_kind(tensors: Sequence[Any]) -> list[tuple[tuple[Any, ...] | None, list[int] | None]]:
    """What is not None, by kind; a kind None is of no tensors. Indices None are all: the usual case, in bulk."""
    types = set(map(type, tensors))
    if types <= {NoneType}:
        return []
    if all(issubclass(kind, Tensor) for kind in types):
        kinds = set(map(_kind_of, tensors))
        if len(kinds) == 1:
            return [(kinds.pop(), None)]
    groups: dict[tuple[Any, ...] | None, list[int]] = {}
    for index, tensor in enumerate(tensors):
        if tensor is not None:
            groups.setdefault(_kind_of(tensor) if isinstance(tensor, Tensor) else None, []).append(index)
    return list(groups.items())


def deserialize_many(data: Buffer, allow_pickle: bool = False) -> list[Experience]:
    """The experiences of a payload; their tensors are copies, so the payload may be freed.

    Args:
        data: a payload of version 2, or of version 1 (Trinity-RFT's).
        allow_pickle: also read plain pickles. Unpickling runs whatever code the bytes name: only for what you wrote
            yourself.

    Raises:
        ExperienceFormatError: anything else, or a damaged payload.
    """
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise ExperienceFormatError(f"expected bytes, got {type(data).__name__}.")
    view = memoryview(data)
    view = view.cast("B") if view.c_contiguous else memoryview(view.tobytes())
    if view[: len(container.MAGIC)] != container.MAGIC:
        if allow_pickle:
            return legacy.read_pickle(view)
        raise ExperienceFormatError(
            f"payload of {len(view)} bytes does not start with {container.MAGIC!r}. "
            "If it is a plain pickle that you wrote yourself, pass allow_pickle=True."
        )
    if len(view) > len(container.MAGIC) and view[len(container.MAGIC)] == legacy.VERSION:
        return legacy.read_version_1(view)
    with _collector_paused():
        return container.unpack(view, _read)


@contextmanager
def _collector_paused() -> Iterator[None]:
    """No garbage collection meanwhile: thousands of new containers, none of them garbage, set off a full one."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def deserialize(data: Buffer, allow_pickle: bool = False) -> Experience:
    """The only experience of a payload; arguments and errors as `deserialize_many`.

    Raises:
        ExperienceError: the payload holds another number of experiences.
    """
    experiences = deserialize_many(data, allow_pickle)
    if len(experiences) != 1:
        raise ExperienceError(f"expected a payload of one experience, got {len(experiences)}; use deserialize_many.")
    return experiences[0]


def _read(value: Any, streams: dict[str, Stream]) -> list[Experience]:
    """Experiences from what `serialize_many` packed; forged content raises an error of some kind."""
    count, columns, chunks = value["count"], value["columns"], value["rows"]
    if len(value) != 3 or not table.REQUIRED.keys() <= columns.keys() <= table.REQUIRED.keys() | table.OPTIONAL.keys():
        raise ExperienceFormatError(f"metadata: unexpected fields {[*value, *columns]!r:.300}.")
    for name, column in columns.items():
        if type(column) is not list or len(column) != count:
            raise ExperienceFormatError(f"metadata: {name} is not a list of {count!r:.40} values.")
    problem = table.find_wrong_type(columns)
    if problem:
        raise ExperienceFormatError(f"experience {problem[0]}: {problem[1]}")
    for inputs in columns.get("multi_modal_inputs", ()):
        if inputs and not all(isinstance(k, str) and isinstance(v, Tensor) for k, v in inputs.items()):
            raise ExperienceFormatError("metadata: multi_modal_inputs: expected tensors by name.")
    if "custom_fields" in columns:
        columns["custom_fields"] = table.read_custom_fields(columns["custom_fields"])
    columns = table.restore_empty(columns, count)
    fields, lengths = _read_rows(chunks, count, streams)
    problem = table.find_misfit(columns, lengths)
    if problem:
        raise ExperienceFormatError(f"experience {problem[0]}: {problem[1]}")
    eids = list(map(EID, *(columns.pop(f"eid.{name}") for name in ID_STATE)))
    state = {"eid": eids, **columns, **fields}
    return list(map(restore, zip(*map(state.__getitem__, STATE), strict=True)))


def _read_rows(
    chunks: dict[str, list[Any]], count: int, streams: dict[str, Stream]
) -> tuple[dict[str, Sequence[Tensor | None]], dict[str, np.ndarray]]:
    """The tensor fields, and the lengths of those that some experience has, -1 where one has none."""
    if set(chunks) != set(_TENSOR_FIELDS):
        raise ExperienceFormatError(f"metadata: unexpected tensor fields {[*chunks]!r:.300}.")
    fields: dict[str, Sequence[Tensor | None]] = {}
    lengths: dict[str, np.ndarray] = {}
    for name in _TENSOR_FIELDS:
        for dtype_name, _, _ in chunks[name]:
            if name in TOKEN_FIELDS and known_dtype(dtype_name) not in INTEGER_DTYPES:
                raise ExperienceFormatError(f"metadata: {name} of dtype {dtype_name}, which is no integer.")
        if chunks[name]:
            fields[name], lengths[name] = _read_field(name, chunks[name], count, streams)
        else:
            fields[name] = [None] * count
    return fields, lengths


def _read_field(
    name: str, chunks: list[Any], count: int, streams: dict[str, Stream]
) -> tuple[Sequence[Tensor | None], np.ndarray]:
    """One tensor field and its lengths from its chunks."""
    if any(type(row_lengths) is not list for _, _, row_lengths in chunks):  # bytes would be a list here, a number there
        raise ExperienceFormatError(f"metadata: the row lengths of {name} are no list.")
    if len(chunks) == 1 and chunks[0][1] is None and len(chunks[0][2]) == count:  # the usual case, in bulk
        dtype_name, _, row_lengths = chunks[0]
        return streams[f"{name}.{dtype_name}"].take_rows(row_lengths), np.array(row_lengths, dtype=np.int64)
    field: list[Tensor | None] = [None] * count
    lengths = np.full(count, -1)
    for dtype_name, indices, row_lengths in chunks:
        indices = range(count) if indices is None else indices
        where = np.array(indices, dtype=np.int64)
        if len(where) != len(row_lengths) or np.any(np.diff(where, prepend=-1) <= 0):
            raise ExperienceFormatError(f"metadata: {name} has {len(row_lengths)} rows for {len(where)} experiences.")
        if (lengths[where] >= 0).any():
            raise ExperienceFormatError(f"metadata: {name} has two rows for one experience.")
        lengths[where] = row_lengths
        for index, row in zip(indices, streams[f"{name}.{dtype_name}"].take_rows(row_lengths), strict=True):
            field[index] = row
    return field, lengths
