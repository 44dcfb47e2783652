"""Pictures in requests to a server: what is sent, what a server keeps of it, and other requests, which pass."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.pictures import processor, random_picture

from trinity_lightning.common.pictures.prompt import PicturePrompt
from trinity_lightning.config.models import resolve_model
from trinity_lightning.explorer.models import server_pictures
from trinity_lightning.explorer.models.server_pictures import KnownExpansions, PicturePrompts, request_of
from trinity_lightning.explorer.models.vllm_pictures import picture_arguments


class Pictures:
    """Stands for `VLLMPictures`."""

    def __init__(self) -> None:
        self.taken: list[PicturePrompt] = []

    async def awaited_input_of(self, prompt: PicturePrompt) -> dict[str, Any]:
        self.taken.append(prompt)
        return {}

    def rendered(self, expansion: Any) -> Any:
        return {"mm_kwargs": {"image": [Item()]}}


class Item:
    def get_data(self) -> dict[str, Any]:
        return {"pixels": torch.zeros(25)}


def prompt(*seeds: int) -> PicturePrompt:
    pieces: list[Any] = [[5, 6]]
    for seed in seeds:
        pieces += [processor().expand("<image>?", [random_picture(seed)]), [7, processor().token_id]]
    return PicturePrompt.joined(*pieces)


def sent(known: KnownExpansions, asked: PicturePrompt, with_pictures: bool) -> list[str]:
    """Take a request as a server does; the hashes that it does not know."""
    body = json.loads(json.dumps(request_of(asked, {}, with_pictures)))
    got, unknown = known.prompt_of(body)
    if not unknown:
        assert list(got) == list(asked)
        assert got.pictures == asked.pictures
        assert [place for place, _ in got.expansions] == [place for place, _ in asked.expansions]
        for (_, mine), (_, its) in zip(asked.expansions, got.expansions, strict=True):
            assert (mine.unexpanded, mine.token_ids) == (its.unexpanded, its.token_ids)
        asyncio.run(known.input_of(got))
    return unknown


def test_pictures_are_known_from_their_first_request_on() -> None:
    known = KnownExpansions(Pictures())  # type: ignore[arg-type]
    assert len(sent(known, prompt(1), False)) == 1
    assert sent(known, prompt(1), True) == []
    assert sent(known, prompt(1), False) == []
    assert len(sent(known, prompt(1, 2), False)) == 1
    assert sent(known, prompt(1, 2), True) == []
    assert sent(known, prompt(2, 1, 2), False) == []


def test_the_oldest_are_forgotten_once_they_take_too_much_memory() -> None:
    known = KnownExpansions(Pictures(), most_bytes=250)  # type: ignore[arg-type]  # of two texts
    for seeds in ((1,), (2,), (1,), (3,)):
        sent(known, prompt(*seeds), True)
    assert [len(sent(known, prompt(seed), False)) for seed in (1, 2, 3)] == [0, 1, 0]
    assert sent(known, prompt(4, 5, 6), True) == []  # whatever their size


def test_other_requests_pass() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        passed.append(scope["path"])

    passed: list[str] = []
    for path in ("/health", "/v1/completions"):
        asyncio.run(PicturePrompts(app)({"type": "http", "path": path}, None, None))  # type: ignore[arg-type]
    assert passed == ["/health", "/v1/completions"]


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
        (b'{"token_ids": [1, 2, 3]}', 400, "expansions"),
        (b'{"token_ids": [1], "expansions": []}', 500, "broken"),
    ],
)
def test_every_request_of_its_own_is_answered(
    body: bytes, status: int, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: Any) -> None:
        raise RuntimeError("it is broken")

    monkeypatch.setattr(KnownExpansions, "input_of", broken)
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

    monkeypatch.setattr(KnownExpansions, "input_of", endless)
    client = Client(b'{"token_ids": [1], "expansions": []}', leaves=True)
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
