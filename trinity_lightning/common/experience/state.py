"""Experiences as tuples of their fields and back: what thousands of them are taken apart and made with.

The names are written out: the interpreter is several times as fast then as with a loop over names, and experiences made
like this share their keys, as those of the constructor do, which needs less memory than a dict of its own for each.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

from trinity_lightning.common.experience.eid import EID
from trinity_lightning.common.experience.experience import Experience

STATE = (*(field.name for field in dataclasses.fields(Experience)), "experience_type")
ID_STATE = tuple(field.name for field in dataclasses.fields(EID))

# fmt: off


def state_of(e: Experience) -> tuple[Any, ...]:
    """The fields named in `STATE`."""
    return (
        e.eid, e.tokens, e.prompt_length, e.logprobs, e.reward, e.token_level_reward, e.advantages, e.returns,
        e.truncate_status, e.info, e.metrics, e.response_text, e.prompt_text, e.action_mask, e.messages, e.tools,
        e.chosen, e.rejected, e.chosen_messages, e.rejected_messages, e.multi_modal_inputs, e.teacher_logprobs,
        e.custom_fields, e.experience_type,
    )


def restore(state: Iterable[Any]) -> Experience:
    """The experience with these fields, which must have been checked."""
    e = object.__new__(Experience)
    (
        e.eid, e.tokens, e.prompt_length, e.logprobs, e.reward, e.token_level_reward, e.advantages, e.returns,
        e.truncate_status, e.info, e.metrics, e.response_text, e.prompt_text, e.action_mask, e.messages, e.tools,
        e.chosen, e.rejected, e.chosen_messages, e.rejected_messages, e.multi_modal_inputs, e.teacher_logprobs,
        e.custom_fields, e.experience_type,
    ) = state
    return e


def id_state_of(eid: EID) -> tuple[Any, ...]:
    """The fields named in `ID_STATE`."""
    return eid.batch, eid.task, eid.run, eid.step, eid.suffix
