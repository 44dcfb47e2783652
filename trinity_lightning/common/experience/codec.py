"""Plain values, tensors and arrays to bytes and back, without a copy too many; nothing is pickled.

offset  size  content
0       4     b"TRXP"
4       1     version, 2
5       3     zero
8       8     length of the tensors, little-endian
16      8     length of the metadata, little-endian
24      8     xxh3_64 of everything else, little-endian
32      ...   tensors "<what>.<dtype>" in safetensors format, then metadata in msgpack

What msgpack has no type for is a list that starts with a marker, an empty extension type: [TUPLE, *items],
[TENSOR, dtype, shape], [ARRAY, dtype, shape], [SCALAR, dtype]. Their numbers are in the tensors "values.<dtype>" and
"arrays.uint8", in order of appearance.
"""

import ctypes
import io
import json
import math
import struct
from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from itertools import accumulate
from operator import attrgetter
from typing import Any

import msgpack
import numpy as np
import torch
import xxhash
from torch import Tensor

from trinity_lightning.common.experience.experience import ExperienceError, ExperienceFormatError
from trinity_lightning.common.hardware import advise

MAGIC = b"TRXP"
VERSION = 2
_HEADER = struct.Struct("<4sB3xQQ")
_NUMBER = struct.Struct("<Q")
_BODY = _HEADER.size + _NUMBER.size
_ALIGNMENT = 16  # of the largest dtype; readers may view the bytes as they lie
# From this size on a payload is in pages of 2 MiB, as NumPy's arrays are: to take tens of megabytes of fresh memory
# from the kernel in pages of 4 KiB costs as much time as the copying. What is smaller holds hardly a huge page.
_HUGE = 1 << 22
_BLOCK = 1 << 18  # bytes written between two updates of the checksum: few enough to be in the cache still

# What safetensors calls the dtypes. It knows no complex128, which is therefore stored as its bytes.
_CODES = {"bool": "BOOL", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"}
_CODES |= {f"{sign}int{bits}": f"{code}{bits}" for sign, code in (("u", "U"), ("", "I")) for bits in (8, 16, 32, 64)}
_CODES |= {"float16": "F16", "float32": "F32", "float64": "F64", "complex64": "C64", "complex128": "U8"}
TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _CODES}
DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in TORCH_DTYPES.items()}
_NUMPY_DTYPES: dict[str, np.dtype] = {
    name: np.dtype(name)
    for name in TORCH_DTYPES
    if name != "bfloat16" and not name.startswith("float8")  # numpy itself has neither
}


def known_dtype(name: Any) -> torch.dtype:
    """The dtype of that name, looked up in the table; ExperienceFormatError if it is not there."""
    if not isinstance(name, str) or name not in TORCH_DTYPES:
        raise ExperienceFormatError(f"unknown dtype {name!r:.60}. Known: {', '.join(TORCH_DTYPES)}.")
    return TORCH_DTYPES[name]


# -- Values and tensors ------------------------------------------------------------------------------------------------


class _Marker(Enum):
    TUPLE = 1
    TENSOR = 2
    ARRAY = 3
    SCALAR = 4


_EXTENSIONS = {marker: msgpack.ExtType(marker.value, b"") for marker in _Marker}
# msgpack raises ValueError for what is nested too deeply, OverflowError for integers beyond 64 bits.
_PACKING_ERRORS = (ExperienceError, TypeError, ValueError, OverflowError, RecursionError)
# str() of a string enum is its name, str.__str__ the string.
_PLAIN = {dict: dict, list: list, str: str.__str__, int: int.__int__, float: float.__float__, bytes: bytes}


