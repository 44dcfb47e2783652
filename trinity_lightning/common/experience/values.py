"""Plain values, tensors and arrays as msgpack; the numbers of tensors and arrays go to streams beside it.

What msgpack has no type for is a list that starts with a marker, an empty extension type: [TUPLE, *items],
[TENSOR, dtype, shape], [ARRAY, dtype, shape], [SCALAR, dtype]. Tensors come from their streams in order of appearance.
"""

import math
from collections.abc import Iterable
from enum import Enum
from typing import Any

import msgpack
import numpy as np
import torch
from torch import Tensor

from trinity_lightning.common.experience.dtypes import NUMPY_DTYPES, TORCH_DTYPES
from trinity_lightning.common.experience.errors import ExperienceError, ExperienceFormatError
from trinity_lightning.common.experience.streams import Stream, StreamWriter

MAX_DIMENSIONS = 64
_PATH_DEPTH = 16  # how far an error message follows a nested value


class _Marker(Enum):
    TUPLE = 1
    TENSOR = 2
    ARRAY = 3
    SCALAR = 4


# msgpack raises ValueError for what is nested too deeply, OverflowError for integers beyond 64 bits.
_PACKING_ERRORS = (ExperienceError, TypeError, ValueError, OverflowError, RecursionError)
_EXTENSIONS = {marker: msgpack.ExtType(marker.value, b"") for marker in _Marker}


def host_tensor(tensor: Tensor) -> Tensor:
    """The tensor in host memory.

    Raises:
        ExperienceError: a sparse or meta tensor.
    """
    if tensor.layout != torch.strided or tensor.is_meta:
        raise ExperienceError(_reason(tensor))
    return tensor if tensor.is_cpu else tensor.cpu()


class Encoder:
    """Packs values; tensors and arrays inside are appended to `streams`."""

    def __init__(self, streams: StreamWriter) -> None:
        self._streams = streams

    def pack(self, value: Any) -> bytes:
        """The value as msgpack.

        Raises:
            ExperienceError: something inside cannot be encoded; the message says where, as `['key'][index]`.
        """
        try:
            return self._packb(value)
        except _PACKING_ERRORS as error:
            raise ExperienceError(find_unencodable(value) or str(error)) from error

    def _packb(self, value: Any) -> bytes:
        packed = msgpack.packb(value, default=self._encode, strict_types=True, unicode_errors="surrogatepass")
        return packed or b""

    def _encode(self, value: Any) -> Any:
        """What msgpack shall pack in place of a value it has no type for."""
        if isinstance(value, Tensor):
            name = self._streams.add("values", value.dtype, [host_tensor(value).reshape(-1)], [value.numel()])
            return [_EXTENSIONS[_Marker.TENSOR], name, list(value.shape)]
        if isinstance(value, (np.ndarray, np.generic)) and value.dtype.name in NUMPY_DTYPES:
            array = np.array(value, dtype=NUMPY_DTYPES[value.dtype.name], order="C")
            self._streams.add(
                "arrays", torch.uint8, [torch.from_numpy(array.reshape(-1).view(np.uint8))], [array.nbytes]
            )
            if isinstance(value, np.generic):
                return [_EXTENSIONS[_Marker.SCALAR], value.dtype.name]
            return [_EXTENSIONS[_Marker.ARRAY], value.dtype.name, list(value.shape)]
        if isinstance(value, tuple):
            return [_EXTENSIONS[_Marker.TUPLE], *value]
        for plain, convert in _PLAIN.items():  # subclasses, as the plain values that they equal
            if isinstance(value, plain) and type(value) is not plain:
                return convert(value)
        raise ExperienceError(_reason(value))


# str() of a string enum is its name, str.__str__ the string.
_PLAIN = {dict: dict, list: list, str: str.__str__, int: int.__int__, float: float.__float__, bytes: bytes}


def _reason(value: Any) -> str:
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


def find_unencodable(value: Any) -> str | None:
    """Where and why a value cannot be encoded, as "['key'][index]: reason"; None where it can.

    For messages only: it packs the parts again and again.
    """
    if _can_pack(value):
        return None
    path = ""
    for _ in range(_PATH_DEPTH):
        bad = next(((key, child) for key, child in _children(value) if not _can_pack(child)), None)
        if bad is None:
            break
        path, value = f"{path}[{bad[0]!r}]", bad[1]
    for key in value if isinstance(value, dict) else ():
        if not _can_pack(key):
            return f"{path}: the key {key!r}: {_reason(key)}"
    return f"{path}: {_reason(value)}"


def _children(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, dict):
        return value.items()
    return enumerate(value) if isinstance(value, (list, tuple)) else ()


def _can_pack(value: Any) -> bool:
    try:
        Encoder(StreamWriter())._packb(value)
    except _PACKING_ERRORS:
        return False
    return True


class Decoder:
    """Unpacks what `Encoder` packed; the numbers of tensors and arrays come from `streams`."""

    def __init__(self, streams: dict[str, Stream]) -> None:
        self._streams = streams
        self._open = 0

    def unpack(self, data: memoryview) -> Any:
        """The value; raises ExperienceFormatError, or an error of msgpack, where the data are not what was packed."""
        # skip() walks the whole value without making objects, so that a list claiming more items than there are bytes
        # is refused before memory is set aside for it.
        walker = msgpack.Unpacker(max_buffer_size=max(len(data), 1))
        walker.feed(data)
        walker.skip()
        if walker.tell() != len(data):
            raise ExperienceFormatError(f"{len(data) - walker.tell()} bytes after the metadata.")
        value = msgpack.unpackb(
            data,
            ext_hook=self._marker,
            list_hook=self._list,
            strict_map_key=False,
            unicode_errors="surrogatepass",
        )
        if self._open:
            raise ExperienceFormatError("metadata: a marker without its list.")
        return value

    def _marker(self, code: int, data: bytes) -> _Marker:
        if data:
            raise ExperienceFormatError(f"metadata: extension type {code} with content.")
        self._open += 1
        return _Marker(code)

    def _list(self, items: list[Any]) -> Any:
        if not items or type(items[0]) is not _Marker:
            return items
        self._open -= 1
        marker, *rest = items
        if marker is _Marker.TUPLE:
            return tuple(rest)
        name, shape = (rest[0], []) if marker is _Marker.SCALAR else rest
        if len(shape) > MAX_DIMENSIONS or not all(type(size) is int and size >= 0 for size in shape):
            raise ExperienceFormatError(f"metadata: {shape!r:.100} is no shape.")
        if marker is _Marker.TENSOR:
            return self._take(f"values.{name}", math.prod(shape)).reshape(shape)
        dtype = NUMPY_DTYPES[name]
        data = self._take("arrays.uint8", math.prod(shape) * dtype.itemsize).numpy()
        if dtype == np.bool_ and data.size and data.max() > 1:
            raise ExperienceFormatError("metadata: a boolean array with other bytes than 0 and 1.")
        array = data.view(dtype).reshape(shape)
        return array[()] if marker is _Marker.SCALAR else array

    def _take(self, name: str, count: int) -> Tensor:
        if name not in self._streams:
            raise ExperienceFormatError(f"metadata: refers to the tensor {name!r}, which is missing.")
        return self._streams[name].take(count)


def known_dtype(name: Any) -> torch.dtype:
    """The dtype of that name.

    Raises:
        ExperienceFormatError: unknown name.
    """
    if not isinstance(name, str) or name not in TORCH_DTYPES:
        raise ExperienceFormatError(f"unknown dtype {name!r:.60}. Known: {', '.join(TORCH_DTYPES)}.")
    return TORCH_DTYPES[name]
