"""The in-process engine of another rank (engine.per_rank): rank 0 asks, by a socket that only this user can open."""

import asyncio
import json
import math
import tempfile
from pathlib import Path
from typing import Any

import torch
from aiohttp import web

from trinity_lightning.common.inference import Completion
from trinity_lightning.common.ranks import SILENT_SECONDS
from trinity_lightning.config.engines import Capabilities, EngineConfig
from trinity_lightning.config.models import load_tokenizer
from trinity_lightning.errors import ConfigError, ModelLoadError, PromptTooLongError, RankError, RolloutError
from trinity_lightning.explorer.models.engine import Engine, LoadedEngine
from trinity_lightning.explorer.models.server import ServerClient
from trinity_lightning.sync.stream import WeightStream

LOST_SECONDS = SILENT_SECONDS + 10  # by then rank 0 has noticed that the rank ended
# What goes over as it is; any other error of an engine ends the request as a RolloutError.
ERRORS = {
    each.__name__: each
    for each in (ConfigError, ModelLoadError, PromptTooLongError, RolloutError, TypeError, ValueError)
}
WAITING = 4096  # connections that are accepted later: each request has its own
FIELDS = ("token_ids", "logprobs", "text", "finish_reason", "stop_reason")


def _refuse_unsendable(sampling: dict[str, Any]) -> None:
    """RolloutError: one of these settings cannot be written as JSON."""
    for name, value in sampling.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise RolloutError(f"sampling.{name} cannot be sent to another rank (engine.per_rank): {error}") from error


class RankEngine(LoadedEngine):
    """On rank 0: the engine of another rank. Weights come to all of them at once (`RankWeights`).

    Attributes:
        rank: whose.
        path: where that rank listens, known once the ranks have met.
        limit: seconds that it has to load, to sleep or to wake up.
    """

    def __init__(self, rank: int, model: str, config: EngineConfig, capabilities: Capabilities) -> None:
        super().__init__(config.max_model_len)
        self.capabilities = capabilities
        self.rank = rank
        self.path: str | None = None
        self.limit = math.inf
        self._model = model
        self._loading = asyncio.Lock()
        self._loaded = False
        self._client: ServerClient | None = None

    async def load(self) -> None:
        """Have that rank load its engine, once; RankError: not within `limit`."""
        async with self._loading:
            if self._loaded:
                return
            if self._client is None:
                self._client = ServerClient(str(self.path), self._lost, f"the engine of rank {self.rank}")
            dtype, shapes, self.quantized = await self._ask_in_time("load")
            self._dtype = getattr(torch, dtype)
            self._weight_shapes = {name: tuple(shape) for name, shape in shapes.items()}
            self._tokenizer = await asyncio.to_thread(load_tokenizer, self._model)
            self._loaded = True

    async def shutdown(self) -> None:
        """End the connections; the other rank frees its engine itself."""
        client, self._client, self._loaded = self._client, None, False
        if client is not None:
            await client.close()

    async def sleep(self) -> None:
        """RankError: that rank does not answer."""
        await self._ask_in_time("sleep")

    async def wake_up(self) -> None:
        """RankError: that rank does not answer. An engine that is not loaded is awake."""
        if self._loaded:
            await self._ask_in_time("wake_up")

    async def _completions(self, token_ids: list[int], n: int, sampling: dict[str, Any]) -> list[Completion]:
        token_ids = [int(each) for each in token_ids]
        try:
            answers = await self._ask("generate", token_ids=token_ids, n=n, sampling=sampling)
        except (TypeError, ValueError):
            _refuse_unsendable(sampling)
            raise  # that engine's own
        return [Completion(token_ids, *found) for found in answers]

    async def _logprobs(self, token_ids: list[int]) -> list[float]:
        return await self._ask("logprobs", token_ids=[int(each) for each in token_ids])

    async def _take(self, stream: WeightStream, version: int) -> None:
        raise NotImplementedError("all engines take weights at once: RankWeights.send")

    def took(self, version: int) -> None:
        """That engine has weights of this version."""
        self._model_version = version

    # -- requests and answers -----------------------------------------------------------------------------------------

    async def _ask_in_time(self, what: str) -> Any:
        """For what needs that rank's main thread, which may hang while another thread sends its beats."""
        try:
            return await asyncio.wait_for(self._ask(what), self.limit)
        except TimeoutError as error:
            raise RankError(
                f"the engine of rank {self.rank} did not {what.replace('_', ' ')} within {self.limit:g} s: it "
                "hangs, or needs a higher trainer.strategy.timeout."
            ) from error

    async def _ask(self, what: str, **arguments: Any) -> Any:
        if self._client is None:
            raise RolloutError("the engine was shut down")
        result, error = await self._client.post(f"/{what}", arguments)
        if error is not None:
            raise self._error(*error)
        return result

    async def _lost(self) -> str:
        """The run will end with that rank's own error once rank 0 checks for it.

        If the requests failed earlier, the step could count as complete without their tasks.
        """
        await asyncio.sleep(LOST_SECONDS)
        return ""

    def _error(self, kinds: list[str], message: str) -> Exception:
        kind = next((ERRORS[each] for each in kinds if each in ERRORS), None)
        return RolloutError(f"rank {self.rank}: {kinds[0]}: {message}") if kind is None else kind(message)


class EngineAnswers:
    """On another rank: answers what its `RankEngine` on rank 0 asks, on the loop of the engine's coroutines."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._folder = tempfile.TemporaryDirectory(prefix="rank-engine-")  # mode 0700
        app = web.Application(client_max_size=0)  # prompts may be long
        app.router.add_post("/{what}", self._answer)
        # A request that rank 0 gives up is given up here, too.
        self._server = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0, access_log=None)

    async def listen(self) -> str:
        """Listen; returns the socket's path. ConfigError: it cannot be where temporary files are."""
        path = str(Path(self._folder.name) / "socket")
        await self._server.setup()
        try:
            await web.UnixSite(self._server, path, backlog=WAITING).start()
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be a socket ({error}): set TMPDIR to a short path, such as /tmp."
            ) from error
        return path

    async def close(self) -> None:
        """Free the engine; requests under way fail."""
        await self._server.cleanup()
        self._folder.cleanup()
        await self._engine.shutdown()

    async def _answer(self, request: web.Request) -> web.Response:
        try:
            found = await self._results[request.match_info["what"]](**await request.json())
            text = json.dumps([found, None])
        except Exception as error:  # rank 0's request failed, or its task: it decides what comes of it
            text = json.dumps([None, [[each.__name__ for each in type(error).__mro__], str(error)]])
        return web.json_response(text=text)

    @property
    def _results(self) -> dict[str, Any]:
        engine = self._engine
        return {
            "load": self._load,
            "generate": self._generate,
            "logprobs": engine.logprobs,
            "sleep": engine.sleep,
            "wake_up": engine.wake_up,
        }

    async def _load(self) -> list[Any]:
        engine = self._engine
        await engine.load()
        return [str(engine.dtype).removeprefix("torch."), engine.weight_shapes, engine.quantized]

    async def _generate(self, token_ids: list[int], n: int, sampling: dict[str, Any]) -> list[list[Any]]:
        if bias := sampling.get("logit_bias"):  # JSON has turned its keys into strings
            sampling["logit_bias"] = {int(token): value for token, value in bias.items()}
        found = await self._engine.generate(token_ids, n, **sampling)
        return [[getattr(each, name) for name in FIELDS] for each in found]
