"""Payloads back to values and experiences: what is cut off, damaged or forged is refused. And what few payloads need.

msgpack has no type for tensors, arrays and tuples in the info. Such a value is a list that starts with a marker, an
empty extension type: [TUPLE, *items], [TENSOR, dtype, shape], [ARRAY, dtype, shape], [SCALAR, dtype]. The numbers are
in the tensors "values.<dtype>" and "arrays.uint8", in order of appearance.
"""

import gc
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from enum import Enum
from functools import partial
from itertools import accumulate
from operator import attrgetter
from types import NoneType
from typing import Any

import msgpack
import numpy as np
import torch
import xxhash
from torch import Tensor

from trinity_lightning.common.experience.codec import (
    BODY,
    COLUMN_TYPES,
    DTYPE_NAMES,
    HEADER,
    MAGIC,
    NUMBER,
    PACKING_ERRORS,
    REQUIRED_COLUMNS,
    TENSOR_FIELDS,
    TORCH_DTYPES,
    VERSION,
    Columns,
    Writer,
    entry_of,
    find_misfit,
    known_dtype,
)
from trinity_lightning.common.experience.experience import (
    EID,
    INTEGER_DTYPES,
    TOKEN_FIELDS,
    Buffer,
    CustomField,
    Experience,
    ExperienceError,
    ExperienceFormatError,
)

# -- values that few experiences have, as they are encoded: tensors, arrays and tuples in the info, custom fields ------

NUMPY_DTYPES: dict[str, np.dtype] = {
    name: np.dtype(name)
    for name in TORCH_DTYPES
    if name != "bfloat16" and not name.startswith("float8")  # numpy itself has neither
}


class Marker(Enum):
    TUPLE = 1
    TENSOR = 2
    ARRAY = 3
    SCALAR = 4


_EXTENSIONS = {marker: msgpack.ExtType(marker.value, b"") for marker in Marker}
# str() of a string enum is its name, str.__str__ the string.
_PLAIN = {dict: dict, list: list, str: str.__str__, int: int.__int__, float: float.__float__, bytes: bytes}


def encoded(value: Any, add: Callable[[str, torch.dtype, Sequence[Tensor], Sequence[int]], str]) -> Any:
    """What msgpack shall pack in place of the value; `add`: as `codec.Writer.add`.

    Raises:
        ExperienceError: the value cannot be encoded.
    """
    if isinstance(value, Tensor):
        name = add("values", value.dtype, [host_tensor(value).reshape(-1)], [value.numel()])
        return [_EXTENSIONS[Marker.TENSOR], name, list(value.shape)]
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.name in NUMPY_DTYPES:
        array = np.array(value, dtype=NUMPY_DTYPES[value.dtype.name], order="C")
        add("arrays", torch.uint8, [torch.from_numpy(array.reshape(-1).view(np.uint8))], [array.nbytes])
        if isinstance(value, np.generic):
            return [_EXTENSIONS[Marker.SCALAR], value.dtype.name]
        return [_EXTENSIONS[Marker.ARRAY], value.dtype.name, list(value.shape)]
    if isinstance(value, tuple):
        return [_EXTENSIONS[Marker.TUPLE], *value]
    for plain, convert in _PLAIN.items():  # subclasses, as the plain values that they equal
        if isinstance(value, plain) and type(value) is not plain:
            return convert(value)
    raise ExperienceError(reason_of(value))


def host_tensor(tensor: Tensor) -> Tensor:
    """The tensor in the host's memory; an ExperienceError if its numbers cannot be read."""
    if tensor.layout != torch.strided or tensor.is_meta:
        raise ExperienceError(reason_of(tensor))
    return tensor if tensor.is_cpu else tensor.cpu()


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


# -- what cannot be encoded, where it is and why -----------------------------------------------------------------------


def refuse_unencodable(experiences: Sequence[Experience], columns: Columns) -> None:
    """Refuse the first value of their plain fields that cannot be encoded with an ExperienceError."""
    for name, column in columns.items():
        for experience, value in zip(experiences, column, strict=True):
            if where := find_unencodable(value):
                raise ExperienceError(f"experience {experience.eid.uid}: {name}{where}") from None


def find_wrong_type(columns: Columns) -> tuple[int, str] | None:
    """The first value whose type its column must not have, as (row, message)."""
    for name, column in columns.items():
        kinds = COLUMN_TYPES[name]
        for row, value in enumerate(column if not set(map(type, column)) <= set(kinds) else ()):
            if not isinstance(value, kinds):
                return row, f"{name}: expected {' or '.join(k.__name__ for k in kinds)}, got {type(value).__name__}."
    return None


