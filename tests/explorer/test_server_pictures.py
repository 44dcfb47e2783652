"""Pictures in requests to a server: what is sent, what a server keeps of it, and other requests, which pass."""

import asyncio
import gc
import json
import weakref
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.pictures import processor, random_picture

from trinity_lightning.common.pictures.picture import Picture
from trinity_lightning.common.pictures.prompt import PicturePrompt
from trinity_lightning.config.models import resolve_model
from trinity_lightning.errors import RolloutError
from trinity_lightning.explorer.models import server_pictures
from trinity_lightning.explorer.models.server_pictures import (
    MOST_BYTES,
    KnownPictures,
    PictureClient,
    PicturePrompts,
    request_of,
)
from trinity_lightning.explorer.models.vllm_pictures import picture_arguments

TEXT = "<image>?"


class Renderer:
    """Stands for vLLM's renderer, with a cache of its own that gives None for pictures that it has seen.

    Attributes:
        images: the pictures that it was given.
        args: the arguments of the processor in each call.
        begun: set once it is called.
        fails: True if the next call fails.
    """

    def __init__(self) -> None:
        self.images: list[weakref.ref] = []
        self.args: list[dict[str, Any]] = []
        self.begun = asyncio.Event()
        self.fails = False

    async def render_cmpl_async(self, prompts: list[dict[str, Any]], skip_mm_cache: bool = False) -> list[Any]:
        [given] = prompts
        [image] = given["multi_modal_data"]["image"]
        self.images.append(weakref.ref(image))
        self.args.append(given["mm_processor_kwargs"])
        self.begun.set()
        await asyncio.sleep(0.01)
        if self.fails:
            self.fails = False
            raise ValueError("no such picture")
        expansion = processor().expand(TEXT, [Picture(image.copy())])
        assert tuple(given["prompt_token_ids"]) == expansion.unexpanded
        items = [Item() if skip_mm_cache else None]
        return [{"prompt_token_ids": list(expansion.token_ids), "mm_kwargs": {"image": items}}]


class Item:
    def get_data(self) -> dict[str, Any]:
        return {"pixels": torch.zeros(25)}


