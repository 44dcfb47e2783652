"""Reads what Trinity-RFT wrote: payloads of version 1, and, if asked to, plain pickles.

Version 1: magic, version byte, two little-endian 8-byte lengths, metadata as a pickle of plain data, and tensors in
safetensors format under "<item>:<field>" and "<item>:multi_modal_inputs:<key>".
"""

import io
import pickle
import pickletools
import struct
from collections.abc import Callable
from typing import Any, ClassVar

import safetensors.torch
from torch import Tensor

from trinity_lightning.common.experience.codec import known_dtype
from trinity_lightning.common.experience.experience import (
    RESPONSE_FIELDS,
    TOKEN_FIELDS,
    CustomField,
    Experience,
    ExperienceFormatError,
)
from trinity_lightning.common.experience.reading import check_size, faults_of

VERSION = 1
_HEADER = struct.Struct("<4sBQQ")
_PLAIN_FIELDS = ("eid", "reward", "truncate_status", "info", "metrics", "prompt_length", "response_text", "prompt_text")
_PLAIN_FIELDS += ("messages", "tools", "chosen_messages", "rejected_messages")


def read_version_1(view: memoryview) -> list[Experience]:
    """The experiences of a payload of version 1.

    The format does not tell single turns from several: an item whose action mask is as a single turn's reads as one.

    Raises:
        ExperienceFormatError: the payload is damaged, or its metadata hold more than plain data.
    """
    if len(view) < _HEADER.size:
        raise ExperienceFormatError(f"payload of {len(view)} bytes is shorter than its header of {_HEADER.size}.")
    _, _, metadata_size, tensor_size = _HEADER.unpack_from(view)
    check_size(view, _HEADER.size + metadata_size + tensor_size)
    split = _HEADER.size + metadata_size
    metadata = load_plain(bytes(view[_HEADER.size : split]))
    with faults_of("payload cannot be read"):
        return _read_items(metadata, safetensors.torch.load(bytes(view[split:])))


def _read_items(metadata: Any, tensors: dict[str, Tensor]) -> list[Experience]:
    items = metadata["items"]
    if metadata["version"] != VERSION or metadata["num_items"] != len(items):
        raise ExperienceFormatError(f"metadata: {metadata['num_items']!r:.40} items announced, {len(items)} there.")
    experiences = [_read_item(index, item, tensors) for index, item in enumerate(items)]
    if tensors:
        raise ExperienceFormatError(f"tensors that belong to no known field: {sorted(tensors)!r:.200}.")
    return experiences


def _read_item(index: int, item: dict[str, Any], tensors: dict[str, Tensor]) -> Experience:
    """One experience; its tensors are taken out of `tensors`."""
    keys = item.get("multi_modal_input_keys") or []
    fields = {name: item[name] for name in _PLAIN_FIELDS if name in item}
    fields |= {name: tensors.pop(f"{index}:{name}", None) for name in (*TOKEN_FIELDS, *RESPONSE_FIELDS)}
    fields["multi_modal_inputs"] = {key: tensors.pop(f"{index}:multi_modal_inputs:{key}") for key in keys} or None
    fields["custom_fields"] = [
        CustomField(
            custom["source_field"], custom["destination_field"], known_dtype(custom["data_type"].removeprefix("torch."))
        )
        for custom in item.get("custom_fields") or []
    ]
    if _is_single_turn(fields):
        fields["action_mask"] = None  # the constructor makes it, and takes a given one for several turns
    return Experience(**fields)


def _is_single_turn(fields: dict[str, Any]) -> bool:
    """Whether the stored action mask is a single turn's: all true, or all false if the prompt was truncated."""
    mask, tokens = fields["action_mask"], fields["tokens"]
    if mask is None or tokens is None or (fields["chosen"] is not None and fields["rejected"] is not None):
        return False
    if fields.get("truncate_status") == "prompt_truncated":
        return fields["logprobs"] is not None and len(mask) == len(fields["logprobs"]) and not mask.any()
    prompt_length = fields.get("prompt_length", 1)
    return prompt_length > 0 and len(mask) > 0 and len(mask) == len(tokens) - prompt_length and bool(mask.all())


# -- Pickles -----------------------------------------------------------------------------------------------------------

_MAX_DEPTH = 100
_MAX_KEY_PARTS = 100
# Shared containers make a small pickle stand for a huge value; this many parts a byte is more than honest data have.
_MAX_PARTS_PER_BYTE = 64
_NAMES = {ord(opcode.code): opcode.name for opcode in pickletools.opcodes}
_OPCODES = {opcode.name: ord(opcode.code) for opcode in pickletools.opcodes}
# Plain values, containers and the memory of those; and what names an object, to be refused by that name.
_ALLOWED = "PROTO FRAME STOP MARK MEMOIZE BINPUT LONG_BINPUT BINGET LONG_BINGET NONE NEWTRUE NEWFALSE BINFLOAT BININT "
_ALLOWED += "BININT1 BININT2 LONG1 LONG4 SHORT_BINUNICODE BINUNICODE BINUNICODE8 SHORT_BINBYTES BINBYTES BINBYTES8 "
_ALLOWED += "BYTEARRAY8 EMPTY_LIST EMPTY_DICT EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 APPEND APPENDS SETITEM SETITEMS "
_ALLOWED += "GLOBAL INST STACK_GLOBAL"


