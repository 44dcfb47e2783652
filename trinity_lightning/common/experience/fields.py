"""Values of an experience's fields: its identity, custom columns, token ids, masks and numbers, checked when set."""

import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from trinity_lightning.config.values import as_float
from trinity_lightning.errors import TrinityError

ExperienceType = Literal["single_turn", "multi_turn", "dpo"]

# Tensors with one value for each response token; they must have the same length.
RESPONSE_FIELDS = ("logprobs", "token_level_reward", "advantages", "returns", "action_mask", "teacher_logprobs")
# Sequences of token ids, each of its own length.
TOKEN_FIELDS = ("tokens", "chosen", "rejected")
# Key of `Experience.multi_modal_inputs`: places of the tokens that stand for pictures, int64 [m], in their order. The
# same token elsewhere is text: the policy may have sampled it.
PLACES = "picture_places"
INTEGER_DTYPES = frozenset({getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)})


class ExperienceError(TrinityError, ValueError):
    """An experience, or a list of them, does not fit what is asked of it."""


class ExperienceFormatError(TrinityError, ValueError):
    """A payload is damaged, or was not written by this library."""


# -- identity and custom columns ---------------------------------------------------------------------------------------


@dataclass(repr=False)
class EID:
    """Identity of one experience.

    Attributes:
        batch: explore step, or "<step>/<eval taskset>"; set by the workflow runner.
        task: position of the task in the batch; set by the workflow runner.
        run: number of the rollout among those of its task; set by the workflow, or by the runner if workflows do not
            repeat.
        step: number of the step within a rollout of several steps; set by the workflow.
        suffix: tells experiences apart that agree in everything else; by default 12 random hex digits. Two of a million
            are equal with probability 0.002 (with 6 digits, certainly).
    """

    batch: int | str = ""
    task: int | str = ""
    run: int = 0
    step: int = 0
    suffix: str = field(default_factory=lambda: secrets.token_hex(6))

    @property
    def uid(self) -> str:
        """Unique identifier, "batch/task/run/step/suffix"."""
        return f"{self.batch}/{self.task}/{self.run}/{self.step}/{self.suffix}"

    @property
    def sid(self) -> str:
        """Step identifier "batch/task/step": the same step of all runs of a task."""
        return f"{self.batch}/{self.task}/{self.step}"

    @property
    def rid(self) -> str:
        """Run identifier "batch/task/run": all steps of one run of a task."""
        return f"{self.batch}/{self.task}/{self.run}"

    @property
    def tid(self) -> str:
        """Task identifier "batch/task": all runs of a task, the group of GRPO and its relatives."""
        return f"{self.batch}/{self.task}"

    def __str__(self) -> str:
        return self.uid

    def __repr__(self) -> str:
        return f"EID(batch={self.batch}, task={self.task}, run={self.run}, step={self.step}, uuid={self.suffix})"

    def to_dict(self) -> dict[str, Any]:
        """The five fields as a dict; `EID(**eid.to_dict()) == eid`."""
        return dict(vars(self))


@dataclass(frozen=True)
class CustomField:
    """A column of the batch, [B], made from one number in the `info` of every experience.

    Attributes:
        source_field: key in `Experience.info`.
        destination_field: name in the batch.
        data_type: dtype in the batch.
    """

    source_field: str
    destination_field: str
    data_type: torch.dtype


# -- conversions of the constructor's arguments ------------------------------------------------------------------------
# Each takes the value and the field's name, and raises an ExperienceError that names the field.

T = TypeVar("T")


def optional(convert: Callable[[Any, str], T], value: Any, name: str) -> T | None:
    """The converted value; None stays None."""
    return None if value is None else convert(value, name)


def instance_of(value: Any, name: str, kind: type) -> Any:
    """The value itself, which must be None or an instance of `kind`."""
    if value is None or isinstance(value, kind):
        return value
    raise ExperienceError(f"{name}: expected {kind.__name__} or None, got {type(value).__name__}.")


def identity(value: Any) -> EID:
    """An EID as it is, one made from a dict of its fields, or a fresh one for None."""
    if value is None:
        return EID()
    if isinstance(value, EID):
        return value
    if not isinstance(value, dict):
        raise ExperienceError(f"eid: expected EID, a dict of its fields, or None, got {type(value).__name__}.")
    try:
        return EID(**value)
    except TypeError as error:
        raise ExperienceError(f"eid: expected the fields batch, task, run, step, suffix, got {list(value)}.") from error


