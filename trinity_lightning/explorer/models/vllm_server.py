"""vLLM in a process of its own, or on another machine: it generates while the trainer trains."""

import asyncio
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import torch
from transformers import AutoConfig

from trinity_lightning.common.config import EngineConfig, EngineDtype
from trinity_lightning.common.errors import ConfigError, ModelLoadError, RolloutError, WeightSyncError
from trinity_lightning.common.inference import Completion
from trinity_lightning.common.model_files import load_tokenizer, resolve_model
from trinity_lightning.common.suggest import unknown_name
from trinity_lightning.common.weight_folder import WeightFolder
from trinity_lightning.common.weights import Shape, WeightStream, parameter_shapes
from trinity_lightning.explorer.models.engine import Engine
from trinity_lightning.explorer.models.server_process import ServerProcess
from trinity_lightning.explorer.models.vllm_args import command_line, engine_args, require_vllm

MODEL_ID = "policy"
START_SECONDS, URL_SECONDS = 600.0, 3.0
HEALTH_SECONDS = 0.2
# Names that vLLM's SamplingParams and its server's requests both have; a server would silently pass over any other.
SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "seed", "max_tokens", "min_tokens"),
    *("skip_special_tokens", "spaces_between_special_tokens", "logit_bias", "allowed_token_ids", "bad_words"),
)
# What a request leaves out, a server elsewhere may take from the model's own generation_config.json.
WHOLE_DISTRIBUTION = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}
TORCH_DTYPES = {EngineDtype.bf16: torch.bfloat16, EngineDtype.fp32: torch.float32}


