"""Tensors as a few flat streams in safetensors format: named "<what>.<dtype>", many rows one after the other."""

import json
import struct
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trinity_lightning.common.experience.dtypes import DTYPE_NAMES, SAFETENSORS_CODES, TORCH_DTYPES
from trinity_lightning.common.experience.errors import ExperienceError, ExperienceFormatError

ALIGNMENT = 16  # of the largest dtype; readers may view the bytes as they lie
_BLOCK = 1 << 18  # bytes written between two reports: few enough to be in the cache still when they are reported
_LENGTH = struct.Struct("<Q")


class StreamWriter:
    """Collects rows, then writes each of them once, straight to its place in the payload."""

    def __init__(self) -> None:
        self._pieces: dict[str, list[Tensor]] = {}
        self._lengths: dict[str, list[int]] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        self._header = b""

    def add(self, what: str, dtype: torch.dtype, pieces: Sequence[Tensor], lengths: Sequence[int]) -> str:
        """Append 1-D host tensors of one dtype, and their lengths, to the stream "<what>.<dtype>".

        Returns:
            The dtype's name.

        Raises:
            ExperienceError: a dtype that payloads cannot hold.
        """
        name = DTYPE_NAMES.get(dtype)
        if name is None:
            raise ExperienceError(
                f"tensors of dtype {dtype} cannot be serialized; convert it to one of {[*TORCH_DTYPES]}."
            )
        stream = f"{what}.{name}"
        self._pieces.setdefault(stream, []).extend(pieces)
        self._lengths.setdefault(stream, []).extend(lengths)
        self._dtypes[stream] = dtype
        return name

    def finish(self) -> int:
        """Lay the streams out, those with the largest items first so that all are aligned; returns the bytes needed."""
        order = sorted(self._pieces, key=lambda name: (-self._dtypes[name].itemsize, name))
        self._pieces = {name: self._pieces[name] for name in order}
        entries, offset = {}, 0
        for name in order:
            count, itemsize = sum(self._lengths[name]), self._dtypes[name].itemsize
            code = SAFETENSORS_CODES[DTYPE_NAMES[self._dtypes[name]]]
            shape = [count * itemsize] if code == "U8" else [count]
            entries[name] = {"dtype": code, "shape": shape, "data_offsets": [offset, offset + count * itemsize]}
            offset += count * itemsize
        header = json.dumps(entries, separators=(",", ":")).encode()
        header += b" " * (-(_LENGTH.size + len(header)) % ALIGNMENT)
        self._header = _LENGTH.pack(len(header)) + header
        return len(self._header) + offset

    def write(self, target: memoryview, report: Callable[[memoryview], None]) -> None:
        """Fill the `finish()` bytes of `target`.

        Args:
            target: where to write.
            report: is given every part, in order, right after it was written.
        """
        start = len(self._header)
        target[:start] = self._header
        report(target[:start])
        if start == len(target):
            return
        flat = torch.frombuffer(target, dtype=torch.uint8)
        with torch.inference_mode():  # past autograd, which would look at every row
            for name, pieces in self._pieces.items():
                dtype = self._dtypes[name]
                for first, last, size in _blocks(self._lengths[name], dtype.itemsize):
                    end = start + size
                    torch.cat(pieces[first:last], out=flat[start:end].view(dtype))
                    report(target[start:end])
                    start = end


