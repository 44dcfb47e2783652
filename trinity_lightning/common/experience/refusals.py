"""What is said of experiences with wrong fields, or that do not go together; and of setting fields of completions."""

import math
from collections.abc import Container, Sequence

import numpy as np
import torch
from torch import Tensor

from trinity_lightning.common.experience.experience import EID, Experience, ExperienceError
from trinity_lightning.errors import ReadOnlyError


def no_column(experiences: Sequence[Experience], name: str, dtype: torch.dtype | None) -> ExperienceError:
    """A field that not all of the experiences have, or not in this dtype, which is the first one's."""
    tensors = [getattr(each, name, None) for each in experiences]
    at = next(index for index, each in enumerate(tensors) if not isinstance(each, Tensor) or each.dtype != dtype)
    row = tensors[at]
    found = row.dtype if isinstance(row, Tensor) else type(row).__name__
    wanted = f"{dtype} as in the first of the batch" if dtype else "a tensor"
    return ExperienceError(f"experience {experiences[at].eid.uid}: {name}: expected {wanted}, got {found}.")


def too_wide(experiences: Sequence[Experience], lengths: np.ndarray, width: int, what: str) -> ExperienceError:
    """A length, one of each experience, that is negative or does not fit the width; `what`: in words."""
    at = int(np.flatnonzero((lengths < 0) | (lengths > width))[0])
    return ExperienceError(
        f"experience {experiences[at].eid.uid}: expected {what} of at most {width}, got {lengths[at]}."
    )


def unequal_rewards(run: str, rewards: Sequence[float]) -> ExperienceError:
    """Rewards of the steps of a run that differ."""
    return ExperienceError(
        f"run {run}: the rewards of its {len(rewards)} steps differ ({min(rewards):g} to {max(rewards):g}), and it is "
        "compared with the task's other runs by one reward: choose add_strategy=step_wise_grpo (the last step's "
        "reward) or gigpo (their sum), or give every step the run's reward (step_reward=return)."
    )


def wrongly_assigned(experience: Experience, name: str, kind: type) -> ExperienceError:
    """That a field was set to what is not of its kind."""
    fix = "EID()" if kind is EID else "{}"
    return ExperienceError(
        f"{name} of an Experience was set to {getattr(experience, name)!r:.80}: it must be of type {kind.__name__}, at "
        f"least {name}={fix}."
    )


def no_length(value: object) -> ExperienceError:
    """That this is no prompt length."""
    shown = value if isinstance(value, float) and not math.isfinite(value) else type(value).__name__
    return ExperienceError(f"prompt_length: expected an int, got {shown}.")


def read_only(name: str, fields: Container[str]) -> ReadOnlyError:
    """That the attribute cannot be set, and what to do instead; `fields`: names of those that there are."""
    if name in fields:
        fix = f"dataclasses.replace(completion, {name}=...) makes another one"
    else:
        fix = (
            "what is known of a rollout goes into the Experience that the workflow makes of it, such as reward and info"
        )
    return ReadOnlyError(f"'{name}' of a Completion cannot be set, it is what the model said: {fix}.")
