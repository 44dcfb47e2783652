"""The bytes of a payload: header, tensors, metadata, under one checksum.

offset  size  content
0       4     b"TRXP"
4       1     version, 2
5       3     zero
8       8     length of the tensors, little-endian
16      8     length of the metadata, little-endian
24      8     xxh3_64 of everything else, little-endian
32      ...   tensors in safetensors format, then metadata in msgpack
"""

import io
import struct
from collections.abc import Callable
from typing import Any

import xxhash

from trinity_lightning.common.experience.errors import ExperienceFormatError
from trinity_lightning.common.experience.pages import advise_huge_pages
from trinity_lightning.common.experience.streams import StreamWriter, read_streams
from trinity_lightning.common.experience.values import Decoder, Encoder

MAGIC = b"TRXP"
VERSION = 2
_HEADER = struct.Struct("<4sB3xQQ")
_CHECKSUM = struct.Struct("<Q")
_BODY = _HEADER.size + _CHECKSUM.size


def pack(value: Any, streams: StreamWriter | None = None) -> bytes:
    """A value, tensors and arrays inside it included, as one payload.

    Args:
        value: plain containers, strings, numbers, bytes, tensors and numpy arrays, nested as you like.
        streams: where further rows were collected, to be read back by who knows of them.

    Raises:
        ExperienceError: something inside cannot be encoded; the message says where.
    """
    streams = StreamWriter() if streams is None else streams
    metadata = Encoder(streams).pack(value)
    tensor_size = streams.finish()
    # Every byte is written once, in place: BytesIO takes over bytes that nobody else holds, lets them be written to,
    # and gives them away again, all without a copy.
    buffer = io.BytesIO(bytes(_BODY + tensor_size + len(metadata)))
    with buffer.getbuffer() as view:
        advise_huge_pages(view)
        _HEADER.pack_into(view, 0, MAGIC, VERSION, tensor_size, len(metadata))
        digest = xxhash.xxh3_64(view[: _HEADER.size])
        with view[_BODY : _BODY + tensor_size] as section:
            streams.write(section, digest.update)
        view[_BODY + tensor_size :] = metadata
        digest.update(metadata)
        _CHECKSUM.pack_into(view, _HEADER.size, digest.intdigest())
    return buffer.getvalue()


def _checksum(view: memoryview) -> int:
    digest = xxhash.xxh3_64()
    with view[: _HEADER.size] as head, view[_BODY:] as body:
        digest.update(head)
        digest.update(body)
    return digest.intdigest()


def unpack(view: memoryview, read: Callable[[Any, dict], Any] = lambda value, streams: value) -> Any:
    """What `pack` packed.

    Args:
        view: the payload, as contiguous bytes.
        read: given the value and the streams, takes further rows from the streams and makes the result.

    Raises:
        ExperienceFormatError: the payload is damaged, truncated, or not of this version.
    """
    if len(view) < _BODY:
        raise ExperienceFormatError(f"payload of {len(view)} bytes is shorter than its header of {_BODY}.")
    magic, version, tensor_size, metadata_size = _HEADER.unpack_from(view)
    if magic != MAGIC or version != VERSION:
        raise ExperienceFormatError(f"expected magic {MAGIC!r} and version {VERSION}, got {magic!r} and {version}.")
    if _BODY + tensor_size + metadata_size != len(view):
        expected = _BODY + tensor_size + metadata_size
        raise ExperienceFormatError(f"payload of {len(view)} bytes, expected {expected}: cut off, or followed by more.")
    if _checksum(view) != _CHECKSUM.unpack_from(view, _HEADER.size)[0]:
        raise ExperienceFormatError("checksum does not match: the payload is damaged.")
    try:
        streams = read_streams(view[_BODY : _BODY + tensor_size])
        result = read(Decoder(streams).unpack(view[_BODY + tensor_size :]), streams)
        for stream in streams.values():
            stream.check_end()
    except ExperienceFormatError:
        raise
    except Exception as error:  # whatever a forged payload provokes in a parser is the payload's fault
        raise ExperienceFormatError(f"payload cannot be read: {type(error).__name__}: {error}") from error
    return result
