"""OpenAI's client over a model of this process, and a model behind an endpoint."""

import asyncio
import json
import sys
import threading
from typing import Any

import pytest
from support.fake_model import FakeModel, Scripted, ScriptedRepeatable, an_experience, scripted
from support.judge_server import JudgeServer, judge_server

from trinity_lightning.common.experience import Experience
from trinity_lightning.common.random_state import rollout_seed
from trinity_lightning.common.thoughts import Response
from trinity_lightning.config.explorer import ExplorerConfig
from trinity_lightning.errors import ConfigError, ModelLoadError, RolloutError
from trinity_lightning.explorer.models.bound import BoundModel
from trinity_lightning.explorer.models.openai_api import OpenAIModel
from trinity_lightning.explorer.tasks.task import Task
from trinity_lightning.explorer.workflow_runner import Status, WorkflowRunner
from trinity_lightning.explorer.workflows import Workflow

openai = pytest.importorskip("openai")

HI: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = 'Well. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


def view(model: FakeModel, trained: bool = True, **sampling: Any) -> BoundModel:
    return BoundModel(model, run_seed=5, batch=7, task=1, run=2, sampling=sampling, trained=trained)


def ask(model: Any, **arguments: Any) -> Any:
    async def call() -> Any:
        client = model.get_openai_async_client()
        return await client.chat.completions.create(**({"model": "any", "messages": HI} | arguments))

    return asyncio.run(call())


def run(body: Any, model: FakeModel | None = None, workflow: type[Workflow] = Scripted, n: int = 1) -> Any:
    runner = WorkflowRunner(ExplorerConfig(), model or FakeModel())
    return asyncio.run(runner.run_task(scripted(body, workflow, batch_id=3, task_id=4), n))


# -- answers -----------------------------------------------------------------------------------------------------------


def test_a_completion_with_the_exact_tokens() -> None:
    response = ask(FakeModel(lambda seed: "yes"), n=2, seed=1, logprobs=True, temperature=0.5, max_tokens=7)
    assert isinstance(response, openai.types.chat.ChatCompletion)
    assert response.model == "any"
    assert [choice.message.content for choice in response.choices] == ["yes", "yes"]
    assert [choice.index for choice in response.choices] == [0, 1]
    choice = response.choices[0]
    assert (choice.finish_reason, choice.message.tool_calls) == ("stop", None)
    assert response.prompt_token_ids == [ord("h"), ord("i")]
    assert choice.token_ids == [ord(c) for c in "yes"]
    assert choice.token_logprobs == [-0.5] * 3
    assert [entry.logprob for entry in choice.logprobs.content] == [-0.5] * 3
    assert choice.logprobs.content[0].token == f"token_id:{ord('y')}"
    assert (response.usage.prompt_tokens, response.usage.completion_tokens) == (2, 6)


def test_log_probabilities_arrive_to_the_last_bit() -> None:
    class Odd(FakeModel):
        def _completion(self, prompt: list[int], text: str) -> Any:
            completion = super()._completion(prompt, text)
            return type(completion)(prompt, [1, 2], [-0.1 - 0.2, -1e-17 / 3], text, "stop")

    assert ask(Odd(), seed=1).choices[0].token_logprobs == [-0.1 - 0.2, -1e-17 / 3]


def test_settings_reach_the_engine_unless_they_change_nothing() -> None:
    model = FakeModel(max_model_len=50)
    ask(model, seed=1, stop=["x"], top_p=1.0, presence_penalty=0, extra_body={"top_k": 5})
    assert model.calls == [{"prompt": [104, 105], "n": 1, "seed": 1, "stop": ["x"], "top_k": 5, "max_tokens": 48}]


def test_a_views_calls_have_its_seeds_and_settings() -> None:
    model = FakeModel()
    bound = view(model, temperature=0.7, max_tokens=9)
    ask(bound)
    ask(bound, max_completion_tokens=4)
    assert model.calls == [
        {"prompt": [104, 105], "n": 1, "temperature": 0.7, "max_tokens": 9, "seed": rollout_seed(5, 7, 1, 0, 2)},
        {"prompt": [104, 105], "n": 1, "temperature": 0.7, "max_tokens": 4, "seed": rollout_seed(5, 7, 1, 1, 2)},
    ]


def test_models_are_listed() -> None:
    async def listed() -> list[str]:
        return [model.id async for model in FakeModel().get_openai_async_client().models.list()]

    assert asyncio.run(listed()) == ["policy"]


