"""vLLM in a process of its own, or on another machine: it generates while the trainer trains."""

import asyncio
import contextlib
import logging
import math
import os
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from functools import cached_property, partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from trinity_lightning.common.hardware import TORCH_DTYPES
from trinity_lightning.common.inference import Completion
from trinity_lightning.common.pictures.processor import load_processor
from trinity_lightning.common.pictures.prompt import PicturePrompt
from trinity_lightning.config.engines import (
    CAPABILITIES,
    PARALLEL,
    EngineConfig,
    EngineDtype,
    check_vllm_args,
    require_vllm,
    visible_gpus,
)
from trinity_lightning.config.explorer import NEUTRAL_SAMPLING
from trinity_lightning.config.models import load_generation_config, load_tokenizer, resolve_model
from trinity_lightning.config.registry import PACKAGE_DIR
from trinity_lightning.config.run import TrainConfig
from trinity_lightning.config.servers import trains_meanwhile
from trinity_lightning.config.values import unknown_name
from trinity_lightning.errors import ConfigError, ModelLoadError, RolloutError, WeightSyncError
from trinity_lightning.explorer.models.engine import LoadedEngine
from trinity_lightning.explorer.models.server import ServerClient, ServerProcess, command_line, dealt, server_cores
from trinity_lightning.explorer.models.server_pictures import PictureClient, PicturePrompts
from trinity_lightning.explorer.models.server_requests import KEEPING
from trinity_lightning.explorer.models.unfinished import UnfinishedSamples, resume_if_paused
from trinity_lightning.explorer.models.vllm_engine import engine_args, requests_at_once, with_end_tokens
from trinity_lightning.explorer.models.vllm_pictures import picture_arguments, picture_config
from trinity_lightning.sync.files import MEMORY, WeightFolder
from trinity_lightning.sync.servers import server_arguments
from trinity_lightning.sync.stream import WeightStream, parameter_shapes

logger = logging.getLogger(__name__)

