"""A question that may be answered again."""

from typing import Any

from trinity_lightning.explorer.rewards import resolve_rewards, score
from trinity_lightning.explorer.tasks.messages import messages_of
from trinity_lightning.explorer.tasks.task import Task
from trinity_lightning.explorer.workflows.environments.environment import StepResult


class Retry:
    """Asks the task's question; after a wrong answer, says so and lets the policy try again.

    An answer at turn t (from 1) counts its score times decay**(t - 1), and an episode is worth its best answer: what a
    step adds to that is its reward.

    Args:
        verifier: reward functions that score an answer, as `Task.reward_fn`; None: reasoning-gym's own verifier where
            the task is one of reasoning-gym, else `math`.
        decay: worth of a later answer, relative to the answer before it.
        pass_at: score from which an answer is right.
        feedback: what is said after a wrong answer.
    """

    def __init__(
        self,
        verifier: Any = None,
        decay: float = 0.5,
        pass_at: float = 1.0,
        feedback: str = "That is wrong. Try again.",
    ) -> None:
        self._verifier = resolve_rewards(verifier)
        self._decay = decay
        self._pass_at = pass_at
        self._feedback = feedback

    def reset(self, task: Task) -> list[dict[str, Any]]:
        """The task's own conversation."""
        self._task = task
        self._turn = 0
        self._best = 0.0
        if not self._verifier:
            self._verifier = resolve_rewards("reasoning_gym" if task.raw_task.get("reasoning_gym") else "math")
        return messages_of(task)

    async def step(self, response: str) -> StepResult:
        """Score an answer."""
        value, _ = await score(self._verifier, response, self._task)
        value = value or 0.0
        worth = value * self._decay**self._turn
        gained = max(worth - self._best, 0.0)
        self._best += gained
        self._turn += 1
        metrics = {"first_answer_score": value} if self._turn == 1 else {}
        return self._feedback, gained, value >= self._pass_at, {"metrics": metrics}