def test_tool_calls_are_read() -> None:
    choice = ask(FakeModel(lambda seed: CALL), tools=[TOOL], seed=1).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Well."
    [call] = choice.message.tool_calls
    assert (call.type, call.function.name, json.loads(call.function.arguments)) == ("function", "add", {"a": 1})
    assert choice.token_ids == [ord(c) for c in CALL]


@pytest.mark.parametrize("offered", [{}, {"tools": [TOOL], "tool_choice": "none"}])
def test_without_tools_a_call_is_text(offered: dict[str, Any]) -> None:
    message = ask(FakeModel(lambda seed: CALL), seed=1, **offered).choices[0].message
    assert (message.content, message.tool_calls) == (CALL, None)


def test_a_malformed_call_is_text() -> None:
    message = ask(FakeModel(lambda seed: "<tool_call>{</tool_call>"), tools=[TOOL], seed=1).choices[0].message
    assert (message.content, message.tool_calls) == ("<tool_call>{</tool_call>", None)


@pytest.mark.parametrize(
    ("written", "answer"),
    [
        (f"<think>{CALL}? No.</think>None.", "None."),
        (f"<think>{CALL}", None),
        (Response(CALL, opened=True), None),
    ],
)
def test_a_call_in_thoughts_is_text_and_the_answer_stands_beside_it(written: str, answer: str | None) -> None:
    choice = ask(FakeModel(lambda seed: written), tools=[TOOL], seed=1).choices[0]
    assert (choice.message.content, choice.message.tool_calls, choice.answer) == (written, None, answer)


def test_how_tokens_become_text_can_be_asked_for() -> None:
    model = FakeModel()
    shown = {"skip_special_tokens": True, "include_stop_str_in_output": False}
    ask(model, seed=1, extra_body=shown)
    assert model.calls[0].items() >= shown.items()


@pytest.mark.parametrize("of_policy", [{"mood": "calm", "enable_thinking": True}, None])
def test_variables_of_a_call_reach_the_chat_template_of_the_model_that_is_asked(of_policy: Any) -> None:
    """Also those of an auxiliary model, which is given none of the policy's."""
    rendered: list[Any] = []

    class Model(FakeModel):
        async def render(self, messages: Any, tools: Any = None, so_far: Any = ()) -> list[int]:
            rendered.append(messages.template_variables)
            return [1]

    bound = BoundModel(Model(), run_seed=5, batch=7, task=1, run=2, template_variables=of_policy)
    ask(bound, extra_body={"chat_template_kwargs": {"enable_thinking": False}})
    assert rendered == [{**(of_policy or {}), "enable_thinking": False}]


def tiny_engine() -> Any:
    from transformers import AutoModelForCausalLM

    from trinity_lightning.config.model_files import resolve_model
    from trinity_lightning.explorer.models.transformers_engine import TransformersEngine

    engine = TransformersEngine("tiny", max_model_len=128)
    engine.bind(AutoModelForCausalLM.from_pretrained(resolve_model("tiny")))
    return engine


def test_the_engine_that_generates_with_the_training_model_has_a_client() -> None:
    engine = tiny_engine()
    response = ask(engine, seed=3, max_tokens=5)
    expected = asyncio.run(engine.chat(HI, seed=3, max_tokens=5))[0]
    assert response.choices[0].token_ids == list(expected.token_ids)
    assert response.choices[0].message.content == expected.text
    with pytest.raises(openai.BadRequestError, match="not top_p: use vLLM"):
        ask(engine, top_p=0.5)


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"stream": True}, r"stream=True\) is not supported"),
        ({"top_logprobs": 3}, r"top_logprobs=3\) is not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"extra_body": {"best_off": 2}}, "unknown argument of chat.completions.create 'best_off'"),
        ({"messages": []}, "needs messages"),
    ],
)
def test_what_is_not_supported_is_refused_plainly(arguments: dict[str, Any], told: str) -> None:
    model = FakeModel()
    with pytest.raises(openai.BadRequestError, match=told):
        ask(model, seed=1, **arguments)
    assert model.calls == []


def test_a_trained_call_comes_from_the_whole_distribution() -> None:
    with pytest.raises(openai.BadRequestError, match=r"sampling\.top_p is for evaluation only"):
        ask(view(FakeModel()), top_p=0.5)
    ask(view(FakeModel(), trained=False), top_p=0.5)


def test_other_paths_are_not_found() -> None:
    client = FakeModel().get_openai_async_client()
    with pytest.raises(openai.NotFoundError, match=r"only chat\.completions\.create and models\.list"):
        asyncio.run(client.embeddings.create(model="any", input="hi"))


