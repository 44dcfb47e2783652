"""Experiences as columns of their fields and back: what thousands of them are taken apart and made with.

The names are written out: the interpreter is several times as fast then as with a loop over names, and experiences made
like this share their keys, as those of the constructor do, which needs less memory than a dict of its own for each.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from trinity_lightning.common.experience.eid import EID
from trinity_lightning.common.experience.experience import Experience

STATE = (*(field.name for field in dataclasses.fields(Experience)), "experience_type")
ID_STATE = tuple(field.name for field in dataclasses.fields(EID))


def split(experiences: Sequence[Experience]) -> dict[str, list[Any]]:
    """The fields named in `STATE`, one list each; in place of the EID its own fields, as "eid.batch" and so on."""
    eids = [e.eid for e in experiences]
    return {
        "eid.batch": [eid.batch for eid in eids],
        "eid.task": [eid.task for eid in eids],
        "eid.run": [eid.run for eid in eids],
        "eid.step": [eid.step for eid in eids],
        "eid.suffix": [eid.suffix for eid in eids],
        "tokens": [e.tokens for e in experiences],
        "prompt_length": [e.prompt_length for e in experiences],
        "logprobs": [e.logprobs for e in experiences],
        "reward": [e.reward for e in experiences],
        "token_level_reward": [e.token_level_reward for e in experiences],
        "advantages": [e.advantages for e in experiences],
        "returns": [e.returns for e in experiences],
        "truncate_status": [e.truncate_status for e in experiences],
        "info": [e.info for e in experiences],
        "metrics": [e.metrics for e in experiences],
        "response_text": [e.response_text for e in experiences],
        "prompt_text": [e.prompt_text for e in experiences],
        "action_mask": [e.action_mask for e in experiences],
        "messages": [e.messages for e in experiences],
        "tools": [e.tools for e in experiences],
        "chosen": [e.chosen for e in experiences],
        "rejected": [e.rejected for e in experiences],
        "chosen_messages": [e.chosen_messages for e in experiences],
        "rejected_messages": [e.rejected_messages for e in experiences],
        "multi_modal_inputs": [e.multi_modal_inputs for e in experiences],
        "teacher_logprobs": [e.teacher_logprobs for e in experiences],
        "custom_fields": [e.custom_fields for e in experiences],
        "experience_type": [e.experience_type for e in experiences],
    }


def restore(state: Iterable[Any]) -> Experience:
    """The experience with these fields, in the order of `STATE`, which must have been checked."""
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