def reason_of(value: Any) -> str:
    """Why a value cannot be encoded."""
    if type(value) is int:
        return "an integer beyond 64 bits cannot be serialized; use a str."
    if isinstance(value, Tensor):
        return f"a tensor of dtype {value.dtype}, layout {value.layout} on {value.device} cannot be serialized."
    if isinstance(value, np.ndarray):
        return f"an array of dtype {value.dtype} cannot be serialized; use numbers, or a list."
    if isinstance(value, (dict, list, tuple)):
        return f"a {type(value).__name__} that is nested too deeply, or contains itself, cannot be serialized."
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    return f"a value of type {kind} cannot be serialized; use plain values, tensors or arrays."


def find_unencodable(value: Any, depth: int = 16) -> str | None:
    """Where and why a value cannot be encoded, as "['key'][index]: reason", to this depth; None if it can.

    It packs the parts again and again.
    """
    if _can_encode(value):
        return None
    children = value.items() if isinstance(value, dict) else ()
    for key, child in enumerate(value) if isinstance(value, (list, tuple)) else children:
        if depth and not _can_encode(child):
            return f"[{key!r}]{find_unencodable(child, depth - 1)}"
    for key, _ in children:
        if not _can_encode(key):
            return f": the key {key!r}: {reason_of(key)}"
    return f": {reason_of(value)}"


def _can_encode(value: Any) -> bool:
    try:
        Writer().encode(value)
    except PACKING_ERRORS:
        return False
    return True


# -- payloads, back to values and tensors ------------------------------------------------------------------------------


class Reader:
    """A payload's value, and its rows, which are taken in order; all that is given out is a copy.

    Raises:
        ExperienceFormatError: the payload is cut off, damaged or of another version. What a parser raises for a forged
            one passes: see `unpack`.
    """

    def __init__(self, view: memoryview) -> None:
        if len(view) < BODY:
            raise ExperienceFormatError(f"payload of {len(view)} bytes is shorter than its header of {BODY}.")
        magic, version, size, metadata_size = HEADER.unpack_from(view)
        if magic != MAGIC or version != VERSION:
            raise ExperienceFormatError(f"expected magic {MAGIC!r} and version {VERSION}, got {magic!r} and {version}.")
        check_size(view, BODY + size + metadata_size)
        digest = xxhash.xxh3_64(view[: HEADER.size])
        digest.update(view[BODY:])
        if digest.intdigest() != NUMBER.unpack_from(view, HEADER.size)[0]:
            raise ExperienceFormatError("checksum does not match: the payload is damaged.")
        self._rest = _split(view[BODY : BODY + size])
        self._open_markers = 0
        self.value = self._decode(view[BODY + size :])

    def take(self, name: str, count: int) -> Tensor:
        """The next `count` items of a tensor, [count]."""
        return _copy(self._next(name, count), known_dtype(name.rpartition(".")[2]))

    def take_rows(self, name: str, lengths: Sequence[int]) -> list[Tensor]:
        """The next rows of a tensor, each with storage of its own: filtering a step frees what it drops."""
        if min(lengths, default=1) < 0:
            raise ExperienceFormatError(f"tensor {name!r} has a row of negative length.")
        data, dtype = self._next(name, sum(lengths)), known_dtype(name.rpartition(".")[2])
        ends = list(accumulate(length * dtype.itemsize for length in lengths))
        rows = map(data.__getitem__, map(slice, [0, *ends], ends))
        if 0 in lengths:
            return [_copy(row, dtype) for row in rows]
        # `_copy` without a Python call a row: there are tens of thousands of them.
        return list(map(partial(torch.frombuffer, dtype=dtype), map(bytearray, rows)))

    def check_end(self) -> None:
        """Raise unless everything was taken."""
        for name in filter(self._rest.get, self._rest):
            raise ExperienceFormatError(f"tensor {name!r} is longer than its rows together.")

    def _next(self, name: str, count: int) -> memoryview:
        """The bytes of the next items, still those of the payload."""
        if name not in self._rest:
            raise ExperienceFormatError(f"metadata: refers to the tensor {name!r}, which is missing.")
        rest, dtype = self._rest[name], known_dtype(name.rpartition(".")[2])
        size = count * dtype.itemsize
        if not 0 <= size <= len(rest):
            raise ExperienceFormatError(f"tensor {name!r} is shorter than its rows together.")
        data, self._rest[name] = rest[:size], rest[size:]
        if dtype == torch.bool and data and np.frombuffer(data, dtype=np.uint8).max() > 1:
            raise ExperienceFormatError(f"tensor {name!r} holds bytes that are no booleans.")
        return data

    def _decode(self, data: memoryview) -> Any:
        # skip() walks the whole value without making objects, so that a list claiming more items than there are bytes
        # is refused before memory is set aside for it.
        walker = msgpack.Unpacker(max_buffer_size=max(len(data), 1))
        walker.feed(data)
        walker.skip()
        if walker.tell() != len(data):
            raise ExperienceFormatError(f"{len(data) - walker.tell()} bytes after the metadata.")
        hooks = {"ext_hook": self._decode_marker, "list_hook": self._decode_list}
        value = msgpack.unpackb(data, strict_map_key=False, unicode_errors="surrogatepass", **hooks)
        if self._open_markers:
            raise ExperienceFormatError("metadata: a marker without its list.")
        return value

    def _decode_marker(self, code: int, data: bytes) -> Marker:
        if data:
            raise ExperienceFormatError(f"metadata: extension type {code} with content.")
        self._open_markers += 1
        return Marker(code)

    def _decode_list(self, items: list[Any]) -> Any:
        if not items or type(items[0]) is not Marker:
            return items
        self._open_markers -= 1
        marker, *rest = items
        if marker is Marker.TUPLE:
            return tuple(rest)
        name, shape = (rest[0], []) if marker is Marker.SCALAR else rest
        if len(shape) > 64 or not all(type(size) is int and size >= 0 for size in shape):
            raise ExperienceFormatError(f"metadata: {shape!r:.100} is no shape.")
        if marker is Marker.TENSOR:
            return self.take(f"values.{name}", math.prod(shape)).reshape(shape)
        dtype = NUMPY_DTYPES[name]
        data = self.take("arrays.uint8", math.prod(shape) * dtype.itemsize).numpy()
        if dtype == np.bool_ and data.size and data.max() > 1:
            raise ExperienceFormatError("metadata: a boolean array with other bytes than 0 and 1.")
        array = data.view(dtype).reshape(shape)
        return array[()] if marker is Marker.SCALAR else array


