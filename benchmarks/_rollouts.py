"""Rollouts that sides of a comparison train on: random tokens of given lengths, the same for each. Standard library."""

import random
from dataclasses import dataclass
from typing import Any

FIRST_TOKEN = 4  # below are special ones


@dataclass(frozen=True)
class Rollout:
    """A prompt, its response, and the advantage of each token of it."""

    prompt: list[int]
    response: list[int]
    advantage: float


@dataclass(frozen=True)
class Case:
    """Lengths of rollouts in tokens, least and largest.

    Attributes:
        shared: whether a group's rollouts answer the same prompt; otherwise prompts of the same length.
    """

    prompts: tuple[int, int]
    responses: tuple[int, int]
    shared: bool = True

    @property
    def longest(self) -> int:
        """Tokens of the longest rollout there may be."""
        return self.prompts[1] + self.responses[1]

    def rollouts(self, groups: int, group_size: int, vocabulary: int, seed: int = 0) -> list[list[Rollout]]:
        """Groups of rollouts, none of them without advantage; one of the longest prompt and of the longest response."""
        generator = random.Random(seed)

        def tokens(count: int) -> list[int]:
            return [generator.randrange(FIRST_TOKEN, vocabulary) for _ in range(count)]

        lengths = [generator.randint(*self.prompts) for _ in range(groups)]
        lengths[0] = self.prompts[1]
        rollouts = []
        for group, length in enumerate(lengths):
            prompt = tokens(length)
            sizes = [generator.randint(*self.responses) for _ in range(group_size)]
            sizes[0] = sizes[0] if group else self.responses[1]
            rollouts.append(
                [
                    Rollout(
                        prompt if self.shared else tokens(length),
                        tokens(size),
                        generator.choice((-1, 1)) * (1 + row / 8),
                    )
                    for row, size in enumerate(sizes)
                ]
            )
        return rollouts


def varied(response: str, task: Any = None) -> float:
    """A reward that differs within nearly every group, whatever a model writes: every group has advantages."""
    return len(response) % 16 / 15


CASES = {
    "short": Case((45, 45), (2, 25)),
    "ragged": Case((48, 112), (8, 256)),
    "uniform": Case((64, 64), (128, 128)),
    "no_shared_prompt": Case((64, 64), (128, 128), shared=False),
}
