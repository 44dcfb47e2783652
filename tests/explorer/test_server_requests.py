"""Requests to a server whose tokens are known before they end, with a server that is played."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from trinity_lightning.common.inference import Completion, Progress
from trinity_lightning.common.random_state import rest_seed
from trinity_lightning.errors import RolloutError, WeightSyncError
from trinity_lightning.explorer.models import unfinished
from trinity_lightning.explorer.models.record import watched
from trinity_lightning.explorer.models.server_requests import KNOWN, PATH, _progress
from trinity_lightning.explorer.models.unfinished import UnfinishedSamples

PROMPT = [7, 30]


class Server:
    """Draws the token `seed + place` at each place of a request, one at each `step`, until the request's limit.

    Attributes:
        weights: its label of its weights.
        asked: the requests so far.
        posted: paths of all requests, with what follows `?`.
        lives: False if it answers nothing any more.
        fails: the paths that fail.
        answers_late: waited for before progress is told; None: at once.
    """

    def __init__(self) -> None:
        self.weights, self.lives = "default", True
        self.answers_late: asyncio.Event | None = None
        self.asked: list[dict[str, Any]] = []
        self.posted: list[str] = []
        self.fails: set[str] = set()
        self.states: dict[str, dict[str, Any]] = {}
        self.samples = UnfinishedSamples(self.post, self.post, lambda: self.lives, self.revive, lambda: {99})  # type: ignore[arg-type]

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        self.posted.append(path)
        if path in self.fails:
            raise RolloutError(f"{path} failed")
        if path != PATH:
            return None
        if KNOWN in body:
            answer = {name: self.new(name, known) for name, known in body[KNOWN].items() if name in self.states}
            if self.answers_late is not None:
                await self.answers_late.wait()
            return answer
        return await self.drawn(dict(body))

    def new(self, name: str, known: int) -> dict[str, Any]:
        state = self.states[name]
        tokens, versions = state["token_ids"], state["versions"]
        return {"token_ids": tokens[known:], "logprobs": [-float(t) for t in tokens[known:]], "versions": versions}

    async def drawn(self, body: dict[str, Any]) -> Any:
        self.asked.append(body)
        state = self.states[body["id"]] = {"body": body, "token_ids": [], "versions": []}
        while len(state["token_ids"]) < body["sampling"]["max_tokens"]:
            await asyncio.sleep(0)
            if not self.lives:
                del self.states[body["id"]]
                raise RolloutError("it died")
        choice = self.new(body["id"], 0) | {"finish_reason": "length", "stop_reason": None}
        del self.states[body["id"]]
        return {"choices": [choice]}

    def step(self, tokens: int = 1) -> None:
        for state in self.states.values():
            for _ in range(tokens):
                place = len(state["token_ids"])
                if not state["versions"] or state["versions"][-1][1] != self.weights:
                    state["versions"].append([place, self.weights])
                state["token_ids"].append(state["body"]["sampling"]["seed"] % 1000 + place)

    async def revive(self, connection: object) -> bool:
        assert connection is True, "the server lived when the request began"
        was_dead, self.lives = not self.lives, True
        return was_dead

    def run(self, play: Callable[[asyncio.Task[list[Completion]]], Awaitable[None]], n: int = 1) -> list[Completion]:
        """The samples of a prompt, drawn while `play` goes on."""

        async def both() -> list[Completion]:
            sampling = {"seed": 5, "max_tokens": 6, "min_tokens": 4}
            completions = asyncio.create_task(self.samples.completions(PROMPT, n, sampling))
            while len(self.asked) < n:  # noqa: ASYNC110
                await asyncio.sleep(0)
            await play(completions)
            return await asyncio.wait_for(completions, 5)

        return asyncio.run(both())


async def change(server: Server, path: str, body: Mapping[str, Any]) -> Any:
    try:
        return await server.post(path, body)
    except RolloutError as error:
        raise WeightSyncError(str(error)) from error


def test_each_sample_is_a_request_of_its_own_with_a_seed_of_its_own() -> None:
    server = Server()

    async def play(_: Any) -> None:
        server.step(6)

    completions = server.run(play, n=3)
    assert [request["sampling"]["seed"] for request in server.asked] == [5, 6, 7]
    assert [completion.token_ids[0] for completion in completions] == [5, 6, 7]
    assert completions[0].versions == ((0, 0),)
    assert server.samples.under_way() == []


def test_the_rest_of_a_sample_is_asked_for_once_its_server_lives_again() -> None:
    server = Server()

    async def play(_: Any) -> None:
        server.weights = "3"
        server.step(2)
        await server.samples._look(server.post)
        server.step()  # a token that nobody knows
        server.weights, server.lives = "4", False
        while len(server.asked) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0)
        (sample,) = server.samples.under_way()
        assert (sample.written().token_ids, sample.drawn, sample.written().versions) == ([5, 6], 0, ((0, 3),))
        server.step(4)

    (completion,) = server.run(play)
    rest = server.asked[1]
    seed = rest_seed(5, 2)
    assert rest["token_ids"] == [*PROMPT, 5, 6]
    assert rest["sampling"] == server.asked[0]["sampling"] | {"seed": seed, "max_tokens": 4, "min_tokens": 2}
    assert completion.token_ids == [5, 6, *(seed % 1000 + place for place in range(4))]
    assert completion.logprobs == [-token for token in completion.token_ids]
    assert completion.versions == ((0, 3), (2, 4))
    assert completion.prompt_token_ids == PROMPT


def test_who_asks_sees_the_samples_while_they_are_written() -> None:
    server, progress = Server(), Progress()

    async def ask() -> list[Completion]:
        call = server.samples.completions(PROMPT, 2, {"seed": 5, "max_tokens": 3})
        completions = asyncio.create_task(watched(progress, call))
        while len(server.asked) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0)
        server.step(2)
        await server.samples._look(server.post)
        assert [(sample.token_ids, sample.finish_reason) for sample in progress.written()] == [
            ([5, 6], None),
            ([6, 7], None),
        ]
        server.step()
        return await completions

    assert asyncio.run(ask()) == progress.written()
    assert [sample.finish_reason for sample in progress.written()] == ["length"] * 2


def test_a_server_that_lives_fails_one_request_alone() -> None:
    server = Server()
    server.fails.add(PATH)

    async def ask() -> None:
        await server.samples.completions(PROMPT, 2, {"max_tokens": 3, "seed": 0})

    with pytest.raises(RolloutError, match="failed"):
        asyncio.run(ask())
    assert server.samples.under_way() == []


def test_no_token_is_learnt_twice_or_for_a_request_that_has_ended() -> None:
    server = Server()

    async def play(completions: asyncio.Task[list[Completion]]) -> None:
        server.step(2)
        await asyncio.gather(*(server.samples._look(server.post) for _ in range(3)))
        (sample,) = server.samples.under_way()
        assert sample.written().token_ids == [5, 6]
        server.answers_late = late_answer = asyncio.Event()
        server.step(1)
        late = asyncio.create_task(server.samples._look(server.post))
        await asyncio.sleep(0.01)
        server.lives = False
        while len(server.asked) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0)
        late_answer.set()
        await late
        assert sample.written().token_ids == [5, 6]  # the third belongs to a request that has ended
        server.step(4)

    assert len(server.run(play)[0].token_ids) == 6


def test_progress_that_comes_after_the_answer_adds_nothing_to_the_sample() -> None:
    server = Server()

    async def play(_: Any) -> None:
        [sample, _other] = server.samples.under_way()
        server.step(2)
        server.answers_late = late_answer = asyncio.Event()
        late = asyncio.create_task(server.samples._look(server.post))
        await asyncio.sleep(0)
        state = server.states[sample.name]
        state["token_ids"] = [5, 6, 7, 8, 9, 10]
        while len(server.samples.under_way()) == 2:  # noqa: ASYNC110
            await asyncio.sleep(0)
        late_answer.set()
        await late
        assert sample.written().token_ids == [5, 6, 7, 8, 9, 10]
        server.step(6)

    server.run(play, n=2)


def test_a_server_is_paused_while_its_weights_change_and_its_requests_are_known() -> None:
    server = Server()

    async def play(_: Any) -> None:
        server.weights = "1"
        server.step(2)
        async with server.samples.paused(lambda *request: change(server, *request)):
            assert server.posted[-2:] == ["/pause?mode=keep&clear_cache=false", PATH]
            assert server.samples.cached_tokens() == len(PROMPT) + 2
            server.weights = "2"
        assert server.posted[-1] == "/resume"
        server.step(4)

    assert server.run(play)[0].versions == ((0, 1), (2, 2))


@pytest.mark.parametrize("path", ["/pause?mode=keep&clear_cache=false", PATH])
def test_a_pause_that_fails_leaves_the_server_as_it_was(path: str) -> None:
    server = Server()

    async def play(_: Any) -> None:
        server.fails.add(path)
        with pytest.raises(WeightSyncError, match="failed"):
            async with server.samples.paused(lambda *request: change(server, *request)):
                raise AssertionError("it takes no weights")
        assert server.posted[-1] == "/resume"
        server.fails.clear()
        server.step(6)

    server.run(play)


def test_a_server_that_may_hold_half_of_the_weights_stays_paused() -> None:
    server = Server()

    async def fail(error: BaseException) -> None:
        async with server.samples.paused(lambda *request: change(server, *request)):
            raise error

    with pytest.raises(WeightSyncError, match="half of the weights"):
        asyncio.run(fail(WeightSyncError("It broke.")))
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(fail(asyncio.CancelledError()))
    assert "/resume" not in server.posted


def test_a_server_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by a sync that its time limit has ended."""
    monkeypatch.setattr(unfinished, "RESUME_SECONDS", 0.05)

    async def hang(path: str, body: Any) -> Any:
        posted.append(path)
        await asyncio.sleep(3600)

    async def sync() -> None:
        samples = UnfinishedSamples(hang, hang, lambda: None, hang, lambda: ())  # type: ignore[arg-type]
        async with samples.paused(hang):
            raise AssertionError("it takes no weights")

    posted: list[str] = []
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(sync(), 0.05))
    assert posted == ["/pause?mode=keep&clear_cache=false", "/resume"]


def test_progress_is_told_of_requests_that_are_asked_for_alone() -> None:
    """As vLLM keeps them."""

    def state(name: str, tokens: list[int], starts: list[tuple[str, int]]) -> Any:
        flat = SimpleNamespace(
            logprobs=[-float(i) / 2 for i in range(2 * len(tokens))], start_indices=range(0, 2 * len(tokens), 2)
        )
        return SimpleNamespace(
            external_req_id=name,
            detokenizer=SimpleNamespace(output_token_ids=tokens),
            logprobs_processor=SimpleNamespace(logprobs=flat),
            weight_version_starts=starts,
        )

    states = [state("a", [1, 2, 3], [("1", 0), ("2", 2)]), state("b", [4], [("2", 0)]), state("c", [5, 6], [])]
    new = {"token_ids": [2, 3], "logprobs": [-1.0, -2.0], "versions": [[0, "1"], [2, "2"]]}
    assert _progress(states, {"a": 1, "b": 1, "d": 0}) == {"a": new}
