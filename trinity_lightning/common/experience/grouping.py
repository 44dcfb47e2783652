"""Experiences that belong together, and preference pairs as single turns."""

from collections.abc import Sequence
from typing import Literal

import torch

from trinity_lightning.common.experience.experience import EID, Experience, ExperienceError

_ID_OF = {"task": "tid", "run": "rid", "step": "sid"}


def group_by(experiences: Sequence[Experience], id_type: Literal["task", "run", "step"]) -> dict[str, list[Experience]]:
    """Experiences by their task, run or step identifier, in order of first appearance.

    Raises:
        ValueError: unknown id_type.
    """
    if id_type not in _ID_OF:
        raise ValueError(f"unknown id_type {id_type!r}. Known: {', '.join(_ID_OF)}.")
    groups: dict[str, list[Experience]] = {}
    for experience in experiences:
        groups.setdefault(getattr(experience.eid, _ID_OF[id_type]), []).append(experience)
    return groups


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
