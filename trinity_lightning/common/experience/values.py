"""What few experiences have: tensors, arrays and tuples in the info, masks as lists, tensors by name, custom fields.

msgpack has no type for the first: such a value is a list that starts with a marker, an empty extension type:
[TUPLE, *items], [TENSOR, dtype, shape], [ARRAY, dtype, shape], [SCALAR, dtype]. The numbers are in the tensors
"values.<dtype>" and "arrays.uint8", in order of appearance. `reading` has the way back.
"""

import numbers
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import msgpack
import numpy as np
import torch
from torch import Tensor

from trinity_lightning.common.experience.codec import DTYPE_NAMES, TORCH_DTYPES, known_dtype
from trinity_lightning.common.experience.experience import EID, CustomField, ExperienceError, as_array
from trinity_lightning.common.experience.unencodable import reason_of

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


def eid_of(fields: Any) -> EID:
    """An identity from a dict of its fields; an ExperienceError if it is none."""
    if not isinstance(fields, dict):
        raise ExperienceError(f"eid: expected EID, a dict of its fields, or None, got {type(fields).__name__}.")
    try:
        return EID(**fields)
    except TypeError as error:
        raise ExperienceError(
            f"eid: expected the fields batch, task, run, step, suffix, got {list(fields)}."
        ) from error


def mask_of(value: Any, name: str) -> Tensor:
    """A mask [len] from anything list-like of booleans, zeros and ones; an ExperienceError if it is none."""
    array = as_array(value, name, "biuf", "a 1-D tensor or list of booleans")
    mask = array.astype(bool)
    if not np.array_equal(mask, array):
        raise ExperienceError(f"{name}: expected booleans, zeros or ones, got other numbers.")
    return torch.from_numpy(mask)


def real_number(value: Any, name: str) -> float:
    """A real number, of numpy or torch perhaps, as float; an ExperienceError if it is none."""
    if isinstance(value, (Tensor, np.ndarray)) and value.ndim == 0:
        value = value.item()
    if isinstance(value, (numbers.Real, np.bool_)):
        try:
            return float(value)
        except OverflowError as error:
            raise ExperienceError(f"{name}: expected a number within the range of a float.") from error
    what = f"shape {tuple(value.shape)}" if isinstance(value, (Tensor, np.ndarray)) else type(value).__name__
    raise ExperienceError(f"{name}: expected a real number or None, got {what}.")


def custom_fields(value: Any, name: str) -> list[CustomField]:
    """A list of custom fields; an ExperienceError if it is none."""
    if not isinstance(value, (list, tuple)) or not all(isinstance(each, CustomField) for each in value):
        raise ExperienceError(f"{name}: expected a list of CustomField.")
    return list(value)


def tensors_by_name(value: Any, name: str) -> dict[str, Tensor]:
    """What is given for a field of tensors by name, its values made tensors if they are none yet.

    Raises:
        ExperienceError: no dict, a key that is no text, or a value that cannot be made a tensor.
    """
    if not isinstance(value, dict):
        raise ExperienceError(f"{name}: expected dict or None, got {type(value).__name__}.")
    result = {}
    for key, item in value.items():
        if not isinstance(key, str):
            raise ExperienceError(f"{name}: expected keys of type str, got {key!r}.")
        try:
            result[key] = item if isinstance(item, Tensor) else torch.tensor(item)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ExperienceError(f"{name}[{key!r}]: cannot be made a tensor: {error}") from error
    return result


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
