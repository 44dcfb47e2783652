"""`Experience`: the result of one rollout, unpadded; its identity, and the rules that it keeps."""

import dataclasses
import math
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from trinity_lightning.config.values import as_float
from trinity_lightning.errors import TrinityError

ExperienceType = Literal["single_turn", "multi_turn", "dpo"]
Buffer = bytes | bytearray | memoryview

# Tensors with one value a response token, which must therefore agree in length.
RESPONSE_FIELDS = ("logprobs", "token_level_reward", "advantages", "returns", "action_mask", "teacher_logprobs")
# Tensors with one value a token of their own sequence.
TOKEN_FIELDS = ("tokens", "chosen", "rejected")
INTEGER_DTYPES = frozenset({getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)})


class ExperienceError(TrinityError, ValueError):
    """An experience, or a list of them, does not fit what is asked of it."""


class ExperienceFormatError(TrinityError, ValueError):
    """A payload is not one that this library wrote, or is damaged."""


@dataclass(repr=False)
class EID:
    """Identity of one experience.

    Attributes:
        batch: explore step, or "<step>/<eval taskset>"; set by the workflow runner.
        task: position of the task in the batch; set by the workflow runner.
        run: which of the task's rollouts; set by the workflow, or by the runner if workflows do not repeat.
        step: which step of a rollout of several; set by the workflow.
        suffix: of experiences that agree in everything else; by default 12 random hex digits, of which two in a million
            are the same with probability 0.002 (of 6 digits, certainly).
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
    """A column of the batch from a number of every experience's `info`, [B].

    Attributes:
        source_field: key in `Experience.info`.
        destination_field: name in the batch.
        data_type: dtype in the batch.
    """

    source_field: str
    destination_field: str
    data_type: torch.dtype


@dataclass(init=False, eq=False)
class Experience:
    """The result of one rollout: tokens, what they were worth, and their origin. Nothing is padded.

    `seq` is the length of `tokens` and `resp = seq - prompt_length`. The type follows from what is given:

    - "multi_turn" with an `action_mask`, which may be false inside the response (tool output, user turns);
    - "dpo" with both `chosen` and `rejected`: `tokens` is the prompt alone, and `prompt_length` its length;
    - "single_turn" else: every response token is trained on, unless `truncate_status` is "prompt_truncated", where
      none is, and the per-token fields have the length of `logprobs` instead of `resp`.

    Lists, tuples and arrays become int32 (tokens, chosen, rejected), float32 (per-token numbers) or bool (action_mask)
    tensors; tensors keep their dtype. Fields may be assigned later; only the constructor checks them. To copy one, use
    `copy.copy`: the constructor, and so `dataclasses.replace`, takes any action_mask as a sign of several turns.

    Attributes:
        eid: identity; a dict of its fields is accepted, and None gives a fresh one.
        tokens: prompt and response, [seq], any integer dtype.
        prompt_length: how many of the tokens are the prompt.
        logprobs: log-probability of each response token under the policy that sampled it, [resp].
        reward: what the whole rollout was worth.
        token_level_reward: reward of each response token, [resp].
        advantages, returns: set by add strategies, [resp].
        truncate_status: "prompt_truncated", "response_truncated" or None.
        info: anything about the rollout; the source of custom fields.
        metrics: numbers to be logged.
        response_text, prompt_text: as text.
        action_mask: which response tokens the policy produced, and is trained on, [resp].
        messages, tools: the conversation, and the tools offered in it.
        chosen, rejected: token ids of the better and the worse response, [their own length].
        chosen_messages, rejected_messages: the same as conversations.
        multi_modal_inputs: tensors of the processor by name.
        teacher_logprobs: log-probability of each response token under a teacher, [resp].
        custom_fields: which entries of `info` become columns of the batch.

    Raises:
        ExperienceError: a field has the wrong type, dtype, shape or length; the message names it.
    """

    eid: EID
    tokens: Tensor
    prompt_length: int
    logprobs: Tensor | None
    reward: float | None
    token_level_reward: Tensor | None
    advantages: Tensor | None
    returns: Tensor | None
    truncate_status: str | None
    info: dict[Any, Any]
    metrics: dict[str, float]
    response_text: str | None
    prompt_text: str | None
    action_mask: Tensor | None
    messages: list[dict[str, Any]] | None
    tools: list[dict[str, Any]] | None
    chosen: Tensor | None
    rejected: Tensor | None
    chosen_messages: list[dict[str, Any]] | None
    rejected_messages: list[dict[str, Any]] | None
    multi_modal_inputs: dict[str, Tensor] | None
    teacher_logprobs: Tensor | None
    custom_fields: list[CustomField]

    def __init__(
        self,
        *,
        eid: EID | dict[str, Any] | None = None,
        tokens: Any,
        logprobs: Any = None,
        reward: Any = None,
        token_level_reward: Any = None,
        advantages: Any = None,
        returns: Any = None,
        truncate_status: str | None = None,
        info: dict[Any, Any] | None = None,
        metrics: dict[str, float] | None = None,
        prompt_length: int = 1,
        response_text: str | None = None,
        prompt_text: str | None = None,
        action_mask: Any = None,
        messages: list[dict[str, Any]] | None = None,
        tools: list[dict[str, Any]] | None = None,
        chosen: Any = None,
        rejected: Any = None,
        chosen_messages: list[dict[str, Any]] | None = None,
        rejected_messages: list[dict[str, Any]] | None = None,
        multi_modal_inputs: dict[str, Any] | None = None,
        teacher_logprobs: Any = None,
        custom_fields: list[CustomField] | None = None,
    ) -> None:
        self.eid = _make_eid(eid)
        try:
            self.tokens = _token_ids(tokens, "tokens")
            self.prompt_length = _prompt_length(prompt_length)
            self.logprobs = _optional(_floats, logprobs, "logprobs")
            self.reward = reward_value(reward)
            self.token_level_reward = _optional(_floats, token_level_reward, "token_level_reward")
            self.advantages = _optional(_floats, advantages, "advantages")
            self.returns = _optional(_floats, returns, "returns")
            self.truncate_status = _instance_of(truncate_status, "truncate_status", str)
            self.info = {} if info is None else _instance_of(info, "info", dict)
            self.metrics = {} if metrics is None else _instance_of(metrics, "metrics", dict)
            self.response_text = _instance_of(response_text, "response_text", str)
            self.prompt_text = _instance_of(prompt_text, "prompt_text", str)
            self.action_mask = _optional(_mask, action_mask, "action_mask")
            self.messages = _instance_of(messages, "messages", list)
            self.tools = _instance_of(tools, "tools", list)
            self.chosen = _optional(_token_ids, chosen, "chosen")
            self.rejected = _optional(_token_ids, rejected, "rejected")
            self.chosen_messages = _instance_of(chosen_messages, "chosen_messages", list)
            self.rejected_messages = _instance_of(rejected_messages, "rejected_messages", list)
            self.multi_modal_inputs = _optional(_tensors_by_name, multi_modal_inputs, "multi_modal_inputs")
            self.teacher_logprobs = _optional(_floats, teacher_logprobs, "teacher_logprobs")
            self.custom_fields = _optional(_custom_fields, custom_fields, "custom_fields") or []
            self._set_type_and_mask()
            self._check_lengths()
        except ExperienceError as error:
            raise ExperienceError(f"experience {self.eid.uid}: {error}") from error

    def _set_type_and_mask(self) -> None:
        if self.action_mask is not None:
            self.experience_type: ExperienceType = "multi_turn"
        elif self.chosen is not None and self.rejected is not None:
            self.experience_type = "dpo"
            self.prompt_length = len(self.tokens)
        else:
            self.experience_type = "single_turn"
            if self.truncate_status != "prompt_truncated":
                self.action_mask = torch.ones(max(len(self.tokens) - self.prompt_length, 0), dtype=torch.bool)
            elif self.logprobs is None:
                raise ExperienceError("logprobs: expected for a truncated prompt (they give the length), got None.")
            else:
                self.action_mask = torch.zeros(len(self.logprobs), dtype=torch.bool)

    def _check_lengths(self) -> None:
        """Check prompt_length against the tokens, and the per-token fields against the response."""
        seq, single_turn = len(self.tokens), self.experience_type == "single_turn"
        lowest = 1 if single_turn else 0
        highest = seq - 1 if single_turn and self.truncate_status != "prompt_truncated" else seq
        if not lowest <= self.prompt_length <= highest:
            raise ExperienceError(
                f"prompt_length: expected at least {lowest} and at most {highest} for {self.experience_type} "
                f"with {seq} tokens, got {self.prompt_length}."
            )
        expected = self.response_length
        for name in RESPONSE_FIELDS:
            tensor = getattr(self, name)
            if tensor is not None and len(tensor) != expected:
                raise ExperienceError(f"{name}: expected length {expected} (one a response token), got {len(tensor)}.")

    @property
    def response_length(self) -> int:
        """Length of the per-token fields: `resp`, or that of `logprobs` in a single turn whose prompt was truncated."""
        truncated = self.experience_type == "single_turn" and self.truncate_status == "prompt_truncated"
        return len(self.logprobs) if truncated and self.logprobs is not None else len(self.tokens) - self.prompt_length

    def __eq__(self, other: object) -> bool:
        """Field by field; tensors by dtype, shape and values, NaN equal to NaN."""
        if not isinstance(other, Experience):
            return NotImplemented

        return same(vars(self), vars(other))

    __hash__ = None  # type: ignore[assignment]  # experiences are mutable

    def serialize(self) -> bytes:
        """This experience as a payload; errors as `serialize_many`."""
        return self.serialize_many([self])

    @staticmethod
    def serialize_many(experiences: Sequence["Experience"]) -> bytes:
        """Experiences as one payload of version 2: msgpack, safetensors, checksum; no pickle.

        Raises:
            ExperienceError: a field holds what cannot be encoded, or has a type or length that it must not have (fields
                may be assigned unchecked); the message names experience and field.
        """
        from trinity_lightning.common.experience import codec  # which knows of Experience

        return codec.serialize_many(experiences)

    @staticmethod
    def deserialize(data: Buffer, allow_pickle: bool = False) -> "Experience":
        """The only experience of a payload; arguments and errors as `deserialize_many`.

        Raises:
            ExperienceError: the payload holds another number of experiences.
        """
        experiences = Experience.deserialize_many(data, allow_pickle)
        if len(experiences) != 1:
            raise ExperienceError(
                f"expected a payload of one experience, got {len(experiences)}; use deserialize_many."
            )
        return experiences[0]

    @staticmethod
    def deserialize_many(data: Buffer, allow_pickle: bool = False) -> list["Experience"]:
        """The experiences of a payload; their tensors are copies, so the payload may be freed.

        Args:
            data: a payload of version 2, or of version 1 (Trinity-RFT's).
            allow_pickle: also read plain pickles. Unpickling runs whatever code the bytes name: only for what you wrote
                yourself.

        Raises:
            ExperienceFormatError: anything else, or a damaged payload.
        """
        from trinity_lightning.common.experience import reading

        return reading.deserialize_many(data, allow_pickle)

    def to_dict(self) -> dict[str, Any]:
        """What a person or a logger wants to see, without tensors; optional entries only if they are not None."""

        return described(self)


def check_assigned(experience: Experience) -> None:
    """Check what may have been assigned to an experience that its constructor has not seen; the reward becomes a float.

    Raises:
        ExperienceError: eid, info, metrics or reward is of the wrong type; the message names the field and the fix.
    """
    for name, kind in (("eid", EID), ("info", dict), ("metrics", dict)):
        if not isinstance(value := getattr(experience, name), kind):
            raise ExperienceError(
                f"{name} of an Experience was set to {value!r:.80}: it must be of type {kind.__name__}, at least "
                f"{name}={'EID()' if kind is EID else '{}'}."
            )
    experience.reward = reward_value(experience.reward)


def _make_eid(eid: Any) -> EID:
    if eid is None:
        return EID()
    if isinstance(eid, EID):
        return eid

    return eid_of(eid)


def as_array(value: Any, name: str, kinds: str, expected: str) -> np.ndarray:
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


def _one_dimensional(tensor: Tensor, name: str) -> Tensor:
    if tensor.dim() != 1:
        raise ExperienceError(f"{name}: expected a 1-D tensor, got shape {tuple(tensor.shape)}.")
    return tensor


def _token_ids(value: Any, name: str) -> Tensor:
    """Token ids [len]: an integer tensor as it is, anything list-like as int32."""
    if isinstance(value, Tensor):
        if value.dtype not in INTEGER_DTYPES:
            raise ExperienceError(f"{name}: expected token ids of an integer dtype, got {value.dtype}.")
        return _one_dimensional(value, name)
    array = as_array(value, name, "iu", "a 1-D tensor or list of integers")
    limits = np.iinfo(np.int32)
    if array.size and (array.min() < limits.min or array.max() > limits.max):
        raise ExperienceError(
            f"{name}: expected ids within int32 (pass an int64 tensor for larger ones), "
            f"got {array.min()} to {array.max()}."
        )
    return torch.from_numpy(array.astype(np.int32))


def _floats(value: Any, name: str) -> Tensor:
    """Per-token numbers [len]: a tensor as it is, anything list-like as float32."""
    if isinstance(value, Tensor):
        return _one_dimensional(value, name)
    return torch.from_numpy(as_array(value, name, "fiu", "a 1-D tensor or list of numbers").astype(np.float32))


def _mask(value: Any, name: str) -> Tensor:
    """Per-token mask [len]: a tensor as it is, anything list-like of booleans, zeros and ones as bool."""
    if isinstance(value, Tensor):
        return _one_dimensional(value, name)
    array = as_array(value, name, "biuf", "a 1-D tensor or list of booleans")
    mask = array.astype(bool)
    if not np.array_equal(mask, array):
        raise ExperienceError(f"{name}: expected booleans, zeros or ones, got other numbers.")
    return torch.from_numpy(mask)


def reward_value(value: Any) -> float | None:
    """A reward as float, or None."""
    if value is None or type(value) is float:
        return value

    return real_number(value, "reward")


def _prompt_length(value: Any) -> int:
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        return int(value)
    shown = value if isinstance(value, float) and not math.isfinite(value) else type(value).__name__
    raise ExperienceError(f"prompt_length: expected an int, got {shown}.")


def _instance_of(value: Any, name: str, kind: type) -> Any:
    """The value itself, which must be None or an instance of `kind`."""
    if value is None or isinstance(value, kind):
        return value
    raise ExperienceError(f"{name}: expected {kind.__name__} or None, got {type(value).__name__}.")


def _custom_fields(value: Any, name: str) -> list[CustomField]:
    if not isinstance(value, (list, tuple)) or not all(isinstance(each, CustomField) for each in value):
        raise ExperienceError(f"{name}: expected a list of CustomField.")
    return list(value)


def _tensors_by_name(value: Any, name: str) -> dict[str, Tensor]:

    return tensors_by_name(value, name)


T = TypeVar("T")


def _optional(convert: Callable[[Any, str], T], value: Any, name: str) -> T | None:
    return None if value is None else convert(value, name)


_ID_OF = {"task": "tid", "run": "rid", "step": "sid"}


def group_by(experiences: Iterable[Experience], id_type: Literal["task", "run", "step"]) -> dict[str, list[Experience]]:
    """Experiences by their task, run or step identifier, in order of first appearance. ValueError: unknown id_type."""
    if id_type not in _ID_OF:
        raise ValueError(f"unknown id_type {id_type!r}. Known: {', '.join(_ID_OF)}.")
    groups: dict[str, list[Experience]] = {}
    for experience in experiences:
        groups.setdefault(getattr(experience.eid, _ID_OF[id_type]), []).append(experience)
    return groups


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
