"""The in-process engine of another rank (engine.per_rank): rank 0 asks, by a socket that only this user can open.

Frames are JSON behind four bytes of its length: [number, what, arguments] one way, [number, result, error] the other.
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
from trinity_lightning.config.engine import Capabilities, EngineConfig
from trinity_lightning.config.model_files import load_generation_config, load_tokenizer
from trinity_lightning.errors import ConfigError, ModelLoadError, PromptTooLongError, RankError, RolloutError
from trinity_lightning.explorer.models.engine import Engine, LoadedEngine
from trinity_lightning.sync.stream import WeightStream

CANCEL = "cancel"
LENGTH_BYTES = 4
LOST_SECONDS = SILENT_SECONDS + 10  # by then rank 0 has noticed that the rank ended
# What goes over as it is; any other error of an engine ends the request as a RolloutError.
ERRORS = {
    each.__name__: each
    for each in (ConfigError, ModelLoadError, PromptTooLongError, RolloutError, TypeError, ValueError)
}
FIELDS = ("token_ids", "logprobs", "text", "finish_reason", "stop_reason")


def _encoded(frame: list[Any]) -> bytes:
    """A frame; TypeError or ValueError: it cannot be written as JSON."""
    data = json.dumps(frame).encode()
    return len(data).to_bytes(LENGTH_BYTES, "big") + data


async def _read(reader: StreamReader) -> list[Any]:
    """The next frame; IncompleteReadError, an EOFError, or OSError: the other end is gone."""
    length = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "big")
    return json.loads(await reader.readexactly(length))


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
        self._writer: StreamWriter | None = None
        self._answers: asyncio.Task[None] | None = None
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count()

    async def load(self) -> None:
        """Have that rank load its engine, once; RankError: not within `limit`."""
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
        """RankError: that rank does not answer."""
        await self._ask_in_time("sleep")

    async def wake_up(self) -> None:
        """RankError: that rank does not answer. An engine that is not loaded is awake."""
        if self._loaded:
            await self._ask_in_time("wake_up")

    async def _completions(self, token_ids: list[int], n: int, sampling: dict[str, Any]) -> list[Completion]:
        token_ids = [int(each) for each in token_ids]
        try:
            answers = await self._ask("generate", token_ids, n, sampling)
        except (TypeError, ValueError):
            _refuse_unsendable(sampling)
            raise  # that engine's own
        return [Completion(token_ids, *found) for found in answers]

    async def _logprobs(self, token_ids: list[int]) -> list[float]:
        return await self._ask("logprobs", [int(each) for each in token_ids])

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

    async def _ask(self, what: str, *arguments: Any) -> Any:
        if (writer := self._writer) is None:
            raise RolloutError("the engine was shut down")
        number = next(self._numbers)
        writer.write(_encoded([number, what, arguments]))
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
            # The run will end with that rank's own error once rank 0 checks for it. If the requests failed earlier, the
            # step could count as complete without their tasks.
            await asyncio.sleep(LOST_SECONDS)
            self._end(f"rank {self.rank} has ended, and its engine with it")
        except Exception as error:
            self._end(f"what rank {self.rank} answers cannot be read: {type(error).__name__}: {error}")

    def _end(self, why: str) -> None:
        writer, self._writer, self._loaded = self._writer, None, False
        if writer is not None:
            writer.close()
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(RolloutError(why))

    def _error(self, kinds: list[str], message: str) -> Exception:
        kind = next((ERRORS[each] for each in kinds if each in ERRORS), None)
        return RolloutError(f"rank {self.rank}: {kinds[0]}: {message}") if kind is None else kind(message)


class EngineAnswers:
    """On another rank: answers what its `RankEngine` on rank 0 asks, on the loop of the engine's coroutines."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._folder = tempfile.TemporaryDirectory(prefix="rank-engine-")  # mode 0700
        self._server: asyncio.Server | None = None

    async def listen(self) -> str:
        """Listen; returns the socket's path. ConfigError: it cannot be where temporary files are."""
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
        """Listen no more, and leave nothing in the folder of temporary files."""
        if self._server is not None:
            self._server.close()
        self._folder.cleanup()

    async def _serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        self._stop_listening()  # rank 0 has come
        tasks: dict[int, asyncio.Task[None]] = {}
        try:
            while True:
                number, what, arguments = await _read(reader)
                if what != CANCEL:
                    tasks[number] = asyncio.create_task(self._answer(writer, number, what, arguments))
                    tasks[number].add_done_callback(lambda _, number=number: tasks.pop(number))
                elif number in tasks:
                    tasks[number].cancel()
        except (EOFError, OSError):
            for task in list(tasks.values()):
                task.cancel()
        finally:
            writer.close()

    async def _answer(self, writer: StreamWriter, number: int, what: str, arguments: list[Any]) -> None:
        try:
            answer = _encoded([number, await self._results[what](*arguments), None])
        except Exception as error:  # rank 0's request failed, or its task: it decides what comes of it
            answer = _encoded([number, None, [[each.__name__ for each in type(error).__mro__], str(error)]])
        writer.write(answer)

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
