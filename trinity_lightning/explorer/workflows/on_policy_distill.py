"""One question, one answer, each token weighed by a teacher."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from trinity_lightning.common.experience import Experience
from trinity_lightning.common.inference import Completion
from trinity_lightning.errors import ConfigError, RolloutError
from trinity_lightning.explorer.tasks.task import Task
from trinity_lightning.explorer.workflows.arguments import read_arguments
from trinity_lightning.explorer.workflows.simple import SimpleWorkflow


@dataclass(frozen=True)
class DistillArguments:
    """Settings of the workflow `on_policy_distill`.

    Attributes:
        teacher: which of the auxiliary models teaches.
        system_prompt: first message where the entry has a prompt only.
    """

    teacher: int = 0
    system_prompt: str | None = None


class OnPolicyDistillWorkflow(SimpleWorkflow):
    """Single turn; `teacher_logprobs` of each Experience are an auxiliary model's, for the add strategy of that name.

    The teacher reads the policy's own token ids: it must have the same vocabulary, and a context longer than the
    policy's by a token. Its log-probabilities are those of temperature 1. A reward is optional. Settings:
    `DistillArguments`; metric `teacher_logprob`, the mean over a response's tokens, in nats.

    Source: "On-Policy Distillation", Thinking Machines Lab, 2025.
    """

    @classmethod
    def check_args(cls, workflow_args: Mapping[str, Any]) -> None:
        """Refuse wrong arguments: ConfigError."""
        read_arguments(DistillArguments, workflow_args, "on_policy_distill")

    def reset(self, task: Task) -> None:
        """Take another task."""
        super().reset(task)
        if not task.is_eval and task.rollout_args.get("temperature") not in (None, 1.0):
            raise ConfigError(
                f"workflow 'on_policy_distill' compares log-probabilities at temperature 1, not "
                f"{task.rollout_args['temperature']}: set sampling.temperature=1."
            )
        teacher = read_arguments(DistillArguments, task.workflow_args, "on_policy_distill").teacher
        if teacher >= len(self.auxiliary_models):
            raise ConfigError(
                f"workflow 'on_policy_distill' asks auxiliary model {teacher}, and there are "
                f"{len(self.auxiliary_models)}: give the explorer auxiliary models."
            )
        self.teacher = self.auxiliary_models[teacher]

    async def _experience(self, completion: Completion, run: int) -> Experience:
        experience = await super()._experience(completion, run)
        tokens = [*completion.prompt_token_ids, *completion.token_ids]
        logprobs = await self.teacher.logprobs(tokens)
        if len(logprobs) != len(tokens) - 1:
            raise RolloutError(f"the teacher gave {len(logprobs)} log-probabilities for {len(tokens)} tokens")
        # That of token i stands at i - 1: the first has none.
        experience.teacher_logprobs = torch.tensor(logprobs[experience.prompt_length - 1 :], dtype=torch.float32)
        experience.metrics["teacher_logprob"] = float(experience.teacher_logprobs.mean())
        return experience
