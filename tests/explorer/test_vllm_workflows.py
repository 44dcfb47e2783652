"""Workflows on a real vLLM with the tiny model: what is trained on is token by token what the engine sampled."""

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from support.tiny_model import tiny_model
from support.tiny_vllm import driven_engine

from trinity_lightning.common.experience import Experience
from trinity_lightning.common.inference import Completion
from trinity_lightning.config.explorer import ExplorerConfig
from trinity_lightning.explorer.driver import Driver
from trinity_lightning.explorer.models.tool_calls import ToolCall
from trinity_lightning.explorer.models.vllm_engine import VLLMEngine
from trinity_lightning.explorer.tasks.task import Task
from trinity_lightning.explorer.workflow_runner import WorkflowRunner
from trinity_lightning.explorer.workflows import Workflow
from trinity_lightning.explorer.workflows.tool_use import calculate

CONTEXT = 480
HI = {"prompt": "hi", "answer": "3"}


@pytest.fixture(scope="module")
def driven(needs_vllm: Any) -> Iterator[tuple[VLLMEngine, Driver]]:
    with driven_engine(CONTEXT) as engine_and_host:
        yield engine_and_host


@pytest.fixture(scope="module")
def reference() -> Any:
    return tiny_model()


class Spy:
    """The engine, and what it was asked and answered."""

    def __init__(self, engine: VLLMEngine) -> None:
        self._engine = engine
        self.prompts: list[list[int]] = []
        self.completions: list[Completion] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, prompt: Sequence[int], n: int = 1, **sampling: Any) -> list[Completion]:
        completions = await self._engine.generate(prompt, n, **sampling)
        self.prompts.append(list(prompt))
        self.completions += completions
        return completions


def tried(driven: tuple[VLLMEngine, Driver], task: Task, repeat_times: int = 1) -> tuple[Spy, list[Experience]]:
    engine, driver = driven
    spy: Any = Spy(engine)
    runner = WorkflowRunner(ExplorerConfig(), spy, [engine])
    status, experiences = driver.run(runner.run_task(task, repeat_times))
    assert status.ok, status.message
    return spy, experiences


@torch.no_grad()
def logprobs_of(model: Any, experience: Experience, temperature: float) -> torch.Tensor:
    """Log-probability of every response token under the trainer's model, [response]."""
    tokens = experience.tokens.long()[None]
    logprobs = (model(tokens).logits[0, :-1].double() / temperature).log_softmax(-1)
    return logprobs.gather(-1, tokens[0, 1:, None]).squeeze(-1)[experience.prompt_length - 1 :]


def check(experience: Experience, completions: Sequence[Completion], model: Any, temperature: float) -> None:
    """The trained tokens are the completions' one after the other, with their own log-probabilities."""
    assert experience.action_mask is not None
    assert experience.logprobs is not None
    mask, response = experience.action_mask, experience.tokens[experience.prompt_length :]
    assert response[mask].tolist() == [token for c in completions for token in c.token_ids]
    torch.testing.assert_close(
        experience.logprobs[mask], torch.tensor([logprob for c in completions for logprob in c.logprobs])
    )
    expected = logprobs_of(model, experience, temperature)[mask]
    torch.testing.assert_close(experience.logprobs[mask].double(), expected, atol=1e-4, rtol=0)
    assert experience.info["temperature"] == temperature


def between(tokenizer: Any, experience: Experience) -> list[str]:
    """The stretches of the response that are not trained on."""
    assert experience.action_mask is not None
    response = zip(experience.tokens[experience.prompt_length :].tolist(), experience.action_mask.tolist(), strict=True)
    stretches = itertools.groupby(response, key=lambda pair: pair[1])
    return [tokenizer.decode([token for token, _ in pairs]) for trained, pairs in stretches if not trained]


# -- several turns ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_tokens", [4, 60])  # cut off, and mostly ended by the end token
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_trained_tokens_of_an_episode_are_the_engines(
    driven: tuple[VLLMEngine, Driver], reference: Any, max_tokens: int, temperature: float
) -> None:
    task = Task(
        "multi_turn",
        HI,
        rollout_args={"temperature": temperature, "max_tokens": max_tokens},
        workflow_args={"environment": "guess_number", "max_turns": 3},
        task_id=max_tokens,
    )
    spy, (one,) = tried(driven, task)
    assert len(spy.completions) > 1
    assert one.tokens.tolist() == [*spy.prompts[-1], *spy.completions[-1].token_ids]
    assert one.tokens[: one.prompt_length].tolist() == spy.prompts[0]
    check(one, spy.completions, reference, temperature)
    feedback = between(driven[0].tokenizer, one)
    assert len(feedback) == len(spy.completions) - 1
    for text, completion in zip(feedback, spy.completions, strict=False):
        end = "" if completion.finish_reason == "stop" else "<|im_end|>"  # every turn is closed, and once
        message = "Reply with a whole number|Higher|Lower"
        assert re.fullmatch(
            rf"{re.escape(end)}\n<\|im_start\|>user\n({message})\.<\|im_end\|>\n<\|im_start\|>assistant\n", text
        )


