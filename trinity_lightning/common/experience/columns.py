"""The plain fields of experiences as lists, and the rules that columns keep, on the way out as on the way in."""

from collections.abc import Sequence
from itertools import repeat
from operator import eq
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
_LARGE = 2**62


def plain_columns(experiences: Sequence[Experience], columns: Columns) -> Columns:
    """The plain ones of an experience's fields, with plain values.

    Raises:
        ExperienceError: a value has a type that its field must not have; the message names experience and field.
    """
    plain = {name: columns[name] for name in _TYPES}
    for name, column in plain.items():
        if not _fits(name, column):  # assigned after construction, perhaps by numpy arithmetic
            plain[name] = list(map(reward_value if name == "reward" else _plain_scalar, column))
            problem = find_wrong_type({name: plain[name]})
            if problem:
                raise ExperienceError(f"experience {experiences[problem[0]].eid.uid}: {problem[1]}")
    if any(plain["custom_fields"]):
        plain["custom_fields"] = [custom_field_rows(fields) for fields in plain["custom_fields"]]
    return plain


def _is_none(column: list[Any]) -> bool:
    """Whether there are only Nones: by type, as arrays compare with None element by element."""
    return not column or (column[0] is None and set(map(type, column)) == {type(None)})


def _fits(name: str, column: list[Any]) -> bool:
    """Whether all values have exactly a type that the column may have."""
    if NoneType in _TYPES[name] and _is_none(column):
        return True
    return set(map(type, column)) <= set(_TYPES[name])


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
        empty = not any(column) if NoneType not in _TYPES[name] else _is_none(column)
        if name in REQUIRED or not empty:
            kept[name] = column
    return kept


def restore_empty(columns: Columns, count: int) -> Columns:
    """The reverse of `drop_empty`: every column of the table is there."""
    return {name: columns[name] if name in columns else _empty_column(name, count) for name in _TYPES}


def _empty_column(name: str, count: int) -> list[Any]:
    make = None if NoneType in _TYPES[name] else _TYPES[name][0]
    return [None] * count if make is None else [make() for _ in range(count)]


def find_wrong_type(columns: Columns) -> tuple[int, str] | None:
    """The first value whose type its column must not have, as (row, message)."""
    for name, column in columns.items():
        if _fits(name, column):
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
        lengths: length of every tensor field that some experience has, int64 [B], -1 where one has none.
    """
    none = np.full(len(columns["prompt_length"]), -1)
    tokens, chosen, rejected, logprobs = (lengths.get(n, none) for n in ("tokens", "chosen", "rejected", "logprobs"))
    single, multi, pair = (_where(columns["experience_type"], kind) for kind in ("single_turn", "multi_turn", "dpo"))
    truncated = single & _where(columns["truncate_status"], "prompt_truncated")
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


def _where(column: list[str | None], value: str) -> np.ndarray:
    count = column.count(value)
    if count in (0, len(column)):
        return np.full(len(column), count > 0)
    return np.fromiter(map(eq, column, repeat(value)), bool, len(column))


def _integers(column: list[int]) -> np.ndarray:
    """The column as int64, or as Python's integers where differences could leave the range of those."""
    small = not column or (min(column) >= -_LARGE and max(column) <= _LARGE)
    return np.array(column, dtype=np.int64 if small else object)


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
