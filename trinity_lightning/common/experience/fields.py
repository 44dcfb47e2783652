"""Fields of experiences: given in other forms than they are kept in, compared, shown; and the errors of wrong ones.

Imported where it is needed: what the explorer makes needs none of it.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trinity_lightning.common.experience.experience import EID, Experience, ExperienceError
from trinity_lightning.config.values import as_float

# -- fields given in another form than they are kept in ----------------------------------------------------------------


def eid_of(fields: Any) -> EID:
    """An identity from a dict of its fields; an ExperienceError if it is none."""
    if not isinstance(fields, dict):
        raise ExperienceError(f"eid: expected EID, a dict of its fields, or None, got {type(fields).__name__}.")
    try:
        return EID(**fields)
    except TypeError as error:
        raise ExperienceError(
            f"eid: expected the fields batch, task, run, step, suffix, got {list(fields)}."
        ) from error


def real_number(value: Any, name: str) -> float:
    """A real number, of numpy or torch perhaps, as float; an ExperienceError if it is none."""
    is_array = getattr(value, "ndim", 0) > 0
    try:
        number = None if is_array else as_float(value)
    except OverflowError as error:
        raise ExperienceError(f"{name}: expected a number within the range of a float.") from error
    if number is None:
        what = f"shape {tuple(value.shape)}" if is_array else type(value).__name__
        raise ExperienceError(f"{name}: expected a real number or None, got {what}.")
    return number


def tensors_by_name(value: Any, name: str) -> dict[str, Tensor]:
    """What is given for a field of tensors by name, its values made tensors if they are none yet.

    Raises:
        ExperienceError: no dict, a key that is no text, or a value that cannot be made a tensor.
    """
    if not isinstance(value, dict):
        raise ExperienceError(f"{name}: expected dict or None, got {type(value).__name__}.")
    result = {}
    for key, item in value.items():
        if not isinstance(key, str):
            raise ExperienceError(f"{name}: expected keys of type str, got {key!r}.")
        try:
            result[key] = item if isinstance(item, Tensor) else torch.tensor(item)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ExperienceError(f"{name}[{key!r}]: cannot be made a tensor: {error}") from error
    return result


# -- when two are equal, and what is shown of one ----------------------------------------------------------------------


def same(a: Any, b: Any) -> bool:
    """Whether two values are equal: `==` all the way down, except that NaN equals NaN.

    Tensors and arrays must agree in dtype, shape and values; a list never equals a tuple, nor a tensor an array.
    """
    for kind in (Tensor, np.ndarray):
        if isinstance(a, kind) or isinstance(b, kind):
            return isinstance(a, kind) and isinstance(b, kind) and _same_numbers(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(value, b[key]) for key, value in a.items())
    if (isinstance(a, list) and isinstance(b, list)) or (isinstance(a, tuple) and isinstance(b, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if dataclasses.is_dataclass(a) and type(a) is type(b):
        return same(vars(a), vars(b))
    return bool(a == b) or bool(a != a and b != b)


def _same_numbers(a: Any, b: Any) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if isinstance(a, Tensor):
        b = b.to(a.device)
        if torch.equal(a, b):
            return True
    return bool(((a == b) | ((a != a) & (b != b))).all())  # NaN is what differs from itself


def described(experience: Experience) -> dict[str, Any]:
    """See `Experience.to_dict`."""
    result: dict[str, Any] = {
        "eid": experience.eid.to_dict(),
        "type": experience.experience_type,
        "prompt_length": experience.prompt_length,
        "response_length": len(experience.tokens) - experience.prompt_length,
        "info": experience.info,
        "metrics": experience.metrics,
    }
    if experience.reward is not None:
        result["reward"] = float(experience.reward)
    optional = ("prompt_text", "response_text", "messages", "tools", "chosen_messages", "rejected_messages")
    values = {name: getattr(experience, name) for name in (*optional, "truncate_status")}
    return result | {name: value for name, value in values.items() if value is not None}


# -- experiences that cannot be trained on, or do not go together ------------------------------------------------------


def check_weighed(experiences: Sequence[Experience], by: str) -> None:
    """ExperienceError unless advantages and returns have a finite number for each response token that is trained."""
    for exp in experiences:
        for values in (exp.advantages, exp.returns):
            if values is None or (mask := exp.action_mask) is None:  # without a mask there is no response
                continue
            is_row = isinstance(values, Tensor) and values.shape == mask.shape
            if not (is_row and values[mask.bool()].isfinite().all()):
                raise ExperienceError(
                    f"experience {exp.eid}: {by} gave it {values!r:.60}: give finite numbers, one a response token."
                )


def no_column(experiences: Sequence[Experience], name: str, dtype: torch.dtype | None) -> ExperienceError:
    """The error for a field that some experience lacks, or has in another dtype than this, the first one's."""
    tensors = [getattr(each, name, None) for each in experiences]
    at = next(index for index, each in enumerate(tensors) if not isinstance(each, Tensor) or each.dtype != dtype)
    row = tensors[at]
    found = row.dtype if isinstance(row, Tensor) else type(row).__name__
    wanted = f"{dtype} as in the first of the batch" if dtype else "a tensor"
    return ExperienceError(f"experience {experiences[at].eid.uid}: {name}: expected {wanted}, got {found}.")