def test_a_prompt_that_is_too_long() -> None:
    with pytest.raises(openai.BadRequestError, match="the prompt has 2 tokens, the context 1") as caught:
        ask(FakeModel(max_model_len=1), seed=1)
    assert caught.value.code == "context_length_exceeded"


def test_an_engine_that_fails_or_aborts() -> None:
    class Failing(FakeModel):
        async def generate(self, *args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("out of memory")

    with pytest.raises(openai.InternalServerError, match="RuntimeError: out of memory"):
        ask(Failing())
    aborting = FakeModel()
    aborting.finish_reason = "abort"
    with pytest.raises(openai.InternalServerError, match="aborted the request"):
        ask(aborting, seed=1)


def test_retries_and_timeouts_are_the_clients_own() -> None:
    class Failing(FakeModel):
        failures = 1

        async def generate(self, *args: Any, **kwargs: Any) -> Any:
            self.failures -= 1
            if self.failures >= 0:
                raise RuntimeError("try again")
            return await super().generate(*args, **kwargs)

    async def call() -> None:
        client = Failing().get_openai_async_client().with_options(max_retries=1)
        response = await client.chat.completions.create(model="any", messages=HI, seed=3)
        assert response.choices[0].message.content == "3"
        slow = FakeModel(latency=30)
        with pytest.raises(openai.APITimeoutError):
            await slow.get_openai_async_client().chat.completions.create(model="any", messages=HI, seed=3, timeout=0.01)
        assert slow.aborted == 1

    asyncio.run(call())


def test_cancelling_a_call_aborts_its_request() -> None:
    async def call() -> None:
        model = FakeModel(latency=30)
        waiting = asyncio.create_task(
            model.get_openai_async_client().chat.completions.create(model="any", messages=HI, seed=3)
        )
        while not model.calls:  # noqa: ASYNC110 - the fake model has no event to wait for
            await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert model.aborted == 1

    asyncio.run(call())


def test_without_openai_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(ConfigError, match=r"pip install 'trinity-lightning\[openai\]'"):
        FakeModel().get_openai_async_client()


# -- calls as experiences ---------------------------------------------------------------------------------------------


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
        kept = workflow.model.extract_experience_from_history(clear_history=False)
        experiences = workflow.model.extract_experience_from_history()
        assert len(kept) == 2
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
        found = []
        for step in range(3):
            self.client.chat.completions.create(**self.request())
            found += self.taken(step)
        return found


class StepWiseAsync(StepWise):
    """The same in an async run, with the client of its kind."""

    def __init__(self, *, task: Task, model: Any, auxiliary_models: Any = None) -> None:
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)
        self.client = model.get_openai_async_client()

    async def run(self) -> list[Experience]:  # type: ignore[override]  # pyright: ignore[reportIncompatibleMethodOverride]
        found = []
        for step in range(3):
            await self.client.chat.completions.create(**self.request())
            found += self.taken(step)
        return found


class StepWiseInThreads(StepWise):
    """The blocking client in an async run, off the event loop."""

    async def run(self) -> list[Experience]:  # type: ignore[override]  # pyright: ignore[reportIncompatibleMethodOverride]
        return await asyncio.to_thread(StepWise.run, self)


@pytest.mark.parametrize("workflow", [StepWise, StepWiseAsync, StepWiseInThreads])
def test_step_wise_workflows_of_trinity_rft_run_on_a_real_engine(workflow: type[Workflow]) -> None:
    runner = WorkflowRunner(ExplorerConfig(), tiny_engine())
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


# -- an endpoint: its client lives as long as it is used, and keys go only where they were meant for -------------------


URL = "http://127.0.0.1:9/v1"


async def talk_and_end(model: OpenAIModel) -> str:
    [answer] = await model.chat(HI)
    await model.shutdown()
    await model.shutdown()
    return answer.text


def test_a_model_that_was_shut_down_can_be_asked_again_also_in_another_event_loop() -> None:
    with judge_server(lambda body: (200, "hello")) as server:
        model = OpenAIModel(server.url, "some-model")
        assert [asyncio.run(talk_and_end(model)) for _ in range(3)] == ["hello"] * 3


def test_no_key_is_sent_that_was_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    assert OpenAIModel(URL, "m").get_openai_async_client().api_key == "none"
    assert OpenAIModel(URL, "m", "OPENAI_API_KEY").get_openai_async_client().api_key == "secret"


