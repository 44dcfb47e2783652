"""What one optimizer step is made of."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from trinity_lightning.common.experience import CustomField, Experience

# What marks an expert's experiences: an entry of `info`, and the column that `gather_experiences` makes of it (as in
# Trinity-RFT).
IS_EXPERT = CustomField("is_expert", "expert_mask", torch.bool)


def is_expert(experience: Experience) -> bool:
    """Whether an experience is marked as an expert's; one without a mark is not."""
    return bool(experience.info.get(IS_EXPERT.source_field, False))


def trained_mask(experience: Experience) -> Tensor:
    """Which response tokens can be trained, bool [response]: those of the action mask, if any, that are predicted."""
    if experience.action_mask is None:
        return torch.zeros(experience.response_length, dtype=torch.bool)
    return experience.action_mask.bool() & predicted_mask(experience)


def predicted_mask(experience: Experience) -> Tensor:
    """Which response tokens something precedes, bool [response]: all but the first of a sequence without prompt."""
    mask = torch.ones(experience.response_length, dtype=torch.bool)
    if experience.prompt_length == 0:
        mask[:1] = False
    return mask


@dataclass
class OptimizerBatch:
    """One item of the ExperienceLoader: one `training_step`, one optimizer step.

    Experiences are unpadded; the trainer's layout cuts micro-batches out of them and pads those on the device.
    The totals are those of the whole optimizer batch (on all ranks): every loss is normalised by them, so that
    loss and gradient do not depend on how the batch is cut.

    Attributes:
        experiences: what is trained on, with advantages set.
        columns: per-token extras by name ("old_logprobs", "ref_logprobs"; weights of streams; of a critic "values",
            "returns" and "advantages", which come before the experiences'), a float32 tensor [response] an experience;
            of a teacher's likeliest tokens, ids (int64) and log-probabilities [response, k].
        num_expert_tokens, num_expert_sequences: how many of the two below are an expert's; losses may treat them apart.
        num_tokens: trained tokens, the N of token means.
        num_sequences: experiences, the B of sequence means; those without a trained token count.
        max_response_length: the R of normalised sums, in tokens: the longest response that the run allows, or, where
            that is unknown, the longest of these experiences.
        explore_step: the explore step (EID.batch) of the experiences.
        step: all experiences of the explore step, which decide what has to be alike in all of its batches; None: these
            are all.
        stream_totals: the first three of a loss, for each stream of an objective of several.
        unit: experiences that follow each other and are computed together: 2 if they are preference pairs, the chosen
            response and the rejected one; else 1.
    """

    experiences: Sequence[Experience]
    num_tokens: int
    num_sequences: int
    max_response_length: int
    explore_step: int
    columns: dict[str, list[Tensor]] = field(default_factory=dict)
    num_expert_tokens: int = 0
    num_expert_sequences: int = 0
    step: Sequence[Experience] | None = None
    stream_totals: dict[str, Any] = field(default_factory=dict)
    unit: int = 1

    @classmethod
    def of(
        cls, experiences: Sequence[Experience], explore_step: int, max_response_length: int | None = None
    ) -> "OptimizerBatch":
        """A batch of these experiences, its totals counted from their action masks; pairs become two rows each.

        Raises:
            ExperienceError: preference pairs mixed with other experiences.
        """
        pairs = any(e.experience_type == "dpo" for e in experiences)
        if pairs:
            from trinity_lightning.common.experience import split_dpo_experience_to_single_turn

            experiences = split_dpo_experience_to_single_turn(experiences)
        tokens = [int(trained_mask(e).sum()) for e in experiences]
        expert = [is_expert(e) for e in experiences]
        longest = max((e.response_length for e in experiences), default=0)
        return cls(
            experiences=experiences,
            num_tokens=sum(tokens),
            num_sequences=len(experiences),
            max_response_length=longest if max_response_length is None else max_response_length,
            explore_step=explore_step,
            num_expert_tokens=sum(count for count, one in zip(tokens, expert, strict=True) if one),
            num_expert_sequences=sum(expert),
            unit=2 if pairs else 1,
        )
