"""Payloads of version 1, which Trinity-RFT writes, and plain pickles of experiences: both are only read.

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

from trinity_lightning.common.experience.fields import (
    EID,
    RESPONSE_FIELDS,
    TOKEN_FIELDS,
    CustomField,
    ExperienceFormatError,
)
from trinity_lightning.common.experience.payload import MAGIC, check_size, format_errors, known_dtype

# -- version 1 ---------------------------------------------------------------------------------------------------------

VERSION = 1
_HEADER = struct.Struct("<4sBQQ")
_PLAIN_FIELDS = ("eid", "reward", "truncate_status", "info", "metrics", "prompt_length", "response_text", "prompt_text")
_PLAIN_FIELDS += ("messages", "tools", "chosen_messages", "rejected_messages")


def is_version_1(view: memoryview) -> bool:
    """True if the bytes begin as a payload of version 1 does."""
    return view[: len(MAGIC) + 1] == MAGIC + bytes([VERSION])


def read_version_1(view: memoryview) -> list[dict[str, Any]]:
    """The constructor's arguments for each experience of a payload of version 1.

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
    with format_errors():
        return _read_items(metadata, safetensors.torch.load(bytes(view[split:])))


def _read_items(metadata: Any, tensors: dict[str, Tensor]) -> list[dict[str, Any]]:
    items = metadata["items"]
    if metadata["version"] != VERSION or metadata["num_items"] != len(items):
        raise ExperienceFormatError(f"metadata: {metadata['num_items']!r:.40} items announced, {len(items)} there.")
    arguments = [_read_item(index, item, tensors) for index, item in enumerate(items)]
    if tensors:
        raise ExperienceFormatError(f"tensors that belong to no known field: {sorted(tensors)!r:.200}.")
    return arguments


def _read_item(index: int, item: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    """The arguments for one experience, whose tensors are taken out of `tensors`."""
    keys = item.get("multi_modal_input_keys") or []
    arguments = {name: item[name] for name in _PLAIN_FIELDS if name in item}
    arguments |= {name: tensors.pop(f"{index}:{name}", None) for name in (*TOKEN_FIELDS, *RESPONSE_FIELDS)}
    arguments["multi_modal_inputs"] = {key: tensors.pop(f"{index}:multi_modal_inputs:{key}") for key in keys} or None
    arguments["custom_fields"] = [
        CustomField(
            custom["source_field"], custom["destination_field"], known_dtype(custom["data_type"].removeprefix("torch."))
        )
        for custom in item.get("custom_fields") or []
    ]
    if _is_single_turn(arguments):
        # The constructor makes it, and would take a given mask as a sign of several turns.
        arguments["action_mask"] = None
    return arguments


def _is_single_turn(fields: dict[str, Any]) -> bool:
    """True if the stored action mask is a single turn's: all true, or all false if the prompt was truncated."""
    mask, tokens = fields["action_mask"], fields["tokens"]
    if mask is None or tokens is None or (fields["chosen"] is not None and fields["rejected"] is not None):
        return False
    if fields.get("truncate_status") == "prompt_truncated":
        return fields["logprobs"] is not None and len(mask) == len(fields["logprobs"]) and not mask.any()
    prompt_length = fields.get("prompt_length", 1)
    return prompt_length > 0 and len(mask) > 0 and len(mask) == len(tokens) - prompt_length and bool(mask.all())


# -- pickles of plain data ---------------------------------------------------------------------------------------------

_MAX_DEPTH = 100
_MAX_KEY_PARTS = 100
# Shared containers make a small pickle stand for a huge value. Honest data have fewer parts a byte than this.
_MAX_PARTS_PER_BYTE = 64
_NAMES = {ord(opcode.code): opcode.name for opcode in pickletools.opcodes}
_OPCODES = {opcode.name: ord(opcode.code) for opcode in pickletools.opcodes}
# Plain values, containers and the memo for both; and opcodes that name an object, which is refused by that name.
_ALLOWED = "PROTO FRAME STOP MARK MEMOIZE BINPUT LONG_BINPUT BINGET LONG_BINGET NONE NEWTRUE NEWFALSE BINFLOAT BININT "
_ALLOWED += "BININT1 BININT2 LONG1 LONG4 SHORT_BINUNICODE BINUNICODE BINUNICODE8 SHORT_BINBYTES BINBYTES BINBYTES8 "
_ALLOWED += "BYTEARRAY8 EMPTY_LIST EMPTY_DICT EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 APPEND APPENDS SETITEM SETITEMS "
_ALLOWED += "GLOBAL INST STACK_GLOBAL"


class _Allowed(dict[int, Any]):
    """The methods of the allowed opcodes; any other opcode is refused by its name."""

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
        """Load bytes as pickle does, but without setting memory aside for bytes that are not there."""
        (size,) = struct.unpack("<Q", self.read(8))
        self.append(bytearray(self.read(size)))

    def load_setitem(self) -> None:
        """Set an item whose key can be hashed: Python's hash of a tuple follows any depth and every shared part."""
        _check_key(self.stack[-2])
        super().load_setitem()  # type: ignore[misc]

    def load_setitems(self) -> None:
        """Set all items since the mark, with the same check of their keys."""
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
    with format_errors("metadata: no readable pickle"):
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
    """The number of values within a value, shared ones counted every time, and the depth of its containers.

    Args:
        value: anything.
        known: both numbers of the containers that were measured already, by their identity.
        depth: number of containers around the value.
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


# -- pickles of experiences --------------------------------------------------------------------------------------------


class _Unpickler(pickle.Unpickler):
    """Finds classes that have moved since the pickle was written."""

    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("trinity_lightning.common.experience.") and name in ("EID", "CustomField"):
            return EID if name == "EID" else CustomField
        return super().find_class(module, name)


def read_pickle(view: memoryview) -> Any:
    """The value of a plain pickle. Unpickling runs any code that the bytes name.

    Raises:
        ExperienceFormatError: the bytes are no pickle.
    """
    with format_errors("no readable pickle"):
        return _Unpickler(io.BytesIO(view)).load()
