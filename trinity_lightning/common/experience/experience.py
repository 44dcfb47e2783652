"""What came of one rollout, unpadded."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from trinity_lightning.common.experience import validation as check
from trinity_lightning.common.experience.custom_field import CustomField
from trinity_lightning.common.experience.eid import EID
from trinity_lightning.common.experience.equality import same
from trinity_lightning.common.experience.errors import ExperienceError

ExperienceType = Literal["single_turn", "multi_turn", "dpo"]
Buffer = bytes | bytearray | memoryview

# Tensors with one value a response token, which must therefore agree in length.
RESPONSE_FIELDS = ("logprobs", "token_level_reward", "advantages", "returns", "action_mask", "teacher_logprobs")
# Tensors with one value a token of their own sequence.
TOKEN_FIELDS = ("tokens", "chosen", "rejected")


@dataclass(init=False, eq=False)
class Experience:
    """What came of one rollout: tokens, what they were worth, and where they came from. Nothing is padded.

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
            self.tokens = check.token_ids(tokens, "tokens")
            self.prompt_length = check.prompt_length_value(prompt_length)
            self.logprobs = check.optional(check.float_values, logprobs, "logprobs")
            self.reward = check.reward_value(reward)
            self.token_level_reward = check.optional(check.float_values, token_level_reward, "token_level_reward")
            self.advantages = check.optional(check.float_values, advantages, "advantages")
            self.returns = check.optional(check.float_values, returns, "returns")
            self.truncate_status = check.instance_of(truncate_status, "truncate_status", str)
            self.info = {} if info is None else check.instance_of(info, "info", dict)
            self.metrics = {} if metrics is None else check.instance_of(metrics, "metrics", dict)
            self.response_text = check.instance_of(response_text, "response_text", str)
            self.prompt_text = check.instance_of(prompt_text, "prompt_text", str)
            self.action_mask = check.optional(check.mask_values, action_mask, "action_mask")
            self.messages = check.instance_of(messages, "messages", list)
            self.tools = check.instance_of(tools, "tools", list)
            self.chosen = check.optional(check.token_ids, chosen, "chosen")
            self.rejected = check.optional(check.token_ids, rejected, "rejected")
            self.chosen_messages = check.instance_of(chosen_messages, "chosen_messages", list)
            self.rejected_messages = check.instance_of(rejected_messages, "rejected_messages", list)
            self.multi_modal_inputs = check.tensor_dict(multi_modal_inputs, "multi_modal_inputs")
            self.teacher_logprobs = check.optional(check.float_values, teacher_logprobs, "teacher_logprobs")
            self.custom_fields = _make_custom_fields(custom_fields)
            self._set_type_and_mask()
            self._check_lengths()
        except ExperienceError as error:
            raise ExperienceError(f"experience {self.eid.uid}: {error}") from error

    def _set_type_and_mask(self) -> None:
        """Tell the type, and make the action mask of a single turn."""
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

    # Serialization knows of Experience, so it can be imported only when it is used.

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
        from trinity_lightning.common.experience import serialization

        return serialization.serialize_many(experiences)

    @staticmethod
    def deserialize(data: Buffer, allow_pickle: bool = False) -> "Experience":
        """The only experience of a payload; arguments and errors as `deserialize_many`.

        Raises:
            ExperienceError: the payload holds another number of experiences.
        """
        from trinity_lightning.common.experience import serialization

        return serialization.deserialize(data, allow_pickle)

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
        from trinity_lightning.common.experience import serialization

        return serialization.deserialize_many(data, allow_pickle)

    def to_dict(self) -> dict[str, Any]:
        """What a person or a logger wants to see, without tensors; optional entries only where they are not None."""
        result: dict[str, Any] = {
            "eid": self.eid.to_dict(),
            "type": self.experience_type,
            "prompt_length": self.prompt_length,
            "response_length": len(self.tokens) - self.prompt_length,
            "info": self.info,
            "metrics": self.metrics,
        }
        for name in ("prompt_text", "response_text", "messages", "tools", "chosen_messages", "rejected_messages"):
            if getattr(self, name) is not None:
                result[name] = getattr(self, name)
        if self.reward is not None:
            result["reward"] = float(self.reward)
        if self.truncate_status is not None:
            result["truncate_status"] = self.truncate_status
        return result


def check_assigned(experience: Experience) -> None:
    """Check what may have been assigned to an experience that its constructor has not seen; the reward becomes a float.

    Raises:
        ExperienceError: eid, info, metrics or reward is of the wrong type; the message names the field and the fix.
    """
    for name, kind, fix in (("eid", EID, "EID()"), ("info", dict, "{}"), ("metrics", dict, "{}")):
        value = getattr(experience, name)
        if not isinstance(value, kind):
            raise ExperienceError(
                f"{name} of an Experience was set to {value!r:.80}: it must be of type {kind.__name__}, at least "
                f"{name}={fix}."
            )
    experience.reward = check.reward_value(experience.reward)


def _make_eid(eid: Any) -> EID:
    if eid is None:
        return EID()
    if isinstance(eid, EID):
        return eid
    if not isinstance(eid, dict):
        raise ExperienceError(f"eid: expected EID, a dict of its fields, or None, got {type(eid).__name__}.")
    try:
        return EID(**eid)
    except TypeError as error:
        raise ExperienceError(f"eid: expected the fields batch, task, run, step, suffix, got {list(eid)}.") from error


def _make_custom_fields(custom_fields: Any) -> list[CustomField]:
    if custom_fields is None:
        return []
    if not isinstance(custom_fields, (list, tuple)) or not all(isinstance(f, CustomField) for f in custom_fields):
        raise ExperienceError("custom_fields: expected a list of CustomField.")
    return list(custom_fields)
