"""Workflows of one response that is graded further: by a judge, by a teacher, or for an evaluation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from trinity_lightning.common.criterion import criterion_of
from trinity_lightning.common.experience import Experience
from trinity_lightning.common.inference import Completion, InferenceModel
from trinity_lightning.common.judge import check_prompt, filled, read_score
from trinity_lightning.common.messages import Conversation
from trinity_lightning.common.pictures.parts import IN_TEXT, SHOWN
from trinity_lightning.common.pictures.picture import Picture
from trinity_lightning.common.solved import is_solved
from trinity_lightning.config.values import flag, number, whole_number
from trinity_lightning.errors import ConfigError, RolloutError
from trinity_lightning.explorer.rewards import Reward
from trinity_lightning.explorer.tasks.task import Task, messages_of, prompt_text_of
from trinity_lightning.explorer.workflows.workflow import ARGS, SimpleWorkflow, token_ids_of


class AskingWorkflow(SimpleWorkflow):
    """Base of the workflows that ask an auxiliary model."""

    def auxiliary_model(self, index: int) -> InferenceModel:
        """The auxiliary model number `index`; ConfigError: there are fewer models."""
        if not 0 <= index < len(self.auxiliary_models):
            raise ConfigError(
                f"workflow '{self.name}' asks auxiliary model {index}, and there are {len(self.auxiliary_models)}",
                key="auxiliary_models",
                fix="give the explorer auxiliary models",
            )
        return self.auxiliary_models[index]


# -- judged by another model ------------------------------------------------------------------------------------------


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
        judge_prompt: question to the judge; `{question}`, `{answer}` and `{response}` stand for the task's
            conversation, its reference answer ("none" without one) and the response.
        judge_pictures: show the judge the task's pictures, before this question; they are `[picture]` in the text. The
            judge then has to be a model that reads pictures.
        judge_sampling: sampling settings of the judge's verdict, by vLLM's names.
        judge_weight: factor of the score.
        judge: number of the auxiliary model that judges (a run's configuration may give its name).
        system_prompt: first message, if the entry has a prompt only.
    """

    judge_prompt: str = PROMPT
    judge_pictures: bool = False
    judge_sampling: Mapping[str, Any] = field(default_factory=lambda: {"temperature": 0.0, "max_tokens": 256})
    judge_weight: float = 1.0
    judge: int = 0
    system_prompt: str | None = None

    def __post_init__(self) -> None:
        check_prompt(f"{ARGS}.judge_prompt", self.judge_prompt)
        flag(f"{ARGS}.judge_pictures", self.judge_pictures)
        number(f"{ARGS}.judge_weight", self.judge_weight)
        whole_number(f"{ARGS}.judge", self.judge, least=0)


class JudgeWorkflow(AskingWorkflow):
    """Single turn; an auxiliary model's score from 0 to 1 (metric `reward/judge`) is added to the task's other rewards.

    A verdict that cannot be read fails the run, and is quoted in its message. Settings: `JudgeArguments`.
    """

    name = "judge"
    arguments_class = JudgeArguments

    def reset(self, task: Task) -> None:
        super().reset(task)
        self._judge = self.auxiliary_model(self.arguments.judge)
        self.rewards = [*self.rewards, Reward("judge", self._ask, float(self.arguments.judge_weight))]

    async def _ask(self, response: str, task: Task) -> float:
        answer = task.raw_task.get("answer", "none")
        asked = messages_of(task)
        values = {
            "question": prompt_text_of(asked),
            "answer": " or ".join(map(str, answer if isinstance(answer, list) else [answer])),
            "response": response,
        }
        text = filled(self.arguments.judge_prompt, values)
        question: list[dict[str, Any]] = [{"role": "user", "content": text}]
        if self.arguments.judge_pictures and asked.pictures:
            question = showing(text, asked.pictures)
        verdicts = await self._judge.chat(question, **self.arguments.judge_sampling)
        return read_score(verdicts[0].text)


