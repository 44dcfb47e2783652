"""Experiences to bytes and back. Version 2 is columnar: one flat tensor a field and dtype, one list a plain field.

Nothing here is pickled, and a payload is checked before an experience is made of it: whatever is wrong with one is an
`ExperienceFormatError`. Payloads of version 1, Trinity-RFT's, are read by `legacy`.
"""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trinity_lightning.common.experience import columns as table
from trinity_lightning.common.experience import container, legacy
from trinity_lightning.common.experience.eid import EID
from trinity_lightning.common.experience.errors import ExperienceError, ExperienceFormatError
from trinity_lightning.common.experience.experience import RESPONSE_FIELDS, TOKEN_FIELDS, Buffer, Experience
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
    columns = table.plain_columns(experiences)
    streams = StreamWriter()
    chunks, lengths = {}, {}
    for name in _TENSOR_FIELDS:
        chunks[name], lengths[name] = _write_rows(experiences, name, streams)
    problem = table.find_wrong_type(columns) or table.find_misfit(columns, lengths)
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


def _write_rows(experiences: Sequence[Experience], name: str, streams: StreamWriter) -> tuple[list[Any], np.ndarray]:
    """Add a tensor field to the streams, one a dtype.

    Returns:
        A chunk [dtype, indices of the experiences or None for all, lengths] a dtype; and all lengths, -1 for none.
    """
    tensors = list(map(attrgetter(name), experiences))
    indices = [index for index, tensor in enumerate(tensors) if tensor is not None]
    rows = [tensors[index] for index in indices]
    kinds = [_kind_of(row) if isinstance(row, Tensor) else None for row in rows]
    lengths = np.full(len(tensors), -1)
    chunks = []
    different = dict.fromkeys(kinds)
    for kind in different:
        alike, pieces = indices, rows
        if len(different) > 1:
            alike = [index for index, other in zip(indices, kinds, strict=True) if other == kind]
            pieces = [tensors[index] for index in alike]
        if kind is None or kind[1] != 1:
            uid = experiences[alike[0]].eid.uid
            raise ExperienceError(f"experience {uid}: {name}: expected a 1-D tensor, got {pieces[0]!r:.80}.")
        lengths[alike] = list(map(Tensor.numel, pieces))
        if kind[2:] != _PLAIN_HOST:
            pieces = list(map(host_tensor, pieces))
        dtype_name = streams.add(name, kind[0], pieces)
        chunks.append([dtype_name, None if len(alike) == len(tensors) else alike, lengths[alike].tolist()])
    return chunks, lengths


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
    columns = table.restore_empty(columns, count)
    fields, lengths = _read_rows(chunks, count, streams)
    problem = table.find_misfit(columns, lengths)
    if problem:
        raise ExperienceFormatError(f"experience {problem[0]}: {problem[1]}")
    columns["custom_fields"] = table.read_custom_fields(columns["custom_fields"])
    for inputs in columns["multi_modal_inputs"]:
        if inputs and not all(isinstance(k, str) and isinstance(v, Tensor) for k, v in inputs.items()):
            raise ExperienceFormatError("metadata: multi_modal_inputs: expected tensors by name.")
    eids = [
        EID(*row)
        for row in zip(*(columns.pop(f"eid.{n}") for n in ("batch", "task", "run", "step", "suffix")), strict=True)
    ]
    state = {"eid": eids, **columns, **fields}
    return [Experience._restore(zip(state, row, strict=True)) for row in zip(*state.values(), strict=True)]


def _read_rows(
    chunks: dict[str, list[Any]], count: int, streams: dict[str, Stream]
) -> tuple[dict[str, list[Tensor | None]], dict[str, np.ndarray]]:
    """The tensor fields, and the length of each tensor, -1 for none."""
    if set(chunks) != set(_TENSOR_FIELDS):
        raise ExperienceFormatError(f"metadata: unexpected tensor fields {[*chunks]!r:.300}.")
    fields: dict[str, list[Tensor | None]] = {name: [None] * count for name in _TENSOR_FIELDS}
    lengths = {name: np.full(count, -1) for name in _TENSOR_FIELDS}
    for name in _TENSOR_FIELDS:
        for dtype_name, indices, row_lengths in chunks[name]:
            if name in TOKEN_FIELDS and known_dtype(dtype_name) not in INTEGER_DTYPES:
                raise ExperienceFormatError(f"metadata: {name} of dtype {dtype_name}, which is no integer.")
            indices = range(count) if indices is None else indices
            where = np.array(indices, dtype=np.int64)
            if len(where) != len(row_lengths) or np.any(np.diff(where, prepend=-1) <= 0):
                raise ExperienceFormatError(
                    f"metadata: {name} has {len(row_lengths)} rows for {len(where)} experiences."
                )
            if (lengths[name][where] >= 0).any():
                raise ExperienceFormatError(f"metadata: {name} has two rows for one experience.")
            lengths[name][where] = row_lengths
            for index, row in zip(indices, streams[f"{name}.{dtype_name}"].take_rows(row_lengths), strict=True):
                fields[name][index] = row
    return fields, lengths
