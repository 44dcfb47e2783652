"""OpenAI's client over a model of this process, and a model behind an endpoint."""

import asyncio
import json
import sys
from typing import Any

import pytest
from PIL import Image
from support.errors import refuses
from support.fake_model import FakeModel
from support.judge_server import JudgeServer, judge_server
from support.tiny_model import tiny_model

from trinity_lightning.common.experience import Experience
from trinity_lightning.common.messages import Conversation
from trinity_lightning.common.pictures.picture import Picture
from trinity_lightning.common.random_state import rollout_seed
from trinity_lightning.common.thoughts import Response
from trinity_lightning.config.explorer import ExplorerConfig
from trinity_lightning.errors import ConfigError, ModelLoadError, RolloutError
from trinity_lightning.explorer.models.bound import BoundModel
from trinity_lightning.explorer.models.openai_api import OpenAIModel
from trinity_lightning.explorer.models.transformers_engine import TransformersEngine
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
    """An auxiliary model, too, is given the call's variables, but none of the policy's."""
    rendered: list[Any] = []

    class Model(FakeModel):
        async def render(self, messages: Any, tools: Any = None, so_far: Any = ()) -> list[int]:
            rendered.append(messages.template_variables)
            return [1]

    bound = BoundModel(Model(), run_seed=5, batch=7, task=1, run=2, template_variables=of_policy)
    ask(bound, extra_body={"chat_template_kwargs": {"enable_thinking": False}})
    assert rendered == [{**(of_policy or {}), "enable_thinking": False}]


def test_the_engine_that_generates_with_the_training_model_has_a_client() -> None:
    engine = TransformersEngine("tiny", max_model_len=128)
    engine.bind(tiny_model())
    response = ask(engine, seed=3, max_tokens=5)
    expected = asyncio.run(engine.chat(HI, seed=3, max_tokens=5))[0]
    assert response.choices[0].token_ids == list(expected.token_ids)
    assert response.choices[0].message.content == expected.text
    with pytest.raises(openai.BadRequestError, match="top_p"):
        ask(engine, top_p=0.5)


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"stream": True}, "stream"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"extra_body": {"best_off": 2}}, "best_off"),
        ({"messages": []}, "messages"),
    ],
)
def test_an_argument_that_is_not_supported_is_refused_by_name(arguments: dict[str, Any], name: str) -> None:
    model = FakeModel()
    with pytest.raises(openai.BadRequestError, match=name):
        ask(model, seed=1, **arguments)
    assert model.calls == []


def test_a_trained_call_comes_from_the_whole_distribution() -> None:
    with pytest.raises(openai.BadRequestError, match="top_p"):
        ask(view(FakeModel()), top_p=0.5)
    ask(view(FakeModel(), trained=False), top_p=0.5)


def test_other_paths_are_not_found() -> None:
    client = FakeModel().get_openai_async_client()
    with pytest.raises(openai.NotFoundError):
        asyncio.run(client.embeddings.create(model="any", input="hi"))


def test_a_prompt_that_is_too_long() -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(FakeModel(max_model_len=1), seed=1)
    assert caught.value.code == "context_length_exceeded"


def test_an_engine_that_fails_or_aborts() -> None:
    class Failing(FakeModel):
        async def generate(self, *args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("out of memory")

    with pytest.raises(openai.InternalServerError, match="out of memory"):
        ask(Failing())
    aborting = FakeModel()
    aborting.finish_reason = "abort"
    with pytest.raises(openai.InternalServerError):
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
    with pytest.raises(ConfigError, match="pip install"):
        FakeModel().get_openai_async_client()


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


def test_an_endpoint_is_sent_pictures_within_the_messages() -> None:
    picture = Picture(Image.new("RGB", (9, 7), "red"))
    asked = Conversation([{"role": "user", "content": "<image>?"}]).with_pictures([picture])
    with judge_server(lambda body: (200, "red")) as server:

        async def ask() -> None:
            model = OpenAIModel(server.url, "some-model")
            await model.chat(asked)
            await model.shutdown()

        asyncio.run(ask())
    [request] = server.requests
    [message] = request["messages"]
    assert [part["type"] for part in message["content"]] == ["image_url", "text"]
    assert Conversation([message]).with_pictures([]).pictures == [picture]


def test_no_key_is_sent_that_was_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    assert OpenAIModel(URL, "m").get_openai_async_client().api_key == "none"
    assert OpenAIModel(URL, "m", "OPENAI_API_KEY").get_openai_async_client().api_key == "secret"


@pytest.mark.parametrize("value", [None, ""])
def test_a_key_that_is_not_set_is_refused(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SOME_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("SOME_KEY", value)
    with refuses("api_key_env"):
        OpenAIModel(URL, "m", "SOME_KEY")


@pytest.mark.slow
@pytest.mark.parametrize(("models", "refusal"), [(["some-model"], 0), (None, 403), (None, 404), (None, 500)])
def test_an_endpoint_that_answers_anything_is_there(models: list[str] | None, refusal: int) -> None:
    with judge_server(lambda body: (200, "hello"), models, refusal) as server:
        asyncio.run(OpenAIModel(server.url, "some-model").load())


@pytest.mark.slow
def test_an_endpoint_that_cannot_be_used_is_told_before_rollouts() -> None:
    with pytest.raises(ModelLoadError, match=URL):
        asyncio.run(OpenAIModel(URL, "m").load())
    refused = pytest.raises(ModelLoadError, match="401")
    with judge_server(lambda body: (200, "hello"), refusal=401) as server, refused:
        asyncio.run(OpenAIModel(server.url, "some-model").load())


@pytest.mark.slow
def test_a_failure_names_the_endpoint() -> None:
    with judge_server(lambda body: (500, "out of order")) as server:
        model = OpenAIModel(server.url, "some-model")
        with pytest.raises(RolloutError, match=rf"{server.url}.*some-model.*order"):
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
    assert all(part in str(status.message) for part in ("422", server.url, "some-model", "too polite"))


def test_a_stream_of_an_endpoint_is_refused() -> None:
    status, body = asyncio.run(OpenAIModel(URL, "m").answer("/v1/chat/completions", {"stream": True}))
    assert (status, body["error"]["code"]) == (400, "invalid_request")
