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
        """As of every workflow; those of this file have one argument, subclasses elsewhere may read others."""
        for name in workflow_args if cls.__module__ == __name__ else ():
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


# -- measured and never trained on ------------------------------------------------------------------------------------


class EvaluationWorkflow(SimpleWorkflow):
    """Single turn, for evaluation tasks: it also measures `accuracy` (1 if the reward is at least 1),
    `truncated` (1 if the token limit ended the response) and `response_tokens`.

    With `eval_workflow=evaluation` a policy that is trained by a judge, say, is evaluated by verifiable rewards.
    """

    default_reward = "math"

    def reset(self, task: Task) -> None:
        """Take another task; ConfigError for one to train on."""
        if not task.is_eval:
            raise ConfigError("workflow 'evaluation' is for evaluation tasks: give it as eval_workflow.")
        super().reset(task)

    async def _experience(self, completion: Completion, run: int) -> Experience:
        experience = await super()._experience(completion, run)
        experience.metrics |= {
            "accuracy": float(experience.reward is not None and experience.reward >= 1.0),
            "truncated": float(completion.finish_reason == "length"),
            "response_tokens": float(len(completion.token_ids)),
        }
        return experience
