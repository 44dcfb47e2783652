"""Workflows that ask another model: a judge, a teacher."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from fake_model import FakeModel

from trinity_lightning.config.schema import ExplorerConfig
from trinity_lightning.errors import ConfigError
from trinity_lightning.explorer.runner import WorkflowRunner
from trinity_lightning.explorer.tasks.task import Task
from trinity_lightning.explorer.workflows import resolve_workflow


def tried(task: Task, auxiliary: list[FakeModel], repeat_times: int = 2) -> Any:
    runner = WorkflowRunner(ExplorerConfig(), FakeModel(lambda seed: "four {answer}"), auxiliary)
    return asyncio.run(runner.run_task(task, repeat_times))


def a_judge(*verdicts: str) -> FakeModel:
    remaining = list(verdicts)
    return FakeModel(lambda seed: remaining.pop(0), max_model_len=5000)


# -- judge ------------------------------------------------------------------------------------------------------------


def test_the_judges_score_is_the_reward() -> None:
    judge = a_judge('{"score": 0.25}', 'Fine. {"score": 1}')
    status, experiences = tried(Task("judge", {"prompt": "2+2?", "answer": "4"}), [judge])
    assert sorted(e.reward for e in experiences) == [0.25, 1.0]
    assert status.metric["reward/judge"] == 0.625
    prompt = judge.calls[0]["prompt"]
    assert "Question:\n2+2?\n" in prompt
    assert "Reference answer:\n4\n" in prompt
    assert "Response:\nfour {answer}" in prompt
    assert (judge.calls[0]["temperature"], judge.calls[0]["max_tokens"]) == (0.0, 256)


def test_it_is_weighed_and_added_to_other_rewards() -> None:
    task = Task(
        "judge",
        {"prompt": "2+2?", "answer": "four {answer}"},
        reward_fn="exact_match",
        workflow_args={"judge_weight": 0.5, "judge_prompt": "{response}!", "judge_sampling": {"max_tokens": 9}},
    )
    judge = a_judge('{"score": 0.5}')
    _, (one,) = tried(task, [judge], 1)
    assert one.reward == 1.25
    assert (one.metrics["reward/exact_match"], one.metrics["reward/judge"]) == (1.0, 0.5)
    assert (judge.calls[0]["prompt"], judge.calls[0]["max_tokens"]) == ("four {answer}!", 9)


def test_a_verdict_that_cannot_be_read_fails_its_run_only() -> None:
    status, experiences = tried(Task("judge", {"prompt": "?"}), [a_judge("good!", '{"score": 0}')])
    assert [e.reward for e in experiences] == [0.0]
    assert "1 of 2 runs failed" in status.message
    assert "the judge's verdict has no {\"score\": number}: 'good!'" in status.message


# -- teacher ----------------------------------------------------------------------------------------------------------


class Teacher(FakeModel):
    async def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        return [-float(i) for i in range(1, len(token_ids))]


def test_the_teachers_log_probabilities_are_those_of_the_response() -> None:
    status, experiences = tried(Task("on_policy_distill", {"prompt": "hey"}), [Teacher()])
    for experience in experiences:
        length = len("four {answer}")
        assert experience.teacher_logprobs.tolist() == [-float(i) for i in range(3, 3 + length)]
        assert experience.reward is None
    assert status.metric["teacher_logprob"] == pytest.approx(-9.0)


def test_a_teacher_that_leaves_tokens_out_fails_the_runs() -> None:
    class Short(FakeModel):
        async def logprobs(self, token_ids: Sequence[int]) -> list[float]:
            return [-1.0]

    status, _ = tried(Task("on_policy_distill", {"prompt": "hey"}), [Short()])
    assert "the teacher gave 1 log-probabilities for 16 tokens" in status.message


# -- arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["judge", "on_policy_distill"])
def test_without_an_auxiliary_model_the_task_fails_and_says_so(name: str) -> None:
    status, _ = tried(Task(name, {"prompt": "hey"}), [])
    assert f"workflow '{name}' asks auxiliary model 0, and there are 0" in status.message


@pytest.mark.parametrize(
    ("name", "arguments", "told"),
    [
        ("judge", {"weight": 1}, "Did you mean 'judge_weight'"),
        ("judge", {"judge_weight": "much"}, "judge_weight is 'much'"),
        ("judge", {"judge_prompt": "{question}"}, "judge_prompt must contain {response}"),
        ("on_policy_distill", {"techer": 1}, "Did you mean 'teacher'"),
    ],
)
def test_wrong_arguments_are_refused(name: str, arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        resolve_workflow(name).check_args(arguments)