def token_ids(value: Any, name: str) -> Tensor:
    """Token ids [len]: an integer tensor as it is, anything list-like as int32."""
    if isinstance(value, Tensor):
        if value.dtype not in INTEGER_DTYPES:
            raise ExperienceError(f"{name}: expected token ids of an integer dtype, got {value.dtype}.")
        return _one_dimensional(value, name)
    array = _array(value, name, "iu", "a 1-D tensor or list of integers")
    limits = np.iinfo(np.int32)
    if array.size and (array.min() < limits.min or array.max() > limits.max):
        raise ExperienceError(
            f"{name}: expected ids within int32 (pass an int64 tensor for larger ones), "
            f"got {array.min()} to {array.max()}."
        )
    return torch.from_numpy(array.astype(np.int32))


def floats(value: Any, name: str) -> Tensor:
    """Per-token numbers [len]: a tensor as it is, anything list-like as float32."""
    if isinstance(value, Tensor):
        return _one_dimensional(value, name)
    return torch.from_numpy(_array(value, name, "fiu", "a 1-D tensor or list of numbers").astype(np.float32))


def mask(value: Any, name: str) -> Tensor:
    """Per-token mask [len]: a tensor as it is, anything list-like of booleans, zeros and ones as bool."""
    if isinstance(value, Tensor):
        return _one_dimensional(value, name)
    array = _array(value, name, "biuf", "a 1-D tensor or list of booleans")
    booleans = array.astype(bool)
    if not np.array_equal(booleans, array):
        raise ExperienceError(f"{name}: expected booleans, zeros or ones, got other numbers.")
    return torch.from_numpy(booleans)


def _one_dimensional(tensor: Tensor, name: str) -> Tensor:
    if tensor.dim() != 1:
        raise ExperienceError(f"{name}: expected a 1-D tensor, got shape {tuple(tensor.shape)}.")
    return tensor


def _array(value: Any, name: str, kinds: str, expected: str) -> np.ndarray:
    """A list, tuple or array as a 1-D numpy array whose dtype is of one of these numpy `kinds`."""
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


def prompt_tokens(value: Any) -> int:
    """A prompt length in tokens; booleans and floats are refused."""
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        return int(value)
    shown = value if isinstance(value, float) and not math.isfinite(value) else type(value).__name__
    raise ExperienceError(f"prompt_length: expected an int, got {shown}.")


def reward_value(value: Any) -> float | None:
    """A reward (a real number of Python, numpy or torch) as float, or None."""
    if value is None or type(value) is float:
        return value
    is_array = getattr(value, "ndim", 0) > 0
    try:
        number = None if is_array else as_float(value)
    except OverflowError as error:
        raise ExperienceError("reward: expected a number within the range of a float.") from error
    if number is None:
        shown = f"shape {tuple(value.shape)}" if is_array else type(value).__name__
        raise ExperienceError(f"reward: expected a real number or None, got {shown}.")
    return number


def tensors_by_name(value: Any, name: str) -> dict[str, Tensor]:
    """A dict of tensors: the same one, which rollouts share, unless it has values that are yet to be converted."""
    if not isinstance(value, dict):
        raise ExperienceError(f"{name}: expected dict or None, got {type(value).__name__}.")
    converted = {}
    for key, item in value.items():
        if not isinstance(key, str):
            raise ExperienceError(f"{name}: expected keys of type str, got {key!r}.")
        if isinstance(item, Tensor):
            continue
        try:
            tensor = torch.tensor(item)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ExperienceError(f"{name}[{key!r}]: cannot be made a tensor: {error}") from error
        converted[key] = tensor.long() if key == PLACES and not tensor.numel() else tensor  # [] would be float32
    return {key: converted.get(key, item) for key, item in value.items()} if converted else value


def custom_fields(value: Any, name: str) -> list[CustomField]:
    """A list of CustomField."""
    if not isinstance(value, (list, tuple)) or not all(isinstance(custom, CustomField) for custom in value):
        raise ExperienceError(f"{name}: expected a list of CustomField.")
    return list(value)