@pytest.mark.parametrize("value", [None, ""])
def test_a_key_that_is_not_set_is_refused(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SOME_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("SOME_KEY", value)
    with pytest.raises(ConfigError, match="SOME_KEY is not set"):
        OpenAIModel(URL, "m", "SOME_KEY")


@pytest.mark.slow
@pytest.mark.parametrize(("models", "refusal"), [(["some-model"], 0), (None, 403), (None, 404), (None, 500)])
def test_an_endpoint_that_answers_anything_is_there(models: list[str] | None, refusal: int) -> None:
    with judge_server(lambda body: (200, "hello"), models, refusal) as server:
        asyncio.run(OpenAIModel(server.url, "some-model").load())


@pytest.mark.slow
def test_an_endpoint_that_cannot_be_used_is_told_before_rollouts() -> None:
    with pytest.raises(ModelLoadError, match=rf"{URL} \(model 'm'\) cannot be used.*[Cc]onnection"):
        asyncio.run(OpenAIModel(URL, "m").load())
    refused = pytest.raises(ModelLoadError, match=r"cannot be used.*401")
    with judge_server(lambda body: (200, "hello"), refusal=401) as server, refused:
        asyncio.run(OpenAIModel(server.url, "some-model").load())


@pytest.mark.slow
def test_a_failure_names_the_endpoint() -> None:
    with judge_server(lambda body: (500, "out of order")) as server:
        model = OpenAIModel(server.url, "some-model")
        with pytest.raises(
            RolloutError, match=rf"{server.url} \(model 'some-model'\) failed: InternalServerError.*order"
        ):
            asyncio.run(talk_and_end(model))


class Asking(Workflow):
    async def run(self) -> list[Experience]:
        model: Any = self.auxiliary_models[0]
        client, blocking = model.get_openai_async_client(), model.get_openai_client()
        first = await client.chat.completions.create(model=client.model_path, messages=HI, temperature=0.5)
        second = await asyncio.to_thread(
            blocking.chat.completions.create, model=blocking.model_path, messages=HI, temperature=0.25
        )
        texts = [answer.choices[0].message.content for answer in (first, second)]
        texts += [card.id async for card in client.models.list()]
        return [Experience(tokens=[1, 2], prompt_length=1, info={"texts": texts})]


def asked(server: JudgeServer) -> tuple[Status, list[Experience]]:
    runner = WorkflowRunner(ExplorerConfig(), FakeModel(), [OpenAIModel(server.url, "some-model")])
    return asyncio.run(runner.run_task(Task(Asking)))


def test_a_workflow_talks_to_an_endpoint_with_openais_client() -> None:
    with judge_server(lambda body: (200, f"at {body.get('temperature')}"), ["some-model"]) as server:
        _, [experience] = asked(server)
    assert experience.info["texts"] == ["at 0.5", "at 0.25", "some-model"]
    assert [request["model"] for request in server.requests] == ["some-model"] * 2
    assert all("seed" in request for request in server.requests)


def test_only_what_samples_has_the_runs_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: dict[str, dict[str, Any]] = {}

    async def note(path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        sent[path] = body
        return 200, {}

    endpoint = OpenAIModel(URL, "m")
    monkeypatch.setattr(endpoint, "answer", note)

    async def ask_for_each() -> None:
        for path in ("/v1/embeddings", "/v1/responses", "/v1/completions", "/v1/chat/completions"):
            await bound.openai_answer(path, {"input": "hi"})
        await bound.openai_answer("/v1/models", {})

    bound = BoundModel(endpoint, run_seed=5, batch=7, task=1, run=2)
    asyncio.run(ask_for_each())
    assert sent["/v1/embeddings"] == sent["/v1/responses"] == {"input": "hi"}
    seeds = [sent[path].pop("seed") for path in ("/v1/completions", "/v1/chat/completions")]
    assert seeds == [rollout_seed(5, 7, 1, turn, 2) for turn in (0, 1)]
    assert sent["/v1/models"] == {}


def test_openais_client_tells_the_error_of_an_endpoint() -> None:
    with judge_server(lambda body: (422, "too polite")) as server:
        status, _ = asked(server)
    assert "UnprocessableEntityError: Error code: 422 - " in str(status.message)
    assert f"the endpoint {server.url} (model 'some-model') failed" in str(status.message)
    assert "too polite" in str(status.message)


def test_a_stream_of_an_endpoint_is_refused() -> None:
    status, body = asyncio.run(OpenAIModel(URL, "m").answer("/v1/chat/completions", {"stream": True}))
    assert (status, body["error"]["message"]) == (400, "stream=True is not supported here: leave it out.")