class VLLMServerEngine(Engine):
    """An `InferenceModel` over vLLM's OpenAI-compatible server.

    Without a `url` the server is started by the first use, on this machine and for this user only, and ends with this
    process. Weights reach it as a folder that it reads (`VLLM_SERVER_DEV_MODE=1`, which a server elsewhere needs too,
    together with `--logprobs-mode processed_logprobs` and a folder that both machines see: let nobody but the run reach
    such a server, its requests that change weights ask for no password).

    A copy that is sent to another process (a Ray runner) talks to the same server, and never ends it.

    Args:
        model: `smollm2`, `tiny`, a folder, or a hub name: what the server serves.
        config: the engine's knobs; keyword arguments override its fields.
        url: of a server that runs already, such as http://node7:8000.
        weights: where weights are written for it; engines that share one read the same files.
        cores: CPU cores for a server started here, where there is no GPU; None: all that this process may use.
        gpus: those that a server started here may use; None: as this process sees them.
        log: where a server started here writes its output.

    Raises:
        ConfigError: vLLM is not installed, and there is no url.
        ConfigError: (at the first use) it serves a shorter context.
        ModelLoadError: (at the first use) the server does not start or answer, or is not vLLM's. Whether it serves the
            policy's model is proven by the drill of the first weight sync.
    """

    def __init__(
        self,
        model: str,
        config: EngineConfig | None = None,
        *,
        url: str | None = None,
        weights: WeightFolder | None = None,
        cores: list[int] | None = None,
        gpus: list[int] | None = None,
        log: Path | None = None,
        **overrides: Any,
    ) -> None:
        if url is None:
            require_vllm()
        self._config = EngineConfig(**{**vars(config or EngineConfig()), **overrides})
        super().__init__(self._config.max_model_len)
        self._model = model
        self._url = url
        self._weights = weights
        self._cores = cores
        self._gpus = gpus
        self._log = log
        self._socket: str | None = None
        self._process: ServerProcess | None = None
        self._session: aiohttp.ClientSession | None = None
        self._loading: asyncio.Task[None] | None = None

    # -- life ---------------------------------------------------------------------------------------------------------

    async def load(self) -> None:
        """Start the server, or find the one of the url, and wait until it answers."""
        if self._session is not None and not self._session.closed:
            return
        if self._loading is None:  # several may ask at the same time
            self._loading = asyncio.create_task(self._load())
        try:
            await asyncio.shield(self._loading)
        finally:
            if self._loading is not None and self._loading.done():
                self._loading = None

    async def _load(self) -> None:
        path = str(await asyncio.to_thread(resolve_model, self._model))
        self._tokenizer = load_tokenizer(self._model)
        self._weight_shapes = parameter_shapes(path)
        self._dtype = TORCH_DTYPES.get(EngineDtype(self._config.dtype)) or AutoConfig.from_pretrained(path).dtype
        if self._url is None and self._socket is None:
            self._process = ServerProcess(self._flags(path), self._environment(), self._log)
            self._socket = str(self._process.socket)
        session = self._connect()
        try:
            await self._until_healthy(session)
            await self._check_model(session)
        except BaseException:
            await session.close()
            await self._end_process()
            raise
        self._session = session

    def _connect(self) -> aiohttp.ClientSession:
        # No limit of connections: how many requests are decoded at once is the server's to decide.
        connector = aiohttp.UnixConnector(self._socket, limit=0) if self._socket else aiohttp.TCPConnector(limit=0)
        return aiohttp.ClientSession(
            self._url or "http://engine", connector=connector, timeout=aiohttp.ClientTimeout(total=None)
        )

    def _flags(self, path: str) -> list[str]:
        arguments = engine_args(path, self._config, on_cpu=not torch.cuda.is_available())
        return command_line(arguments | {"served_model_name": MODEL_ID, "disable_uvicorn_access_log": True})

    def _environment(self) -> dict[str, str]:
        environment = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "INFO"}
        if self._gpus is not None:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, self._gpus))
        if not torch.cuda.is_available():
            cores = self._cores or sorted(os.sched_getaffinity(0))
            environment |= {
                "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
                # vLLM compiles one line of its sampler at the first request: 11 s, and a C++ compiler needed.
                "TORCHDYNAMO_DISABLE": "1",
            }
        return environment

    async def _until_healthy(self, session: aiohttp.ClientSession) -> None:
        where = self._url or "the vLLM server"
        try:
            async with asyncio.timeout(URL_SECONDS if self._url else START_SECONDS):
                while not await _answers(session):
                    if self._process is not None:
                        self._process.check()
                    await asyncio.sleep(HEALTH_SECONDS)
        except TimeoutError as error:
            log = f" The end of its log:\n{self._process.log_end()}" if self._process else " Is it started?"
            raise ModelLoadError(f"{where} does not answer.{log}") from error

    async def _check_model(self, session: aiohttp.ClientSession) -> None:
        try:
            card = (await _json(await session.get("/v1/models")))["data"][0]
            self._model_id, served = card["id"], int(card["max_model_len"])
        except (LookupError, TypeError, ValueError) as error:
            raise ModelLoadError(f"{self._url} is no vLLM server: {type(error).__name__}: {error}") from error
        if served < self._max_model_len:
            raise ConfigError(
                f"{self._url} serves a context of {served} tokens, less than engine.max_model_len "
                f"({self._max_model_len}): start it with --max-model-len {self._max_model_len}, or lower that."
            )

    async def shutdown(self) -> None:
        """End the server, where it was started here; twice is allowed."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()
        await self._end_process()
        if self._weights is not None:
            self._weights.close()

    async def _end_process(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            self._socket = None
            await process.end()

    def __getstate__(self) -> dict[str, Any]:
        """A copy in another process connects anew, to the server that runs by then."""
        if self._url is None and self._socket is None:
            raise RuntimeError("the server is not started yet: load() the engine before it is sent to other processes.")
        apart = {"_process": None, "_session": None, "_loading": None, "_weights": None, "_log": None}
        return {**self.__dict__, **apart}

    # -- what an engine implements ------------------------------------------------------------------------------------

    @property
    def tokenizer(self) -> Any:
        """The model's Hugging Face tokenizer."""
        return self._tokenizer

    @property
    def dtype(self) -> torch.dtype:
        """What the server computes in."""
        return self._dtype

    @property
    def weight_shapes(self) -> dict[str, Shape]:
        """Every parameter of the Hugging Face model; a tied head counts as a tensor of its own."""
        return self._weight_shapes

    async def _completions(self, token_ids: list[int], n: int, sampling: dict[str, Any]) -> list[Completion]:
        for name in sampling:
            if name not in SAMPLING:
                raise ConfigError(unknown_name("sampling setting", name, SAMPLING))
        chosen = WHOLE_DISTRIBUTION | {name: value for name, value in sampling.items() if value is not None}
        room = self._max_model_len - len(token_ids)
        chosen["max_tokens"] = min(chosen.get("max_tokens", 16), room)  # a server refuses more than there is room for
        body = {"prompt": token_ids, "n": n, "logprobs": 0, "return_token_ids": True, **chosen}
        answer = await self._post("/v1/completions", {"model": self._model_id, **body})
        return [_completion(choice) for choice in sorted(answer["choices"], key=lambda choice: choice["index"])]

    async def _logprobs(self, token_ids: list[int]) -> list[float]:
        # vLLM samples at least one token.
        body = {"model": self._model_id, "prompt": token_ids, "max_tokens": 1, "prompt_logprobs": 0}
        body |= WHOLE_DISTRIBUTION
        answer = await self._post("/v1/completions", body)
        entries = answer["choices"][0]["prompt_logprobs"][1:]  # the first token has none
        return [entry[str(token)]["logprob"] for token, entry in zip(token_ids[1:], entries, strict=True)]

    async def _take(self, stream: WeightStream, version: int) -> None:
        if self._weights is None:
            self._weights = WeightFolder()
        folder = await asyncio.to_thread(self._weights.write, stream, self._dtype)
        arguments = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        try:
            await self._post("/collective_rpc", arguments)
            reset = await self._post("/reset_prefix_cache?reset_running_requests=true", {})
        except (RolloutError, ValueError) as error:
            raise WeightSyncError(f"the vLLM server failed while it took over the weights: {error}") from error
        if not reset["success"]:
            raise WeightSyncError("the vLLM server kept its cache of prompts, which the old weights have computed.")
        self._model_version = version

    async def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The server's answer.

        Raises:
            ValueError: it refused the request.
            RolloutError: it failed, or does not answer any more.
        """
        if self._session is None:
            raise RolloutError("the engine was shut down")
        try:
            return await _json(await self._session.post(path, json=body))
        except (aiohttp.ClientError, OSError) as error:
            told = f"{self._process.ended()} The end of its log:\n{self._process.log_end()}" if self._process else ""
            raise RolloutError(f"the vLLM server does not answer: {type(error).__name__}: {error}.{told}") from error


async def _answers(session: aiohttp.ClientSession) -> bool:
    try:
        async with session.get("/health") as response:
            return response.status == 200
    except (aiohttp.ClientError, OSError):
        return False


async def _json(response: aiohttp.ClientResponse) -> Any:
    """The body of a response; ValueError where the request was refused, RolloutError where the server failed."""
    async with response:
        text = await response.text()
    if response.status == 200:
        return json.loads(text) if text else None
    message = f"{response.url.path}: status {response.status}: {_message(text)}"
    raise (ValueError if 400 <= response.status < 500 else RolloutError)(message)


def _message(text: str) -> str:
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text[:500]


def _completion(choice: Mapping[str, Any]) -> Completion:
    return Completion(
        prompt_token_ids=choice["prompt_token_ids"],
        token_ids=choice["token_ids"],
        logprobs=choice["logprobs"]["token_logprobs"],
        text=choice["text"],
        finish_reason=choice["finish_reason"],
        stop_reason=choice["stop_reason"],
    )