class _Allowed(dict[int, Any]):
    def __missing__(self, code: int) -> Any:
        raise ExperienceFormatError(f"metadata: refuses the opcode {_NAMES.get(code, code)}: not plain data.")


class _PlainUnpickler(pickle._Unpickler):
    """Python's own unpickler in Python, without the opcodes that import, make or call an object."""

    read: Callable[[int], bytes]
    append: Callable[[Any], None]
    stack: list[Any]
    metastack: list[list[Any]]
    dispatch: ClassVar[dict[int, Any]] = _Allowed(
        {_OPCODES[name]: pickle._Unpickler.dispatch[_OPCODES[name]] for name in _ALLOWED.split()}
    )

    def find_class(self, module: str, name: str) -> Any:
        raise ExperienceFormatError(f"metadata: refuses {f'{module}.{name}':.200}: not plain data.")

    def load_bytearray8(self) -> None:
        """As pickle's, but sets no memory aside for bytes that are not there."""
        (size,) = struct.unpack("<Q", self.read(8))
        self.append(bytearray(self.read(size)))

    def load_setitem(self) -> None:
        """As pickle's, of keys that can be hashed: Python's hash of a tuple follows any depth and every shared part."""
        _check_key(self.stack[-2])
        super().load_setitem()  # type: ignore[misc]

    def load_setitems(self) -> None:
        """The same, of all items since the mark."""
        for key in self.stack[::2]:
            _check_key(key)
        super().load_setitems()  # type: ignore[misc]

    dispatch[_OPCODES["BYTEARRAY8"]] = load_bytearray8
    dispatch[_OPCODES["SETITEM"]] = load_setitem
    dispatch[_OPCODES["SETITEMS"]] = load_setitems


def load_plain(data: bytes) -> Any:
    """The plain value that a pickle of protocol 2 or higher describes; nothing is imported or called for it.

    Raises:
        ExperienceFormatError: it holds anything but plain containers, strings, numbers and bytes, is nested more than
            100 deep, contains itself, or is damaged.
    """
    unpickler = _PlainUnpickler(io.BytesIO(data))
    with faults_of("metadata: no readable pickle"):
        value = unpickler.load()
        if unpickler.stack or unpickler.metastack or unpickler.read(1):
            raise ExperienceFormatError("metadata: the pickle does not end with its one value.")
    parts, _ = _measure(value, {})
    if parts > _MAX_PARTS_PER_BYTE * len(data):
        raise ExperienceFormatError("metadata: the pickle stands for a value out of all proportion to its size.")
    return value


def _check_key(key: Any) -> None:
    parts, _ = _measure(key, {})
    if parts > _MAX_KEY_PARTS:
        raise ExperienceFormatError(f"metadata: a key of a dict has more than {_MAX_KEY_PARTS} parts.")


def _measure(value: Any, known: dict[int, tuple[int, int]], depth: int = 0) -> tuple[int, int]:
    """How many values a value is made of, shared ones counted every time, and how many containers deep it is.

    `known` holds both by identity; `depth` containers are around the value.
    """
    if not isinstance(value, (list, dict, tuple)):
        return 1, 0
    if depth + known.get(id(value), (0, 1))[1] > _MAX_DEPTH:
        raise ExperienceFormatError(f"metadata: nested more than {_MAX_DEPTH} deep, or a container contains itself.")
    if id(value) not in known:
        children = [*value.keys(), *value.values()] if isinstance(value, dict) else value
        parts, heights = zip((1, 0), *(_measure(child, known, depth + 1) for child in children), strict=True)
        known[id(value)] = sum(parts), 1 + max(heights)
    return known[id(value)]


class _Unpickler(pickle.Unpickler):
    """Finds classes that have moved since the pickle was written."""

    def find_class(self, module: str, name: str) -> Any:
        moved = name in ("EID", "CustomField") and module.startswith("trinity_lightning.common.experience.")
        return super().find_class(Experience.__module__ if moved else module, name)


def read_pickle(view: memoryview) -> list[Experience]:
    """The experiences of a plain pickle, of one or of a list. Unpickling runs whatever code the bytes name.

    Raises:
        ExperienceFormatError: no pickle, or one of something else.
    """
    with faults_of("no readable pickle"):
        value = _Unpickler(io.BytesIO(view)).load()
    experiences = value if isinstance(value, list) else [value]
    for item in experiences:
        if not isinstance(item, Experience):
            raise ExperienceFormatError(f"expected a pickle of experiences, got one of {type(item).__name__}.")
    return experiences
