"""Samples that a vLLM server is drawing: they go on under new weights, and on the next server if theirs dies."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from trinity_lightning.common.inference import PROGRESS, Completion, Spans
from trinity_lightning.common.pictures.prompt import PicturePrompt
from trinity_lightning.errors import ConfigError, RolloutError, WeightSyncError
from trinity_lightning.explorer.models.record import joined
from trinity_lightning.explorer.models.rest import rest_of
from trinity_lightning.explorer.models.server import ServerClient
from trinity_lightning.explorer.models.server_requests import KEEPING, KNOWN, PATH

logger = logging.getLogger(__name__)

PROGRESS_SECONDS = 2.0  # between two requests for progress: a server that dies loses so many seconds of its tokens
RESUME_SECONDS = 2.0  # limit for a server to go on after a weight sync that did not begin

_NOTHING = Completion((), [], [], "", None)
Post = Callable[[str, Mapping[str, Any]], Awaitable[Any]]


class UnfinishedSample:
    """A sample that a server is drawing, and its tokens as far as they are known.

    Args:
        prompt: its prompt.
        sampling: the settings of the whole sample.

    Attributes:
        name: the present request's name.
    """

    def __init__(self, prompt: Sequence[int], sampling: Mapping[str, Any]) -> None:
        self.name = ""
        self._sampling = sampling
        # What earlier requests have drawn, and what the present one has. Another thread reads both at once.
        self._parts = (Completion(prompt, [], [], "", None), _NOTHING)

    def ask_again(self, name: str) -> None:
        """Begin another request, for the rest of the sample."""
        self.name, self._parts = name, (self.written(), _NOTHING)

    @property
    def drawn(self) -> int:
        """Number of known tokens of the present request."""
        return len(self._parts[1].token_ids)

    def rest(self) -> tuple[Sequence[int], dict[str, Any]]:
        """Prompt and settings of the present request."""
        before = self._parts[0]
        return rest_of(before.prompt_token_ids, before.token_ids, self._sampling)

    def add(self, progress: Mapping[str, Any]) -> None:
        """Take the tokens that the present request has drawn since the last time."""
        before, present = self._parts
        present = replace(
            present,
            token_ids=[*present.token_ids, *progress["token_ids"]],
            logprobs=[*present.logprobs, *progress["logprobs"]],
            versions=spans_of(progress["versions"]),
        )
        self._parts = (before, present)

    def end(self, choice: Mapping[str, Any], ends: Collection[int]) -> None:
        """Take the answer to the present request, given the tokens that end a response."""
        present = Completion(
            prompt_token_ids=(),
            token_ids=choice["token_ids"],
            logprobs=choice["logprobs"],
            text="",  # `generate` makes it
            finish_reason=choice["finish_reason"],
            stop_reason=None if choice["stop_reason"] in ends else choice["stop_reason"],
            versions=spans_of(choice["versions"]),
        )
        self._parts = (self._parts[0], present)

    def written(self) -> Completion:
        """The sample so far, without its text; it has a finish_reason once it has ended."""
        return joined(*self._parts)


def spans_of(versions: Iterable[tuple[int, str]]) -> Spans:
    """Spans of the labels that a server has of its weights: version 0 is that of weights that nobody has named."""
    return tuple((start, int(label) if label.isdecimal() else 0) for start, label in versions)


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
        ends: Callable[[], Collection[int]],
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
        if (progress := PROGRESS.get()) is not None:
            progress.written = lambda: [sample.written() for sample in samples]
        tasks = [asyncio.create_task(self._draw(sample)) for sample in samples]
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
                    sample.end(await self._ask(*sample.rest(), sample.name), self._ends())
                    return sample.written()
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
            known = {name: sample.drawn for name, sample in by_name.items()}
            for name, new in (await post(PATH, {KNOWN: known})).items():
                # Else another request has begun to ask for the rest, or the answer to this one was quicker.
                if by_name[name].name == name and by_name[name].drawn == known[name]:
                    by_name[name].add(new)

    def under_way(self) -> list[UnfinishedSample]:
        """The samples that are not finished, as far as they are known."""
        return list(self._samples)

    def cached_tokens(self) -> int:
        """Number of tokens that the server has to compute again once it has other weights.

        A request without a token counts nothing, and the prompt that requests share counts for each of them.
        """
        cached = [sample.written() for sample in self._samples if sample.drawn]
        return sum(len(sample.prompt_token_ids) + len(sample.token_ids) for sample in cached)

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
