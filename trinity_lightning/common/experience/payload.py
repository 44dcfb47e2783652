"""Writes and reads the bytes of a payload: a value of plain containers, tensors and arrays, and flat tensors beside it.

offset  size  content
0       4     b"TRXP"
4       1     version: 2, or 3, by which a value says that it has more entries (see `codec`)
5       3     zero
8       8     length of the tensors, little-endian
16      8     length of the metadata, little-endian
24      8     xxh3_64 of everything else, little-endian
32      ...   tensors "<name>.<dtype>" in safetensors format, then metadata in msgpack

msgpack has no type for tensors, arrays and tuples. The metadata have a list in place of each, which starts with a
marker, an empty extension type: [TUPLE, *items], [TENSOR, dtype, shape], [ARRAY, dtype, shape], [SCALAR, dtype]. The
numbers are in the tensors "values.<dtype>" and "arrays.uint8", in order of appearance. Nothing is pickled.

Writing makes no needless copy. Reading refuses a payload that is cut off, damaged or forged.
"""

import ctypes
import io
import json
import math
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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

from trinity_lightning.common.experience.fields import ExperienceError, ExperienceFormatError
from trinity_lightning.common.hardware import advise

Buffer = bytes | bytearray | memoryview

MAGIC = b"TRXP"
VERSION = 2
EXTENDED = 3  # version of a payload that has more entries
HEADER = struct.Struct("<4sB3xQQ")
NUMBER = struct.Struct("<Q")
BODY = HEADER.size + NUMBER.size
_ALIGNMENT = 16  # size of the largest dtype in bytes; readers may view the bytes as they lie
# From this size on a payload lies in pages of 2 MiB, as NumPy's arrays do: taking tens of megabytes of fresh memory
# from the kernel in pages of 4 KiB costs as much time as the copying. A smaller payload fills hardly one huge page.
_HUGE = 1 << 22
_BLOCK = 1 << 18  # bytes written between two updates of the checksum: few enough to be in the cache still

# safetensors' names of the dtypes. It has none for complex128, which is therefore stored as bytes.
_CODES = {"bool": "BOOL", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"}
_CODES |= {f"{sign}int{bits}": f"{code}{bits}" for sign, code in (("u", "U"), ("", "I")) for bits in (8, 16, 32, 64)}
_CODES |= {"float16": "F16", "float32": "F32", "float64": "F64", "complex64": "C64", "complex128": "U8"}
TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _CODES}
DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in TORCH_DTYPES.items()}
NUMPY_DTYPES: dict[str, np.dtype] = {
    name: np.dtype(name)
    for name in TORCH_DTYPES
    if name != "bfloat16" and not name.startswith("float8")  # numpy itself has neither
}


def known_dtype(name: Any) -> torch.dtype:
    """The dtype of that name, looked up in the table; ExperienceFormatError if it is not there."""
    if not isinstance(name, str) or name not in TORCH_DTYPES:
        raise ExperienceFormatError(f"unknown dtype {name!r:.60}. Known: {', '.join(TORCH_DTYPES)}.")
    return TORCH_DTYPES[name]


def _dtype_of(tensor_name: str) -> torch.dtype:
    """The dtype that a flat tensor's name ends in."""
    return known_dtype(tensor_name.rpartition(".")[2])


