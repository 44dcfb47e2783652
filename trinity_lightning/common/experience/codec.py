"""Experiences to payloads, without a copy too many; nothing is pickled. `reading` has the way back.

offset  size  content
0       4     b"TRXP"
4       1     version, 2
5       3     zero
8       8     length of the tensors, little-endian
16      8     length of the metadata, little-endian
24      8     xxh3_64 of everything else, little-endian
32      ...   tensors "<what>.<dtype>" in safetensors format, then metadata in msgpack

What msgpack has no type for is a list that starts with a marker, as `reading` has it. Of experiences, each field is one
flat tensor a dtype, each plain field one list, and all are checked in bulk.
"""

import ctypes
import io
import json
import struct
from collections.abc import Callable, Sequence
from dataclasses import fields
from itertools import repeat
from operator import attrgetter, eq
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

import msgpack
import numpy as np
import torch
import xxhash
from torch import Tensor

from trinity_lightning.common.experience.experience import (
    EID,
    RESPONSE_FIELDS,
    TOKEN_FIELDS,
    Experience,
    ExperienceError,
    ExperienceFormatError,
    reward_value,
)
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


# -- values and tensors ------------------------------------------------------------------------------------------------


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
            from trinity_lightning.common.experience.reading import find_unencodable

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
        from trinity_lightning.common.experience.reading import encoded  # few experiences have any

        return encoded(value, self.add)


# -- the rules of `Experience`, checked in bulk: fields may have been assigned that its constructor has not seen -------

Columns = dict[str, list[Any]]
REQUIRED_COLUMNS: dict[str, tuple[type, ...]] = {
    **{f"eid.{each.name}": (int, str) for each in fields(EID)},
    "experience_type": (str,),
    "prompt_length": (int,),
}


def _classes(declared: Any) -> tuple[type, ...]:
    """What a field's declaration allows: (list, NoneType) for `list[str] | None`."""
    kinds = get_args(declared) if isinstance(declared, UnionType) else (declared,)
    return tuple(get_origin(kind) or kind for kind in kinds)


_DECLARED = {each.name: _classes(each.type) for each in fields(Experience)}
COLUMN_TYPES = REQUIRED_COLUMNS | {
    name: kinds for name, kinds in _DECLARED.items() if not {Tensor, EID} & set(kinds) and name not in REQUIRED_COLUMNS
}
_LARGE = 2**62


def find_misfit(columns: Columns, lengths: dict[str, np.ndarray]) -> tuple[int, str] | None:
    """The first experience whose parts do not fit together, as (row, message).

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
    for message, kept in rules.items():
        if not kept.all():
            row = int(np.flatnonzero(~kept.astype(bool))[0])
            found = {name: int(length[row]) for name, length in lengths.items() if length[row] >= 0}
            return row, f"{message}, got lengths {found} and prompt_length {prompt[row]}."
    return None


def _equal(column: list[str | None], value: str) -> np.ndarray:
    count = column.count(value)
    if count in (0, len(column)):
        return np.full(len(column), count > 0)
    return np.fromiter(map(eq, column, repeat(value)), bool, len(column))


def _integers(column: list[int]) -> np.ndarray:
    """The column as int64, or as Python's integers if differences could leave the range of those."""
    small = not column or (min(column) >= -_LARGE and max(column) <= _LARGE)
    return np.array(column, dtype=np.int64 if small else object)


# -- experiences -------------------------------------------------------------------------------------------------------

TENSOR_FIELDS = (*TOKEN_FIELDS, *RESPONSE_FIELDS)
_kind_of = attrgetter("dtype", "ndim", "is_cpu", "layout")


def serialize_many(experiences: Sequence[Experience]) -> bytes:
    """See `Experience.serialize_many`."""
    if wrong := [kind for kind in set(map(type, experiences)) if not issubclass(kind, Experience)]:
        raise ExperienceError(f"expected experiences to serialize, got a value of type {wrong[0].__name__}.")
    columns, writer = _plain_columns(experiences), Writer()
    chunks, lengths = {}, {}
    for name in TENSOR_FIELDS:
        chunks[name], found = _add_field(experiences, name, writer)
        if chunks[name]:
            lengths[name] = found
    _refuse(find_misfit(columns, lengths), experiences)
    for name in COLUMN_TYPES.keys() - REQUIRED_COLUMNS.keys():  # all None or, if that is no choice, empty: left out
        column = columns[name]
        if column.count(None) == len(column) if NoneType in COLUMN_TYPES[name] else not any(column):
            del columns[name]
    try:
        return writer.pack({"count": len(experiences), "columns": columns, "rows": chunks})
    except ExperienceError:
        from trinity_lightning.common.experience.reading import refuse_unencodable

        refuse_unencodable(experiences, columns)
        raise


def _refuse(problem: tuple[int, str] | None, experiences: Sequence[Experience]) -> None:
    if problem is not None:
        raise ExperienceError(f"experience {experiences[problem[0]].eid.uid}: {problem[1]}")


def _plain_columns(experiences: Sequence[Experience]) -> Columns:
    """The plain fields; ExperienceError if one has a type that it must not have."""
    columns = {name: list(map(attrgetter(name), experiences)) for name in COLUMN_TYPES}
    for name, column in columns.items():
        if not set(map(type, column)) <= set(COLUMN_TYPES[name]):  # assigned since, perhaps by numpy arithmetic
            from trinity_lightning.common.experience.reading import find_wrong_type

            plain = [each.item() if isinstance(each, np.generic) else each for each in column]
            columns[name] = list(map(reward_value, column)) if name == "reward" else plain
            _refuse(find_wrong_type({name: columns[name]}), experiences)
    if any(columns["custom_fields"]):
        from trinity_lightning.common.experience.reading import custom_field_rows

        columns["custom_fields"] = [custom_field_rows(each) for each in columns["custom_fields"]]
    return columns


def _add_field(experiences: Sequence[Experience], name: str, writer: Writer) -> tuple[list[Any], np.ndarray]:
    """Write a field: [dtype, indices of the experiences or None for all, lengths] a dtype; all lengths, -1 for none."""
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
            from trinity_lightning.common.experience.reading import host_tensor

            rows = list(map(host_tensor, rows))
        chunks.append([writer.add(name, kind[0], rows, row_lengths), indices, row_lengths])
    return chunks, lengths


def _group_by_kind(tensors: Sequence[Any]) -> list[tuple[tuple[Any, ...] | None, list[int] | None]]:
    """What is not None, by kind; a kind None is of no tensors. Indices None are all: the usual case, in bulk."""
    types = set(map(type, tensors))
    if types and all(issubclass(kind, Tensor) for kind in types):
        kinds = set(map(_kind_of, tensors))
        if len(kinds) == 1:
            return [(kinds.pop(), None)]
    groups: dict[tuple[Any, ...] | None, list[int]] = {}
    for index, tensor in enumerate(tensors if types != {NoneType} else ()):
        if tensor is not None:
            groups.setdefault(_kind_of(tensor) if isinstance(tensor, Tensor) else None, []).append(index)
    return list(groups.items())
