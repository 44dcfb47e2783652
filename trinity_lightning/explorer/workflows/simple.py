"""One question, one answer."""

import asyncio
from collections.abc import Sequence
from typing import Any

from trinity_lightning.common.experience import EID, Experience
from trinity_lightning.common.inference import Completion, InferenceModel
from trinity_lightning.errors import RolloutError
from trinity_lightning.explorer.rewards import resolve_rewards, score
from trinity_lightning.explorer.tasks.messages import messages_of, prompt_text_of
from trinity_lightning.explorer.tasks.task import Task
from trinity_lightning.explorer.workflows.workflow import PartialFailure, Workflow


class SimpleWorkflow(Workflow):
    """Single turn: all n responses to the task's prompt in one request, each judged by the task's reward functions.

    The entry holds "messages" (a conversation) or "prompt" (one user message, after `workflow_args["system_prompt"]`
    where that is set).
    """

    repeatable = True
    default_reward: str | None = None

    def __init__(
        self,
        task: Task,
        model: InferenceModel,
        auxiliary_models: Sequence[InferenceModel] | None = None,
    ) -> None:
        super().__init__(task, model, auxiliary_models)
        self.reset(task)

    def reset(self, task: Task) -> None:
        """Take another task, its messages and reward functions."""
        super().reset(task)
        self.messages = messages_of(task)
        self.rewards = resolve_rewards(self.default_reward if task.reward_fn is None else task.reward_fn)

    async def run(self) -> list[Experience]:
        """One Experience a response; those whose reward function failed are reported by PartialFailure."""
        completions = await self.model.chat(self.messages, n=self.repeat_times)
        results = await asyncio.gather(
            *(self._experience(completion, self.run_id_base + i) for i, completion in enumerate(completions)),
            return_exceptions=True,
        )
        errors: dict[int, Exception] = {}
        experiences: list[Experience] = []
        for run, result in enumerate(results, start=self.run_id_base):
            if isinstance(result, Experience):
                experiences.append(result)
            elif isinstance(result, Exception):
                errors[run] = result
            else:
                raise result
        if errors:
            raise PartialFailure(experiences, errors)
        return experiences

    async def _experience(self, completion: Completion, run: int) -> Experience:
        if completion.finish_reason == "abort":
            raise RolloutError("the engine aborted the request before its end")
        reward, metrics = await score(self.rewards, completion.text, self.task)
        info: dict[str, Any] = {"finish_reason": completion.finish_reason}
        return Experience(
            eid=EID(run=run),
            tokens=[*completion.prompt_token_ids, *completion.token_ids],
            prompt_length=len(completion.prompt_token_ids),
            logprobs=list(completion.logprobs),
            reward=reward,
            truncate_status="response_truncated" if completion.finish_reason == "length" else None,
            info=info,
            metrics=metrics,
            prompt_text=prompt_text_of(self.messages),
            response_text=completion.text,
        )
