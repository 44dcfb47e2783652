"""What is done about responses that are too long: not to train on those cut off, and to charge for length."""

from typing import Any

import torch

from trinity_lightning.buffer.operators.experience_operator import ExperienceOperatorV1
from trinity_lightning.common.experience import Experience
from trinity_lightning.config.values import whole_number
from trinity_lightning.errors import ConfigError


class MaskResponseTruncated(ExperienceOperatorV1):
    """Trains on no token of a response that was cut off (overlong filtering: DAPO, arXiv 2503.14476, section 3.4).

    Such an experience stays in its group: its reward counts for the others' advantages.
    """

    async def process(self, exps: list[Experience]) -> tuple[list[Experience], dict[str, Any]]:
        """All experiences; `masked_truncated_count` is the number of those with an action mask of zeros now."""
        masked = 0
        for exp in exps:
            if exp.truncate_status == "response_truncated" and exp.action_mask is not None:
                exp.action_mask = torch.zeros_like(exp.action_mask)
                masked += 1
        return exps, {"masked_truncated_count": masked}


class OverlongPenalty(ExperienceOperatorV1):
    """Adds a penalty for length to the reward (soft overlong punishment: DAPO, arXiv 2503.14476, equation 13).

    For a response of L tokens: 0 up to max_length - cache_length, from there on
    ((max_length - cache_length) - L) / cache_length, and -1 from max_length on. A missing reward stays missing.

    Args:
        max_length: length from which on the penalty is -1, in tokens.
        cache_length: over how many tokens before it the penalty grows; above 0 and below max_length.
    """

    def __init__(self, max_length: int, cache_length: int) -> None:
        self.max_length = whole_number("max_length", max_length, least=1)
        self.cache_length = whole_number("cache_length", cache_length, least=1)
        if cache_length >= max_length:
            raise ConfigError(f"cache_length ({cache_length}) must be below max_length ({max_length}).")

    async def process(self, exps: list[Experience]) -> tuple[list[Experience], dict[str, Any]]:
        """All experiences; `overlong_penalty/mean` is the mean of their penalties."""
        penalties = [self._penalty(exp.response_length) for exp in exps]
        for exp, penalty in zip(exps, penalties, strict=True):
            if exp.reward is not None:
                exp.reward += penalty
        return exps, {"overlong_penalty/mean": sum(penalties) / len(penalties)} if penalties else {}

    def _penalty(self, length: int) -> float:
        return max(min((self.max_length - self.cache_length - length) / self.cache_length, 0.0), -1.0)
