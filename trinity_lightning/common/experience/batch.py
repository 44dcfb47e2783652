"""The padded batch of whole experiences, with every field, and preference pairs as single turns."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from trinity_lightning.common.experience.experience import EID, CustomField, Experience, ExperienceError
from trinity_lightning.common.experience.gather import (
    Device,
    first_of,
    gather_action_masks,
    gather_attention_masks,
    gather_multi_modal_inputs,
    gather_response_attrs,
    gather_token_ids,
)


@dataclass
class Experiences:
    """A padded batch. B experiences, P prompt cells (padded on the left), R response cells (padded on the right).

    Every field, custom ones by their destination name, can be read as an attribute and by key.

    Attributes:
        eids: identities, B of them.
        tokens: [B, P + R].
        rewards: float32 [B].
        token_level_rewards, advantages, returns: [B, R].
        attention_masks: which cells hold tokens, bool [B, P + R].
        action_masks: which response cells are trained on, bool [B, R].
        prompt_length: P, the longest prompt.
        logprobs, teacher_logprobs: [B, R].
        multi_modal_inputs: by name, concatenated along dimension 0.
        custom_fields: by destination name, [B] each.

    Optional tensors are None if no experience has them.
    """

    eids: list[EID]
    tokens: Tensor
    rewards: Tensor | None
    token_level_rewards: Tensor | None
    advantages: Tensor | None
    returns: Tensor | None
    attention_masks: Tensor
    action_masks: Tensor
    prompt_length: int
    logprobs: Tensor | None
    teacher_logprobs: Tensor | None
    multi_modal_inputs: dict[str, Tensor] | None
    custom_fields: dict[str, Tensor] = field(default_factory=dict)

    @property
    def batch_size(self) -> int:
        """B."""
        return len(self.tokens)

    def __getattr__(self, name: str) -> Any:
        custom = vars(self).get("custom_fields", {})  # not an attribute yet while a copy is being made
        if name in custom:
            return custom[name]
        raise AttributeError(f"the batch has no field {name!r}. Custom fields: {sorted(custom) or 'none'}.")

    def __getitem__(self, name: str) -> Any:
        try:
            return getattr(self, name)
        except AttributeError as error:
            raise KeyError(str(error)) from error


def gather_experiences(
    experiences: Sequence[Experience],
    pad_token_id: int,
    device: Device = None,
    custom_fields: Sequence[CustomField] | None = None,
) -> Experiences:
    """The padded batch of some experiences; preference pairs are first split into single turns.

    Args:
        experiences: at least one.
        pad_token_id: what cells without a token are filled with.
        device: of the tensors; None: host memory.
        custom_fields: columns to take from `info`; None takes those that the experiences themselves name.

    Raises:
        ExperienceError: empty list, preference pairs mixed with other types, an optional field that only some have, a
            custom field missing in some `info`, experiences whose own custom fields differ, or mixed dtypes.
    """
    first_of(experiences)
    pairs = sum(e.experience_type == "dpo" for e in experiences)
    if 0 < pairs < len(experiences):
        raise ExperienceError(
            f"expected preference pairs only or none, got {pairs} among {len(experiences)} experiences."
        )
    if pairs:
        experiences = split_dpo_experience_to_single_turn(experiences)
    if custom_fields is None:
        custom_fields = _common_custom_fields(experiences)
    prompt = max(e.prompt_length for e in experiences)
    response = max(max(len(e.tokens) - e.prompt_length, e.response_length) for e in experiences)

    def per_token(name: str) -> Tensor | None:
        return _if_all(experiences, name, lambda: gather_response_attrs(experiences, name, response, device=device))

    return Experiences(
        eids=[e.eid for e in experiences],
        tokens=gather_token_ids(experiences, prompt, response, pad_token_id, device=device),
        rewards=_if_all(
            experiences,
            "reward",
            lambda: torch.tensor([e.reward for e in experiences], dtype=torch.float32, device=device),
        ),
        token_level_rewards=per_token("token_level_reward"),
        advantages=per_token("advantages"),
        returns=per_token("returns"),
        attention_masks=gather_attention_masks(experiences, prompt, response, device=device),
        action_masks=gather_action_masks(experiences, response, device=device),
        prompt_length=prompt,
        logprobs=per_token("logprobs"),
        teacher_logprobs=per_token("teacher_logprobs"),
        multi_modal_inputs=_if_all(
            experiences, "multi_modal_inputs", lambda: gather_multi_modal_inputs(experiences, device=device)
        ),
        custom_fields=_custom_columns(experiences, custom_fields, device),
    )


def split_dpo_experience_to_single_turn(experiences: Sequence[Experience]) -> list[Experience]:
    """Every preference pair as two single turns: [chosen 0, rejected 0, chosen 1, rejected 1, ...].

    Each has the prompt followed by its response as tokens, the pair's batch, task, run and step with a fresh suffix,
    and the pair's reward, info, metrics, prompt_text, tools, multi_modal_inputs and custom fields; its messages are the
    chosen or the rejected ones.

    Raises:
        ExperienceError: an experience lacks chosen or rejected tokens.
    """
    singles = []
    for pair in experiences:
        for name in ("chosen", "rejected"):
            response = getattr(pair, name)
            if response is None:
                raise ExperienceError(f"experience {pair.eid.uid}: {name}: expected token ids to split, got None.")
            singles.append(
                Experience(
                    eid=EID(batch=pair.eid.batch, task=pair.eid.task, run=pair.eid.run, step=pair.eid.step),
                    tokens=torch.cat([pair.tokens, response]),
                    prompt_length=len(pair.tokens),
                    reward=pair.reward,
                    info=dict(pair.info),  # a copy, so that writing into one half leaves the other alone
                    metrics=dict(pair.metrics),
                    prompt_text=pair.prompt_text,
                    messages=getattr(pair, f"{name}_messages"),
                    tools=pair.tools,
                    multi_modal_inputs=pair.multi_modal_inputs,
                    custom_fields=pair.custom_fields,
                )
            )
    return singles


def _if_all(experiences: Sequence[Experience], name: str, make: Callable[[], Any]) -> Any:
    """`make()` if all experiences have the field, None if none has."""
    lacking = [e for e in experiences if getattr(e, name) is None]
    if not lacking:
        return make()
    if len(lacking) == len(experiences):
        return None
    having = next(e for e in experiences if getattr(e, name) is not None)
    raise ExperienceError(
        f"{name}: expected in all experiences or in none; {having.eid.uid} has it, {lacking[0].eid.uid} does not."
    )


def _common_custom_fields(experiences: Sequence[Experience]) -> list[CustomField]:
    fields = experiences[0].custom_fields
    for experience in experiences:
        if experience.custom_fields != fields:
            raise ExperienceError(
                f"experience {experience.eid.uid}: custom_fields: expected {fields} as in the first of the batch, "
                f"got {experience.custom_fields}."
            )
    return fields


def _custom_columns(
    experiences: Sequence[Experience], custom_fields: Sequence[CustomField], device: Device
) -> dict[str, Tensor]:
    columns: dict[str, Tensor] = {}
    for custom in custom_fields:
        source, destination = custom.source_field, custom.destination_field
        if destination in columns or hasattr(Experiences, destination) or destination in Experiences.__annotations__:
            raise ExperienceError(f"custom field {destination!r}: the batch has a field of that name already.")
        for experience in experiences:
            if source not in experience.info:
                raise ExperienceError(
                    f"experience {experience.eid.uid}: custom field {destination!r}: expected the key {source!r} in "
                    f"info, got {sorted(map(str, experience.info))}."
                )
        try:
            columns[destination] = torch.tensor(
                [e.info[source] for e in experiences], dtype=custom.data_type, device=device
            )
        except (TypeError, ValueError, RuntimeError) as error:
            raise ExperienceError(f"custom field {destination!r}: info[{source!r}] is not a number: {error}") from error
    return columns