def test_trained_tokens_of_every_step_are_the_engines(driven: tuple[VLLMEngine, Driver], reference: Any) -> None:
    arguments = {"environment": "guess_number", "max_turns": 3, "mode": "step_wise"}
    task = Task("multi_turn", HI, rollout_args={"max_tokens": 20}, workflow_args=arguments)
    spy, experiences = tried(driven, task)
    assert len(experiences) == len(spy.completions)
    for experience, prompt, completion in zip(experiences, spy.prompts, spy.completions, strict=True):
        assert experience.tokens[: experience.prompt_length].tolist() == prompt
        check(experience, [completion], reference, 1.0)


def test_a_full_context_ends_an_episode(driven: tuple[VLLMEngine, Driver], reference: Any) -> None:
    task = Task(
        "multi_turn",
        HI,
        rollout_args={"max_tokens": 100, "ignore_eos": True},
        workflow_args={"environment": "guess_number", "max_turns": 9},
    )
    spy, (one,) = tried(driven, task)
    assert one.metrics["context_overflow"] == 1.0
    assert one.truncate_status == "response_truncated"
    assert len(one.tokens) <= CONTEXT
    check(one, spy.completions, reference, 1.0)


# -- tools ------------------------------------------------------------------------------------------------------------


def calling(times: int) -> Callable[[str], tuple[str, list[ToolCall]]]:
    """A random model writes no call: its first responses are taken for one."""
    left = [ToolCall("calculate", {"expression": "1 + 2"})] * times
    return lambda text: ("", [left.pop()]) if left else (text, [])


def test_trained_tokens_of_a_tool_user_are_the_engines(driven: tuple[VLLMEngine, Driver], reference: Any) -> None:
    task = Task(
        "tool_use",
        {"prompt": "1+2", "answer": "3"},
        rollout_args={"max_tokens": 10},
        workflow_args={"tools": [calculate], "tool_parser": calling(2), "system_prompt": "."},
    )
    spy, (one,) = tried(driven, task)
    assert (len(spy.completions), one.metrics["context_overflow"]) == (3, 0.0)
    assert one.metrics["tool_calls"] == 2.0
    assert one.tokens.tolist() == [*spy.prompts[-1], *spy.completions[-1].token_ids]
    check(one, spy.completions, reference, 1.0)
    text = driven[0].tokenizer.decode(one.tokens)
    assert text.startswith("<|im_start|>system\n.\n\nYou can call these functions:")
    for feedback in between(driven[0].tokenizer, one):
        assert feedback.endswith("\n<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\n")


# -- OpenAI's client --------------------------------------------------------------------------------------------------


class WithClient(Workflow):
    """Two calls, of which the second carries the first's answer as text."""

    async def run(self) -> None:  # type: ignore[override]  # pyright: ignore[reportIncompatibleMethodOverride]
        model: Any = self.model
        client = model.get_openai_async_client()
        messages = [{"role": "user", "content": "hi"}]
        for _ in range(2):
            response = await client.chat.completions.create(model="any", messages=messages, logprobs=True)
            [choice] = response.choices
            assert choice.token_logprobs == [entry.logprob for entry in choice.logprobs.content]
            messages += [choice.message.model_dump(include={"role", "content"}), {"role": "user", "content": "more"}]
        model.set_reward(1.0)


def test_calls_through_openais_client_are_trained_on_with_the_engines_tokens(
    driven: tuple[VLLMEngine, Driver], reference: Any
) -> None:
    pytest.importorskip("openai")
    spy, experiences = tried(driven, Task(WithClient, rollout_args={"max_tokens": 20, "temperature": 0.8}))
    assert [(e.eid.step, e.reward) for e in experiences] == [(0, 1.0), (1, 1.0)]
    for experience, prompt, completion in zip(experiences, spy.prompts, spy.completions, strict=True):
        assert experience.tokens[: experience.prompt_length].tolist() == prompt
        check(experience, [completion], reference, 0.8)


def test_the_engine_itself_has_a_client(driven: tuple[VLLMEngine, Driver]) -> None:
    openai = pytest.importorskip("openai")
    engine, driver = driven

    async def ask(**arguments: Any) -> Any:
        messages: list[Any] = [{"role": "user", "content": "hi"}]
        client = engine.get_openai_async_client()
        return await client.chat.completions.create(**{"model": "any", "messages": messages, "seed": 3, **arguments})

    response = driver.run(ask(n=2))
    expected = driver.run(engine.chat([{"role": "user", "content": "hi"}], n=2, seed=3, max_tokens=CONTEXT))
    assert response.prompt_token_ids == list(expected[0].prompt_token_ids)
    for choice, completion in zip(response.choices, expected, strict=True):
        assert choice.token_ids == list(completion.token_ids)
        assert choice.token_logprobs == list(completion.logprobs)
        assert choice.message.content == completion.text
    with pytest.raises(openai.InternalServerError, match="temperature must be non-negative"):
        driver.run(ask(temperature=-1.0))
    with pytest.raises(openai.BadRequestError) as caught:
        driver.run(ask(messages=[{"role": "user", "content": "x" * CONTEXT}]))
    assert caught.value.code == "context_length_exceeded"


# -- a teacher --------------------------------------------------------------------------------------------------------


def test_a_teacher_with_the_same_weights_agrees(driven: tuple[VLLMEngine, Driver]) -> None:
    task = Task("on_policy_distill", HI, rollout_args={"max_tokens": 20})
    _, experiences = tried(driven, task, repeat_times=3)
    assert len(experiences) == 3
    for experience in experiences:
        assert experience.teacher_logprobs is not None
        torch.testing.assert_close(experience.teacher_logprobs, experience.logprobs, atol=1e-4, rtol=0)