class Server:
    """Stands for a `ServerClient` and its server, whose answer to a prompt is the prompt.

    Attributes:
        shown: for each request with texts, the number of those that came with their pictures.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self.renderer = Renderer()
        self.known = KnownPictures(self.renderer, most_bytes)
        self.middleware = PicturePrompts(None)  # type: ignore[arg-type]
        self.middleware._known = self.known
        self.shown: list[int] = []

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        assert path == server_pictures.PATH
        self.shown.append(sum("pictures" in text for _, text in body["texts"]))
        status, answer = await self.middleware._answer(SimpleNamespace(renderer=None), json.dumps(body).encode())
        if status != 200:
            raise ValueError(answer["error"]["message"])
        return answer

    def client(self, **processor_args: Any) -> PictureClient:
        return PictureClient(self, processor_args)  # type: ignore[arg-type]

    def asked(self, prompt: PicturePrompt, **processor_args: Any) -> list[int]:
        """Ask for a prompt; the `shown` of it."""
        before = len(self.shown)
        check(asyncio.run(self.client(**processor_args).answer(prompt, {})), prompt)
        return self.shown[before:]

    def knows(self, prompt: PicturePrompt) -> bool:
        return not self.known.unknown(request_of(prompt, {}, {}))


@pytest.fixture(autouse=True)
def without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    async def generated(engine: Any, prompt: Any, sampling: Any, request_id: Any) -> Any:
        return prompt

    def joined_input(token_ids: Any, texts: Any) -> Any:
        tokens = [(start, rendered["prompt_token_ids"]) for start, rendered in texts]
        assert all(isinstance(item, Item) for _, rendered in texts for item in rendered["mm_kwargs"]["image"])
        return {"token_ids": token_ids, "texts": tokens}

    monkeypatch.setattr(server_pictures, "generated", generated)
    monkeypatch.setattr(server_pictures, "joined_input", joined_input)


def prompt(*seeds: int) -> PicturePrompt:
    pieces: list[Any] = [[5, 6]]
    for seed in seeds:
        pieces += [processor().expand(TEXT, [random_picture(seed)]), [7, processor().token_id]]
    return PicturePrompt.joined(*pieces)


def check(answer: Mapping[str, Any], asked: PicturePrompt) -> None:
    assert answer["token_ids"] == list(asked)
    assert answer["texts"] == [(start, list(expansion.token_ids)) for start, expansion in asked.expansions]


def test_pictures_are_known_from_their_first_request_on() -> None:
    server = Server()
    assert server.asked(prompt(1)) == [0, 1, 0]
    assert server.asked(prompt(1)) == [0]
    assert server.asked(prompt(1, 2)) == [0, 1, 0]
    assert server.asked(prompt(2, 1, 2)) == [0]
    assert len(server.renderer.images) == 2


def test_the_pictures_themselves_are_not_kept() -> None:
    server = Server()
    server.asked(prompt(1, 2))
    gc.collect()
    assert [image() for image in server.renderer.images] == [None, None]


def test_the_oldest_are_forgotten_once_they_take_too_much_memory() -> None:
    server = Server(most_bytes=250)  # of two texts
    for seed in (1, 2, 1, 3):
        server.asked(prompt(seed))
    assert [server.knows(prompt(seed)) for seed in (1, 2, 3)] == [True, False, True]
    # A prompt of three is answered all the same, with its pictures in the request itself; and counted as before.
    assert server.asked(prompt(4, 5, 6)) == [0, 3, 0, 3]
    assert [server.knows(prompt(seed)) for seed in (1, 3, 4, 5, 6)] == [False, False, True, False, True]
    assert server.asked(prompt(6)) == [0]


def test_the_rollouts_of_a_prompt_send_its_pictures_once() -> None:
    async def ask() -> None:
        client = server.client()
        for answer in await asyncio.gather(*(client.answer(prompt(1, 2), {}) for _ in range(8))):
            check(answer, prompt(1, 2))

    server = Server()
    asyncio.run(ask())
    assert [shown for shown in server.shown if shown] == [2]
    assert len(server.renderer.images) == 2


def test_a_rollout_that_is_cancelled_while_it_sends_pictures_has_sent_them_for_the_others() -> None:
    async def ask() -> None:
        client = server.client()
        first = asyncio.create_task(client.answer(prompt(1), {}))
        await server.renderer.begun.wait()
        others = [asyncio.create_task(client.answer(prompt(1), {})) for _ in range(3)]
        first.cancel()
        for answer in await asyncio.gather(*others):
            check(answer, prompt(1))

    server = Server()
    asyncio.run(ask())
    assert [shown for shown in server.shown if shown] == [1]
    assert len(server.renderer.images) == 1


def test_the_pictures_of_several_clients_are_processed_once() -> None:
    async def ask() -> None:
        await asyncio.gather(*(server.client().answer(prompt(1), {}) for _ in range(4)))

    server = Server()
    asyncio.run(ask())
    assert server.shown.count(1) == 4
    assert len(server.renderer.images) == 1
    assert server.knows(prompt(1))


def test_pictures_that_cannot_be_processed_fail_those_that_wait_for_them_alone() -> None:
    async def ask() -> list[Any]:
        client = server.client()
        return await asyncio.gather(*(client.answer(prompt(1), {}) for _ in range(3)), return_exceptions=True)

    server = Server()
    server.renderer.fails = True
    errors = asyncio.run(ask())
    assert [type(error) for error in errors] == [RolloutError] * 3
    assert "no such picture" in str(errors[0])
    assert server.asked(prompt(1)) == [0, 1, 0]


def test_the_processor_has_the_arguments_of_the_request() -> None:
    server = Server()
    assert server.asked(prompt(1), size={"longest_edge": 64}) == [0, 1, 0]
    assert server.asked(prompt(1)) == [0, 1, 0]  # another text, as other tensors belong to it
    assert server.renderer.args == [{"size": {"longest_edge": 64}}, {}]


def test_other_tokens_are_refused_whether_the_pictures_are_known_or_not() -> None:
    other = prompt(1)
    place = other.expansions[0][0] + 3
    other[place] += 1
    server = Server()
    for _ in range(2):
        with pytest.raises(RolloutError, match="differ at place 3"):
            asyncio.run(server.client().answer(other, {}))
    assert server.asked(prompt(1)) == [0]


def test_other_requests_pass() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        passed.append(scope["path"])

    passed: list[str] = []
    for path in ("/health", "/v1/completions"):
        asyncio.run(PicturePrompts(app)({"type": "http", "path": path}, None, None))  # type: ignore[arg-type]
    assert passed == ["/health", "/v1/completions"]


NO_PICTURES = b'{"token_ids": [1], "texts": [], "processor_args": {}, "sampling": {}}'


class Client:
    """Sends a body, and goes away at once or never."""

    def __init__(self, body: bytes, leaves: bool = False) -> None:
        self.messages = [{"type": "http.request", "body": body[i : i + 9], "more_body": True} for i in (0,)]
        self.messages.append({"type": "http.request", "body": body[9:]})
        self.messages += [{"type": "http.disconnect"}] * leaves
        self.answers: list[Any] = []

    async def receive(self) -> Any:
        if not self.messages:
            await asyncio.sleep(3600)
        return self.messages.pop(0)

    async def send(self, message: Any) -> None:
        self.answers.append(message)

    def asks(self) -> None:
        app = SimpleNamespace(state=SimpleNamespace(engine_client=SimpleNamespace(renderer=None)))
        scope = {"type": "http", "path": server_pictures.PATH, "app": app}
        asyncio.run(PicturePrompts(app)(scope, self.receive, self.send))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("body", "status", "told"),
    [
        (b"", 200, ""),
        (b"{}", 200, ""),
        (b"this is no JSON", 400, "Expecting value"),
        (b'{"token_ids": [1, 2, 3]}', 400, "texts"),
        (NO_PICTURES, 500, "broken"),
    ],
)
def test_every_request_of_its_own_is_answered(
    body: bytes, status: int, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: Any) -> None:
        raise RuntimeError("it is broken")

    monkeypatch.setattr(KnownPictures, "input_of", broken)
    client = Client(body)
    client.asks()
    head, content = client.answers
    assert head["status"] == status
    assert told in json.loads(content["body"]).get("error", {}).get("message", "")


def test_a_client_that_goes_away_cancels_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    cancelled: list[bool] = []

    async def endless(*_: Any) -> None:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    monkeypatch.setattr(KnownPictures, "input_of", endless)
    client = Client(NO_PICTURES, leaves=True)
    client.asks()
    assert (client.answers, cancelled) == ([], [True])


def test_arguments_of_vllm_for_pictures() -> None:
    path = str(resolve_model("tiny_vision"))
    assert picture_arguments(str(resolve_model("tiny")), {}, {}, 3) == {}
    assert picture_arguments(path, {}, {"do_resize": False}, 3) == {
        "limit_mm_per_prompt": {"video": 0, "audio": 0, "image": 3},
        "mm_processor_cache_gb": 0,
        "mm_processor_kwargs": {"do_resize": False},
    }
    limits = [picture_arguments(path, {}, {}, most)["limit_mm_per_prompt"] for most in (None, 0)]
    assert limits == [{"video": 0, "audio": 0}, {"video": 0, "audio": 0, "image": 1}]  # without any, no tower is loaded


def test_arguments_of_the_users_own_win_and_leave_the_others() -> None:
    path = str(resolve_model("tiny_vision"))
    limits = {"limit_mm_per_prompt": {"image": 9}, "mm_processor_cache_gb": 1}
    assert picture_arguments(path, limits, {}, 3) == {
        "limit_mm_per_prompt": {"video": 0, "audio": 0, "image": 9},
        "mm_processor_cache_gb": 1,
    }
    films = {"limit_mm_per_prompt": {"video": 1}}
    limits = picture_arguments(path, films, {}, 3)["limit_mm_per_prompt"]
    assert limits == {"video": 1, "audio": 0, "image": 3}
    assert films == {"limit_mm_per_prompt": {"video": 1}}