def _entry(name: str, start: int, end: int) -> dict[str, Any]:
    """What the safetensors header says of a flat tensor, whose name ends in its dtype."""
    dtype = name.rpartition(".")[2]
    itemsize = 1 if known_dtype(dtype) == torch.complex128 else TORCH_DTYPES[dtype].itemsize
    return {"dtype": _CODES[dtype], "shape": [(end - start) // itemsize], "data_offsets": [start, end]}


class Writer:
    """Collects rows of tensors, then writes each of them once, straight to its place in the payload.

    The safetensors library joins tensors that are whole already, and returns bytes of its own to be copied once more:
    with it this took 36 ms for 15, and `Reader` 21 for 18 (benchmarks/experience.py, 2,048 rows of 1,024 tokens).
    """

    def __init__(self) -> None:
        self._rows: dict[str, list[Tensor]] = {}
        self._lengths: dict[str, list[int]] = {}

    def add(self, what: str, dtype: torch.dtype, rows: Sequence[Tensor], lengths: Sequence[int]) -> str:
        """Append 1-D host tensors of one dtype, and their lengths, to the tensor "<what>.<dtype>": the dtype's name."""
        dtype_name = DTYPE_NAMES.get(dtype)
        if dtype_name is None:
            raise ExperienceError(
                f"tensors of dtype {dtype} cannot be serialized; convert it to one of {[*TORCH_DTYPES]}."
            )
        self._rows.setdefault(f"{what}.{dtype_name}", []).extend(rows)
        self._lengths.setdefault(f"{what}.{dtype_name}", []).extend(lengths)
        return dtype_name

    def pack(self, value: Any) -> bytes:
        """A payload of the value (plain containers and values, tensors and arrays) and of all rows.

        Raises:
            ExperienceError: something inside the value cannot be encoded; the message says where.
        """
        try:
            metadata = self._encode(value)
        except _PACKING_ERRORS as error:
            raise ExperienceError(find_unencodable(value) or str(error)) from error
        header, size = self._layout()
        # Every byte is written once, in place: BytesIO takes over bytes that nobody else holds, lets them be written
        # to, and gives them away again, all without a copy.
        buffer = io.BytesIO(bytes(_BODY + size + len(metadata)))
        with buffer.getbuffer() as view:
            if len(view) >= _HUGE:
                advise("MADV_HUGEPAGE", ctypes.addressof(ctypes.c_char.from_buffer(view)), len(view))
            _HEADER.pack_into(view, 0, MAGIC, VERSION, size, len(metadata))
            digest = xxhash.xxh3_64(view[: _HEADER.size])
            view[_BODY : _BODY + len(header)] = header
            digest.update(header)
            with view[_BODY + len(header) : _BODY + size] as data:
                self._write_rows(data, digest.update)
            view[_BODY + size :] = metadata
            digest.update(metadata)
            _NUMBER.pack_into(view, _HEADER.size, digest.intdigest())
        return buffer.getvalue()

    def _layout(self) -> tuple[bytes, int]:
        """The safetensors header, and the size of that and the tensors; the largest items first, so that all align."""
        order = sorted(self._rows, key=lambda name: (-TORCH_DTYPES[name.rpartition(".")[2]].itemsize, name))
        self._rows = {name: self._rows[name] for name in order}
        entries, start = {}, 0
        for name in order:
            end = start + sum(self._lengths[name]) * TORCH_DTYPES[name.rpartition(".")[2]].itemsize
            entries[name], start = _entry(name, start, end), end
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-(_NUMBER.size + len(text)) % _ALIGNMENT)
        return _NUMBER.pack(len(text)) + text, _NUMBER.size + len(text) + start

    def _write_rows(self, target: memoryview, written: Callable[[memoryview], None]) -> None:
        """Fill the target; `written` is given every part, in order, right after it was written."""
        if not target:
            return
        flat, start = torch.frombuffer(target, dtype=torch.uint8), 0
        with torch.inference_mode():  # past autograd, which would look at every row
            for name, rows in self._rows.items():
                dtype, lengths = TORCH_DTYPES[name.rpartition(".")[2]], self._lengths[name]
                block = max(1, _BLOCK * len(lengths) // max(1, sum(lengths) * dtype.itemsize))
                for first in range(0, len(rows), block):
                    end = start + sum(lengths[first : first + block]) * dtype.itemsize
                    torch.cat(rows[first : first + block], out=flat[start:end].view(dtype))
                    written(target[start:end])
                    start = end

    def _encode(self, value: Any) -> bytes:
        options = {"strict_types": True, "unicode_errors": "surrogatepass"}
        return msgpack.packb(value, default=self._encode_other, **options) or b""

    def _encode_other(self, value: Any) -> Any:
        """What msgpack shall pack in place of a value it has no type for."""
        if isinstance(value, Tensor):
            name = self.add("values", value.dtype, [host_tensor(value).reshape(-1)], [value.numel()])
            return [_EXTENSIONS[_Marker.TENSOR], name, list(value.shape)]
        if isinstance(value, (np.ndarray, np.generic)) and value.dtype.name in _NUMPY_DTYPES:
            array = np.array(value, dtype=_NUMPY_DTYPES[value.dtype.name], order="C")
            self.add("arrays", torch.uint8, [torch.from_numpy(array.reshape(-1).view(np.uint8))], [array.nbytes])
            if isinstance(value, np.generic):
                return [_EXTENSIONS[_Marker.SCALAR], value.dtype.name]
            return [_EXTENSIONS[_Marker.ARRAY], value.dtype.name, list(value.shape)]
        if isinstance(value, tuple):
            return [_EXTENSIONS[_Marker.TUPLE], *value]
        for plain, convert in _PLAIN.items():  # subclasses, as the plain values that they equal
            if isinstance(value, plain) and type(value) is not plain:
                return convert(value)
        raise ExperienceError(_reason(value))


def host_tensor(tensor: Tensor) -> Tensor:
    if tensor.layout != torch.strided or tensor.is_meta:
        raise ExperienceError(_reason(tensor))
    return tensor if tensor.is_cpu else tensor.cpu()


def _reason(value: Any) -> str:
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

    For messages only: it packs the parts again and again.
    """
    if _can_encode(value):
        return None
    children = value.items() if isinstance(value, dict) else ()
    for key, child in enumerate(value) if isinstance(value, (list, tuple)) else children:
        if depth and not _can_encode(child):
            return f"[{key!r}]{find_unencodable(child, depth - 1)}"
    for key, _ in children:
        if not _can_encode(key):
            return f": the key {key!r}: {_reason(key)}"
    return f": {_reason(value)}"


def _can_encode(value: Any) -> bool:
    try:
        Writer()._encode(value)
    except _PACKING_ERRORS:
        return False
    return True


class Reader:
    """A payload's value, and its rows, which are taken in order; all that is given out is a copy.

    Raises:
        ExperienceFormatError: the payload is cut off, damaged or of another version. What a parser raises for a forged
            one passes: see `unpack`.
    """

    def __init__(self, view: memoryview) -> None:
        if len(view) < _BODY:
            raise ExperienceFormatError(f"payload of {len(view)} bytes is shorter than its header of {_BODY}.")
        magic, version, size, metadata_size = _HEADER.unpack_from(view)
        if magic != MAGIC or version != VERSION:
            raise ExperienceFormatError(f"expected magic {MAGIC!r} and version {VERSION}, got {magic!r} and {version}.")
        check_size(view, _BODY + size + metadata_size)
        digest = xxhash.xxh3_64(view[: _HEADER.size])
        digest.update(view[_BODY:])
        if digest.intdigest() != _NUMBER.unpack_from(view, _HEADER.size)[0]:
            raise ExperienceFormatError("checksum does not match: the payload is damaged.")
        self._rest = _split(view[_BODY : _BODY + size])
        self._open_markers = 0
        self.value = self._decode(view[_BODY + size :])

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

    def _decode_marker(self, code: int, data: bytes) -> _Marker:
        if data:
            raise ExperienceFormatError(f"metadata: extension type {code} with content.")
        self._open_markers += 1
        return _Marker(code)

    def _decode_list(self, items: list[Any]) -> Any:
        if not items or type(items[0]) is not _Marker:
            return items
        self._open_markers -= 1
        marker, *rest = items
        if marker is _Marker.TUPLE:
            return tuple(rest)
        name, shape = (rest[0], []) if marker is _Marker.SCALAR else rest
        if len(shape) > 64 or not all(type(size) is int and size >= 0 for size in shape):
            raise ExperienceFormatError(f"metadata: {shape!r:.100} is no shape.")
        if marker is _Marker.TENSOR:
            return self.take(f"values.{name}", math.prod(shape)).reshape(shape)
        dtype = _NUMPY_DTYPES[name]
        data = self.take("arrays.uint8", math.prod(shape) * dtype.itemsize).numpy()
        if dtype == np.bool_ and data.size and data.max() > 1:
            raise ExperienceFormatError("metadata: a boolean array with other bytes than 0 and 1.")
        array = data.view(dtype).reshape(shape)
        return array[()] if marker is _Marker.SCALAR else array


def _split(section: memoryview) -> dict[str, memoryview]:
    """The bytes of the tensors of a safetensors section, whose header must be exactly what `Writer` writes."""
    size = _NUMBER.unpack_from(section)[0] if len(section) >= _NUMBER.size else len(section)
    data = section[_NUMBER.size + size :]
    if _NUMBER.size + size > len(section):
        raise ExperienceFormatError(f"tensor header of {size} bytes in a section of {len(section)}.")
    parts, start = {}, 0
    for name, entry in json.loads(str(section[_NUMBER.size : _NUMBER.size + size], "utf-8")).items():
        end = entry["data_offsets"][1]
        if end < start or entry != _entry(name, start, end):
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
    try:
        reader = Reader(view)
        result = read(reader)
        reader.check_end()
    except ExperienceFormatError:
        raise
    except Exception as error:  # whatever a forged payload provokes in a parser is the payload's fault
        raise ExperienceFormatError(f"payload cannot be read: {type(error).__name__}: {error}") from error
    return result
