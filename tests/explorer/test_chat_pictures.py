"""Pictures in the messages of a workflow: each reaches the model in its own place."""

import asyncio
import base64
import json
from dataclasses import replace
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from support.errors import refuses
from support.fake_model import FakeModel
from support.pictures import processor, random_picture

from trinity_lightning.common.experience import Experience
from trinity_lightning.common.messages import Conversation
from trinity_lightning.common.pictures.picture import FIELD, Picture
from trinity_lightning.common.pictures.prompt import PLACES, PicturePrompt
from trinity_lightning.config.explorer import ExplorerConfig
from trinity_lightning.config.models import load_tokenizer
from trinity_lightning.explorer.models.bound import BoundModel
from trinity_lightning.explorer.models.engine import Engine
from trinity_lightning.explorer.models.openai_api import OpenAIModel
from trinity_lightning.explorer.tasks.task import Task, messages_of
from trinity_lightning.explorer.workflow_runner import WorkflowRunner
from trinity_lightning.explorer.workflows.workflow import experience_of

FIRST, SECOND = random_picture(1), random_picture(2)
PLACE = {"type": "image"}


class Seeing(FakeModel):
    """Renders as the engines do, and answers at once."""

    processor = processor()
    max_model_len: Any = 10_000
    render, chat = Engine.render, Engine.chat

    @cached_property
    def tokenizer(self) -> Any:  # pyright: ignore
        return load_tokenizer("tiny_vision")

    async def generate(self, prompt: Any, n: int = 1, **sampling: Any) -> Any:
        completions = await super().generate(prompt, n, **{"seed": 1, **sampling})
        return [replace(completion, prompt_token_ids=prompt) for completion in completions]


@pytest.fixture(scope="module")
def model() -> Seeing:
    return Seeing(max_model_len=10_000)


def asked(model: Any, messages: Any, **options: Any) -> Any:
    """The prompt of a chat."""
    seeing = model if isinstance(model, Seeing) else model._model
    asyncio.run(model.chat(messages, **options))
    return seeing.calls[-1]["prompt"]


def shown(prompt: Any) -> list[Picture]:
    return prompt.pictures if isinstance(prompt, PicturePrompt) else []


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def url_of(picture: Picture) -> str:
    file = BytesIO()
    picture.image.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


@pytest.fixture
def task() -> Task:
    return Task("simple", {"prompt": "What is <image>?", "images": [FIRST]})


@pytest.mark.parametrize("bound", [False, True])
def test_lists_of_messages_keep_their_pictures(bound: bool, task: Task, model: Seeing) -> None:
    asking = BoundModel(model, run_seed=5, batch=7, task=1, run=2) if bound else model
    conversation, further = messages_of(task), [{"role": "assistant", "content": "red"}, user([PLACE, text("Why?")])]
    for messages in (conversation[:], [*conversation], [{"role": "system", "content": "s"}, *conversation]):
        assert shown(asked(asking, messages)) == [FIRST]
    for messages in (conversation + further, [*conversation, *further], Conversation([*conversation, *further])):
        assert shown(asked(asking, messages, images=[SECOND])) == [FIRST, SECOND]
    assert shown(asked(asking, further[1:] + conversation, images=[SECOND])) == [SECOND, FIRST]


def test_a_place_without_a_picture_is_refused(task: Task, model: Seeing) -> None:
    with refuses(FIELD):
        asked(model, [*messages_of(task), user([PLACE])])


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image", "image": FIRST},
        {"type": "image", "image": FIRST.image},
        {"type": "image_url", "image_url": {"url": url_of(FIRST)}},
    ],
    ids=["picture", "pillow", "url"],
)
def test_a_part_brings_its_picture_along(part: dict[str, Any], task: Task, model: Seeing) -> None:
    assert shown(asked(model, [user([part, text("?")])])) == [FIRST]
    assert shown(asked(model, [user((part, text("?")))])) == [FIRST]
    prompt = asyncio.run(model.render([user([part])], so_far=asked(model, messages_of(task))))
    assert shown(prompt) == [FIRST, FIRST]


