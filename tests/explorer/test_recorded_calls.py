"""The calls of a run through OpenAI's client, kept as experiences."""

import asyncio
import threading
from typing import Any

import pytest
from support.fake_model import FakeModel, Scripted, ScriptedRepeatable, an_experience, scripted
from transformers import AutoModelForCausalLM

from trinity_lightning.common.experience import Experience
from trinity_lightning.config.explorer import ExplorerConfig
from trinity_lightning.config.models import resolve_model
from trinity_lightning.explorer.models.transformers_engine import TransformersEngine
from trinity_lightning.explorer.tasks.task import Task
from trinity_lightning.explorer.workflow_runner import WorkflowRunner
from trinity_lightning.explorer.workflows import Workflow

openai = pytest.importorskip("openai")

HI: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def run(body: Any, model: FakeModel | None = None, workflow: type[Workflow] = Scripted, n: int = 1) -> Any:
    runner = WorkflowRunner(ExplorerConfig(), model or FakeModel())
    return asyncio.run(runner.run_task(scripted(body, workflow, batch_id=3, task_id=4), n))


async def two_calls(workflow: Any, temperature: float | None = None) -> None:
    client = workflow.model.get_openai_async_client()
    first = await client.chat.completions.create(model="any", messages=HI)
    messages = [
        *HI,
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "b"},
    ]
    await client.chat.completions.create(model="any", messages=messages, temperature=temperature, tools=[TOOL])
    workflow.model.set_reward(0.5, {"found": 1.0})


def test_a_workflow_that_returns_nothing_has_its_calls_as_experiences() -> None:
    model = FakeModel(lambda seed: "yes")
    status, (first, second) = run(two_calls, model)
    assert status.ok
    assert status.metric["found"] == 1.0
    assert first.tokens.tolist() == [ord(c) for c in "hiyes"]
    assert (first.prompt_length, first.response_text, first.reward) == (2, "yes", 0.5)
    assert first.logprobs is not None
    assert first.logprobs.tolist() == [-0.5] * 3
    assert second.tokens.tolist() == [ord(c) for c in "hi\nyes\nbyes"]
    assert [(e.eid.batch, e.eid.task, e.eid.run, e.eid.step) for e in (first, second)] == [(3, 4, 0, 0), (3, 4, 0, 1)]
    assert (second.reward, second.metrics, second.tools) == (0.5, {"found": 1.0}, [TOOL])
    assert second.messages is not None
    assert [message["role"] for message in second.messages] == ["user", "assistant", "user"]
    assert first.info == {"finish_reason": "stop", "temperature": 1.0, "model_version": 0}


def test_calls_at_several_temperatures_each_have_their_own() -> None:
    async def body(workflow: Any) -> None:
        await two_calls(workflow, temperature=0.5)

    _, experiences = run(body)
    assert [e.info["temperature"] for e in experiences] == [1.0, 0.5]


def test_rewards_in_between_are_those_of_the_calls_before() -> None:
    async def body(workflow: Any) -> list[Experience]:
        client = workflow.model.get_openai_async_client()
        for reward in (0.25, 1.0):
            await client.chat.completions.create(model="any", messages=HI)
            workflow.model.set_reward(reward)
        return []

    assert [e.reward for e in run(body)[1]] == [0.25, 1.0]


def test_experiences_of_the_workflows_own_take_the_place_of_the_calls() -> None:
    async def body(workflow: Any) -> list[Experience]:
        await two_calls(workflow)
        return [an_experience(reward=3.0)]

    assert [e.reward for e in run(body)[1]] == [3.0]


def test_the_history_may_be_taken_and_changed() -> None:
    async def body(workflow: Any) -> list[Experience]:
        await two_calls(workflow)
        history = workflow.model.extract_experience_from_history(clear_history=False)
        experiences = workflow.model.extract_experience_from_history()
        assert len(history) == 2
        assert workflow.model.extract_experience_from_history() == []
        experiences[-1].reward = 2.0
        return experiences[-1:]

    assert [e.reward for e in run(body)[1]] == [2.0]


def test_the_responses_of_a_call_are_runs_where_a_workflow_repeats_itself() -> None:
    async def body(workflow: Any) -> None:
        client = workflow.model.get_openai_async_client()
        await client.chat.completions.create(model="any", messages=HI, n=workflow.repeat_times)
        workflow.model.set_reward(1.0)

    _, experiences = run(body, workflow=ScriptedRepeatable, n=3)
    assert [(e.eid.run, e.eid.step) for e in experiences] == [(0, 0), (1, 0), (2, 0)]
    assert len({e.response_text for e in experiences}) == 3


def test_a_failed_call_leaves_no_experience() -> None:
    async def body(workflow: Any) -> None:
        client = workflow.model.get_openai_async_client()
        with pytest.raises(openai.BadRequestError):
            await client.chat.completions.create(model="any", messages=HI, stream=True)

    status, _ = run(body)
    assert "returned NoneType, expected a list of Experience" in status.message


