"""vLLM in a process of its own, or on another machine: it generates while the trainer trains."""

import asyncio
import contextlib
import json
import logging
import math
import os
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from trinity_lightning.common.hardware import TORCH_DTYPES
from trinity_lightning.common.inference import Completion
from trinity_lightning.config.engine import (
    CAPABILITIES,
    PARALLEL,
    EngineConfig,
    EngineDtype,
    check_vllm_args,
    require_vllm,
    visible_gpus,
)
from trinity_lightning.config.explorer import NEUTRAL_SAMPLING
from trinity_lightning.config.model_files import load_generation_config, load_tokenizer, resolve_model
from trinity_lightning.config.registry import PACKAGE_DIR
from trinity_lightning.config.run import TrainConfig
from trinity_lightning.config.values import unknown_name
from trinity_lightning.errors import ConfigError, ModelLoadError, RolloutError, WeightSyncError
from trinity_lightning.explorer.models.engine import LoadedEngine
from trinity_lightning.explorer.models.server import ServerClient, ServerProcess
from trinity_lightning.explorer.models.vllm_engine import engine_args, with_end_tokens
from trinity_lightning.sync.files import MEMORY, WeightFolder
from trinity_lightning.sync.stream import WeightStream, parameter_shapes

logger = logging.getLogger(__name__)

