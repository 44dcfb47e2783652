"""The in-process engine of another rank (engine.per_rank), which rank 0 asks by a socket that only this user can open.

A frame is JSON after four bytes with its length: a request [number, name, arguments], or an answer [number, result,
error].
"""

import asyncio
import itertools
import json
import math
import tempfile
from asyncio import StreamReader, StreamWriter
from pathlib import Path
from typing import Any

import torch

from trinity_lightning.common.inference import Completion
from trinity_lightning.common.ranks import SILENT_SECONDS
from trinity_lightning.config.engines import Capabilities, EngineConfig
from trinity_lightning.config.models import load_generation_config, load_tokenizer
from trinity_lightning.errors import ConfigError, ModelLoadError, PromptTooLongError, RankError, RolloutError
from trinity_lightning.explorer.models.engine import Engine, LoadedEngine
from trinity_lightning.sync.stream import WeightStream

CANCEL = "cancel"
LENGTH_BYTES = 4
LOST_SECONDS = SILENT_SECONDS + 10  # by this time rank 0 has noticed that the other rank ended
# Errors of an engine that keep their type on the way; any other becomes a RolloutError.
ERRORS = {
    kind.__name__: kind
    for kind in (ConfigError, ModelLoadError, PromptTooLongError, RolloutError, TypeError, ValueError)
}
# Fields of a Completion in the order of an answer.
FIELDS = ("token_ids", "logprobs", "text", "finish_reason", "stop_reason", "versions")


def _encoded(frame: list[Any]) -> bytes:
    """The bytes of a frame; TypeError or ValueError: it cannot be written as JSON."""
    data = json.dumps(frame).encode()
    return len(data).to_bytes(LENGTH_BYTES, "big") + data


async def _read(reader: StreamReader) -> list[Any]:
    """The next frame; EOFError or OSError: the other end is gone."""
    length = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "big")
    return json.loads(await reader.readexactly(length))


def _refuse_unsendable(sampling: dict[str, Any]) -> None:
    """Refuse settings that cannot be written as JSON: RolloutError."""
    for name, value in sampling.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise RolloutError(f"sampling.{name} cannot be sent to another rank (engine.per_rank): {error}") from error


class RankEngine(LoadedEngine):
    """The engine of another rank, on rank 0. Weights go to the engines of all ranks at once (`RankWeights`).

    Attributes:
        rank: the other rank.
        path: the socket on which that rank listens, known once the ranks have met.
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
        self._writer: StreamWriter | None = None
        self._answers: asyncio.Task[None] | None = None
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count()

    async def load(self) -> None:
        """Have the other rank load its engine, once; RankError: it took longer than `limit`."""
        async with self._loading:
            if self._loaded:
                return
            if self._writer is None:
                try:
                    reader, self._writer = await asyncio.open_unix_connection(self.path)
                except OSError as error:
                    raise RolloutError(f"rank {self.rank} is not reached: {error}") from error
                self._answers = asyncio.create_task(self._take_answers(reader))
            dtype, shapes, self.quantized = await self._ask_in_time("load")
            self._dtype = getattr(torch, dtype)
            self._weight_shapes = {name: tuple(shape) for name, shape in shapes.items()}
            self._tokenizer = await asyncio.to_thread(load_tokenizer, self._model)
            self.generation_config = await asyncio.to_thread(load_generation_config, self._model)
            self._loaded = True

    async def shutdown(self) -> None:
        """End the connection; the other rank frees its engine itself."""
        if self._answers is not None:
            self._answers.cancel()
        self._end("the engine was shut down")

    async def sleep(self) -> None:
        """Have the other rank's engine sleep; RankError: it does not answer."""
        await self._ask_in_time("sleep")

    async def sleep_until_sync(self) -> bool:
        """Have the other rank's engine sleep, perhaps without its weights; RankError: it does not answer."""
        return await self._ask_in_time("sleep_until_sync")

    async def wake_up(self) -> None:
        """Wake the other rank's engine if it is loaded; RankError: it does not answer."""
        if self._loaded:
            await self._ask_in_time("wake_up")

    async def _completions(self, token_ids: list[int], n: int, sampling: dict[str, Any]) -> list[Completion]:
        token_ids = [int(token) for token in token_ids]
        try:
            answers = await self._ask("generate", token_ids, n, sampling)
        except (TypeError, ValueError):
            _refuse_unsendable(sampling)
            raise  # an error of that engine
        return [
            Completion(token_ids, *fields, versions=tuple((start, version) for start, version in versions))
            for *fields, versions in answers
        ]

    async def _logprobs(self, token_ids: list[int]) -> list[float]:
        return await self._ask("logprobs", [int(token) for token in token_ids])

    async def _take(self, stream: WeightStream, version: int) -> None:
        raise NotImplementedError("all engines take weights at once: RankWeights.send")

    def took(self, version: int) -> None:
        """Note that the other rank's engine has weights of this version."""
        self._model_version = version

    # -- requests and answers -----------------------------------------------------------------------------------------

    async def _ask_in_time(self, request: str) -> Any:
        """Ask for work of the other rank's main thread; RankError: it hangs, although another thread sends beats."""
        try:
            return await asyncio.wait_for(self._ask(request), self.limit)
        except TimeoutError as error:
            raise RankError(
                f"the engine of rank {self.rank} did not {request.replace('_', ' ')} within {self.limit:g} s: it "
                "hangs, or needs a higher trainer.strategy.timeout."
            ) from error

    async def _ask(self, request: str, *arguments: Any) -> Any:
        if (writer := self._writer) is None:
            raise RolloutError("the engine was shut down")
        number = next(self._numbers)
        writer.write(_encoded([number, request, arguments]))
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            return await answer
        except asyncio.CancelledError:
            writer.write(_encoded([number, CANCEL, []]))
            raise
        finally:
            del self._waiting[number]

    async def _take_answers(self, reader: StreamReader) -> None:
        try:
            while True:
                number, result, error = await _read(reader)
                answer = self._waiting.get(number)
                if answer is None or answer.done():
                    continue  # it was cancelled
                if error is None:
                    answer.set_result(result)
                else:
                    answer.set_exception(self._error(*error))
        except (EOFError, OSError):
            # The run will end with the other rank's error once rank 0 looks for it. If the requests failed before that,
            # the step could count as complete without their tasks.
            await asyncio.sleep(LOST_SECONDS)
            self._end(f"rank {self.rank} has ended, and its engine with it")
        except Exception as error:
            self._end(f"what rank {self.rank} answers cannot be read: {type(error).__name__}: {error}")

    def _end(self, reason: str) -> None:
        """Close the connection; requests under way fail for this reason."""
        writer, self._writer, self._loaded = self._writer, None, False
        if writer is not None:
            writer.close()
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(RolloutError(reason))

    def _error(self, kinds: list[str], message: str) -> Exception:
        """The error of the other rank's engine, by the names of its class and base classes."""
        kind = next((ERRORS[name] for name in kinds if name in ERRORS), None)
        return RolloutError(f"rank {self.rank}: {kinds[0]}: {message}") if kind is None else kind(message)