def _header_entry(tensor_name: str, start: int, end: int) -> dict[str, Any]:
    """The safetensors header's entry for a flat tensor, whose bytes lie from `start` to `end`."""
    dtype = _dtype_of(tensor_name)
    itemsize = 1 if dtype == torch.complex128 else dtype.itemsize
    return {"dtype": _CODES[DTYPE_NAMES[dtype]], "shape": [(end - start) // itemsize], "data_offsets": [start, end]}


class Marker(Enum):
    """The first item of a list that stands for a value without a msgpack type."""

    TUPLE = 1
    TENSOR = 2
    ARRAY = 3
    SCALAR = 4


# -- writing -----------------------------------------------------------------------------------------------------------

# msgpack raises ValueError for deep nesting, OverflowError for integers beyond 64 bits.
_PACKING_ERRORS = (ExperienceError, TypeError, ValueError, OverflowError, RecursionError)
_EXTENSIONS = {marker: msgpack.ExtType(marker.value, b"") for marker in Marker}
# str() of a string enum is its name, str.__str__ the string.
_PLAIN = {dict: dict, list: list, str: str.__str__, int: int.__int__, float: float.__float__, bytes: bytes}


class Writer:
    """Collects rows of tensors, then writes each of them once, straight to its place in the payload.

    The safetensors library needs whole tensors, and returns bytes that have to be copied once more. With it, writing
    took 36 ms in place of 15, and reading 21 in place of 18 (benchmarks/experience.py, 2,048 rows of 1,024 tokens).
    """

    def __init__(self) -> None:
        self._rows: dict[str, list[Tensor]] = {}
        self._lengths: dict[str, list[int]] = {}

    def add(self, name: str, dtype: torch.dtype, rows: Sequence[Tensor], lengths: Sequence[int]) -> str:
        """Append 1-D host tensors of one dtype, and their lengths, to the tensor "<name>.<dtype>".

        Returns:
            The dtype's name.
        """
        dtype_name = DTYPE_NAMES.get(dtype)
        if dtype_name is None:
            raise ExperienceError(
                f"tensors of dtype {dtype} cannot be serialized; convert it to one of {[*TORCH_DTYPES]}."
            )
        self._rows.setdefault(f"{name}.{dtype_name}", []).extend(rows)
        self._lengths.setdefault(f"{name}.{dtype_name}", []).extend(lengths)
        return dtype_name

    def pack(self, value: Any, version: int = VERSION) -> bytes:
        """A payload of the value (plain containers and values, tensors and arrays) and of all rows.

        Raises:
            ExperienceError: something inside the value cannot be encoded; the message says where.
        """
        try:
            metadata = self.encode(value)
        except _PACKING_ERRORS as error:
            raise ExperienceError(find_unencodable(value) or str(error)) from error
        header, size = self._layout()
        # Every byte is written once, in place: BytesIO takes over bytes that nobody else holds, lets them be written
        # to, and gives them away again, all without a copy.
        buffer = io.BytesIO(bytes(BODY + size + len(metadata)))
        with buffer.getbuffer() as view:
            if len(view) >= _HUGE:
                advise("MADV_HUGEPAGE", ctypes.addressof(ctypes.c_char.from_buffer(view)), len(view))
            HEADER.pack_into(view, 0, MAGIC, version, size, len(metadata))
            digest = xxhash.xxh3_64(view[: HEADER.size])
            view[BODY : BODY + len(header)] = header
            digest.update(header)
            with view[BODY + len(header) : BODY + size] as data:
                self._write_rows(data, digest.update)
            view[BODY + size :] = metadata
            digest.update(metadata)
            NUMBER.pack_into(view, HEADER.size, digest.intdigest())
        return buffer.getvalue()

    def _layout(self) -> tuple[bytes, int]:
        """The safetensors header, and the size of header and tensors; the largest items first, so that all align."""
        order = sorted(self._rows, key=lambda name: (-_dtype_of(name).itemsize, name))
        self._rows = {name: self._rows[name] for name in order}
        entries, start = {}, 0
        for name in order:
            end = start + sum(self._lengths[name]) * _dtype_of(name).itemsize
            entries[name], start = _header_entry(name, start, end), end
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-(NUMBER.size + len(text)) % _ALIGNMENT)
        return NUMBER.pack(len(text)) + text, NUMBER.size + len(text) + start

    def _write_rows(self, target: memoryview, written: Callable[[memoryview], None]) -> None:
        """Fill the target; call `written` with every part, in order, right after it was written."""
        if not target:
            return
        flat, start = torch.frombuffer(target, dtype=torch.uint8), 0
        with torch.inference_mode():  # past autograd, which would look at every row
            for name, rows in self._rows.items():
                dtype, lengths = _dtype_of(name), self._lengths[name]
                block = max(1, _BLOCK * len(lengths) // max(1, sum(lengths) * dtype.itemsize))
                for first in range(0, len(rows), block):
                    end = start + sum(lengths[first : first + block]) * dtype.itemsize
                    torch.cat(rows[first : first + block], out=flat[start:end].view(dtype))
                    written(target[start:end])
                    start = end

    def encode(self, value: Any) -> bytes:
        """The metadata alone; the numbers of the value's tensors and arrays are added to the rows."""
        options = {"strict_types": True, "unicode_errors": "surrogatepass"}
        return msgpack.packb(value, default=self._encode_other, **options) or b""

    def _encode_other(self, value: Any) -> Any:
        """A stand-in that msgpack can pack for a value that it has no type for."""
        if isinstance(value, Tensor):
            name = self.add("values", value.dtype, [host_tensor(value).reshape(-1)], [value.numel()])
            return [_EXTENSIONS[Marker.TENSOR], name, list(value.shape)]
        if isinstance(value, (np.ndarray, np.generic)) and value.dtype.name in NUMPY_DTYPES:
            array = np.array(value, dtype=NUMPY_DTYPES[value.dtype.name], order="C")
            self.add("arrays", torch.uint8, [torch.from_numpy(array.reshape(-1).view(np.uint8))], [array.nbytes])
            if isinstance(value, np.generic):
                return [_EXTENSIONS[Marker.SCALAR], value.dtype.name]
            return [_EXTENSIONS[Marker.ARRAY], value.dtype.name, list(value.shape)]
        if isinstance(value, tuple):
            return [_EXTENSIONS[Marker.TUPLE], *value]
        for plain, convert in _PLAIN.items():  # subclasses become the plain values that they equal
            if isinstance(value, plain) and type(value) is not plain:
                return convert(value)
        raise ExperienceError(_reason(value))


def host_tensor(tensor: Tensor) -> Tensor:
    """The tensor in the host's memory; an ExperienceError if its numbers cannot be read."""
    if tensor.layout != torch.strided or tensor.is_meta:
        raise ExperienceError(_reason(tensor))
    return tensor if tensor.is_cpu else tensor.cpu()


def find_unencodable(value: Any, depth: int = 16) -> str | None:
    """The place in a value that cannot be encoded and why, as "['key'][index]: reason"; None if all of it can.

    It goes at most `depth` containers deep, and packs the parts again and again.
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
        Writer().encode(value)
    except _PACKING_ERRORS:
        return False
    return True


def _reason(value: Any) -> str:
    """The reason why a value cannot be encoded."""
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


# -- reading -----------------------------------------------------------------------------------------------------------


class Reader:
    """A payload's value, and its rows, which are taken in order. Everything that it gives out is a copy.

    Attributes:
        version: VERSION or EXTENDED.
        value: the value that was packed.

    Raises:
        ExperienceFormatError: the payload is cut off, damaged or of another version. A forged one may also make a
            parser raise its own errors: see `unpack`.
    """

    def __init__(self, view: memoryview) -> None:
        if len(view) < BODY:
            raise ExperienceFormatError(f"payload of {len(view)} bytes is shorter than its header of {BODY}.")
        magic, self.version, size, metadata_size = HEADER.unpack_from(view)
        if magic != MAGIC or self.version not in (VERSION, EXTENDED):
            raise ExperienceFormatError(
                f"expected magic {MAGIC!r} and version {VERSION} or {EXTENDED}, got {magic!r} and {self.version}."
            )
        check_size(view, BODY + size + metadata_size)
        digest = xxhash.xxh3_64(view[: HEADER.size])
        digest.update(view[BODY:])
        if digest.intdigest() != NUMBER.unpack_from(view, HEADER.size)[0]:
            raise ExperienceFormatError("checksum does not match: the payload is damaged.")
        self._rest = _split(view[BODY : BODY + size])  # bytes that were not taken yet, by tensor
        self._open_markers = 0
        self.value = self._decode(view[BODY + size :])

    def take(self, name: str, count: int) -> Tensor:
        """The next `count` items of a tensor, [count]."""
        return _copy(self._next(name, count), _dtype_of(name))

    def take_rows(self, name: str, lengths: Sequence[int]) -> list[Tensor]:
        """The next rows of a tensor, each with storage of its own: filtering a step frees the rows that it drops."""
        if min(lengths, default=1) < 0:
            raise ExperienceFormatError(f"tensor {name!r} has a row of negative length.")
        data, dtype = self._next(name, sum(lengths)), _dtype_of(name)
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
        """The bytes of the next items, in the payload's own memory."""
        if name not in self._rest:
            raise ExperienceFormatError(f"metadata: refers to the tensor {name!r}, which is missing.")
        rest, dtype = self._rest[name], _dtype_of(name)
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
    """The bytes of each tensor of a safetensors section, whose header must be exactly as `Writer` writes it."""
    size = NUMBER.unpack_from(section)[0] if len(section) >= NUMBER.size else len(section)
    data = section[NUMBER.size + size :]
    if NUMBER.size + size > len(section):
        raise ExperienceFormatError(f"tensor header of {size} bytes in a section of {len(section)}.")
    parts, start = {}, 0
    for name, entry in json.loads(str(section[NUMBER.size : NUMBER.size + size], "utf-8")).items():
        end = entry["data_offsets"][1]
        if end < start or entry != _header_entry(name, start, end):
            raise ExperienceFormatError(f"tensor {name!r} has the header entry {entry!r:.200}.")
        parts[name], start = data[start:end], end
    if start != len(data):
        raise ExperienceFormatError(f"tensors of {start} bytes in a section that has {len(data)}.")
    return parts


def _copy(data: memoryview, dtype: torch.dtype) -> Tensor:
    """A tensor of these bytes in memory of its own.

    The memory is a bytearray, which is allocated and filled in a fraction of torch's time for a small tensor.
    """
    return torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)


def view_of(data: Buffer) -> memoryview:
    """The bytes of any buffer, one after the other; ExperienceFormatError for anything else."""
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise ExperienceFormatError(f"expected bytes, got {type(data).__name__}.")
    view = memoryview(data)
    return view.cast("B") if view.c_contiguous else memoryview(view.tobytes())


def check_size(view: memoryview, expected: int) -> None:
    """Refuse a payload of another size than its header says."""
    if len(view) != expected:
        raise ExperienceFormatError(f"payload of {len(view)} bytes, expected {expected}: cut off, or followed by more.")


def unpack(view: memoryview, read: Callable[[Reader], Any] = attrgetter("value")) -> Any:
    """The result of `read` for a payload: by default its value.

    Raises:
        ExperienceFormatError: the payload is damaged, cut off, forged, or not of this version.
    """
    with format_errors():
        reader = Reader(view)
        result = read(reader)
        reader.check_end()
        return result


@contextmanager
def format_errors(prefix: str = "payload cannot be read") -> Iterator[None]:
    """Turn every error of a parser, which a forged payload may provoke, into an ExperienceFormatError."""
    try:
        yield
    except ExperienceFormatError:
        raise
    except Exception as error:
        raise ExperienceFormatError(f"{prefix}: {type(error).__name__}: {error}") from error
