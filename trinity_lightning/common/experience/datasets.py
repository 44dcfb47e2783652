"""Turns experiences into rows of a Hugging Face dataset, and back.

The plain columns are for people. Dtypes and values that a plain column cannot hold (float64 numbers, tuples, tensors in
`info`, tool calls in messages, ...) are also in the binary column `exact`, which is preferred when a row is read. Every
row stands alone: it can be selected and saved.
"""

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import torch

from trinity_lightning.common.experience.codec import custom_field_rows, read_custom_fields
from trinity_lightning.common.experience.experience import Experience
from trinity_lightning.common.experience.fields import (
    INTEGER_DTYPES,
    RESPONSE_FIELDS,
    TOKEN_FIELDS,
    ExperienceError,
    ExperienceFormatError,
    ExperienceType,
)
from trinity_lightning.common.experience.inputs import share_inputs
from trinity_lightning.common.experience.payload import DTYPE_NAMES, TORCH_DTYPES, Writer, known_dtype, unpack

if TYPE_CHECKING:
    from datasets import Dataset

EXACT = "exact"

# -- one column for each field -----------------------------------------------------------------------------------------


class _Column(NamedTuple):
    """The column of a plain field: its type, and the conversions of values other than None."""

    feature: Any
    to_cell: Callable[[Any], Any]
    from_cell: Callable[[Any], Any]


class _TensorColumn(NamedTuple):
    """The column of a tensor field, a list of numbers in each cell."""

    feature: str
    default: torch.dtype  # dtype of the tensor that is read, unless `exact` names another
    exact_dtypes: frozenset[torch.dtype]  # dtypes whose values the numbers hold exactly


def _readable(value: Any) -> str:
    """Text that can be stored as UTF-8 (a lone surrogate becomes a question mark); JSON of anything else."""
    text = value if isinstance(value, str) else _to_json(value)
    return text.encode("utf-8", "replace").decode()


def _to_json(value: Any) -> str:
    try:
        return json.dumps(value, default=repr)
    except (TypeError, ValueError):  # keys that JSON does not allow, or a value that contains itself
        return json.dumps(repr(value))


def _to_chat(value: list[Any]) -> list[dict[str, str | None]]:
    """The role and content of each message, without its other keys."""
    messages = [message if isinstance(message, dict) else {"content": message} for message in value]
    return [
        {key: None if message.get(key) is None else _readable(message[key]) for key in ("role", "content")}
        for message in messages
    ]


def _to_eid_cell(eid: dict[str, Any]) -> dict[str, Any]:
    numbers = {name: eid[name] if isinstance(eid[name], int) else None for name in ("run", "step")}
    return {name: _readable(str(value)) for name, value in eid.items()} | numbers


def _from_eid_cell(cell: dict[str, Any]) -> dict[str, Any]:
    """The fields of an EID; a batch or task that reads as a whole number is one."""
    ids = {name: int(cell[name]) if _is_number(cell[name]) else cell[name] for name in ("batch", "task")}
    return {**ids, "run": cell["run"], "step": cell["step"], "suffix": cell["suffix"]}


def _is_number(text: str) -> bool:
    return text.isascii() and text.removeprefix("-").isdecimal() and len(text) < 20 and str(int(text)) == text


def _unchanged(value: Any) -> Any:
    return value


def _from_chat(cell: list[dict[str, str | None]]) -> list[dict[str, str | None]]:
    return [{"role": message["role"], "content": message["content"]} for message in cell]


_EID = {"batch": "string", "task": "string", "run": "int64", "step": "int64", "suffix": "string"}
_TEXT, _JSON = _Column("string", _readable, _unchanged), _Column("string", _to_json, json.loads)
_CHAT = _Column([{"role": "string", "content": "string"}], _to_chat, _from_chat)
_PLAIN: dict[str, _Column] = {
    "eid": _Column(_EID, _to_eid_cell, _from_eid_cell),
    "experience_type": _TEXT,
    "prompt_length": _Column("int64", _unchanged, _unchanged),
    "reward": _Column("float64", float, _unchanged),
    "truncate_status": _TEXT,
    "info": _JSON,
    "metrics": _JSON,
    "prompt_text": _TEXT,
    "response_text": _TEXT,
    "messages": _CHAT,
    "tools": _JSON,
    "chosen_messages": _CHAT,
    "rejected_messages": _CHAT,
    "custom_fields": _JSON,
}
_INTEGERS = _TensorColumn("int64", torch.int32, INTEGER_DTYPES - {torch.uint64})
_FLOATS = _TensorColumn("float32", torch.float32, frozenset({torch.float16, torch.bfloat16, torch.float32}))
_BOOLEANS = _TensorColumn("bool", torch.bool, frozenset({torch.bool}))
_TENSORS: dict[str, _TensorColumn] = {
    **dict.fromkeys(TOKEN_FIELDS, _INTEGERS),
    **dict.fromkeys(RESPONSE_FIELDS, _FLOATS),
    "action_mask": _BOOLEANS,
}