def test_openais_client_takes_pictures(model: Seeing) -> None:
    bound = BoundModel(model, run_seed=5, batch=7, task=1, run=2)
    messages = [user([text("What is "), {"type": "image_url", "image_url": {"url": url_of(SECOND)}}])]
    for client in (model.get_openai_async_client(), bound.get_openai_async_client()):
        asyncio.run(client.chat.completions.create(model="policy", messages=messages, max_tokens=3))
        assert shown(model.calls[-1]["prompt"]) == [SECOND]
    [experience] = bound.extract_experience_from_history()
    assert experience.messages == [user([text("What is "), PLACE])]
    assert experience.multi_modal_inputs is not None


def test_an_experience_has_the_places_of_pictures_alone(task: Task, model: Seeing) -> None:
    [completion] = asyncio.run(model.chat(messages := messages_of(task)))
    experience = experience_of(completion, messages, messages=messages)
    assert experience.messages == [user([text("What is "), PLACE, text("?")])]
    assert Experience.deserialize(experience.serialize()).messages == experience.messages


def test_an_endpoint_is_sent_the_pictures_as_data_urls(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []

    class Completions:
        async def create(self, **body: Any) -> Any:
            sent.append(json.loads(json.dumps(body["messages"])))
            return type("Response", (), {"choices": []})

    client = type("Client", (), {"chat": type("Chat", (), {"completions": Completions()})})
    endpoint = OpenAIModel("http://localhost:1/v1", "judge")
    monkeypatch.setattr(endpoint, "_client", client)
    elsewhere = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
    asyncio.run(endpoint.chat([*messages_of(task), user([elsewhere])]))
    [first, second] = sent[0]
    assert first["content"] == [text("What is "), {"type": "image_url", "image_url": {"url": url_of(FIRST)}}, text("?")]
    assert second["content"] == [elsewhere]


# A text that has the token for pictures


@pytest.mark.parametrize(
    "messages",
    [
        [user([text("<image> or "), {"type": "image", "image": FIRST}, text(" or <image>"), PLACE])],
        [
            user([{"type": "image", "image": FIRST}, text("a")]),
            {"role": "assistant", "content": "a<image>b<image>"},
            user([text("<image>"), PLACE]),
        ],
    ],
    ids=["a question", "an answer"],
)
def test_a_token_for_pictures_in_a_text_is_text(messages: list[dict[str, Any]], model: Seeing) -> None:
    prompt, token = asked(model, messages, images=[SECOND]), processor().token_id
    assert shown(prompt) == [FIRST, SECOND]
    places = prompt.inputs[PLACES].tolist()
    assert len(places) == 2 * 16
    as_text = [place for place in range(len(prompt)) if prompt[place] == token and place not in places]
    # The same text with letters in place of the tokens that are text:
    plain = asked(model, json.loads(json.dumps(messages, default=url_of).replace("<image>", "#")), images=[SECOND])
    letter = plain[as_text[0]]
    expected = list(plain)
    for place in as_text:
        assert expected[place] == letter
        expected[place] = token
    assert list(prompt) == expected
    assert plain.inputs[PLACES].tolist() == places
    assert len(as_text) == str(messages).count("<image>")
    for name, tensor in plain.inputs.items():
        assert torch.equal(tensor, prompt.inputs[name])


def test_a_later_turn_may_have_both(model: Seeing, task: Task) -> None:
    so_far = asked(model, messages_of(task))
    later = [user([text("<image>?"), {"type": "image", "image": SECOND}])]
    prompt = asyncio.run(model.render(later, so_far=so_far))
    assert list(prompt[: len(so_far)]) == list(so_far)
    assert shown(prompt) == [FIRST, SECOND]


def test_a_file_that_is_lost_fails_the_runs_of_its_task(model: Seeing, tmp_path: Path) -> None:
    task = Task("simple", {"prompt": "?", "images": [Picture(tmp_path / "lost.png")], "answer": "1"}, 2)
    attempt = asyncio.run(WorkflowRunner(ExplorerConfig(), model).attempt(task, [0, 1]))
    assert attempt.experiences == []
    assert all("lost.png" in str(error) for error in attempt.errors.values())
    assert [*attempt.errors] == [0, 1]
