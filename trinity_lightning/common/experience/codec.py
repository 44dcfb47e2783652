"""Plain values, tensors and arrays to bytes, without a copy too many; nothing is pickled. `reading` has the way back.

offset  size  content
0       4     b"TRXP"
4       1     version, 2
5       3     zero
8       8     length of the tensors, little-endian
16      8     length of the metadata, little-endian
24      8     xxh3_64 of everything else, little-endian
32      ...   tensors "<what>.<dtype>" in safetensors format, then metadata in msgpack

What msgpack has no type for is a list that starts with a marker, as `values` has it.
"""

import ctypes
import io
import json
import struct
from collections.abc import Callable, Sequence
from typing import Any

import msgpack
import torch
import xxhash
from torch import Tensor

from trinity_lightning.common.experience.experience import ExperienceError, ExperienceFormatError
from trinity_lightning.common.hardware import advise

MAGIC = b"TRXP"
VERSION = 2
HEADER = struct.Struct("<4sB3xQQ")
NUMBER = struct.Struct("<Q")
BODY = HEADER.size + NUMBER.size
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


def known_dtype(name: Any) -> torch.dtype:
    """The dtype of that name, looked up in the table; ExperienceFormatError if it is not there."""
    if not isinstance(name, str) or name not in TORCH_DTYPES:
        raise ExperienceFormatError(f"unknown dtype {name!r:.60}. Known: {', '.join(TORCH_DTYPES)}.")
    return TORCH_DTYPES[name]


# -- Values and tensors ------------------------------------------------------------------------------------------------


# msgpack raises ValueError for what is nested too deeply, OverflowError for integers beyond 64 bits.
PACKING_ERRORS = (ExperienceError, TypeError, ValueError, OverflowError, RecursionError)


def entry_of(name: str, start: int, end: int) -> dict[str, Any]:
    """What the safetensors header says of a flat tensor, whose name ends in its dtype."""
    dtype = name.rpartition(".")[2]
    itemsize = 1 if known_dtype(dtype) == torch.complex128 else TORCH_DTYPES[dtype].itemsize
    return {"dtype": _CODES[dtype], "shape": [(end - start) // itemsize], "data_offsets": [start, end]}


class Writer:
    """Collects rows of tensors, then writes each of them once, straight to its place in the payload.

    The safetensors library joins tensors that are whole already, and returns bytes of its own to be copied once more:
    with it this took 36 ms for 15, and reading 21 for 18 (benchmarks/experience.py, 2,048 rows of 1,024 tokens).
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
            metadata = self.encode(value)
        except PACKING_ERRORS as error:
            from trinity_lightning.common.experience.unencodable import find_unencodable

            raise ExperienceError(find_unencodable(value) or str(error)) from error
        header, size = self._layout()
        # Every byte is written once, in place: BytesIO takes over bytes that nobody else holds, lets them be written
        # to, and gives them away again, all without a copy.
        buffer = io.BytesIO(bytes(BODY + size + len(metadata)))
        with buffer.getbuffer() as view:
            if len(view) >= _HUGE:
                advise("MADV_HUGEPAGE", ctypes.addressof(ctypes.c_char.from_buffer(view)), len(view))
            HEADER.pack_into(view, 0, MAGIC, VERSION, size, len(metadata))
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
        """The safetensors header, and the size of that and the tensors; the largest items first, so that all align."""
        order = sorted(self._rows, key=lambda name: (-TORCH_DTYPES[name.rpartition(".")[2]].itemsize, name))
        self._rows = {name: self._rows[name] for name in order}
        entries, start = {}, 0
        for name in order:
            end = start + sum(self._lengths[name]) * TORCH_DTYPES[name.rpartition(".")[2]].itemsize
            entries[name], start = entry_of(name, start, end), end
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-(NUMBER.size + len(text)) % _ALIGNMENT)
        return NUMBER.pack(len(text)) + text, NUMBER.size + len(text) + start

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

    def encode(self, value: Any) -> bytes:
        """The metadata alone; the numbers of its tensors and arrays are added to the rows."""
        options = {"strict_types": True, "unicode_errors": "surrogatepass"}
        return msgpack.packb(value, default=self._encode_other, **options) or b""

    def _encode_other(self, value: Any) -> Any:
        """What msgpack shall pack in place of a value it has no type for."""
        from trinity_lightning.common.experience.values import encoded  # few experiences have any

        return encoded(value, self.add)