def _split(section: memoryview) -> dict[str, memoryview]:
    """The bytes of the tensors of a safetensors section, whose header must be exactly what `Writer` writes."""
    size = NUMBER.unpack_from(section)[0] if len(section) >= NUMBER.size else len(section)
    data = section[NUMBER.size + size :]
    if NUMBER.size + size > len(section):
        raise ExperienceFormatError(f"tensor header of {size} bytes in a section of {len(section)}.")
    parts, start = {}, 0
    for name, entry in json.loads(str(section[NUMBER.size : NUMBER.size + size], "utf-8")).items():
        end = entry["data_offsets"][1]
        if end < start or entry != entry_of(name, start, end):
            raise ExperienceFormatError(f"tensor {name!r} has the header entry {entry!r:.200}.")
        parts[name], start = data[start:end], end
    if start != len(data):
        raise ExperienceFormatError(f"tensors of {start} bytes in a section that has {len(data)}.")
    return parts


def _copy(data: memoryview, dtype: torch.dtype) -> Tensor:
    """A tensor of these bytes, in memory of its own: a bytearray, which is allocated and filled in a fraction of the
    time that torch takes for a small tensor."""
    return torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)


def check_size(view: memoryview, expected: int) -> None:
    """Refuse a payload of another size than its header says."""
    if len(view) != expected:
        raise ExperienceFormatError(f"payload of {len(view)} bytes, expected {expected}: cut off, or followed by more.")


def unpack(view: memoryview, read: Callable[[Reader], Any] = attrgetter("value")) -> Any:
    """What `read` makes of a payload: by default its value.

    Raises:
        ExperienceFormatError: the payload is damaged, cut off, forged, or not of this version.
    """
    with faults_of("payload cannot be read"):
        reader = Reader(view)
        result = read(reader)
        reader.check_end()
        return result


@contextmanager
def faults_of(what: str) -> Iterator[None]:
    """Whatever a forged payload provokes in a parser is the payload's fault: an ExperienceFormatError."""
    try:
        yield
    except ExperienceFormatError:
        raise
    except Exception as error:
        raise ExperienceFormatError(f"{what}: {type(error).__name__}: {error}") from error


# -- back to experiences -----------------------------------------------------------------------------------------------


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