def _blocks(lengths: Sequence[int], itemsize: int) -> Iterator[tuple[int, int, int]]:
    """Consecutive rows of about `_BLOCK` bytes together, as (first, last + 1, bytes)."""
    rows = max(1, _BLOCK * len(lengths) // max(1, sum(lengths) * itemsize))
    for first in range(0, len(lengths), rows):
        block = lengths[first : first + rows]
        yield first, first + len(block), sum(block) * itemsize


class Stream:
    """One flat tensor of a payload, handed out in order; what is handed out is a copy."""

    def __init__(self, name: str, dtype: torch.dtype, data: memoryview) -> None:
        self._name, self._dtype, self._data, self._position = name, dtype, data, 0

    def _next(self, count: int) -> memoryview:
        """The bytes of the next `count` items, still those of the payload."""
        end = self._position + count * self._dtype.itemsize
        if count < 0 or end > len(self._data):
            raise ExperienceFormatError(f"tensor {self._name!r} is shorter than its rows together.")
        data = self._data[self._position : end]
        if self._dtype == torch.bool and data and np.frombuffer(data, dtype=np.uint8).max() > 1:
            raise ExperienceFormatError(f"tensor {self._name!r} holds bytes that are no booleans.")
        self._position = end
        return data

    def take(self, count: int) -> Tensor:
        """The next `count` items, [count]."""
        return _copy(self._next(count), self._dtype)

    def take_rows(self, lengths: Sequence[int]) -> list[Tensor]:
        """The next rows, each with storage of its own: filtering a step frees what it drops."""
        if min(lengths, default=1) < 0:
            raise ExperienceFormatError(f"tensor {self._name!r} has a row of negative length.")
        data = self._next(sum(lengths))
        ends = list(accumulate(length * self._dtype.itemsize for length in lengths))
        rows = map(data.__getitem__, map(slice, [0, *ends], ends))
        if 0 in lengths:
            return [_copy(row, self._dtype) for row in rows]
        # `_copy` without a Python call a row: there are tens of thousands of them.
        return list(map(partial(torch.frombuffer, dtype=self._dtype), map(bytearray, rows)))

    def check_end(self) -> None:
        """Raise unless everything was handed out."""
        if self._position != len(self._data):
            raise ExperienceFormatError(f"tensor {self._name!r} is longer than its rows together.")


def _copy(data: memoryview, dtype: torch.dtype) -> Tensor:
    """A tensor of these bytes, in memory of its own: a bytearray, which is allocated and filled in a fraction of the
    time that torch takes for a small tensor."""
    return torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)


def read_streams(section: memoryview) -> dict[str, Stream]:
    """The streams of a safetensors section, by name.

    Raises:
        ExperienceFormatError: not safetensors, an unknown dtype, or tensors that do not fill the section exactly.
    """
    size = _LENGTH.unpack_from(section)[0] if len(section) >= _LENGTH.size else len(section)
    start = _LENGTH.size + size
    if start > len(section):
        raise ExperienceFormatError(f"tensor header of {size} bytes in a section of {len(section)}.")
    entries = json.loads(str(section[_LENGTH.size : start], "utf-8"))
    if not isinstance(entries, dict):
        raise ExperienceFormatError("tensor header is not a table.")
    streams, end = {}, start
    for name, entry in entries.items():
        stop = end + _stream_size(name, entry, end - start)
        if stop > len(section):
            raise ExperienceFormatError(f"tensor {name!r} ends after the payload.")
        streams[name] = Stream(name, TORCH_DTYPES[name.rpartition(".")[2]], section[end:stop])
        end = stop
    if end != len(section):
        raise ExperienceFormatError(f"{len(section) - end} bytes belong to no tensor.")
    return streams


def _stream_size(name: str, entry: Any, offset: int) -> int:
    """Bytes of a stream, whose header entry must be exactly what `StreamWriter` writes at this offset."""
    dtype_name = name.rpartition(".")[2]
    if dtype_name not in TORCH_DTYPES:
        raise ExperienceFormatError(f"tensor {name!r} has no known dtype. Known: {', '.join(TORCH_DTYPES)}.")
    begin, stop = entry["data_offsets"]
    code = SAFETENSORS_CODES[dtype_name]
    size, rest = divmod(stop - begin, 1 if code == "U8" else TORCH_DTYPES[dtype_name].itemsize)
    expected = {"dtype": code, "shape": [size], "data_offsets": [offset, stop]}
    if entry != expected or begin != offset or rest or size < 0:
        raise ExperienceFormatError(f"tensor {name!r} has the header entry {entry!r:.200}, expected {expected!r:.200}.")
    return stop - begin
