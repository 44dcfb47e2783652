"""The shared rules for rewards that are equal, or are no numbers at all."""

import math
from collections.abc import Sequence

# Relative to the largest absolute reward: 0.1 + 0.2 against 0.3 differs by 1.8e-16 of it, float32 rounding by 6e-8.
EQUAL_TOLERANCE = 1e-6


def is_valid_reward(reward: float | None) -> bool:
    """Whether a reward is a finite number."""
    return reward is not None and math.isfinite(reward)


def equal_rewards(rewards: Sequence[float]) -> bool:
    """Whether finite rewards are equal up to rounding: max - min <= 1e-6 times the largest absolute value.

    A range, not a variance of floating-point numbers: [0.1 + 0.2, 0.3] are equal.
    """
    if not rewards:
        return True
    low, high = min(rewards), max(rewards)
    return high - low <= EQUAL_TOLERANCE * max(abs(low), abs(high))