MODEL_ID = "policy"
START_SECONDS, URL_SECONDS = 600.0, 3.0
WEIGHTS_PER_SECOND = 25e6  # parameters that a slow disk reads a second, by which large models are given longer to start
HEALTH_SECONDS = 0.2  # between two looks at a server that starts
ENDING_SECONDS = 20.0  # time for a server that failed to end, or to answer again
LOOK_SECONDS = 0.05  # between two looks at a server that failed
MAX_RESTARTS, RESTART_WINDOW = 3, 600.0  # most restarts of a server within so many seconds
PROBE, PROBE_TEMPERATURE, PROBE_ROUNDING = "The answer is", 0.2, 0.05
WORKER = "trinity_lightning.explorer.models.server_worker.Extension"
MIDDLEWARE = f"{PicturePrompts.__module__}.{PicturePrompts.__name__}"
# Set in every request, because a server elsewhere may take omitted settings from the model's generation_config.json.
WHOLE_DISTRIBUTION = {"temperature": 1.0, **NEUTRAL_SAMPLING}
# Settings that both vLLM's SamplingParams and its server's requests have; a server silently ignores any other.
SAMPLING = (
    *WHOLE_DISTRIBUTION,
    *("stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "seed", "max_tokens", "min_tokens"),
    *("skip_special_tokens", "spaces_between_special_tokens", "logit_bias", "allowed_token_ids", "bad_words"),
)


class VLLMServerEngine(LoadedEngine):
    """An `InferenceModel` over vLLM's OpenAI-compatible server.

    Without a `url` the server is started at the first use, on this machine and for this user only, and ends with this
    process. By default it reads its weights from a folder, by a request of VLLM_SERVER_DEV_MODE=1. A server elsewhere
    must be started with that, with `--logprobs-mode processed_logprobs`, and must see the folder. If prompts may have
    pictures it needs `--middleware` with the class `PicturePrompts`, too. Make it reachable by this run only, since
    requests that change its weights need no password.

    A server started here that dies is started again by the next request, and answers once it has its weights again: no
    request is answered with other weights than `model_version` says. A server of a `url` that stops answering is given
    its weights again when it answers. Such a server must not be restarted between two requests: only a failed request
    shows that it was down.

    A copy that is sent to another process (a Ray runner) talks to the same server, also after a restart, but never
    starts or ends it.

    With `keeps_requests` the server is paused while it takes new weights: requests under way keep their tokens, are
    computed again under the new weights, and go on. Completions then say the version of each token's weights. If the
    server dies, the tokens of its requests that are known are kept, and the rest is asked for once it runs again.

    Args:
        model: `smollm2`, `tiny`, a folder, or a hub name: the model that the server serves.
        config: the engine's knobs; keyword arguments override its fields.
        url: address of a server that runs already, such as http://node7:8000.
        weights: the folder where its weights are written; engines that share one read the same files.
        sync_method: the way by which weights reach it: `checkpoint`, as a folder, which any server can read; `nccl`
            (see `WeightGroup`), also for a server of a url that was started for it; or `ipc` (see `SharedMemory`).
        cores: CPU cores for a server started here, if there is no GPU; None: all that this process may use.
        gpus: GPUs for a server started here, by their numbers in this process; None: all that it sees.
        log: file for the output of a server started here.
        keeps_requests: True if requests may be under way while weights change (explorer.max_staleness). A server of a
            url must then have been started with `--middleware` and the class `KeptRequests`.

    Raises:
        ConfigError: vLLM is not installed, and there is no url.
        ConfigError: (at the first use) it serves a shorter context, or was not started as it must be.
        ModelLoadError: (at the first use) the server does not start or answer, or is not vLLM's. The drill of the first
            weight sync proves that it serves the policy's model.
    """

    capabilities = CAPABILITIES["vllm_server"]

    @classmethod
    def of_run(cls, config: TrainConfig, folder: Path, **others: Any) -> "list[VLLMServerEngine]":
        """The servers of a run, which share the files of weights; each one started here gets cores and GPUs."""
        name, engine = config.model.name, config.engine
        shutil.rmtree(folder / "weights", ignore_errors=True)  # left by a run that was killed, and is resumed
        chosen = config.synchronizer.folder
        keeps = config.explorer.max_staleness > 0 and config.explorer.in_flight == "continue"
        others = {"sync_method": config.synchronizer.method, "keeps_requests": keeps, **others}
        weights = WeightFolder(chosen or folder / "weights", memory=None if chosen or engine.urls else MEMORY)
        if engine.urls:
            return [cls(name, engine, url=url, weights=weights, **others) for url in engine.urls]
        cores = server_cores(sorted(os.sched_getaffinity(0)), engine, bool(trains_meanwhile(config.explorer)))
        gpus: list[Any] = [None] * engine.servers
        if engine.gpus:
            gpus = dealt(engine.gpus, engine.servers, max(len(engine.gpus) // engine.servers, 1))
        logs = [folder / f"vllm_server_{i}.log" for i in range(engine.servers)]
        return [
            cls(name, engine, weights=weights, cores=cores[i], gpus=gpus[i], log=logs[i], **others)
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
        keeps_requests: bool = False,
        **overrides: Any,
    ) -> None:
        if url is None:
            require_vllm()
        self._config = EngineConfig(**{**vars(config or EngineConfig()), **overrides})
        self.most_requests = requests_at_once(self._config)
        check_vllm_args("engine", self._config, in_process=False)
        super().__init__(self._config.max_model_len)
        self._model = model
        self.quantized = self._config.quantizes  # for a server started here
        self._url = url
        self._weights = weights
        self.sync_method = sync_method
        self._cores = cores
        self._gpus = gpus
        self._log = log
        self._keeps_requests = keeps_requests
        self._address: str | None = None  # socket of a server started here, for copies in other processes
        self._process: ServerProcess | None = None
        self._client: ServerClient | None = None
        self._loading: asyncio.Task[None] | None = None
        self._start_seconds = START_SECONDS
        self.restarts = 0
        self._deaths: list[float] = []  # times within RESTART_WINDOW at which the server was found dead
        self._resend: Callable[[], Awaitable[None]] | None = None  # sends the present weights once more

    # -- start, restart, connection, end -------------------------------------------------------------------------------

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
            flags = await asyncio.to_thread(self._flags, path)
            self._process = ServerProcess(flags, self._environment(flags), self._log)
            self._address = str(self._process.address)
        try:
            self._read_model(path)  # while the server starts
            await self._connect()
        except BaseException:
            await self._disconnect()  # so that the next request checks a refused server again
            await self._end_process()
            raise

    def _read_model(self, path: str) -> None:
        self._tokenizer = load_tokenizer(self._model)
        self.generation_config = load_generation_config(self._model)
        self.processor = load_processor(self._model, self.processor_args)
        self._weight_shapes = parameter_shapes(path)
        dtype = TORCH_DTYPES.get(EngineDtype(self._config.dtype))
        model_dtype: Any = AutoConfig.from_pretrained(path).dtype
        self._dtype = model_dtype if dtype is None else dtype
        weights = sum(map(math.prod, self._weight_shapes.values()))
        self._start_seconds = START_SECONDS + weights / WEIGHTS_PER_SECOND

    async def _restart(self, process: ServerProcess) -> None:
        now = time.monotonic()
        recent = [death for death in self._deaths if now - death < RESTART_WINDOW]
        last_words = process.last_words()
        if len(recent) >= MAX_RESTARTS:
            raise RolloutError(f"the vLLM server died {len(recent) + 1} times in {RESTART_WINDOW:g} s.{last_words}")
        self._deaths = [*recent, now]
        self.restarts = (self.restarts or 0) + 1
        logger.warning("the vLLM server died and is started again (%d).%s", self.restarts, last_words)
        await self._disconnect()
        try:
            await process.start_again()
            await self._connect()
        except BaseException:
            await process.stop()  # it may lack its weights; the next request tries again
            raise

    async def _connect(self) -> None:
        """Wait until the server answers, check its model and settings, and give it the weights that it had."""
        address = self._address or self._url or "" if self._process is None else str(self._process.socket)
        self._client = client = ServerClient(address, self._diagnose)
        self._pictures = PictureClient(client, self.processor_args)
        await self._until_healthy(client)
        await self._check_model(client)
        if self._url is not None:
            await self._check_settings(self._url)
        if self._resend is not None:
            try:
                await asyncio.wait_for(self._resend(), self._start_seconds)
            except TimeoutError as error:
                raise RolloutError(
                    "the vLLM server was started again, and did not take its weights again within "
                    f"{self._start_seconds:g} s."
                ) from error
        if self._process is not None:
            self._process.publish()

    async def _disconnect(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    async def _diagnose(self) -> str:
        """A sentence, after a failed request, on how a server started here ended; "" if it goes on.

        A server that is ending is waited for, so that the next request starts it again: after its engine process was
        killed, vLLM's server refuses every request for a while before it ends.
        """
        process, client = self._process, self._client
        if process is None or client is None:
            await self._forget_if_down()
            return ""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ENDING_SECONDS):
                while self._client is client and not process.has_ended and not await client.answers():  # noqa: ASYNC110
                    await asyncio.sleep(LOOK_SECONDS)
        return process.last_words()

    async def _forget_if_down(self) -> None:
        """Disconnect from the server of a url that is down: once restarted it has the weights of its own folder.

        The next request connects anew, checks the server, and gives it the policy's weights once more. The connection
        stays if the server is only slow, and in a copy of the engine in a Ray worker, which has no weights to give.
        """
        client = self._client
        if self._url is None or client is None or self._resend is None:
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
        if self._gpus and not set(PARALLEL) & set(self._config.args):  # split over all GPUs, unless args say how
            arguments["tensor_parallel_size"] = len(self._gpus)
        if not torch.cuda.is_available():
            arguments["worker_extension_cls"] = WORKER
        arguments |= engine_args(path, self._config, on_cpu=not torch.cuda.is_available())
        arguments |= server_arguments(self.sync_method)
        arguments |= picture_arguments(path, arguments, self.processor_args, self.most_pictures)
        arguments |= {"served_model_name": MODEL_ID, "disable_uvicorn_access_log": True}
        middleware = [MIDDLEWARE] * bool(picture_config(path)) + [KEEPING] * self._keeps_requests
        return [*command_line(arguments), *(word for name in middleware for word in ("--middleware", name))]

    def _environment(self, flags: Collection[str]) -> dict[str, str]:
        environment = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "INFO"}
        # An engine in this process has set it to 0; vLLM's CPU build would then ignore the cores below.
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
        if {"--worker-extension-cls", "--middleware"} & {*flags}:
            # The server or its workers import this package, which may be a checkout that is not installed.
            paths = [str(PACKAGE_DIR.parent), os.environ.get("PYTHONPATH", "")]
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        if self._gpus is not None:
            visible = visible_gpus()
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(visible[i] if visible else str(i) for i in self._gpus)
        if not torch.cuda.is_available():
            cores = self._cores or sorted(os.sched_getaffinity(0))
            environment |= {
                "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
                # vLLM would compile a line of its sampler at the first request, which takes 11 s and a C++ compiler.
                "TORCHDYNAMO_DISABLE": "1",
            }
        return environment

    async def _until_healthy(self, client: ServerClient) -> None:
        server = self._url or "the vLLM server"
        try:
            async with asyncio.timeout(URL_SECONDS if self._url else self._start_seconds):
                while not await client.answers():
                    if self._process is not None and self._process.has_ended:
                        raise ModelLoadError(f"the vLLM server does not start.{self._process.last_words()}")
                    await asyncio.sleep(HEALTH_SECONDS)
        except TimeoutError as error:
            log = f" The end of its log:\n{self._process.log_end()}" if self._process else " Is it started?"
            raise ModelLoadError(f"{server} does not answer.{log}") from error

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
                key="engine.max_model_len",
                fix=f"start it with --max-model-len {self.max_model_len}, or lower that",
            )

    async def _check_settings(self, url: str) -> None:
        """Check the settings of a server elsewhere whose lack would show late, or never."""
        try:
            await self.workers()
        except ValueError as error:
            raise ConfigError(
                f"{url} takes no weights ({error})", key="engine.urls", fix="start it with VLLM_SERVER_DEV_MODE=1"
            ) from error
        await self._check_takes_pictures(url)
        await resume_if_paused(self._running(), url)
        if self._keeps_requests:
            await self._unfinished.check(url, self._tokenizer.encode(PROBE), WHOLE_DISTRIBUTION)
        try:
            sampling = {"temperature": PROBE_TEMPERATURE, "max_tokens": 8, "seed": 0}
            [sampled] = await self._completions(self._tokenizer.encode(PROBE), 1, sampling)
            plain = await self._logprobs([*sampled.prompt_token_ids, *sampled.token_ids])
        except (ValueError, RolloutError) as error:
            raise ModelLoadError(f"{url} does not generate: {error}") from error
        plain = plain[len(sampled.prompt_token_ids) - 1 :]
        differences = [abs(drawn - scored) for drawn, scored in zip(sampled.logprobs, plain, strict=True)]
        # If the values are equal although some tokens are unlikely, the temperature was not applied.
        if max(differences) < PROBE_ROUNDING and min(plain) < -10 * PROBE_ROUNDING:
            raise ConfigError(
                f"{url} gives log-probabilities without the temperature",
                key="engine.urls",
                fix="start it with --logprobs-mode processed_logprobs",
            )

    async def _check_takes_pictures(self, url: str) -> None:
        if self.processor is None:
            return
        try:
            await self._pictures.check()
        except ValueError as error:
            if self.most_pictures == 0:
                logger.info("%s takes no pictures, and no entry has any.", url)
                self.processor = None
                return
            raise ConfigError(
                f"{url} takes no pictures ({error})",
                key="engine.urls",
                fix=f"install this package there, and start it with --middleware {MIDDLEWARE}",
            ) from error

    async def shutdown(self) -> None:
        """End the server if it was started here; twice is allowed."""
        loading, self._loading = self._loading, None
        if loading is not None:
            loading.cancel()
            await asyncio.wait([loading])
        self._resend, self._model_version = None, 0
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
        """The state of a copy in another process, which makes its own connections, and never starts or ends the server.

        Raises:
            RuntimeError: the server is not started yet.
        """
        if self._url is None and self._address is None:
            raise RuntimeError("the server is not started yet: load() the engine before it is sent to other processes.")
        not_copied = ("_process", "_client", "_pictures", "_loading", "_weights", "_log", "_resend")
        state = {**self.__dict__, **dict.fromkeys(not_copied)}
        state.pop("_unfinished", None)
        return state

    # -- requests ------------------------------------------------------------------------------------------------------

    async def _completions(self, token_ids: list[int], n: int, sampling: dict[str, Any]) -> list[Completion]:
        for name in sampling:
            if name not in SAMPLING:
                raise ConfigError(unknown_name("sampling setting", name, SAMPLING), key=f"sampling.{name}")
        # Stop strings may hold special tokens.
        chosen = {"skip_special_tokens": False} | WHOLE_DISTRIBUTION | with_end_tokens(sampling, self.end_tokens)
        room = self.max_model_len - len(token_ids)
        chosen["max_tokens"] = min(chosen.get("max_tokens", 16), room)  # the server refuses more than fits
        if self._keeps_requests:
            return await self._unfinished.completions(token_ids, n, chosen)
        if isinstance(token_ids, PicturePrompt):
            chosen |= {"n": n, "logprobs": 0, "detokenize": bool(chosen.get("stop"))}
            choices = sorted((await self._pictures.answer(token_ids, chosen))["choices"], key=itemgetter("index"))
            return [_completion_of(token_ids, choice, choice["logprobs"], self.end_tokens) for choice in choices]
        body = {"prompt": token_ids, "n": n, "logprobs": 0, "return_token_ids": True, **chosen}
        answer = await self._running().post("/v1/completions", {"model": self._model_id, **body})
        choices = sorted(answer["choices"], key=itemgetter("index"))
        return [
            _completion_of(choice["prompt_token_ids"], choice, choice["logprobs"]["token_logprobs"], self.end_tokens)
            for choice in choices
        ]

    async def _logprobs(self, token_ids: list[int]) -> list[float]:
        # vLLM samples at least one token.
        if isinstance(token_ids, PicturePrompt):
            scoring = {"max_tokens": 1, "prompt_logprobs": 0, "detokenize": False, **WHOLE_DISTRIBUTION}
            return (await self._pictures.answer(token_ids, scoring))["logprobs"]
        body = {"model": self._model_id, "prompt": token_ids, "max_tokens": 1, "prompt_logprobs": 0}
        body |= WHOLE_DISTRIBUTION
        answer = await self._running().post("/v1/completions", body)
        entries = answer["choices"][0]["prompt_logprobs"][1:]  # the first token has none
        return [entry[str(token)]["logprob"] for token, entry in zip(token_ids[1:], entries, strict=True)]

    async def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        """The server's answer to a request of its completions API; RolloutError: it failed; ValueError: it refuses."""
        await self.load()
        return await self._running().post("/v1/completions", body | {"model": self._model_id})

    # -- requests that go on under new weights -------------------------------------------------------------------------

    @cached_property
    def _unfinished(self) -> UnfinishedSamples:
        return UnfinishedSamples(
            post=lambda path, body: self._running().post(path, body),
            ask_with_pictures=lambda *request: self._pictures.answer(*request),
            connection=lambda: self._client,
            revive=self._revive,
            ends=lambda: self.end_tokens,
        )

    async def _revive(self, connection: object) -> bool:
        """Start or find a server again that has ended, if that is not done; False: it lives, or is shut down."""
        process = self._process
        ended = self._client is None and self._resend is not None if process is None else process.has_ended
        replaced = self._loading is not None or self._client not in (None, connection)
        if ended or replaced:
            await self.load()
        return ended or replaced

    @contextlib.asynccontextmanager
    async def _paused(self) -> AsyncIterator[None]:
        """Pause the server while it takes new weights; see `UnfinishedSamples.paused`."""
        if not self._keeps_requests:
            yield
            return
        start = time.perf_counter()
        async with self._unfinished.paused(self._change):
            self.reprefilled_tokens += self._unfinished.cached_tokens()
            yield
        self.pause_seconds = time.perf_counter() - start

    # -- weights -------------------------------------------------------------------------------------------------------

    async def _take(self, stream: WeightStream, version: int) -> None:
        if self._weights is None:
            self._weights = WeightFolder(memory=MEMORY if self._url is None else None)
        folder = await asyncio.to_thread(self._weights.write, stream, self._dtype)
        self._resend = partial(self._reload, folder, version)
        try:
            await self._resend()
        except WeightSyncError:
            if self._process is None or not self._process.has_ended:
                raise
            await self.load()  # starts the server again, with these weights

    async def _reload(self, folder: Path, version: int) -> None:
        """Have the workers read their weights from a folder."""
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        async with self._paused():
            await self._change("/collective_rpc", body)
            await self._changed(version)

    async def _change(self, path: str, body: Mapping[str, Any]) -> Any:
        """Send a request that changes the weights; WeightSyncError: it fails."""
        try:
            return await self._running().post(path, body)
        except (RolloutError, ValueError) as error:
            raise WeightSyncError(f"the vLLM server failed while it took over the weights: {error}") from error

    async def _changed(self, version: int) -> None:
        """Clear the caches, which the old weights computed, and set the version of the new ones.

        States of pictures are cleared first: requests that go on are computed anew once the other cache is cleared.
        """
        if self.processor is not None:
            await self._change("/reset_encoder_cache", {})
        reset = await self._change("/reset_prefix_cache?reset_running_requests=true", {})
        if not (isinstance(reset, dict) and reset.get("success")):
            raise WeightSyncError(
                f"the vLLM server did not clear its prefix cache, which the old weights computed: it answered {reset}. "
                "Versions of vLLM before 0.32 do not answer as this package needs it."
            )
        if self._keeps_requests:
            await self._change("/update_weight_version", {"new_version": str(version)})
        self._model_version = version

    # -- weights that are sent, by a `ToServers` -----------------------------------------------------------------------

    async def workers(self) -> int:
        """Number of the server's processes that hold weights."""
        return int((await self._running().get("/get_world_size"))["world_size"])

    async def join_group(self, invitation: Mapping[str, Any]) -> None:
        """Have the workers join the group that the trainer invites to; ValueError or RolloutError: they did not."""
        # vLLM would keep the group of an earlier run beside the new one.
        await self._running().post("/shutdown_weight_transfer_engine", {})
        await self._running().post("/init_weight_transfer_engine", {"init_info": dict(invitation)})

    async def receive_weights(
        self, updates: AsyncIterator[dict[str, Any]], version: int, resend: Callable[[], Awaitable[None]]
    ) -> None:
        """Take over the weights that the trainer sends; WeightSyncError: the server failed.

        Args:
            updates: vLLM's announcements of the weights, part by part; the next one is read once a part is loaded.
            version: the weights' version.
            resend: sends the weights once more, for a server that is started again.
        """
        async with self._paused():
            await self._change("/start_weight_update", {})
            async for update in updates:
                await self._change("/update_weights", {"update_info": update})
            await self._change("/finish_weight_update", {})
            await self._changed(version)
        self._resend = resend


def _completion_of(
    prompt: Sequence[int], choice: Mapping[str, Any], logprobs: Sequence[float], ends: Collection[int]
) -> Completion:
    return Completion(
        prompt_token_ids=prompt,
        token_ids=choice["token_ids"],
        logprobs=logprobs,
        text="",  # `generate` makes it
        finish_reason=choice["finish_reason"],
        stop_reason=None if choice["stop_reason"] in ends else choice["stop_reason"],
    )
