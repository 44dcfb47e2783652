"""`Experience`: the result of one rollout, unpadded, and the rules that it keeps."""

import dataclasses
import gc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from trinity_lightning.common.experience import codec, fields, legacy
from trinity_lightning.common.experience.fields import (
    EID,
    RESPONSE_FIELDS,
    CustomField,
    ExperienceError,
    ExperienceFormatError,
    ExperienceType,
)
from trinity_lightning.common.experience.inputs import misplaced, share_inputs
from trinity_lightning.common.experience.payload import MAGIC, Buffer, format_errors, unpack, view_of
from trinity_lightning.common.pictures.parts import count_places, without_pictures


@dataclass(init=False, eq=False)
class Experience:
    """The result of one rollout: tokens, rewards and identity. Nothing is padded.

    `seq` is the length of `tokens` and `resp = seq - prompt_length`. The arguments decide the type:

    - "multi_turn" with an `action_mask`, which may be false inside the response (tool output, user turns);
    - "dpo" with both `chosen` and `rejected`: `tokens` is the prompt alone, and `prompt_length` its length;
    - "single_turn" otherwise: every response token is trained on. If `truncate_status` is "prompt_truncated", none is,
      and the per-token fields have the length of `logprobs` instead of `resp`.

    Lists, tuples and arrays become int32 (tokens, chosen, rejected), float32 (per-token numbers) or bool (action_mask)
    tensors; tensors keep their dtype. Fields may be assigned later; only the constructor checks them. Copy an
    experience by `copy.copy`: the constructor, and so `dataclasses.replace`, takes any action_mask as a sign of several
    turns.

    Attributes:
        eid: identity; a dict of its fields is accepted, and None gives a fresh one.
        tokens: prompt and response, [seq], any integer dtype.
        prompt_length: number of tokens in the prompt.
        logprobs: log-probability of each response token under the policy that sampled it, [resp].
        reward: reward of the whole rollout.
        token_level_reward: reward of each response token, [resp].
        advantages, returns: set by add strategies, [resp].
        truncate_status: "prompt_truncated", "response_truncated" or None.
        info: anything about the rollout; the source of custom fields.
        metrics: numbers to be logged.
        response_text, prompt_text: response and prompt as text.
        action_mask: true for response tokens that the policy produced and is trained on, [resp].
        messages, tools: the conversation, whose pictures become empty places, and the tools offered in it.
        chosen, rejected: token ids of the better and the worse response, [their own length].
        chosen_messages, rejected_messages: the same as conversations.
        multi_modal_inputs: the processor's tensors by name. Under the key "picture_places" may be the places of the
            tokens that stand for pictures, [m], rising; none may be trained on. The rollouts of a prompt share one
            dict: assign another one to change it.
        teacher_logprobs: log-probability of each response token under a teacher, [resp].
        custom_fields: the entries of `info` that become columns of the batch.

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
        self.eid = fields.identity(eid)
        try:
            self.tokens = fields.token_ids(tokens, "tokens")
            self.prompt_length = fields.prompt_tokens(prompt_length)
            self.logprobs = fields.optional(fields.floats, logprobs, "logprobs")
            self.reward = fields.reward_value(reward)
            self.token_level_reward = fields.optional(fields.floats, token_level_reward, "token_level_reward")
            self.advantages = fields.optional(fields.floats, advantages, "advantages")
            self.returns = fields.optional(fields.floats, returns, "returns")
            self.truncate_status = fields.instance_of(truncate_status, "truncate_status", str)
            self.info = {} if info is None else fields.instance_of(info, "info", dict)
            self.metrics = {} if metrics is None else fields.instance_of(metrics, "metrics", dict)
            self.response_text = fields.instance_of(response_text, "response_text", str)
            self.prompt_text = fields.instance_of(prompt_text, "prompt_text", str)
            self.action_mask = fields.optional(fields.mask, action_mask, "action_mask")
            self.messages = fields.instance_of(messages, "messages", list)
            if self.messages and count_places(self.messages):  # the tensors of the pictures are kept in their stead
                self.messages = without_pictures(self.messages)
            self.tools = fields.instance_of(tools, "tools", list)
            self.chosen = fields.optional(fields.token_ids, chosen, "chosen")
            self.rejected = fields.optional(fields.token_ids, rejected, "rejected")
            self.chosen_messages = fields.instance_of(chosen_messages, "chosen_messages", list)
            self.rejected_messages = fields.instance_of(rejected_messages, "rejected_messages", list)
            self.multi_modal_inputs = fields.optional(fields.tensors_by_name, multi_modal_inputs, "multi_modal_inputs")
            self.teacher_logprobs = fields.optional(fields.floats, teacher_logprobs, "teacher_logprobs")
            self.custom_fields = fields.optional(fields.custom_fields, custom_fields, "custom_fields") or []
            self._set_type_and_mask()
            self._check_lengths()
            if self.multi_modal_inputs:
                self._check_places(self.multi_modal_inputs)
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

    def _check_places(self, inputs: dict[str, Tensor]) -> None:
        if problem := misplaced(inputs, len(self.tokens), self.prompt_length, self.action_mask):
            raise ExperienceError(problem)

    @property
    def response_length(self) -> int:
        """Length of the per-token fields: `resp`, or, in a single turn with a truncated prompt, `len(logprobs)`."""
        truncated = self.experience_type == "single_turn" and self.truncate_status == "prompt_truncated"
        return len(self.logprobs) if truncated and self.logprobs is not None else len(self.tokens) - self.prompt_length

    def __eq__(self, other: object) -> bool:
        """Equal in every field: tensors in dtype, shape and values, with NaN equal to NaN."""
        if not isinstance(other, Experience):
            return NotImplemented
        return same(vars(self), vars(other))

    __hash__ = None  # type: ignore[assignment]  # experiences are mutable

    def serialize(self) -> bytes:
        """This experience as a payload; errors as in `serialize_many`."""
        return self.serialize_many([self])

    @staticmethod
    def serialize_many(experiences: Sequence["Experience"]) -> bytes:
        """Experiences as one payload: msgpack, safetensors, checksum; no pickle.

        It is of version 2, or, if there are multi-modal inputs, of version 3, which has equal tensors among them once.

        Raises:
            ExperienceError: a value cannot be encoded, or has a type or length that its field must not have (fields
                may be assigned unchecked); the message names experience and field.
        """
        if wrong := [kind for kind in set(map(type, experiences)) if not issubclass(kind, Experience)]:
            raise ExperienceError(f"expected experiences to serialize, got a value of type {wrong[0].__name__}.")
        return codec.write_payload(experiences)

    @staticmethod
    def deserialize(data: Buffer, allow_pickle: bool = False) -> "Experience":
        """The only experience of a payload; arguments and errors as in `deserialize_many`.

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

        Experiences with equal multi-modal inputs share them.

        Args:
            data: a payload of version 2 or 3, or of version 1 (Trinity-RFT's).
            allow_pickle: also read plain pickles. Unpickling runs any code that the bytes name: allow it only for bytes
                that you wrote yourself.

        Raises:
            ExperienceFormatError: the payload is damaged, or is something else.
        """
        view = view_of(data)
        if legacy.is_version_1(view):
            with format_errors():
                experiences = [Experience(**arguments) for arguments in legacy.read_version_1(view)]
                share_inputs(experiences)
                return experiences
        if view[: len(MAGIC)] == MAGIC:
            return read_payload(view, {})
        if allow_pickle:
            return _unpickled(view)
        raise ExperienceFormatError(
            f"payload of {len(view)} bytes does not start with {MAGIC!r}. "
            "If it is a plain pickle that you wrote yourself, pass allow_pickle=True."
        )

    def to_dict(self) -> dict[str, Any]:
        """The fields that a person or a logger wants to see, without tensors; optional ones only if they are set."""
        shown: dict[str, Any] = {
            "eid": self.eid.to_dict(),
            "type": self.experience_type,
            "prompt_length": self.prompt_length,
            "response_length": len(self.tokens) - self.prompt_length,
            "info": self.info,
            "metrics": self.metrics,
        }
        if self.reward is not None:
            shown["reward"] = float(self.reward)
        optional = ("prompt_text", "response_text", "messages", "tools", "chosen_messages", "rejected_messages")
        values = {name: getattr(self, name) for name in (*optional, "truncate_status")}
        return shown | {name: value for name, value in values.items() if value is not None}


# -- reading payloads --------------------------------------------------------------------------------------------------

_STATE = (*(field.name for field in dataclasses.fields(Experience)), "experience_type")


def read_payload(view: memoryview, apart: Mapping[str, Tensor]) -> list[Experience]:
    """The experiences of a payload of version 2 or 3; errors as in `Experience.deserialize_many`.

    Args:
        view: the payload.
        apart: tensors of multi-modal inputs that the payload names by their hash, see `codec.write_payload`.
    """
    with _without_collection():
        return _restored(unpack(view, partial(codec.read_fields, apart=apart)))


def _restored(values: codec.Columns) -> list[Experience]:
    """The experiences with these values of every field, which must have been checked: no constructor runs."""
    return list(map(_restore, zip(*map(values.__getitem__, _STATE), strict=True)))


def _restore(state: Sequence[Any]) -> Experience:
    """The experience with these values, in the order of `_STATE`.

    Written out: several times as fast as a loop over names.
    """
    e = object.__new__(Experience)
    # fmt: off
    (
        e.eid, e.tokens, e.prompt_length, e.logprobs, e.reward, e.token_level_reward, e.advantages, e.returns,
        e.truncate_status, e.info, e.metrics, e.response_text, e.prompt_text, e.action_mask, e.messages, e.tools,
        e.chosen, e.rejected, e.chosen_messages, e.rejected_messages, e.multi_modal_inputs, e.teacher_logprobs,
        e.custom_fields, e.experience_type,
    ) = state
    # fmt: on
    return e


@contextmanager
def _without_collection() -> Iterator[None]:
    """Keep the garbage collector away: thousands of new containers, none of them garbage, would set it off."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _unpickled(view: memoryview) -> list[Experience]:
    """The experiences of a plain pickle, which holds one or a list."""
    value = legacy.read_pickle(view)
    experiences = value if isinstance(value, list) else [value]
    for item in experiences:
        if not isinstance(item, Experience):
            raise ExperienceFormatError(f"expected a pickle of experiences, got one of {type(item).__name__}.")
    return experiences


# -- checks of assigned fields -----------------------------------------------------------------------------------------


def check_assigned(experience: Experience) -> None:
    """Check fields that may have been assigned since the constructor checked them; the reward becomes a float.

    Raises:
        ExperienceError: eid, info, metrics or reward is of the wrong type; the message names the field and the fix.
    """
    for name, kind in (("eid", EID), ("info", dict), ("metrics", dict)):
        if not isinstance(value := getattr(experience, name), kind):
            raise ExperienceError(
                f"{name} of an Experience was set to {value!r:.80}: it must be of type {kind.__name__}, at least "
                f"{name}={'EID()' if kind is EID else '{}'}."
            )
    experience.reward = fields.reward_value(experience.reward)


def check_weighed(experiences: Sequence[Experience], by: str) -> None:
    """Check advantages and returns, if they are set, for a finite number at every trained response token.

    Args:
        experiences: experiences that an add strategy has returned.
        by: the add strategy's name in messages.

    Raises:
        ExperienceError: a number is missing or not finite.
    """
    for exp in experiences:
        for values in (exp.advantages, exp.returns):
            if values is None or (mask := exp.action_mask) is None:  # without a mask there is no response
                continue
            is_row = isinstance(values, Tensor) and values.shape == mask.shape
            if not (is_row and values[mask.bool()].isfinite().all()):
                raise ExperienceError(
                    f"experience {exp.eid}: {by} gave it {values!r:.60}: give finite numbers, one a response token."
                )


# -- comparing and grouping --------------------------------------------------------------------------------------------


def same(a: Any, b: Any) -> bool:
    """True if two values are equal: `==` all the way down, except that NaN equals NaN.

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
    return bool(((a == b) | ((a != a) & (b != b))).all())  # only NaN differs from itself


_ID_OF = {"task": "tid", "run": "rid", "step": "sid"}


def group_by(experiences: Iterable[Experience], id_type: Literal["task", "run", "step"]) -> dict[str, list[Experience]]:
    """Experiences by their task, run or step identifier, in order of first appearance. ValueError: unknown id_type."""
    if id_type not in _ID_OF:
        raise ValueError(f"unknown id_type {id_type!r}. Known: {', '.join(_ID_OF)}.")
    groups: dict[str, list[Experience]] = {}
    for experience in experiences:
        groups.setdefault(getattr(experience.eid, _ID_OF[id_type]), []).append(experience)
    return groups
