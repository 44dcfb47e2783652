"""The shared rule for rewards that carry no signal, or are no numbers at all."""

import math
from collections.abc import Sequence

# Relative to the largest absolute reward: 0.1 + 0.2 against 0.3 differs by 1.8e-16 of it, float32 rounding by 6e-8.
CONSTANT_TOLERANCE = 1e-6


def is_valid_reward(reward: float | None) -> bool:
    """Whether a reward is a finite number."""
    return reward is not None and math.isfinite(reward)


def is_constant(rewards: Sequence[float]) -> bool:
    """Whether finite rewards are equal up to rounding: max - min <= 1e-6 times the largest absolute value.

    A range, not a variance of floating-point numbers, tells it: [0.1 + 0.2, 0.3] is no signal.
    """
    if not rewards:
        return True
    low, high = min(rewards), max(rewards)
    return high - low <= CONSTANT_TOLERANCE * max(abs(low), abs(high))
