"""One question, one answer."""

import asyncio
from collections.abc import Mapping
from typing import Any

from trinity_lightning.common.experience import EID, Experience
from trinity_lightning.common.inference import Completion
from trinity_lightning.config.values import unknown_name
from trinity_lightning.errors import ConfigError, RolloutError
from trinity_lightning.explorer.rewards import score
from trinity_lightning.explorer.tasks.task import Task, messages_of
from trinity_lightning.explorer.workflows.workflow import PartialFailure, RewardedWorkflow, experience_of


class SimpleWorkflow(RewardedWorkflow):
    """Single turn: all n responses to the task's prompt in one request, each judged by the task's reward functions.

    The entry holds "messages" (a conversation) or "prompt" (one user message, after `workflow_args["system_prompt"]`
    if that is set).
    """

    repeatable = True

    @classmethod
    def check_args(cls, workflow_args: Mapping[str, Any]) -> Any:
        """As of every workflow; built-in ones without settings have one argument, one's own may read others."""
        built_in = cls.__module__.startswith(f"{__package__}.")
        for name in workflow_args if built_in and cls.arguments_class is None else ():
            if name != "system_prompt":
                raise ConfigError(unknown_name(f"workflow.args of {cls.__name__}:", name, ["system_prompt"]))
        return super().check_args(workflow_args)

    def reset(self, task: Task) -> None:
        """Take another task and its conversation."""
        super().reset(task)
        self.messages = messages_of(task)

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
        return experience_of(completion, self.messages, eid=EID(run=run), reward=reward, metrics=metrics)


# -- mathematics ------------------------------------------------------------------------------------------------------


class MathWorkflow(SimpleWorkflow):
    """Single turn, judged by the boxed answer or the last number if the task names no reward function."""

    default_reward = "math"
