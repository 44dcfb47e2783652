"""A guessing game, small enough to see at a glance what a policy does."""

import random
from typing import Any

from trinity_lightning.errors import ConfigError
from trinity_lightning.explorer.rewards.text import find_last_number
from trinity_lightning.explorer.tasks.task import Task
from trinity_lightning.explorer.workflows.environments.environment import StepResult


class GuessNumber:
    """Find a number; after each guess the game says whether it is higher or lower.

    Finding it at guess t (from 1) is worth decay**(t - 1), not finding it 0. The number is `raw_task["secret"]`, or
    else drawn from the seed and the task's place in its taskset, so that all runs of a task look for the same one.

    Args:
        low, high: the range of the number.
        decay: worth of a later guess, relative to the guess before it.
        seed: of the numbers.
    """

    def __init__(self, low: int = 0, high: int = 20, decay: float = 0.9, seed: int = 0) -> None:
        if low >= high:
            raise ConfigError(f"guess_number: low is {low} and high is {high}; low must be less.")
        self._low, self._high = low, high
        self._decay = decay
        self._seed = seed
        self._guesses = 0
        self._known = [low, high]
        self._secret = low

    def reset(self, task: Task) -> list[dict[str, Any]]:
        """The rules of the game."""
        self._guesses, self._known = 0, [self._low, self._high]
        place = task.raw_task.get("task_index", task.raw_task)
        drawn = random.Random(f"{self._seed}/{place!r}").randint(self._low, self._high)
        self._secret = int(task.raw_task.get("secret", drawn))
        rules = f"I think of a whole number from {self._low} to {self._high}. Guess it. Reply with only the number."
        return [{"role": "user", "content": rules}]

    def step(self, response: str) -> StepResult:
        """Judge a guess: the last number of the response."""
        self._guesses += 1
        guess = find_last_number(response)
        if guess is None or guess != int(guess):
            return "Reply with a whole number.", 0.0, False, {"state": list(self._known)}
        if guess == self._secret:
            return "Right.", self._decay ** (self._guesses - 1), True, {"state": list(self._known)}
        if guess < self._secret:
            self._known[0] = max(self._known[0], int(guess) + 1)
            return "Higher.", 0.0, False, {"state": list(self._known)}
        self._known[1] = min(self._known[1], int(guess) - 1)
        return "Lower.", 0.0, False, {"state": list(self._known)}
