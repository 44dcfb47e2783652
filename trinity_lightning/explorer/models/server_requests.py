"""Requests to vLLM servers that go on under new weights: the version of each token's weights, and their tokens so far.

vLLM's server says neither in the answers of its OpenAI API, so it is started with `--middleware` and the class
`KeptRequests`. vLLM itself notes which weights sampled a token: it is told their version while it is paused.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trinity_lightning.common.inference import PROGRESS, Completion, Spans, joined_spans
from trinity_lightning.common.pictures.prompt import PicturePrompt
from trinity_lightning.errors import ConfigError, RolloutError, WeightSyncError
from trinity_lightning.explorer.models.rest import rest_of
from trinity_lightning.explorer.models.server_path import ServerPath, generated

if TYPE_CHECKING:
    from trinity_lightning.explorer.models.server import ServerClient

logger = logging.getLogger(__name__)

PATH = "/kept_requests"
KNOWN = "known"  # key of a request for progress: the number of known tokens of each request
PROGRESS_SECONDS = 2.0  # between two requests for progress: a server that dies loses so many seconds of its tokens
RESUME_SECONDS = 2.0  # limit for a server to go on after a weight sync that did not begin

# -- the server's side -------------------------------------------------------------------------------------------------


class KeptRequests(ServerPath):
    """Middleware of vLLM's server: answers prompts with the versions of tokens' weights, and tells tokens so far."""

    path = PATH

    async def _answered(self, engine: Any, request: Mapping[str, Any]) -> dict[str, Any]:
        if not request:
            return {}
        if KNOWN in request:
            return _progress(engine.output_processor.request_states.values(), request[KNOWN])
        prompt = {"type": "token", "prompt_token_ids": request["token_ids"]}
        return await generated(engine, prompt, request["sampling"], request["id"])


KEEPING = f"{KeptRequests.__module__}.{KeptRequests.__name__}"


def _progress(states: Iterable[Any], known: Mapping[str, int]) -> dict[str, Any]:
    """The new tokens of requests by their names: token ids, log-probabilities, and the starts of all versions.

    Args:
        states: vLLM's states of the unfinished requests.
        known: number of known tokens of each request that is asked for.
    """
    progress = {}
    for state in states:
        start = known.get(state.external_req_id)
        token_ids = state.detokenizer.output_token_ids
        if start is None or len(token_ids) == start:
            continue
        flat = state.logprobs_processor.logprobs
        progress[state.external_req_id] = {
            "token_ids": list(token_ids[start:]),
            "logprobs": [flat.logprobs[place] for place in flat.start_indices[start:]],
            "versions": [[place, version] for version, place in state.weight_version_starts],
        }
    return progress


# -- the client's side -------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class UnfinishedSample:
    """A sample that a server is drawing, and its tokens as far as they are known.

    Attributes:
        prompt: its prompt.
        sampling: the settings of the whole sample.
        token_ids: tokens so far.
        logprobs: their log-probabilities, as in a `Completion`.
        versions: the versions of their weights, as in a `Completion`.
        name: the present request's name.
    """

    prompt: Sequence[int]
    sampling: Mapping[str, Any]
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: Spans = ()
    name: str = ""
    _before: int = 0  # tokens that earlier requests have drawn
    _versions_before: Spans = ()

    def ask_again(self, name: str) -> None:
        """Begin another request, for the rest of the sample."""
        self.name, self._before, self._versions_before = name, len(self.token_ids), self.versions

    @property
    def drawn(self) -> int:
        """Number of known tokens of the present request."""
        return len(self.token_ids) - self._before

    def rest(self) -> tuple[Sequence[int], dict[str, Any]]:
        """Prompt and settings of a request for the rest of the sample."""
        return rest_of(self.prompt, self.token_ids, self.sampling)

    def add(self, progress: Mapping[str, Any]) -> None:
        """Take the tokens that the present request has drawn since the last time."""
        self.versions = self._joined(progress["versions"])
        self.logprobs += progress["logprobs"]
        self.token_ids += progress["token_ids"]  # last, because another thread may look: it counts the tokens

    def so_far(self) -> Completion:
        """The known tokens, without a finish_reason."""
        token_ids = list(self.token_ids)
        known = len(token_ids)
        spans = tuple((start, version) for start, version in self.versions if start < known)
        return Completion(self.prompt, token_ids, self.logprobs[:known], "", None, versions=spans)

    def completion(self, choice: Mapping[str, Any], ends: Iterable[int]) -> Completion:
        """The whole sample, given the answer to the present request and the tokens that end a response."""
        kept = self._before
        return Completion(
            prompt_token_ids=self.prompt,
            token_ids=[*self.token_ids[:kept], *choice["token_ids"]],
            logprobs=[*self.logprobs[:kept], *choice["logprobs"]],
            text="",  # `generate` makes it
            finish_reason=choice["finish_reason"],
            stop_reason=None if choice["stop_reason"] in ends else choice["stop_reason"],
            versions=self._joined(choice["versions"]),
        )

    def _joined(self, versions: Iterable[tuple[int, str]]) -> Spans:
        spans = tuple((start, version_of(label)) for start, label in versions)
        return joined_spans([(0, self._versions_before), (self._before, spans)] if self._before else [(0, spans)])


def version_of(label: str) -> int:
    """The version that a server's label of its weights means: 0 for weights that nobody has named."""
    return int(label) if label.isdecimal() else 0


