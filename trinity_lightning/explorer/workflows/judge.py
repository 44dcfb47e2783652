"""One question, one answer, judged by another model."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trinity_lightning.common.rewards import is_valid_reward
from trinity_lightning.common.verdict import read_score
from trinity_lightning.errors import ConfigError
from trinity_lightning.explorer.rewards import Reward
from trinity_lightning.explorer.tasks.messages import messages_of, prompt_text_of
from trinity_lightning.explorer.tasks.task import Task
from trinity_lightning.explorer.workflows.arguments import read_arguments
from trinity_lightning.explorer.workflows.simple import SimpleWorkflow

PROMPT = """Judge the response to a question. Reply with JSON only: {"score": x}, x from 0 (useless) to 1 (perfect).

Question:
{question}

Reference answer:
{answer}

Response:
{response}"""


@dataclass(frozen=True)
class JudgeArguments:
    """Settings of the workflow `judge`.

    Attributes:
        judge_prompt: what the judge is asked; `{question}`, `{answer}` and `{response}` stand for the task's
            conversation, its reference answer ("none" where it has none) and the response.
        judge_sampling: how the judge's verdict is sampled, by vLLM's names.
        judge_weight: the score is multiplied by it.
        judge: which of the auxiliary models judges.
        system_prompt: first message where the entry has a prompt only.
    """

    judge_prompt: str = PROMPT
    judge_sampling: Mapping[str, Any] = field(default_factory=lambda: {"temperature": 0.0, "max_tokens": 256})
    judge_weight: float = 1.0
    judge: int = 0
    system_prompt: str | None = None

    def __post_init__(self) -> None:
        if "{response}" not in self.judge_prompt:
            raise ConfigError("judge_prompt lacks {response}: the judge would not see what it judges.")
        if not isinstance(self.judge_weight, int | float) or not is_valid_reward(float(self.judge_weight)):
            raise ConfigError(f"judge_weight is {self.judge_weight!r}; give a finite number.")


class JudgeWorkflow(SimpleWorkflow):
    """Single turn; the reward is an auxiliary model's score from 0 to 1 (metric `reward/judge`), added to what the
    task's reward functions give.

    A verdict that cannot be read fails the run, with the verdict in its message. Settings: `JudgeArguments`.
    """

    @classmethod
    def check_args(cls, workflow_args: Mapping[str, Any]) -> None:
        """Refuse wrong arguments: ConfigError."""
        read_arguments(JudgeArguments, workflow_args, "judge")

    def reset(self, task: Task) -> None:
        """Take another task."""
        super().reset(task)
        self.arguments = read_arguments(JudgeArguments, task.workflow_args, "judge")
        if self.arguments.judge >= len(self.auxiliary_models):
            raise ConfigError(
                f"workflow 'judge' asks auxiliary model {self.arguments.judge}, and there are "
                f"{len(self.auxiliary_models)}: give the explorer auxiliary models."
            )
        self.rewards = [*self.rewards, Reward("judge", self._ask, float(self.arguments.judge_weight))]

    async def _ask(self, response: str, task: Task) -> float:
        wanted = {
            "{question}": prompt_text_of(messages_of(task)),
            "{answer}": str(task.raw_task.get("answer", "none")),
            "{response}": response,
        }
        # All at once: what stands in a response must not be taken for a place to fill in.
        text = re.sub(r"\{(?:question|answer|response)\}", lambda found: wanted[found[0]], self.arguments.judge_prompt)
        judge = self.auxiliary_models[self.arguments.judge]
        verdicts = await judge.chat([{"role": "user", "content": text}], **self.arguments.judge_sampling)
        return read_score(verdicts[0].text)