class Blocking(Workflow):
    def run(self) -> None:  # type: ignore[override]  # pyright: ignore[reportIncompatibleMethodOverride]
        model: Any = self.model
        model.get_openai_client().chat.completions.create(model="any", messages=HI)

        async def call() -> None:
            await model.get_openai_async_client().chat.completions.create(model="any", messages=HI)

        asyncio.run(call())
        model.set_reward(1.0)


def test_plain_workflows_have_clients_that_block_or_run_on_a_loop_of_their_own() -> None:
    model = FakeModel()
    status, experiences = asyncio.run(WorkflowRunner(ExplorerConfig(), model).run_task(Task(Blocking)))
    assert status.ok, status.message
    assert [(e.eid.step, e.reward) for e in experiences] == [(0, 1.0), (1, 1.0)]
    assert len({call["seed"] for call in model.calls}) == 2


# -- workflows as Trinity-RFT has them --------------------------------------------------------------------------------


class StepWise(Workflow):
    """Asks for the history and takes the blocking client at construction; a step a call, whose reward is its own."""

    def __init__(self, *, task: Task, model: Any, auxiliary_models: Any = None) -> None:
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)
        assert model.enable_history
        self.client: Any = model.get_openai_client()

    def request(self) -> dict[str, Any]:
        return {"model": self.client.model_path, "messages": HI, "max_tokens": 4, "logprobs": True}

    def taken(self, step: int) -> list[Experience]:
        model: Any = self.model
        experiences = model.extract_experience_from_history()
        for experience in experiences:
            experience.reward, experience.eid.step = float(step), step
        return experiences

    def run(self) -> list[Experience]:  # type: ignore[override]  # pyright: ignore[reportIncompatibleMethodOverride]
        experiences = []
        for step in range(3):
            self.client.chat.completions.create(**self.request())
            experiences += self.taken(step)
        return experiences


class StepWiseAsync(StepWise):
    """The same in an async run, with the client of its kind."""

    def __init__(self, *, task: Task, model: Any, auxiliary_models: Any = None) -> None:
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)
        self.client = model.get_openai_async_client()

    async def run(self) -> list[Experience]:  # type: ignore[override]  # pyright: ignore[reportIncompatibleMethodOverride]
        experiences = []
        for step in range(3):
            await self.client.chat.completions.create(**self.request())
            experiences += self.taken(step)
        return experiences


class StepWiseInThreads(StepWise):
    """The blocking client in an async run, off the event loop."""

    async def run(self) -> list[Experience]:  # type: ignore[override]  # pyright: ignore[reportIncompatibleMethodOverride]
        return await asyncio.to_thread(StepWise.run, self)


@pytest.mark.parametrize("workflow", [StepWise, StepWiseAsync, StepWiseInThreads])
def test_step_wise_workflows_of_trinity_rft_run_on_a_real_engine(workflow: type[Workflow]) -> None:
    engine = TransformersEngine("tiny", max_model_len=128)
    engine.bind(AutoModelForCausalLM.from_pretrained(resolve_model("tiny")))
    runner = WorkflowRunner(ExplorerConfig(), engine)
    status, experiences = asyncio.run(runner.run_task(Task(workflow, batch_id=3, task_id=4), 2))
    assert status.ok, status.message
    assert [(e.eid.run, e.eid.step, e.reward) for e in experiences] == [(r, s, s) for r in range(2) for s in range(3)]
    assert all(0 < len(e.tokens) - e.prompt_length <= 4 for e in experiences)


def test_a_blocking_client_is_refused_on_the_event_loop() -> None:
    async def body(workflow: Any) -> None:
        workflow.model.get_openai_client().chat.completions.create(model="any", messages=HI)

    assert "await it, or use asyncio.to_thread" in run(body)[0].message


@pytest.mark.slow
def test_what_threads_of_an_async_run_ask_for_is_aborted_with_the_run() -> None:
    seen: list[BaseException] = []
    ended = threading.Event()

    async def body(workflow: Any) -> None:
        client = workflow.model.get_openai_client()

        def calls() -> None:
            for _ in range(2):
                try:
                    client.chat.completions.create(model="any", messages=HI)
                except Exception as error:
                    seen.append(error)
            ended.set()

        await asyncio.to_thread(calls)

    async def main() -> None:
        model = FakeModel(latency=100)
        attempt = await WorkflowRunner(ExplorerConfig(), model).attempt(scripted(body), [0], 0.5)
        assert isinstance(attempt.errors[0], TimeoutError)
        assert await asyncio.to_thread(ended.wait, 5)
        assert (model.aborted, len(model.calls)) == (1, 1)

    asyncio.run(main())
    assert "the run is over" in str(seen[1].__cause__ or seen[1])