MODEL_ID = "policy"
START_SECONDS, URL_SECONDS = 600.0, 3.0
WEIGHTS_PER_SECOND = 25e6  # that a slow disk gives: large models have longer to start
HEALTH_SECONDS = 0.2
ENDING_SECONDS, LOOK_SECONDS = 20.0, 0.05  # for a server that fails to end, or to answer again
MAX_RESTARTS, RESTART_WINDOW = 3, 600.0  # so often within so many seconds is a server that died started again
PROBE, PROBE_TEMPERATURE, PROBE_ROUNDING = "The answer is", 0.2, 0.05
# What a request leaves out, a server elsewhere may take from the model's own generation_config.json.
WHOLE_DISTRIBUTION = {"temperature": 1.0, **NEUTRAL_SAMPLING}
# Names that vLLM's SamplingParams and its server's requests both have; a server would silently pass over any other.
SAMPLING = (
    *WHOLE_DISTRIBUTION,
    *("stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "seed", "max_tokens", "min_tokens"),
    *("skip_special_tokens", "spaces_between_special_tokens", "logit_bias", "allowed_token_ids", "bad_words"),
)


class VLLMServerEngine(LoadedEngine):
    """An `InferenceModel` over vLLM's OpenAI-compatible server.

    Without a `url` the server is started by the first use, on this machine and for this user only, and ends with this
    process. Weights reach it as a folder that it reads (`VLLM_SERVER_DEV_MODE=1`, which a server elsewhere needs too,
    together with `--logprobs-mode processed_logprobs` and a folder that both machines see: make such a server reachable
    by this run only, since requests that change its weights need no password).

    A server started here that dies is started again by the next request, and answers once it has the weights that it
    had: a request is never answered with others than `model_version` says. One of a `url` that stops answering is given
    them again when it answers: a request has to fail first, so it should not be started again between two of them.

    A copy that is sent to another process (a Ray runner) talks to the same server, also after it was started again, but
    never starts or ends it.

    Args:
        model: `smollm2`, `tiny`, a folder, or a hub name: what the server serves.
        config: the engine's knobs; keyword arguments override its fields.
        url: of a server that runs already, such as http://node7:8000.
        weights: where weights are written for it; engines that share one read the same files.
        sync_method: how its weights reach it: `checkpoint`, a folder that any server reads too; or sent, by `nccl` (see
            `WeightGroup`), as to one of a url if it was started so, or `ipc` (see `SharedMemory`).
        cores: CPU cores for a server started here, if there is no GPU; None: all that this process may use.
        gpus: those that a server started here may use; None: as this process sees them.
        log: where a server started here writes its output.

    Raises:
        ConfigError: vLLM is not installed, and there is no url.
        ConfigError: (at the first use) it serves a shorter context, or was not started as it has to be.
        ModelLoadError: (at the first use) the server does not start or answer, or is not vLLM's. Whether it serves the
            policy's model is proven by the drill of the first weight sync.
    """

    capabilities = CAPABILITIES["vllm_server"]

    @classmethod
    def of_run(cls, config: TrainConfig, folder: Path, **others: Any) -> "list[VLLMServerEngine]":
        """Servers that share their weights' files; those that are started here, each with its cores and GPUs."""
        name, engine = config.model.name, config.engine
        shutil.rmtree(folder / "weights", ignore_errors=True)  # of a run that was killed, and is resumed
        chosen, method = config.synchronizer.folder, config.synchronizer.method
        weights = WeightFolder(chosen or folder / "weights", memory=None if chosen or engine.urls else MEMORY)
        if engine.urls:
            return [cls(name, engine, url=url, weights=weights, sync_method=method, **others) for url in engine.urls]
        cores = server_cores(sorted(os.sched_getaffinity(0)), engine, overlaps=config.explorer.sync_offset > 0)
        gpus: list[Any] = [None] * engine.servers
        if engine.gpus:
            gpus = _dealt(engine.gpus, engine.servers, max(len(engine.gpus) // engine.servers, 1))
        logs = [folder / f"vllm_server_{i}.log" for i in range(engine.servers)]
        return [
            cls(name, engine, weights=weights, sync_method=method, cores=cores[i], gpus=gpus[i], log=logs[i], **others)
            for i in range(engine.servers)
        ]

    def __init__(
        self,
        model: str,
        config: EngineConfig | None = None,
        *,
        url: str | None = None,
        weights: WeightFolder | None = None,
        sync_method: str = "checkpoint",
        cores: list[int] | None = None,
        gpus: list[int] | None = None,
        log: Path | None = None,
        **overrides: Any,
    ) -> None:
        if url is None:
            require_vllm()
        self._config = EngineConfig(**{**vars(config or EngineConfig()), **overrides})
        check_vllm_args("engine", self._config, in_process=False)
        super().__init__(self._config.max_model_len)
        self._model = model
        self.quantized = self._config.quantizes  # of a server started here
        self._url = url
        self._weights = weights
        self.sync_method = sync_method
        self._cores = cores
        self._gpus = gpus
        self._log = log
        self._address: str | None = None  # of a server started here, for copies in other processes
        self._process: ServerProcess | None = None
        self._client: ServerClient | None = None
        self._loading: asyncio.Task[None] | None = None
        self._start_seconds = START_SECONDS
        self.restarts = 0
        self._deaths: list[float] = []  # when it was found dead, within RESTART_WINDOW
        self._again: Callable[[], Awaitable[None]] | None = None  # gives it the weights that it has once more

    # -- life ---------------------------------------------------------------------------------------------------------

    async def load(self) -> None:
        """Start the server, or find the one of the url, and wait until it answers; RolloutError: it died too often."""
        if self._loading is None:  # several may ask at the same time
            process = self._process
            if process is not None and process.has_ended:
                self._loading = asyncio.create_task(self._restart(process))
            elif self._client is None:
                self._loading = asyncio.create_task(self._load())
            else:
                return
        try:
            await asyncio.shield(self._loading)
        finally:
            if self._loading is not None and self._loading.done():
                self._loading = None

    async def _load(self) -> None:
        path = str(await asyncio.to_thread(resolve_model, self._model))
        if self._url is None and self._address is None:
            self._process = ServerProcess(self._flags(path), self._environment(), self._log)
            self._address = str(self._process.address)
        try:
            self._read_model(path)  # while the server starts
            await self._connect()
        except BaseException:
            await self._disconnect()  # a server that was refused is refused the next time, too
            await self._end_process()
            raise

    def _read_model(self, path: str) -> None:
        self._tokenizer = load_tokenizer(self._model)
        self.generation_config = load_generation_config(self._model)
        self._weight_shapes = parameter_shapes(path)
        dtype = TORCH_DTYPES.get(EngineDtype(self._config.dtype))
        own: Any = AutoConfig.from_pretrained(path).dtype
        self._dtype = own if dtype is None else dtype
        weights = sum(map(math.prod, self._weight_shapes.values()))
        self._start_seconds = START_SECONDS + weights / WEIGHTS_PER_SECOND

    async def _restart(self, process: ServerProcess) -> None:
        now = time.monotonic()
        recent = [death for death in self._deaths if now - death < RESTART_WINDOW]
        why = process.last_words()
        if len(recent) >= MAX_RESTARTS:
            raise RolloutError(f"the vLLM server died {len(recent) + 1} times in {RESTART_WINDOW:g} s.{why}")
        self._deaths = [*recent, now]
        self.restarts = (self.restarts or 0) + 1
        logger.warning("the vLLM server died and is started again (%d).%s", self.restarts, why)
        await self._disconnect()
        try:
            await process.start_again()
            await self._connect()
        except BaseException:
            await process.stop()  # it may have other weights: the next request tries again
            raise

    async def _connect(self) -> None:
        """Wait until the server answers, check that it is the right one, and give it the weights that it had."""
        where = self._address or self._url or "" if self._process is None else str(self._process.socket)
        self._client = client = ServerClient(where, self._why)
        await self._until_healthy(client)
        await self._check_model(client)
        if self._url is not None:
            await self._check_settings(self._url)
        if self._again is not None:
            try:
                await asyncio.wait_for(self._again(), self._start_seconds)
            except TimeoutError as error:
                late = f"did not take its weights again within {self._start_seconds:g} s"
                raise RolloutError(f"the vLLM server was started again, and {late}.") from error
        if self._process is not None:
            self._process.publish()

    async def _disconnect(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    async def _why(self) -> str:
        """After a request failed: how the server that was started here ended; nothing if it goes on.

        One that is ending is waited for, for the next request to start it again: if vLLM's own engine process was
        killed, the server refuses everything for a while first.
        """
        process, client = self._process, self._client
        if process is None or client is None:
            await self._let_go()
            return ""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ENDING_SECONDS):
                while self._client is client and not process.has_ended and not await client.answers():  # noqa: ASYNC110
                    await asyncio.sleep(LOOK_SECONDS)
        return process.last_words()

    async def _let_go(self) -> None:
        """Of a url that is down: what starts its server again will start it with the weights of its own folder.

        The next request connects anew, with all checks, and gives it the policy's weights once more. A copy in a Ray
        worker, which has no weights to give, stays connected; and so does one of a server that is only slow.
        """
        client = self._client
        if self._url is None or client is None or self._again is None:
            return
        try:
            async with asyncio.timeout(URL_SECONDS):
                is_there = await client.answers()
        except TimeoutError:
            return
        if not is_there and self._client is client:
            logger.warning("%s does not answer. Once it does it is given its weights again.", self._url)
            await self._disconnect()

    def _running(self) -> ServerClient:
        if self._client is None:
            raise RolloutError("the engine was shut down")
        return self._client

    def _flags(self, path: str) -> list[str]:
        arguments: dict[str, Any] = {"max_logprobs": -1}  # a teacher's top k may be any number
        if self._gpus and not set(PARALLEL) & set(self._config.args):  # unless they say how, split over all GPUs
            arguments["tensor_parallel_size"] = len(self._gpus)
        arguments |= engine_args(path, self._config, on_cpu=not torch.cuda.is_available())
        if self.sync_method == "nccl":
            arguments["weight_transfer_config"] = {"backend": "nccl"}
        elif self.sync_method == "ipc":
            from trinity_lightning.sync.servers import BACKEND, WORKER

            arguments |= {"weight_transfer_config": {"backend": BACKEND}, "worker_extension_cls": WORKER}
        return _command_line(arguments | {"served_model_name": MODEL_ID, "disable_uvicorn_access_log": True})

    def _environment(self) -> dict[str, str]:
        environment = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "INFO"}
        # An engine in this process has set it to 0, with which vLLM's CPU build passes over the cores below.
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
        if self.sync_method == "ipc":  # its workers import this package, which may be a checkout that is not installed
            places = [str(PACKAGE_DIR.parent), os.environ.get("PYTHONPATH", "")]
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, places))
        if self._gpus is not None:
            visible = visible_gpus()
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(visible[i] if visible else str(i) for i in self._gpus)
        if not torch.cuda.is_available():
            cores = self._cores or sorted(os.sched_getaffinity(0))
            environment |= {
                "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
                # vLLM compiles one line of its sampler at the first request: 11 s, and a C++ compiler needed.
                "TORCHDYNAMO_DISABLE": "1",
            }
        return environment

    async def _until_healthy(self, client: ServerClient) -> None:
        where = self._url or "the vLLM server"
        try:
            async with asyncio.timeout(URL_SECONDS if self._url else self._start_seconds):
                while not await client.answers():
                    if self._process is not None and self._process.has_ended:
                        raise ModelLoadError(f"the vLLM server does not start.{self._process.last_words()}")
                    await asyncio.sleep(HEALTH_SECONDS)
        except TimeoutError as error:
            log = f" The end of its log:\n{self._process.log_end()}" if self._process else " Is it started?"
            raise ModelLoadError(f"{where} does not answer.{log}") from error

    async def _check_model(self, client: ServerClient) -> None:
        try:
            card = (await client.get("/v1/models"))["data"][0]
            self._model_id, served = card["id"], int(card["max_model_len"])
        except (LookupError, TypeError, ValueError) as error:
            raise ModelLoadError(f"{self._url} is no vLLM server: {type(error).__name__}: {error}") from error
        if served < self.max_model_len:
            raise ConfigError(
                f"{self._url} serves a context of {served} tokens, less than engine.max_model_len "
                f"({self.max_model_len})",
                fix=f"start it with --max-model-len {self.max_model_len}, or lower that",
            )

    async def _check_settings(self, url: str) -> None:
        """What a server that was started elsewhere needs, and would miss silently, or late."""
        try:
            await self.workers()
        except ValueError as error:
            raise ConfigError(
                f"{url} takes no weights ({error})", fix="start it with VLLM_SERVER_DEV_MODE=1"
            ) from error
        try:
            sampling = {"temperature": PROBE_TEMPERATURE, "max_tokens": 8, "seed": 0}
            [sampled] = await self._completions(self._tokenizer.encode(PROBE), 1, sampling)
            plain = await self._logprobs([*sampled.prompt_token_ids, *sampled.token_ids])
        except (ValueError, RolloutError) as error:
            raise ModelLoadError(f"{url} does not generate: {error}") from error
        plain = plain[len(sampled.prompt_token_ids) - 1 :]
        far = [abs(one - other) for one, other in zip(sampled.logprobs, plain, strict=True)]
        # Equal to those of temperature 1, although some of these tokens are unsure: the temperature was left out.
        if max(far) < PROBE_ROUNDING and min(plain) < -10 * PROBE_ROUNDING:
            raise ConfigError(
                f"{url} gives log-probabilities without the temperature",
                fix="start it with --logprobs-mode processed_logprobs",
            )

    async def shutdown(self) -> None:
        """End the server if it was started here; twice is allowed."""
        loading, self._loading = self._loading, None
        if loading is not None:
            loading.cancel()
            await asyncio.wait([loading])
        self._again, self._model_version = None, 0
        await self._disconnect()
        await self._end_process()
        if self._weights is not None:
            self._weights.close()

    async def _end_process(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            self._address = None
            await process.end()

    def __getstate__(self) -> dict[str, Any]:
        """A copy in another process has connections of its own, and leaves the server's life to this one."""
        if self._url is None and self._address is None:
            raise RuntimeError("the server is not started yet: load() the engine before it is sent to other processes.")
        own = {"_process": None, "_client": None, "_loading": None, "_weights": None, "_log": None, "_again": None}
        return {**self.__dict__, **own}

    # -- what an engine implements ------------------------------------------------------------------------------------

    async def _completions(self, token_ids: list[int], n: int, sampling: dict[str, Any]) -> list[Completion]:
        for name in sampling:
            if name not in SAMPLING:
                raise ConfigError(unknown_name("sampling setting", name, SAMPLING))
        # Stop strings may hold special tokens.
        chosen = {"skip_special_tokens": False} | WHOLE_DISTRIBUTION | with_end_tokens(sampling, self.end_tokens)
        room = self.max_model_len - len(token_ids)
        chosen["max_tokens"] = min(chosen.get("max_tokens", 16), room)  # a server refuses more than there is room for
        body = {"prompt": token_ids, "n": n, "logprobs": 0, "return_token_ids": True, **chosen}
        answer = await self._running().post("/v1/completions", {"model": self._model_id, **body})
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        return [_completion(choice, self.end_tokens) for choice in choices]

    async def _logprobs(self, token_ids: list[int]) -> list[float]:
        # vLLM samples at least one token.
        body = {"model": self._model_id, "prompt": token_ids, "max_tokens": 1, "prompt_logprobs": 0}
        body |= WHOLE_DISTRIBUTION
        answer = await self._running().post("/v1/completions", body)
        entries = answer["choices"][0]["prompt_logprobs"][1:]  # the first token has none
        return [entry[str(token)]["logprob"] for token, entry in zip(token_ids[1:], entries, strict=True)]

    async def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        """The server's answer to a request of its completions API; RolloutError or ValueError if it refuses it."""
        await self.load()
        return await self._running().post("/v1/completions", body | {"model": self._model_id})

    async def _take(self, stream: WeightStream, version: int) -> None:
        if self._weights is None:
            self._weights = WeightFolder(memory=MEMORY if self._url is None else None)
        folder = await asyncio.to_thread(self._weights.write, stream, self._dtype)
        self._again = partial(self._reload, folder, version)
        try:
            await self._again()
        except WeightSyncError:
            if self._process is None or not self._process.has_ended:
                raise
            await self.load()  # starts it again, with these weights

    async def _reload(self, folder: Path, version: int) -> None:
        """Have the workers read their weights from a folder."""
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        await self._change("/collective_rpc", body)
        await self._changed(version)

    async def _change(self, path: str, body: Mapping[str, Any]) -> Any:
        """A request that changes the weights."""
        try:
            return await self._running().post(path, body)
        except (RolloutError, ValueError) as error:
            raise WeightSyncError(f"the vLLM server failed while it took over the weights: {error}") from error

    async def _changed(self, version: int) -> None:
        """The weights are now those of that version: forget what the old ones computed."""
        reset = await self._change("/reset_prefix_cache?reset_running_requests=true", {})
        if not (isinstance(reset, dict) and reset.get("success")):
            raise WeightSyncError(
                f"the vLLM server did not clear its prefix cache, which the old weights computed: it answered {reset}. "
                "Versions of vLLM before 0.32 do not answer as this package needs it."
            )
        self._model_version = version

    # -- weights that are sent, which `WeightGroup` and `SharedMemory` drive -------------------------------------------

    async def workers(self) -> int:
        """How many processes of the server hold weights."""
        return int((await self._running().get("/get_world_size"))["world_size"])

    async def join_group(self, invitation: Mapping[str, Any]) -> None:
        """Have the workers join the group that the trainer invites to; ValueError or RolloutError: they did not."""
        await self._running().post("/shutdown_weight_transfer_engine", {})  # of a run before: vLLM would keep it, too
        await self._running().post("/init_weight_transfer_engine", {"init_info": dict(invitation)})

    async def receive_weights(
        self, updates: AsyncIterator[dict[str, Any]], version: int, again: Callable[[], Awaitable[None]]
    ) -> None:
        """Take over the weights that the trainer sends; WeightSyncError: the server failed.

        Args:
            updates: vLLM's announcement of each part of them; asked for the next once it has taken over the one before.
            version: theirs.
            again: sends them once more, if the server is started again.
        """
        await self._change("/start_weight_update", {})
        async for update in updates:
            await self._change("/update_weights", {"update_info": update})
        await self._change("/finish_weight_update", {})
        await self._changed(version)
        self._again = again


def _command_line(arguments: Mapping[str, Any]) -> list[str]:
    """The same arguments as flags of vLLM's server: `--max-model-len 256`, `--enforce-eager`, `--no-...`."""
    flags: list[str] = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if value is None:
            continue
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, list):
            flags += [f"--{flag}", *map(_word, value)]
        else:
            flags += [f"--{flag}", _word(value)]
    return flags


