"""The bytes of an append-only file of experiences: a header that names the file, then one frame a write.

file header, 16 bytes       frame                                            after the payload
0   4  b"TRXB"              0   4  b"FRAM"                                   4  b"DONE"
4   1  version, 1           4   4  number of experiences, little-endian
5   3  zero                 8   8  length of the payload, little-endian
8   8  random id            16  8  xxh3_64 of the payload, little-endian
                            24  8  xxh3_64 of the 24 bytes before
                            32  .. payload of version 2

What a killed writer or a power failure leaves is another thing than damage: a frame is torn when the file ends inside
it or is zero from its end backwards (blocks that were promised but never written). The header has a checksum
of its own, so that a damaged length is never taken for a torn frame: everything behind it would be cut off.
"""

import os
import secrets
import struct
from dataclasses import dataclass

import xxhash

MAGIC = b"TRXB"
VERSION = 1
FILE_HEADER = struct.Struct("<4sB3x8s")
FRAME_MAGIC, FRAME_END = b"FRAM", b"DONE"
_FRAME = struct.Struct("<4sIQQ")
_CHECKSUM = struct.Struct("<Q")
_HEAD = _FRAME.size + _CHECKSUM.size

# A reader that looks while a tail is cut off and written again may mix both; a second look then differs from the first.
_LOOKS = 10


class TornError(Exception):
    """The file ends inside a frame, or with it: there is nothing whole at this offset yet."""


class DamagedError(Exception):
    """The bytes at this offset were never written by this library; the message says what is wrong with them."""


@dataclass(frozen=True)
class Frame:
    """A frame's payload, the number of experiences in it, and the offset of the next frame."""

    payload: bytes
    count: int
    end: int


def new_file_header() -> bytes:
    """The header of a new file, with an id of its own."""
    return FILE_HEADER.pack(MAGIC, VERSION, secrets.token_bytes(8))


def read_file_header(data: bytes) -> str:
    """The id in a file's first bytes.

    Raises:
        DamagedError: these are not the first bytes of such a file, or of this version.
    """
    if len(data) < FILE_HEADER.size:
        raise DamagedError(f"{len(data)} bytes, shorter than the header of {FILE_HEADER.size}")
    magic, version, identity = FILE_HEADER.unpack_from(data)
    if magic != MAGIC:
        raise DamagedError(f"starts with {magic!r}, expected {MAGIC!r}")
    if version != VERSION:
        raise DamagedError(f"has version {version}, expected {VERSION}")
    return identity.hex()


def pack_frame(payload: bytes, count: int) -> tuple[bytes, bytes, bytes]:
    """Head, payload and end of a frame."""
    head = _FRAME.pack(FRAME_MAGIC, count, len(payload), xxhash.xxh3_64_intdigest(payload))
    return head + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(head)), payload, FRAME_END


def read_frame(descriptor: int, offset: int) -> Frame:
    """The frame at an offset of an open file.

    Raises:
        TornError: there is no whole frame (yet).
        DamagedError: there is something else.
    """
    for _ in range(_LOOKS):
        head = os.pread(descriptor, _HEAD, offset)
        try:
            return _read_frame(descriptor, offset, head)
        except DamagedError as error:
            damage = error
        if os.pread(descriptor, _HEAD, offset) == head:
            raise damage
    raise TornError


def skip_frame(descriptor: int, offset: int) -> int:
    """The offset of the next frame; of this one only head and end are looked at.

    Raises:
        TornError, DamagedError: as `read_frame`.
    """
    head = os.pread(descriptor, _HEAD, offset)
    length = _read_head(descriptor, offset, head)[1]
    end = offset + _HEAD + length + len(FRAME_END)
    if os.fstat(descriptor).st_size < end:
        raise TornError
    mark = os.pread(descriptor, len(FRAME_END), end - len(FRAME_END))
    if mark == bytes(len(FRAME_END)) and _only_zeros(descriptor, end):
        raise TornError
    if mark != FRAME_END:
        raise DamagedError("the frame that starts here does not end as it should")
    return end


def _read_frame(descriptor: int, offset: int, head: bytes) -> Frame:
    count, length, checksum = _read_head(descriptor, offset, head)
    end = skip_frame(descriptor, offset)
    payload = _pread(descriptor, length, offset + _HEAD)
    if len(payload) != length or xxhash.xxh3_64_intdigest(payload) != checksum:
        raise DamagedError("the checksum of its payload does not match")
    return Frame(payload, count, end)


def _read_head(descriptor: int, offset: int, head: bytes) -> tuple[int, int, int]:
    """Count, length and checksum out of a frame's head."""
    if len(head) < _HEAD:
        raise TornError
    magic, count, length, checksum = _FRAME.unpack_from(head)
    if magic == FRAME_MAGIC and _CHECKSUM.unpack_from(head, _FRAME.size)[0] == xxhash.xxh3_64_intdigest(
        head[: _FRAME.size]
    ):
        return count, length, checksum
    if head[-1] == 0 and _only_zeros(descriptor, offset + len(head.rstrip(b"\0"))):
        raise TornError
    raise DamagedError("no frame starts here")


def _only_zeros(descriptor: int, offset: int, chunk: int = 1 << 20) -> bool:
    while data := os.pread(descriptor, chunk, offset):
        if data.strip(b"\0"):
            return False
        offset += len(data)
    return True


def _pread(descriptor: int, size: int, offset: int) -> bytes:
    """`size` bytes, fewer at the end of the file; one `os.pread` returns 2 GB at most."""
    first = os.pread(descriptor, size, offset)
    if len(first) == size or not first:
        return first
    parts, got = [first], len(first)
    while got < size and (more := os.pread(descriptor, size - got, offset + got)):
        parts.append(more)
        got += len(more)
    return b"".join(parts)
