"""`OptimizerBatch`: the experiences and numbers that one optimizer step is computed from."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from trinity_lightning.common.experience import CustomField, Experience, split_dpo_experience_to_single_turn

# The mark of an expert's experiences: an entry of `info`, and the column that `gather_experiences` makes of it (as in
# Trinity-RFT).
IS_EXPERT = CustomField("is_expert", "expert_mask", torch.bool)


def is_expert(experience: Experience) -> bool:
    """True if an experience is marked as an expert's."""
    return bool(experience.info.get(IS_EXPERT.source_field, False))


def trained_mask(experience: Experience) -> Tensor:
    """Mask of the response tokens that can be trained, bool [response]: in the action mask, and predicted."""
    if experience.action_mask is None:
        return torch.zeros(experience.response_length, dtype=torch.bool)
    return experience.action_mask.bool() & predicted_mask(experience)


def predicted_mask(experience: Experience) -> Tensor:
    """Mask of the response tokens with a token before them, bool [response]: without a prompt the first has none."""
    mask = torch.ones(experience.response_length, dtype=torch.bool)
    if experience.prompt_length == 0:
        mask[:1] = False
    return mask


@dataclass
class OptimizerBatch:
    """One item of the ExperienceLoader: one `training_step`, one optimizer step.

    Experiences are unpadded; the trainer's layout cuts them into micro-batches and makes the tensors of those. The
    totals count the whole optimizer batch, on all ranks. Every loss is normalised by them, so neither loss nor gradient
    depends on how the batch is cut.

    Attributes:
        experiences: experiences to train on, with advantages set.
        num_tokens: trained tokens, the N of token means.
        num_sequences: experiences, the B of sequence means; one without a trained token counts too.
        max_response_length: the R of normalised sums, in tokens: the longest response that the run allows, or, if that
            is unknown, the longest of these experiences.
        explore_step: the explore step (EID.batch) of the experiences.
        columns: numbers for each response token by name, a float32 tensor [response] for each experience:
            "old_logprobs", "ref_logprobs", weights of streams, and a critic's "values", "returns" and "advantages",
            which are used in place of the experiences' own. A teacher's likeliest tokens have ids (int64) and
            log-probabilities, [response, k] each.
        num_expert_tokens, num_expert_sequences: an expert's part of the totals; losses may treat it apart.
        step: all experiences of the explore step, which decide what must be alike in all of its batches; None: these
            experiences are all.
        stream_totals: num_tokens, num_sequences and max_response_length for each stream of an objective of several.
        unit: number of consecutive experiences that are computed together: 2 for preference pairs (chosen, rejected),
            else 1.
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
            num_expert_tokens=sum(count for count, by_expert in zip(tokens, expert, strict=True) if by_expert),
            num_expert_sequences=sum(expert),
            unit=2 if pairs else 1,
        )
