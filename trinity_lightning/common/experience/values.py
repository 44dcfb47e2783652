"""Values that few experiences have, as they are encoded: tensors, arrays and tuples in the info, custom fields.

msgpack has no type for the first: such a value is a list that starts with a marker, an empty extension type:
[TUPLE, *items], [TENSOR, dtype, shape], [ARRAY, dtype, shape], [SCALAR, dtype]. The numbers are in the tensors
"values.<dtype>" and "arrays.uint8", in order of appearance. `reading` has the way back. It also says where a
value cannot be encoded, and why.
"""

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import msgpack
import numpy as np
import torch
from torch import Tensor

from trinity_lightning.common.experience.codec import (
    COLUMN_TYPES,
    DTYPE_NAMES,
    PACKING_ERRORS,
    TORCH_DTYPES,
    Columns,
    Writer,
    known_dtype,
)
from trinity_lightning.common.experience.experience import CustomField, Experience, ExperienceError

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
