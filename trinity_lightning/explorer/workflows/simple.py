"""One question, one answer."""

import asyncio
from collections.abc import Sequence
from typing import Any

from trinity_lightning.common.errors import ConfigError, RolloutError
from trinity_lightning.common.experience import EID, Experience
from trinity_lightning.common.inference import Completion, InferenceModel
from trinity_lightning.explorer.rewards import resolve_rewards, score
from trinity_lightning.explorer.tasks.task import Task
from trinity_lightning.explorer.workflows.workflow import WORKFLOWS, PartialFailure, Workflow


@WORKFLOWS.register("simple")
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
        """One Experience a response; those whose reward function failed are told by PartialFailure."""
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
        if "task_index" in self.task.raw_task:
            info["task_index"] = self.task.raw_task["task_index"]
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


def messages_of(task: Task) -> list[dict[str, Any]]:
    """The conversation that a task's entry begins.

    Raises:
        ConfigError: the entry has neither "messages" nor "prompt".
    """
    messages, prompt = task.raw_task.get("messages"), task.raw_task.get("prompt")
    if messages:
        return [dict(message) for message in messages]
    if not isinstance(prompt, str):
        fields = ", ".join(task.raw_task) or "none"
        raise ConfigError(
            f"a task's entry needs 'messages' or a 'prompt' text; it has: {fields}. "
            "Set the taskset's prompt_field or messages_field."
        )
    system = task.workflow_args.get("system_prompt")
    opening = [{"role": "system", "content": system}] if system else []
    return [*opening, {"role": "user", "content": prompt}]


def prompt_text_of(messages: Sequence[dict[str, Any]]) -> str:
    """A conversation as people read it: a lone message's content, else one "role: content" a line."""
    if len(messages) == 1:
        return str(messages[0].get("content", ""))
    return "\n".join(f"{message.get('role')}: {message.get('content', '')}" for message in messages)