# -- rows of experiences -----------------------------------------------------------------------------------------------


def to_hf_datasets(experiences: Sequence[Experience]) -> "Dataset":
    """A dataset with one row for each experience; `from_hf_datasets` gives back equal experiences.

    Raises:
        ExperienceError: a field's value cannot be encoded; the message names experience and field.
    """
    from datasets import Dataset  # takes seconds to import

    rows = [_to_row(experience) for experience in experiences]
    features = _features()
    return Dataset.from_dict({name: [row[name] for row in rows] for name in features}, features=features)


def _features() -> Any:
    from datasets import Features, Value

    def feature(kind: Any) -> Any:
        if isinstance(kind, dict):
            return {name: feature(inner) for name, inner in kind.items()}
        return [feature(kind[0])] if isinstance(kind, list) else Value(kind)

    plain = {name: feature(column.feature) for name, column in _PLAIN.items()}
    tensors = {name: feature([column.feature]) for name, column in _TENSORS.items()}
    return Features({**plain, **tensors, EXACT: Value("binary")})


def _to_row(experience: Experience) -> dict[str, Any]:
    row: dict[str, Any] = {}
    exact: dict[str, Any] = {}
    dtypes: dict[str, str] = {}
    fields = vars(experience) | {
        "eid": experience.eid.to_dict(),
        "custom_fields": custom_field_rows(experience.custom_fields),
    }
    for name, column in _PLAIN.items():
        value = fields[name]
        row[name] = None if value is None else column.to_cell(value)
        # Equal representations are equal types too: 1 is not 1.0 here, nor a tuple a list.
        if value is not None and repr(column.from_cell(row[name])) != repr(value):
            exact[name] = value
    for name, column in _TENSORS.items():
        tensor = fields[name]
        row[name] = None if tensor is None else tensor.tolist()
        if tensor is not None and tensor.dtype != column.default:
            if tensor.dtype in column.exact_dtypes:
                dtypes[name] = DTYPE_NAMES[tensor.dtype]
            else:
                exact[name] = tensor
                row[name] = tensor.to(TORCH_DTYPES[column.feature]).tolist()
    if experience.multi_modal_inputs is not None:
        exact["multi_modal_inputs"] = experience.multi_modal_inputs
    try:
        row[EXACT] = Writer().pack({"dtypes": dtypes, "values": exact}) if dtypes or exact else None
    except ExperienceError as error:
        raise ExperienceError(f"experience {experience.eid.uid}: {error}") from error
    return row


def from_hf_datasets(dataset: "Dataset") -> list[Experience]:
    """The experiences of a dataset made by `to_hf_datasets`, or of some of its rows, in the dataset's order.

    Experiences with equal multi-modal inputs share them.

    Raises:
        ExperienceError: a column is missing, or per-token fields of a row differ in length.
        ExperienceFormatError: a cell is not as `to_hf_datasets` makes it, or one of `exact` is damaged.
    """
    names = [*_PLAIN, *_TENSORS, EXACT]
    missing = [name for name in names if name not in dataset.column_names]
    if missing:
        raise ExperienceError(f"dataset: expected the columns of to_hf_datasets, lacks {missing}.")
    columns = dataset.with_format(None)[:]
    rows = zip(*map(columns.get, names), strict=True)
    experiences = [_from_row(dict(zip(names, cells, strict=True))) for cells in rows]
    share_inputs(experiences)  # every row has its own
    return experiences


def _from_row(row: dict[str, Any]) -> Experience:
    exact = {"dtypes": {}, "values": {}} if row[EXACT] is None else unpack(memoryview(row[EXACT]))
    fields: dict[str, Any] = {}
    try:
        for name, column in _PLAIN.items():
            fields[name] = None if row[name] is None else column.from_cell(row[name])
        for name, column in _TENSORS.items():
            dtype = known_dtype(exact["dtypes"][name]) if name in exact["dtypes"] else column.default
            fields[name] = None if row[name] is None else torch.tensor(row[name], dtype=dtype)
        fields |= exact["values"]
        fields["custom_fields"] = read_custom_fields(fields["custom_fields"])
        kind, mask = fields.pop("experience_type"), fields["action_mask"]
        if kind != "multi_turn":
            fields["action_mask"] = None  # the constructor would take a given mask as a sign of several turns
        experience = Experience(**fields)
    except (ExperienceError, ExperienceFormatError):
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise ExperienceFormatError(f"a row cannot be read: {type(error).__name__}: {error}") from error
    is_pair = experience.chosen is not None and experience.rejected is not None
    if not (is_pair if kind == "dpo" else kind in get_args(ExperienceType) and mask is not None):
        raise ExperienceFormatError(
            f"experience {experience.eid.uid}: experience_type: expected single_turn or multi_turn with an action_mask,"
            f" or dpo with chosen and rejected, got {kind!r}."
        )
    experience.experience_type, experience.action_mask = kind, mask
    experience._check_lengths()
    return experience
