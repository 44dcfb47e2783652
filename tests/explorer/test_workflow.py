"""Workflows of one response: simple, math, evaluation, and those that ask a judge or a teacher."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from PIL import Image
from support.errors import refuses
from support.fake_model import FakeModel

from trinity_lightning.common.experience import Experience
from trinity_lightning.common.pictures.parts import count_places, text_of
from trinity_lightning.common.pictures.picture import Picture
from trinity_lightning.config.explorer import ExplorerConfig
from trinity_lightning.config.registry import PARTS
from trinity_lightning.errors import ConfigError, UnfinishedClassError
from trinity_lightning.explorer import RunnerWrapper, TaskWrapper
from trinity_lightning.explorer.tasks.task import Task
from trinity_lightning.explorer.workflow_runner import WorkflowRunner
from trinity_lightning.explorer.workflows import MathWorkflow, SimpleWorkflow, Workflow, resolve_workflow
from trinity_lightning.explorer.workflows.graded import DistillArguments, JudgeArguments


def tried(task: Task, model: FakeModel | None = None, repeat_times: int = 2, run_id_base: int = 0) -> Any:
    runner = RunnerWrapper(0, model or FakeModel(), None, ExplorerConfig())
    status, experiences, _ = asyncio.run(runner.run_with_retry(TaskWrapper(task, 3, run_id_base, repeat_times)))
    return status, experiences


def counting(answers: list[str]) -> FakeModel:
    """Answers one after the other, and then always the last."""
    remaining = list(answers)
    return FakeModel(lambda seed: remaining.pop(0) if len(remaining) > 1 else remaining[0])


def test_names() -> None:
    assert resolve_workflow("simple") is SimpleWorkflow
    assert resolve_workflow("math") is MathWorkflow
    assert resolve_workflow("trinity_lightning.explorer.workflows.MathWorkflow") is MathWorkflow
    assert resolve_workflow(MathWorkflow) is MathWorkflow
    names = ["evaluation", "judge", "math", "multi_turn", "on_policy_distill", "simple", "tool_use"]
    assert set(names) == set(PARTS["workflow"])


def test_simple_makes_one_experience_a_response() -> None:
    task = Task(
        "simple",
        {"prompt": "hé", "answer": "7", "task_index": {"taskset_id": "sums", "index": 4}},
        rollout_args={"temperature": 0.8},
        reward_fn="last_number",
        task_id=9,
    )
    model = counting(["it is 7", "it is 8"])
    status, (right, wrong) = tried(task, model, run_id_base=4)
    assert len(model.calls) == 1
    assert right.tokens.tolist() == [ord(c) for c in "héit is 7"]
    assert right.prompt_length == 2
    assert right.logprobs is not None
    assert right.logprobs.tolist() == [-0.5] * 7
    assert right.action_mask is not None
    assert right.action_mask.tolist() == [True] * 7
    assert (right.prompt_text, right.response_text) == ("hé", "it is 7")
    assert (right.reward, wrong.reward) == (1.0, 0.0)
    assert right.metrics == {"reward/last_number": 1.0}
    assert right.info == {
        "temperature": 0.8,
        "finish_reason": "stop",
        "task_index": {"taskset_id": "sums", "index": 4},
        "model_version": 0,
    }
    assert [(e.eid.batch, e.eid.task, e.eid.run) for e in (right, wrong)] == [(3, 9, 4), (3, 9, 5)]
    assert status.metric["reward/last_number"] == 0.5


def test_a_conversation_or_a_prompt_after_a_system_prompt() -> None:
    model = FakeModel()
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    _, (one,) = tried(Task("simple", {"messages": messages}), model, 1)
    _, (two,) = tried(Task("simple", {"prompt": "hi"}, workflow_args={"system_prompt": "be brief"}), model, 1)
    assert one.prompt_text == two.prompt_text == "system: be brief\nuser: hi"
    assert model.calls[0]["prompt"] == model.calls[1]["prompt"] == "be brief\nhi"
    assert (one.reward, one.metrics, one.info["temperature"]) == (None, {}, 1.0)


def test_an_entry_without_a_prompt_names_what_it_has() -> None:
    status, _ = tried(Task("simple", {"question": "?", "answer": 1}))
    assert "needs 'messages' or a 'prompt' text; it has: question, answer" in status.message


def test_a_response_cut_off_is_marked() -> None:
    model = FakeModel()
    model.finish_reason = "length"
    _, experiences = tried(Task("simple", {"prompt": "hi"}), model)
    assert [e.truncate_status for e in experiences] == ["response_truncated"] * 2


def test_an_aborted_request_is_a_failure() -> None:
    model = FakeModel()
    model.finish_reason = "abort"
    status, experiences = tried(Task("simple", {"prompt": "hi"}), model)
    assert experiences == []
    assert "aborted the request" in status.message


def test_a_prompt_that_is_too_long_is_a_counted_failure_with_its_lengths() -> None:
    model = FakeModel(max_model_len=3)
    status, experiences = tried(Task("simple", {"prompt": "hello"}), model)
    assert experiences == []
    assert len(model.calls) == 1
    expected = "PromptTooLongError: prompt_truncated: the prompt has 5 tokens, the context 3"
    assert status.message == f"2 of 2 runs failed: 2 x {expected}"


def test_a_reward_that_raises_fails_its_run_only() -> None:
    def picky(response: str, task: Task) -> float:
        if response == "b":
            raise ZeroDivisionError("no b")
        return 1.0

    model = FakeModel(lambda seed: "abc"[seed - model.calls[0]["seed"]])
    status, experiences = tried(Task("simple", {"prompt": "hi"}, reward_fn=picky), model, 3)
    assert [e.response_text for e in experiences] == ["a", "c"]
    assert [e.eid.run for e in experiences] == [0, 2]
    cause = "RewardError: reward function 'picky' raised ZeroDivisionError: no b"
    assert str(status.message).startswith(f"1 of 3 runs failed: {cause} (")
    assert [call["n"] for call in model.calls] == [3, 1, 1]
    assert model.calls[1]["seed"] == model.calls[0]["seed"] + 1  # the same sample again


def test_a_reward_that_works_the_second_time_completes_the_group() -> None:
    failures = 1

    async def judge(response: str, task: Task) -> float:
        nonlocal failures
        failures -= 1
        if failures >= 0:
            raise ConnectionError("try later")
        return 0.5

    status, experiences = tried(Task("simple", {"prompt": "hi"}, reward_fn=judge), repeat_times=4)
    assert status.ok
    assert [e.eid.run for e in experiences] == [0, 1, 2, 3]


def test_an_unknown_reward_fails_without_asking_the_model() -> None:
    model = FakeModel()
    status, _ = tried(Task("simple", {"prompt": "hi"}, reward_fn="exact_mach"), model)
    assert "Did you mean 'exact_match'?" in status.message
    assert model.calls == []


def test_math_is_judged_by_the_boxed_answer_unless_told_otherwise() -> None:
    model = FakeModel(lambda seed: r"so \boxed{4}, not 5")
    task = Task("math", {"prompt": "2 + 2", "answer": "4"})
    assert [e.metrics for e in tried(task, model)[1]] == [{"reward/math": 1.0}] * 2
    task = Task("math", {"prompt": "2 + 2", "answer": "4"}, reward_fn="last_number")
    assert [e.metrics for e in tried(task, model)[1]] == [{"reward/last_number": 0.0}] * 2


def test_a_question_has_its_pictures() -> None:
    picture = Picture(Image.new("RGB", (2, 2)))
    workflow: Any = SimpleWorkflow(Task("simple", {"prompt": "What is <image>?", "images": [picture]}), FakeModel())
    assert workflow.messages.pictures == [picture]
    texts = [{"type": "text", "text": text} for text in ("What is ", "?")]
    assert workflow.messages == [{"role": "user", "content": [texts[0], {"type": "image", "image": picture}, texts[1]]}]


def test_reset_takes_another_task() -> None:
    workflow: Any = SimpleWorkflow(Task("simple", {"prompt": "one"}), FakeModel(lambda seed: "x"))
    workflow.reset(Task("simple", {"prompt": "two", "answer": "x"}, reward_fn="exact_match"))
    assert workflow.messages == [{"role": "user", "content": "two"}]
    assert [reward.name for reward in workflow.rewards] == ["exact_match"]


@pytest.mark.parametrize(
    "fields",
    [
        {"repeat_times": 0},
        {"repeat_times": 2.0},
        {"rollout_args": {"n": 4}},
        {"rollout_args": {"seed": 4}},
        {"raw_task": "a prompt"},
        {"workflow_args": None},
    ],
)
def test_wrong_tasks_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"Task\.{next(iter(fields))}"):
        Task("simple", **fields)


def test_experiences_of_a_task_are_ready_to_train_on() -> None:
    _, experiences = tried(Task("simple", {"prompt": "hi"}, reward_fn="contains_digits"))
    assert all(isinstance(e, Experience) and e.experience_type == "single_turn" for e in experiences)
    assert all(e.reward == 1.0 for e in experiences)  # the fake answers with its seed


def test_evaluation_measures_and_is_never_trained_on() -> None:
    task = Task("evaluation", {"prompt": "1+6?", "answer": "7"}, is_eval=True)
    status, experiences = tried(task, counting(["it is 7", "it is 8"]))
    assert experiences == []
    assert [experience.metrics["accuracy"] for experience in status.eval_experiences] == [1.0, 0.0]
    assert status.metric["accuracy"] == 0.5
    assert status.metric["response_tokens"] == 7
    assert status.metric["truncated"] == 0
    half = Task("evaluation", task.raw_task, is_eval=True, reward_fn={"math": 0.5, "contains_digits": 0.1})
    assert tried(half, counting(["it is 7", "it is 8"]))[0].metric["accuracy"] == 0.5  # whatever the weights
    unknown = Task("evaluation", task.raw_task, is_eval=True, reward_fn=["last_number", "contains_digits"])
    assert "accuracy" not in tried(unknown, counting(["it is 7", "it is 8"]))[0].metric
    named = replace(unknown, reward_solved={"contains_digits": 0.1})
    assert tried(named, counting(["it is 7", "it is 8"]))[0].metric["accuracy"] == 1.0
    status, _ = tried(Task("evaluation", {"prompt": "1+6?", "answer": "7"}), FakeModel())
    assert not status.ok
    assert "give it as eval_workflow" in str(status.message)


def asked(task: Task, auxiliary: list[FakeModel], repeat_times: int = 2) -> Any:
    runner = WorkflowRunner(ExplorerConfig(), FakeModel(lambda seed: "four {answer}"), auxiliary)
    return asyncio.run(runner.run_task(task, repeat_times))


def a_judge(*verdicts: str) -> FakeModel:
    remaining = list(verdicts)
    return FakeModel(lambda seed: remaining.pop(0), max_model_len=5000)


# -- judge ------------------------------------------------------------------------------------------------------------


def test_the_judges_score_is_the_reward() -> None:
    judge = a_judge('{"score": 0.25}', 'Fine. {"score": 1}')
    status, experiences = asked(Task("judge", {"prompt": "2+2?", "answer": "4"}), [judge])
    assert sorted(e.reward for e in experiences) == [0.25, 1.0]
    assert status.metric["reward/judge"] == 0.625
    prompt = judge.calls[0]["prompt"]
    assert "Question:\n2+2?\n" in prompt
    assert "Reference answer:\n4\n" in prompt
    assert "Response:\nfour {answer}" in prompt
    assert (judge.calls[0]["temperature"], judge.calls[0]["max_tokens"]) == (0.0, 256)


def test_the_judge_is_shown_each_accepted_answer() -> None:
    judge = a_judge('{"score": 1}')
    asked(Task("judge", {"prompt": "2+2?", "answer": [4, "four"]}), [judge], 1)
    assert "Reference answer:\n4 or four\n" in judge.calls[0]["prompt"]


@pytest.mark.parametrize("shows", [True, False])
def test_the_judge_may_be_shown_pictures(shows: bool) -> None:
    judge, asked_for = a_judge('{"score": 1}'), []

    async def chat(messages: Any, tools: Any = None, n: int = 1, **sampling: Any) -> Any:
        asked_for.append(messages)
        return await judge.generate("", n, **sampling)

    judge.chat = chat  # type: ignore[method-assign]
    pictures = [Image.new("RGB", (4, 4), color) for color in ("red", "blue")]
    entry = {"prompt": "<image>, or <image>?", "images": pictures, "answer": "<image>"}
    asked(Task("judge", entry, workflow_args={"judge_pictures": shows}), [judge], 1)
    [[message]] = asked_for
    text = text_of(message["content"])
    assert "Question:\n[picture], or [picture]?\n" in text
    assert asked_for[0].pictures == ([Picture(picture) for picture in pictures] if shows else [])
    assert count_places([message]) == 2 * shows
    assert ("<image>" in text) is not shows  # else a processor would take it for the place of a third


def test_it_is_weighed_and_added_to_other_rewards() -> None:
    task = Task(
        "judge",
        {"prompt": "2+2?", "answer": "four {answer}"},
        reward_fn="exact_match",
        workflow_args={"judge_weight": 0.5, "judge_prompt": "{response}!", "judge_sampling": {"max_tokens": 9}},
    )
    judge = a_judge('{"score": 0.5}')
    _, (one,) = asked(task, [judge], 1)
    assert one.reward == 1.25
    assert (one.metrics["reward/exact_match"], one.metrics["reward/judge"]) == (1.0, 0.5)
    assert (judge.calls[0]["prompt"], judge.calls[0]["max_tokens"]) == ("four {answer}!", 9)


def test_a_verdict_that_cannot_be_read_fails_its_run_only() -> None:
    status, experiences = asked(Task("judge", {"prompt": "?"}), [a_judge("good!", '{"score": 0}')])
    assert [e.reward for e in experiences] == [0.0]
    assert "1 of 2 runs failed" in status.message
    assert "the judge's verdict has no {\"score\": number}: 'good!'" in status.message


# -- teacher ----------------------------------------------------------------------------------------------------------


class Teacher(FakeModel):
    async def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        return [-float(i) for i in range(1, len(token_ids))]


def test_the_teachers_log_probabilities_are_those_of_the_response() -> None:
    status, experiences = asked(Task("on_policy_distill", {"prompt": "hey"}), [Teacher()])
    for experience in experiences:
        length = len("four {answer}")
        assert experience.teacher_logprobs.tolist() == [-float(i) for i in range(3, 3 + length)]
        assert experience.reward is None
    assert status.metric["teacher_logprob"] == pytest.approx(-9.0)


def test_a_teacher_that_leaves_tokens_out_fails_the_runs() -> None:
    class Short(FakeModel):
        async def logprobs(self, token_ids: Sequence[int]) -> list[float]:
            return [-1.0]

    status, _ = asked(Task("on_policy_distill", {"prompt": "hey"}), [Short()])
    assert "the teacher gave 1 log-probabilities for 16 tokens" in status.message


# -- their arguments --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("arguments", "name"), [(JudgeArguments, "judge"), (DistillArguments, "teacher")])
@pytest.mark.parametrize("value", [-1, "umpire"])
def test_the_model_that_is_asked_goes_by_its_number(arguments: type, name: str, value: Any) -> None:
    with refuses(f"workflow.args.{name}"):
        arguments(**{name: value})


@pytest.mark.parametrize("name", ["judge", "on_policy_distill"])
def test_without_an_auxiliary_model_the_task_fails_and_says_so(name: str) -> None:
    status, _ = asked(Task(name, {"prompt": "hey"}), [])
    assert f"workflow '{name}' asks auxiliary model 0, and there are 0" in status.message


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("judge", {"weight": 1}),
        ("judge", {"judge_weight": "much"}),
        ("judge", {"judge_prompt": "{question}"}),
        ("on_policy_distill", {"techer": 1}),
        ("simple", {"sytem_prompt": "Be brief."}),
    ],
)
def test_wrong_arguments_are_refused(name: str, arguments: dict[str, Any]) -> None:
    with refuses(f"workflow.args.{next(iter(arguments))}"):
        resolve_workflow(name).check_args(arguments)


def test_a_workflow_without_its_run_is_refused_before_anything_is_tried() -> None:
    class Unfinished(Workflow):
        pass

    with refuses(None, UnfinishedClassError):
        resolve_workflow(Unfinished)
