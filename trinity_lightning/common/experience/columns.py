"""The plain fields of experiences as lists, and the rules that columns keep, on the way out as on the way in."""

from collections.abc import Callable, Sequence
from operator import attrgetter
from types import NoneType
from typing import Any

import numpy as np

from trinity_lightning.common.experience.custom_field import CustomField
from trinity_lightning.common.experience.dtypes import DTYPE_NAMES
from trinity_lightning.common.experience.errors import ExperienceError
from trinity_lightning.common.experience.experience import RESPONSE_FIELDS, Experience
from trinity_lightning.common.experience.validation import reward_value
from trinity_lightning.common.experience.values import known_dtype

Columns = dict[str, list[Any]]

REQUIRED: dict[str, tuple[type, ...]] = {
    "eid.batch": (int, str),
    "eid.task": (int, str),
    "eid.run": (int, str),
    "eid.step": (int, str),
    "eid.suffix": (int, str),
    "experience_type": (str,),
    "prompt_length": (int,),
}
# Left out where they are empty throughout: None, or the empty container that is the only type.
OPTIONAL: dict[str, tuple[type, ...]] = {
    "reward": (float, NoneType),
    "truncate_status": (str, NoneType),
    "info": (dict,),
    "metrics": (dict,),
    "response_text": (str, NoneType),
    "prompt_text": (str, NoneType),
    "messages": (list, NoneType),
    "tools": (list, NoneType),
    "chosen_messages": (list, NoneType),
    "rejected_messages": (list, NoneType),
    "multi_modal_inputs": (dict, NoneType),
    "custom_fields": (list,),
}
_TYPES = REQUIRED | OPTIONAL


def plain_columns(experiences: Sequence[Experience]) -> Columns:
    """One list a plain field, those of the EID as "eid.batch" and so on.

    Raises:
        ExperienceError: a value has a type that its field must not have.
    """
    columns = {name: list(map(attrgetter(name), experiences)) for name in _TYPES}
    for name, column in columns.items():
        if not set(map(type, column)) <= set(_TYPES[name]):  # assigned after construction, perhaps by numpy arithmetic
            convert = reward_value if name == "reward" else _plain_scalar
            columns[name] = list(map(convert, column))
    if any(columns["custom_fields"]):
        columns["custom_fields"] = [custom_field_rows(fields) for fields in columns["custom_fields"]]
    return columns


def _plain_scalar(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def custom_field_rows(custom_fields: Sequence[CustomField]) -> list[list[str]]:
    """Custom fields as rows [source, destination, dtype name]."""
    for custom in custom_fields:
        if custom.data_type not in DTYPE_NAMES:
            raise ExperienceError(
                f"custom field {custom.destination_field!r}: {custom.data_type} cannot be serialized."
            )
    return [[c.source_field, c.destination_field, DTYPE_NAMES[c.data_type]] for c in custom_fields]


def drop_empty(columns: Columns) -> Columns:
    """The columns without the optional ones in which nothing is set."""
    kept = {}
    for name, column in columns.items():
        empty = not any(column) if NoneType not in _TYPES[name] else all(value is None for value in column)
        if name in REQUIRED or not empty:
            kept[name] = column
    return kept


def restore_empty(columns: Columns, count: int) -> Columns:
    """The reverse of `drop_empty`: every column of the table is there."""
    missing: dict[str, Callable[[], Any]] = {name: _TYPES[name][0] for name in OPTIONAL if NoneType not in _TYPES[name]}
    return {
        name: columns[name] if name in columns else [missing[name]() if name in missing else None for _ in range(count)]
        for name in _TYPES
    }


def find_wrong_type(columns: Columns) -> tuple[int, str] | None:
    """The first value whose type its column must not have, as (row, message)."""
    for name, column in columns.items():
        if set(map(type, column)) <= set(_TYPES[name]):
            continue
        for row, value in enumerate(column):
            if not isinstance(value, _TYPES[name]):
                expected = " or ".join(kind.__name__ for kind in _TYPES[name])
                return row, f"{name}: expected {expected}, got {type(value).__name__}."
    return None


def find_misfit(columns: Columns, lengths: dict[str, np.ndarray]) -> tuple[int, str] | None:
    """The first experience whose parts do not fit together, as (row, message): the constructor's rules, on columns.

    Args:
        columns: the plain fields.
        lengths: length of every tensor field, int64 [B], -1 where an experience has none.
    """
    types = np.array(columns["experience_type"], dtype=object)
    single, pair = types == "single_turn", types == "dpo"
    truncated = single & (np.array(columns["truncate_status"], dtype=object) == "prompt_truncated")
    tokens, prompt = lengths["tokens"], np.array(columns["prompt_length"], dtype=object)
    responses = np.where(truncated & (lengths["logprobs"] >= 0), lengths["logprobs"], tokens - prompt)
    rules = {
        "experience_type: expected single_turn, multi_turn or dpo": single | pair | (types == "multi_turn"),
        "tokens: expected a tensor": tokens >= 0,
        "chosen, rejected: expected in a dpo experience": ~pair
        | ((lengths["chosen"] >= 0) & (lengths["rejected"] >= 0)),
        "prompt_length: expected within the tokens": (prompt >= single) & (prompt <= tokens - (single & ~truncated)),
    }
    for name in RESPONSE_FIELDS:
        rules[f"{name}: expected one value a response token"] = (lengths[name] < 0) | (lengths[name] == responses)
    for message, kept in rules.items():
        if not kept.all():
            row = int(np.flatnonzero(~kept.astype(bool))[0])
            found = {name: int(length[row]) for name, length in lengths.items() if length[row] >= 0}
            return row, f"{message}, got lengths {found} and prompt_length {prompt[row]}."
    return None


def read_custom_fields(column: list[list[list[str]]]) -> list[list[CustomField]]:
    """The reverse of `custom_field_rows`, for every experience."""
    known: dict[tuple[str, ...], CustomField] = {}
    result = []
    for rows in column:
        for row in rows:
            if tuple(row) not in known:
                source, destination, dtype = row
                known[tuple(row)] = CustomField(source, destination, known_dtype(dtype))
        result.append([known[tuple(row)] for row in rows])
    return result
