"""Turns what users pass to `Experience` into what it holds, or says which field is wrong and what was expected."""

import math
import numbers
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trinity_lightning.common.experience.errors import ExperienceError

INTEGER_DTYPES = frozenset(
    {
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.uint8,
        torch.uint16,
        torch.uint32,
        torch.uint64,
    }
)


def _as_array(value: Any, name: str, kinds: str, expected: str) -> np.ndarray:
    """A list, tuple or array as a 1-D numpy array whose dtype is of one of the `kinds`."""
    if not isinstance(value, (list, tuple, np.ndarray)):
        raise ExperienceError(f"{name}: expected {expected}, got {type(value).__name__}.")
    try:
        array = np.asarray(value)
    except (ValueError, OverflowError) as error:
        raise ExperienceError(f"{name}: expected {expected}, got nested or ragged values ({error}).") from error
    if array.ndim != 1:
        raise ExperienceError(f"{name}: expected {expected}, got shape {array.shape}.")
    if array.size and array.dtype.kind not in kinds:
        raise ExperienceError(f"{name}: expected {expected}, got values of type {array.dtype}.")
    return array


def check_1d(tensor: Tensor, name: str) -> Tensor:
    """The tensor itself, which must have one dimension."""
    if tensor.dim() != 1:
        raise ExperienceError(f"{name}: expected a 1-D tensor, got shape {tuple(tensor.shape)}.")
    return tensor


def token_ids(value: Any, name: str) -> Tensor:
    """Token ids [len]: an integer tensor as it is, anything list-like as int32."""
    if isinstance(value, Tensor):
        if value.dtype not in INTEGER_DTYPES:
            raise ExperienceError(f"{name}: expected token ids of an integer dtype, got {value.dtype}.")
        return check_1d(value, name)
    array = _as_array(value, name, "iu", "a 1-D tensor or list of integers")
    limits = np.iinfo(np.int32)
    if array.size and (array.min() < limits.min or array.max() > limits.max):
        raise ExperienceError(
            f"{name}: expected ids within int32 (pass an int64 tensor for larger ones), "
            f"got {array.min()} to {array.max()}."
        )
    return torch.from_numpy(array.astype(np.int32))


def float_values(value: Any, name: str) -> Tensor:
    """Per-token numbers [len]: a tensor as it is, anything list-like as float32."""
    if isinstance(value, Tensor):
        return check_1d(value, name)
    return torch.from_numpy(_as_array(value, name, "fiu", "a 1-D tensor or list of numbers").astype(np.float32))


def mask_values(value: Any, name: str) -> Tensor:
    """Per-token mask [len]: a tensor as it is, anything list-like of booleans, zeros and ones as bool."""
    if isinstance(value, Tensor):
        return check_1d(value, name)
    array = _as_array(value, name, "biuf", "a 1-D tensor or list of booleans")
    mask = array.astype(bool)
    if not np.array_equal(mask, array):
        raise ExperienceError(f"{name}: expected booleans, zeros or ones, got other numbers.")
    return torch.from_numpy(mask)


def reward_value(value: Any) -> float | None:
    """A reward as float, or None."""
    if isinstance(value, (Tensor, np.ndarray)) and value.ndim == 0:
        value = value.item()
    if value is None or type(value) is float:
        return value
    if isinstance(value, (numbers.Real, np.bool_)):
        try:
            return float(value)
        except OverflowError as error:
            raise ExperienceError("reward: expected a number within the range of a float.") from error
    what = f"shape {tuple(value.shape)}" if isinstance(value, (Tensor, np.ndarray)) else type(value).__name__
    raise ExperienceError(f"reward: expected a real number or None, got {what}.")


def prompt_length_value(value: Any) -> int:
    """A prompt length as int."""
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        return int(value)
    shown = value if isinstance(value, float) and not math.isfinite(value) else type(value).__name__
    raise ExperienceError(f"prompt_length: expected an int, got {shown}.")


def instance_of(value: Any, name: str, kind: type) -> Any:
    """The value itself, which must be None or an instance of `kind`."""
    if value is None or isinstance(value, kind):
        return value
    raise ExperienceError(f"{name}: expected {kind.__name__} or None, got {type(value).__name__}.")


def tensor_dict(value: Any, name: str) -> dict[str, Tensor] | None:
    """A dict of tensors, its values converted where they are not tensors yet; None stays None."""
    if instance_of(value, name, dict) is None:
        return None
    result = {}
    for key, item in value.items():
        if not isinstance(key, str):
            raise ExperienceError(f"{name}: expected keys of type str, got {key!r}.")
        try:
            result[key] = item if isinstance(item, Tensor) else torch.tensor(item)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ExperienceError(f"{name}[{key!r}]: cannot be made a tensor: {error}") from error
    return result


def optional(convert: Callable[[Any, str], Tensor], value: Any, name: str) -> Tensor | None:
    """`convert(value, name)`, or None for None."""
    return None if value is None else convert(value, name)
