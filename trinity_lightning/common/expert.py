"""Which experiences are an expert's: the one mark that buffer, trainer and losses agree on."""

import copy

import torch

from trinity_lightning.common.experience import CustomField, Experience

# An entry of `info`, and the column that `gather_experiences` makes of it (as in Trinity-RFT).
IS_EXPERT = CustomField("is_expert", "expert_mask", torch.bool)


def is_expert(experience: Experience) -> bool:
    """Whether an experience is marked as an expert's; one without a mark is not."""
    return bool(experience.info.get(IS_EXPERT.source_field, False))


def marked(experience: Experience, expert: bool) -> Experience:
    """A copy that says whether it is an expert's."""
    copied = copy.copy(experience)
    copied.info = {**experience.info, IS_EXPERT.source_field: expert}
    others = [f for f in experience.custom_fields if f.destination_field != IS_EXPERT.destination_field]
    copied.custom_fields = [*others, IS_EXPERT]
    return copied
