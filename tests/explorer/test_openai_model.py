"""An endpoint that chats: its client lives as long as it is used, and keys go only where they were meant for."""

import asyncio
from typing import Any

import pytest
from fake_model import FakeModel
from judge_server import JudgeServer, judge_server

from trinity_lightning.common.experience import Experience
from trinity_lightning.config.schema import ExplorerConfig
from trinity_lightning.errors import ConfigError, ModelLoadError, RolloutError
from trinity_lightning.explorer.models.openai_model import OpenAIModel
from trinity_lightning.explorer.runner import Status, WorkflowRunner
from trinity_lightning.explorer.tasks.task import Task
from trinity_lightning.explorer.workflows import Workflow

pytest.importorskip("openai")

URL = "http://127.0.0.1:9/v1"
HI: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]


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


@pytest.mark.parametrize(("models", "refusal"), [(["some-model"], 0), (None, 403), (None, 404), (None, 500)])
def test_an_endpoint_that_answers_anything_is_there(models: list[str] | None, refusal: int) -> None:
    with judge_server(lambda body: (200, "hello"), models, refusal) as server:
        asyncio.run(OpenAIModel(server.url, "some-model").load())


def test_an_endpoint_that_cannot_be_used_is_told_before_rollouts() -> None:
    with pytest.raises(ModelLoadError, match=rf"{URL} \(model 'm'\) cannot be used.*[Cc]onnection"):
        asyncio.run(OpenAIModel(URL, "m").load())
    refused = pytest.raises(ModelLoadError, match=r"cannot be used.*401")
    with judge_server(lambda body: (200, "hello"), refusal=401) as server, refused:
        asyncio.run(OpenAIModel(server.url, "some-model").load())


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


def test_openais_client_tells_the_error_of_an_endpoint() -> None:
    with judge_server(lambda body: (422, "too polite")) as server:
        status, _ = asked(server)
    assert "UnprocessableEntityError: Error code: 422 - " in str(status.message)
    assert f"the endpoint {server.url} (model 'some-model') failed" in str(status.message)
    assert "too polite" in str(status.message)


def test_a_stream_of_an_endpoint_is_refused() -> None:
    status, body = asyncio.run(OpenAIModel(URL, "m").answer("/v1/chat/completions", {"stream": True}))
    assert (status, body["error"]["message"]) == (400, "stream=True is not supported here: leave it out.")
