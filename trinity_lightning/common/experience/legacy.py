"""Reads what Trinity-RFT wrote: payloads of version 1, and, where asked for, plain pickles.

Version 1: magic, version byte, two little-endian 8-byte lengths, metadata as a pickle of plain data, and tensors in
safetensors format under "<item>:<field>" and "<item>:multi_modal_inputs:<key>".
"""

import pickle
import struct
from typing import Any

import safetensors.torch
from torch import Tensor

from trinity_lightning.common.experience.custom_field import CustomField
from trinity_lightning.common.experience.errors import ExperienceFormatError
from trinity_lightning.common.experience.experience import RESPONSE_FIELDS, TOKEN_FIELDS, Experience
from trinity_lightning.common.experience.plain_pickle import load_plain
from trinity_lightning.common.experience.values import known_dtype

VERSION = 1
_HEADER = struct.Struct("<4sBQQ")
_PLAIN_FIELDS = (
    "eid",
    "reward",
    "truncate_status",
    "info",
    "metrics",
    "prompt_length",
    "response_text",
    "prompt_text",
    "messages",
    "tools",
    "chosen_messages",
    "rejected_messages",
)


def read_version_1(view: memoryview) -> list[Experience]:
    """The experiences of a payload of version 1.

    The format does not tell single turns from several: an item whose action mask is as a single turn's reads as one.

    Raises:
        ExperienceFormatError: the payload is damaged, or its metadata hold more than plain data.
    """
    if len(view) < _HEADER.size:
        raise ExperienceFormatError(f"payload of {len(view)} bytes is shorter than its header of {_HEADER.size}.")
    _, _, metadata_size, tensor_size = _HEADER.unpack_from(view)
    expected = _HEADER.size + metadata_size + tensor_size
    if expected != len(view):
        raise ExperienceFormatError(f"payload of {len(view)} bytes, expected {expected}: cut off, or followed by more.")
    split = _HEADER.size + metadata_size
    metadata = load_plain(bytes(view[_HEADER.size : split]))
    try:
        return _read_items(metadata, safetensors.torch.load(bytes(view[split:])))
    except ExperienceFormatError:
        raise
    except Exception as error:  # whatever a forged payload provokes in a parser is the payload's fault
        raise ExperienceFormatError(f"payload cannot be read: {type(error).__name__}: {error}") from error


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
            custom["source_field"],
            custom["destination_field"],
            known_dtype(custom["data_type"].removeprefix("torch.")),
        )
        for custom in item.get("custom_fields") or []
    ]
    if _is_single_turn(fields):
        fields["action_mask"] = None  # the constructor makes it, and takes a given one for several turns
    return Experience(**fields)


def _is_single_turn(fields: dict[str, Any]) -> bool:
    """Whether the stored action mask is a single turn's: all true, or all false where the prompt was truncated."""
    mask, tokens = fields["action_mask"], fields["tokens"]
    if mask is None or tokens is None or (fields["chosen"] is not None and fields["rejected"] is not None):
        return False
    if fields.get("truncate_status") == "prompt_truncated":
        return fields["logprobs"] is not None and len(mask) == len(fields["logprobs"]) and not mask.any()
    prompt_length = fields.get("prompt_length", 1)
    return prompt_length > 0 and len(mask) > 0 and len(mask) == len(tokens) - prompt_length and bool(mask.all())


def read_pickle(view: memoryview) -> list[Experience]:
    """The experiences of a plain pickle, of one or of a list. Unpickling runs whatever code the bytes name.

    Raises:
        ExperienceFormatError: no pickle, or one of something else.
    """
    try:
        value = pickle.loads(view)  # noqa: S301  # only on explicit request, for what the caller wrote
    except Exception as error:  # unpickling may raise anything
        raise ExperienceFormatError(f"no readable pickle: {type(error).__name__}: {error}") from error
    experiences = value if isinstance(value, list) else [value]
    for item in experiences:
        if not isinstance(item, Experience):
            raise ExperienceFormatError(f"expected a pickle of experiences, got one of {type(item).__name__}.")
    return experiences