def showing(text: str, pictures: Sequence[Picture]) -> Conversation:
    """A question with pictures before its text, in which nothing stands for a picture any more."""
    return Conversation([{"role": "user", "content": text.replace(IN_TEXT, SHOWN)}]).with_pictures(pictures)


# -- graded by a teacher, token by token ------------------------------------------------------------------------------


@dataclass(frozen=True)
class DistillArguments:
    """Settings of the workflow `on_policy_distill`.

    Attributes:
        teacher: number of the auxiliary model that teaches (a run's configuration may give its name).
        system_prompt: first message, if the entry has a prompt only.
    """

    teacher: int = 0
    system_prompt: str | None = None

    def __post_init__(self) -> None:
        whole_number(f"{ARGS}.teacher", self.teacher, least=0)


class OnPolicyDistillWorkflow(AskingWorkflow):
    """Single turn; an auxiliary model gives `teacher_logprobs` of each Experience, for the add strategy of that name.

    The teacher reads the policy's token ids, so that it must have the same vocabulary, and a context that is a token
    longer than the policy's. Its log-probabilities are taken at temperature 1. A reward is optional. Settings:
    `DistillArguments`. Metric: `teacher_logprob`, the mean over a response's tokens, in nats.

    Source: "On-Policy Distillation", Thinking Machines Lab, 2025.
    """

    name = "on_policy_distill"
    arguments_class = DistillArguments

    def reset(self, task: Task) -> None:
        super().reset(task)
        if not task.is_eval and task.rollout_args.get("temperature") not in (None, 1.0):
            raise ConfigError(
                "workflow 'on_policy_distill' compares log-probabilities at temperature 1, not "
                f"{task.rollout_args['temperature']}",
                key="sampling.temperature",
                fix="set sampling.temperature=1",
            )
        self.teacher = self.auxiliary_model(self.arguments.teacher)

    async def _experience(self, completion: Completion, run: int) -> Experience:
        experience = await super()._experience(completion, run)
        tokens = token_ids_of(completion)
        logprobs = await self.teacher.logprobs(tokens)
        if len(logprobs) != len(tokens) - 1:
            raise RolloutError(f"the teacher gave {len(logprobs)} log-probabilities for {len(tokens)} tokens")
        # The log-probability of token i is at place i - 1, because the first token has none.
        experience.teacher_logprobs = torch.tensor(logprobs[experience.prompt_length - 1 :], dtype=torch.float32)
        experience.metrics["teacher_logprob"] = float(experience.teacher_logprobs.mean())
        return experience


# -- graded for an evaluation ------------------------------------------------------------------------------------------


class EvaluationWorkflow(SimpleWorkflow):
    """Single turn, for evaluation tasks, with three further metrics.

    `accuracy` is 1 if the response solves the task by `common.solved.criterion_of`, and absent without a criterion.
    `truncated` is 1 if the token limit ended the response, and `response_tokens` its length.

    With `eval_workflow=evaluation` a policy that is trained by a judge, say, is evaluated by verifiable rewards.
    """

    default_reward = "math"

    def reset(self, task: Task) -> None:
        """Take another task; ConfigError: it is a task to train on."""
        if not task.is_eval:
            raise ConfigError(
                "workflow 'evaluation' is for evaluation tasks", key="workflow.name", fix="give it as eval_workflow"
            )
        super().reset(task)

    async def _experience(self, completion: Completion, run: int) -> Experience:
        experience = await super()._experience(completion, run)
        criterion = criterion_of(experience.metrics, self.task.reward_solved)
        if criterion is not None and (solved := is_solved(criterion, [experience])) is not None:
            experience.metrics["accuracy"] = float(solved)
        experience.metrics |= {
            "truncated": float(completion.finish_reason == "length"),
            "response_tokens": float(len(completion.token_ids)),
        }
        return experience