def _word(value: Any) -> str:
    """A value, or an entry of a list, as vLLM's command line reads it: what has parts is JSON."""
    return json.dumps(value) if isinstance(value, Mapping | list) else str(value)


def _completion(choice: Mapping[str, Any], ends: Collection[int]) -> Completion:
    return Completion(
        prompt_token_ids=choice["prompt_token_ids"],
        token_ids=choice["token_ids"],
        logprobs=choice["logprobs"]["token_logprobs"],
        text="",  # `generate` makes it
        finish_reason=choice["finish_reason"],
        stop_reason=None if choice["stop_reason"] in ends else choice["stop_reason"],
    )


def server_cores(cores: Sequence[int], engine: EngineConfig, overlaps: bool) -> list[list[int]]:
    """The CPU cores of each server. Two that compute at once on the same core slow each other down many times over.

    Args:
        cores: what this process may use.
        engine: `cpu_cores` and `servers` of it.
        overlaps: whether the trainer computes while they do.
    """
    usable = cores[len(cores) // 2 :] if overlaps else cores
    each = engine.cpu_cores or max(len(usable) // engine.servers, 1)
    return _dealt(list(cores)[-each * engine.servers :], engine.servers, each)


def _dealt(parts: Sequence[int], servers: int, each: int) -> list[list[int]]:
    """GPUs or cores, as many to each server, one after the other: [0, 1, 2, 3] for two -> [[0, 1], [2, 3]]."""
    return [[parts[(server * each + i) % len(parts)] for i in range(each)] for server in range(servers)]