Post = Callable[[str, Mapping[str, Any]], Awaitable[Any]]


class UnfinishedSamples:
    """Draws samples from a server, and knows their tokens so far: if it ends, another one draws the rest.

    Args:
        post: sends a request to the server, and returns its answer; see `ServerClient.post`.
        ask_with_pictures: sends a prompt with pictures, its settings, and the request's name; see `PictureClient`.
        connection: returns the present connection to the server, in whose place another one is made if the server ends.
        revive: called with its connection after a request failed: True once a server that had ended takes requests.
        ends: returns the tokens that end a response.
    """

    def __init__(
        self,
        post: Post,
        ask_with_pictures: Callable[[PicturePrompt, Mapping[str, Any], str], Awaitable[Any]],
        connection: Callable[[], object],
        revive: Callable[[object], Awaitable[bool]],
        ends: Callable[[], Iterable[int]],
    ) -> None:
        self._post, self._ask_with_pictures, self._ends = post, ask_with_pictures, ends
        self._connection, self._revive = connection, revive
        self._samples: list[UnfinishedSample] = []
        self._prefix, self._numbers = uuid.uuid4().hex, itertools.count()
        self._polling: asyncio.Task[None] | None = None
        self._looking = asyncio.Lock()  # so that no token is taken twice

    async def check(self, url: str, prompt: Sequence[int], sampling: Mapping[str, Any]) -> None:
        """Refuse a server that cannot do it: ConfigError; RolloutError: it does not answer.

        Args:
            url: the server's address.
            prompt, sampling: a prompt to try, and its settings.
        """
        fix = f"start vLLM 0.32 or later there with --middleware {KEEPING}, with this package beside it"
        try:
            versions = (await self._ask(prompt, {**sampling, "max_tokens": 1, "logprobs": 0}, "probe"))["versions"]
        except ValueError as error:
            message = f"{url} cannot keep requests while its weights change ({error})"
            raise ConfigError(message, key="engine.urls", fix=fix) from error
        if versions is None:
            raise ConfigError(f"{url} does not say which weights sampled a token", key="engine.urls", fix=fix)

    async def completions(self, prompt: Sequence[int], n: int, sampling: Mapping[str, Any]) -> list[Completion]:
        """Samples of a prompt, sample i with `seed` + i, each in a request of its own; errors as in `ServerClient`."""
        chosen = {**sampling, "logprobs": 0, "detokenize": bool(sampling.get("stop"))}
        seeds = [{"seed": chosen["seed"] + i} if "seed" in chosen else {} for i in range(n)]
        samples = [UnfinishedSample(prompt, chosen | seed) for seed in seeds]
        tasks = [asyncio.create_task(self._draw(sample)) for sample in samples]
        if (progress := PROGRESS.get()) is not None:
            progress.written = lambda: [
                task.result() if task.done() and not task.cancelled() and not task.exception() else sample.so_far()
                for sample, task in zip(samples, tasks, strict=True)
            ]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:  # the others, if one has failed
                task.cancel()

    async def _draw(self, sample: UnfinishedSample) -> Completion:
        self._samples.append(sample)
        if self._polling is None:
            self._polling = asyncio.create_task(self._poll())
        try:
            while True:
                sample.ask_again(f"{self._prefix}-{next(self._numbers)}")
                connection = self._connection()
                try:
                    return sample.completion(await self._ask(*sample.rest(), sample.name), self._ends())
                except RolloutError:
                    if not await self._revive(connection):
                        raise
        finally:
            self._samples.remove(sample)
            if not self._samples and self._polling is not None:
                self._polling.cancel()
                self._polling = None

    async def _ask(self, prompt: Sequence[int], sampling: Mapping[str, Any], name: str) -> Mapping[str, Any]:
        if isinstance(prompt, PicturePrompt):
            answer = await self._ask_with_pictures(prompt, sampling, name)
        else:
            answer = await self._post(PATH, {"token_ids": list(prompt), "sampling": sampling, "id": name})
        return answer["choices"][0]

    # -- tokens so far -------------------------------------------------------------------------------------------------

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(PROGRESS_SECONDS)
            with contextlib.suppress(RolloutError, ValueError):  # the samples' own requests fail, too
                await self._look(self._post)

    async def _look(self, post: Post) -> None:
        """Learn the tokens that the server has drawn since the last time; errors are those of `post`."""
        async with self._looking:
            by_name = {sample.name: sample for sample in self._samples}
            progress = await post(PATH, {KNOWN: {name: sample.drawn for name, sample in by_name.items()}})
            for name, new in progress.items():
                if by_name[name].name == name:  # else another request has begun to ask for the rest
                    by_name[name].add(new)

    def under_way(self) -> list[UnfinishedSample]:
        """The samples that are not finished, as far as they are known."""
        return list(self._samples)

    def cached_tokens(self) -> int:
        """Number of tokens that the server has to compute again once it has other weights.

        A request without a token counts nothing, and the prompt that requests share counts for each of them.
        """
        return sum(len(sample.prompt) + len(sample.token_ids) for sample in self._samples if sample.drawn)

    # -- new weights ---------------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def paused(self, change: Post) -> AsyncIterator[None]:
        """Pause the server, with its requests kept, while it takes new weights; the tokens so far are known then.

        If it does not take them, it stays paused, since it may hold half of them: no token is drawn from such weights,
        and the next weights that it takes let it go on.

        Args:
            change: as `post`, but errors are WeightSyncErrors.
        """
        try:
            await change("/pause?mode=keep&clear_cache=false", {})
            if self._samples:
                await self._look(change)
        except BaseException:  # its weights are as they were
            with contextlib.suppress(RolloutError, ValueError, TimeoutError):
                async with asyncio.timeout(RESUME_SECONDS):
                    await self._post("/resume", {})
            raise
        try:
            yield
        except WeightSyncError as error:
            raise WeightSyncError(f"{error} It stays paused, since it may hold half of the weights.") from error
        await change("/resume", {})


async def resume_if_paused(client: ServerClient, url: str) -> None:
    """Let a server go on that a run has left paused, as one that was killed within a weight sync."""
    with contextlib.suppress(ValueError):  # vLLM before 0.32 has no such path
        if (await client.get("/is_paused")).get("is_paused"):
            logger.warning("%s is paused, as by a run that ended within a weight sync: it is resumed.", url)
            await client.post("/resume", {})