class EngineAnswers:
    """Answers the requests of rank 0's `RankEngine`; lives on another rank, on the event loop of its engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._folder = tempfile.TemporaryDirectory(prefix="rank-engine-")  # mode 0700
        self._server: asyncio.Server | None = None

    async def listen(self) -> str:
        """Listen on a new socket, and return its path. ConfigError: the folder of temporary files cannot hold one."""
        path = str(Path(self._folder.name) / "socket")
        try:
            self._server = await asyncio.start_unix_server(self._serve, path)
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be a socket ({error})", fix="set TMPDIR to a short path, such as /tmp"
            ) from error
        return path

    async def close(self) -> None:
        """Free the engine; requests under way fail."""
        self._stop_listening()
        await self._engine.shutdown()

    def _stop_listening(self) -> None:
        """Stop listening, and leave nothing in the folder of temporary files."""
        if self._server is not None:
            self._server.close()
        self._folder.cleanup()

    async def _serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        self._stop_listening()  # rank 0 is connected
        tasks: dict[int, asyncio.Task[None]] = {}
        try:
            while True:
                number, request, arguments = await _read(reader)
                if request != CANCEL:
                    tasks[number] = asyncio.create_task(self._answer(writer, number, request, arguments))
                    tasks[number].add_done_callback(lambda _, number=number: tasks.pop(number))
                elif number in tasks:
                    tasks[number].cancel()
        except (EOFError, OSError):
            for task in list(tasks.values()):
                task.cancel()
        finally:
            writer.close()

    async def _answer(self, writer: StreamWriter, number: int, request: str, arguments: list[Any]) -> None:
        try:
            answer = _encoded([number, await self._handlers[request](*arguments), None])
        except Exception as error:  # rank 0 decides what a failed request means
            answer = _encoded([number, None, [[kind.__name__ for kind in type(error).__mro__], str(error)]])
        writer.write(answer)

    @property
    def _handlers(self) -> dict[str, Any]:
        engine = self._engine
        return {
            "load": self._load,
            "generate": self._generate,
            "logprobs": engine.logprobs,
            "sleep": engine.sleep,
            "sleep_until_sync": engine.sleep_until_sync,
            "wake_up": engine.wake_up,
        }

    async def _load(self) -> list[Any]:
        engine = self._engine
        await engine.load()
        return [str(engine.dtype).removeprefix("torch."), engine.weight_shapes, engine.quantized]

    async def _generate(self, token_ids: list[int], n: int, sampling: dict[str, Any]) -> list[list[Any]]:
        if bias := sampling.get("logit_bias"):  # JSON has turned its keys into strings
            sampling["logit_bias"] = {int(token): value for token, value in bias.items()}
        completions = await self._engine.generate(token_ids, n, **sampling)
        return [[getattr(completion, name) for name in FIELDS] for completion in completions]
