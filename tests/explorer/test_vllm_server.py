"""vLLM in a process of its own, with the tiny model in float32: exact tokens, weights, failures, and its end."""

import asyncio
import contextlib
import json
import os
import pickle
import re
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import ClientError, web
from support.engine_promises import EnginePromises
from support.errors import refuses
from support.forked import fork_servers
from support.runs import Commands
from support.tiny_model import logprobs, tiny_model
from support.under_way import begun, check_spans, until_drawn, worker_of

from trinity_lightning.buffer.operators.auxiliary import TeacherTopK
from trinity_lightning.common.experience import Experience
from trinity_lightning.common.inference import Completion
from trinity_lightning.config.engines import EngineDtype
from trinity_lightning.config.explorer import ExplorerConfig, SamplingConfig
from trinity_lightning.config.models import resolve_model
from trinity_lightning.errors import (
    ConfigError,
    ModelLoadError,
    RolloutError,
    WeightSyncError,
)
from trinity_lightning.explorer.driver import Driver
from trinity_lightning.explorer.explorer import Explorer, Watcher
from trinity_lightning.explorer.models import server, server_requests, vllm_server
from trinity_lightning.explorer.models.server import ServerClient, command_line
from trinity_lightning.explorer.models.server_requests import KEEPING
from trinity_lightning.explorer.models.vllm_server import VLLMServerEngine
from trinity_lightning.explorer.task_source import TaskSource
from trinity_lightning.explorer.tasks.taskset import Taskset
from trinity_lightning.sync.files import WeightFolder
from trinity_lightning.sync.stream import weight_stream

CONTEXT = 320
SETTINGS: dict[str, Any] = {"dtype": EngineDtype.fp32, "max_model_len": CONTEXT, "max_num_seqs": 16, "kv_cache_gb": 0.1}
PROMPT = [7, 30, 41, 12]
ROOT = str(Path(__file__).resolve().parents[2])


@pytest.fixture(scope="module")
def driver() -> Iterator[Driver]:
    driver = Driver()
    yield driver
    driver.close()


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("server") / "server.log"


@pytest.fixture(scope="module")
def engine(needs_vllm: Any, driver: Driver, log: Path, run_train: Commands) -> Iterator[VLLMServerEngine]:
    """An engine of the tiny model, in a folder with its own sampling settings; servers after the first are forked."""
    model = log.parent / "model"
    shutil.copytree(resolve_model("tiny"), model)
    settings = {"do_sample": True, "top_k": 1, "temperature": 0.1, "repetition_penalty": 1.5}
    (model / "generation_config.json").write_text(json.dumps(settings))
    args = {"enable_log_requests": True, "middleware": [KEEPING]}
    engine = VLLMServerEngine(str(model), log=log, args=args, **SETTINGS)
    driver.run(engine.load())
    with pytest.MonkeyPatch.context() as patch:
        fork_servers(run_train.address, patch.setattr)
        yield engine
        driver.run(engine.shutdown())


class Elsewhere:
    """A server at a url, which something else starts again: it begins with the weights of its own folder.

    Args:
        context: the longest context that it serves.
        sampled, plain: log-probabilities that it gives of tokens that it samples, and of tokens that it scores.

    Attributes:
        answers: status and content for the requests of a path, in place of its own.
        hangs: the paths whose requests it never answers.
        requests: the paths of all requests.
        weights: the folder of its weights.
    """

    def __init__(self, context: int = CONTEXT, sampled: float = -3.9, plain: float = -4.6) -> None:
        self.context, self.sampled, self.plain = context, sampled, plain
        self.answers: dict[str, tuple[int, Any]] = {}
        self.hangs: set[str] = set()
        self.requests: list[str] = []
        self.port, self.weights, self.is_paused = 0, "its own", False
        self.runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self.answer)
        self.runner, self.weights = web.AppRunner(app, shutdown_timeout=0.01), "its own"
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self.runner.addresses[0][1]

    async def stop(self) -> None:
        assert self.runner is not None
        await self.runner.cleanup()

    async def answer(self, request: web.Request) -> web.Response:
        self.requests.append(request.path)
        if request.path in self.hangs:
            await asyncio.sleep(3600)
        if request.path in self.answers:
            status, content = self.answers[request.path]
            return web.json_response(content, status=status)
        body = await request.json() if request.can_read_body else {}
        if request.path == "/collective_rpc":
            self.weights = Path(body["kwargs"]["weights_path"]).name
        card = {"id": "policy", "max_model_len": self.context}
        content = {"data": [card], "success": True, "world_size": 1, "weights": self.weights}
        choice = self.choice(body.get("prompt", []))
        if request.path == server_requests.PATH:
            choice |= {"logprobs": [self.sampled] * 8, "versions": [[0, "default"]]}
        return web.json_response(content | {"choices": [choice], "is_paused": self.is_paused})

    def choice(self, prompt: list[int]) -> dict[str, Any]:
        return {
            "index": 0,
            "prompt_token_ids": prompt,
            "token_ids": [5] * 8,
            "logprobs": {"token_logprobs": [self.sampled] * 8},
            "prompt_logprobs": [None, *({str(token): {"logprob": self.plain}} for token in prompt[1:])],
            "finish_reason": "length",
            "stop_reason": None,
        }


def with_elsewhere(
    server: Elsewhere,
    use: Callable[[VLLMServerEngine], Coroutine[Any, Any, Any]],
    model: str = "tiny",
    **settings: Any,
) -> None:
    """Use an engine of this server, on an event loop of its own."""

    async def used() -> None:
        await server.start()
        engine = VLLMServerEngine(model, url=server.url, **SETTINGS | settings)
        try:
            await use(engine)
        finally:
            await engine.shutdown()
            await server.stop()

    asyncio.run(used())


class TestPromises(EnginePromises):
    misspelt_error = ConfigError


def test_the_models_own_sampling_settings_are_not_taken(engine: VLLMServerEngine, driver: Driver) -> None:
    [completion] = driver.run(engine.generate(PROMPT, max_tokens=8, seed=5))
    expected = logprobs(tiny_model(), [*PROMPT, *completion.token_ids])[len(PROMPT) - 1 :]
    assert list(completion.logprobs) == pytest.approx(expected, abs=1e-4)


def test_a_worker_without_work_leaves_its_core_to_the_trainer(engine: VLLMServerEngine, driver: Driver) -> None:
    worker = worker_of(engine)
    driver.run(engine.generate(PROMPT, max_tokens=8))
    before = worker.cpu_times()
    time.sleep(0.8)
    after = worker.cpu_times()
    assert (after.user + after.system) - (before.user + before.system) < 0.2  # vLLM's default: all of it


def test_cancelling_a_call_aborts_its_request(engine: VLLMServerEngine, driver: Driver, log: Path) -> None:
    def requests_in_log(word: str) -> int:
        return len(re.findall(f"equest .*{word}|{word} request", log.read_text()))

    async def cancelled() -> None:
        received, aborted = (requests_in_log(word) for word in ("Received", "aborted"))  # vLLM aborts at stop strings
        # 16 at a time: whatever else the machine does, it goes on long after the call is cancelled.
        call = asyncio.create_task(engine.generate(PROMPT, n=256, max_tokens=300, ignore_eos=True))
        while requests_in_log("Received") == received:  # noqa: ASYNC110 - a log tells nobody
            await asyncio.sleep(0.01)
        call.cancel()
        async with asyncio.timeout(30):
            while requests_in_log("aborted") == aborted:  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    driver.run(cancelled())


def test_a_copy_in_another_process_uses_the_same_server(engine: VLLMServerEngine, driver: Driver) -> None:
    copy = pickle.loads(pickle.dumps(engine))  # noqa: S301  # written here
    mine, its = (driver.run(one.generate(PROMPT, seed=3, max_tokens=6)) for one in (engine, copy))
    assert mine == its
    driver.run(copy.shutdown())
    assert driver.run(engine.generate(PROMPT, seed=3, max_tokens=6)) == mine


def test_a_server_is_found_by_its_url(engine: VLLMServerEngine, driver: Driver) -> None:
    async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        writer.close()

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert engine._address is not None
        there = await asyncio.open_unix_connection(engine._address)
        await asyncio.gather(pipe(reader, there[1]), pipe(there[0], writer))

    async def through_a_port() -> Any:
        server = await asyncio.start_server(forward, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        remote = VLLMServerEngine("tiny", url=f"http://127.0.0.1:{port}", **SETTINGS)
        completions = await remote.generate(PROMPT, seed=3, max_tokens=6)
        await remote.shutdown()
        server.close()
        return completions

    assert driver.run(through_a_port()) == driver.run(engine.generate(PROMPT, seed=3, max_tokens=6))


def test_a_server_with_a_shorter_context_is_refused() -> None:
    async def load(engine: VLLMServerEngine) -> None:
        with refuses("engine.max_model_len"):
            await engine.load()

    with_elsewhere(Elsewhere(context=CONTEXT // 2), load)


# -- weights ----------------------------------------------------------------------------------------------------------


def test_a_cache_that_is_not_reset_is_an_error(tmp_path: Path) -> None:
    async def sync(engine: VLLMServerEngine) -> None:
        with pytest.raises(WeightSyncError, match=r"\{'success': False\}"):
            await engine.sync_weights(weight_stream(tiny_model()), 1)
        assert engine.model_version == 0

    server = Elsewhere()
    server.answers["/reset_prefix_cache"] = 200, {"success": False}
    with_elsewhere(server, sync, weights=WeightFolder(tmp_path))


@pytest.mark.parametrize("model", ["tiny", "tiny_vision"])
def test_states_of_pictures_are_forgotten_before_requests_are_computed_anew(model: str, tmp_path: Path) -> None:
    async def sync(engine: VLLMServerEngine) -> None:
        await engine.load()
        weights = [(name, torch.zeros(shape)) for name, shape in engine.weight_shapes.items()]
        await engine.sync_weights(weights, 1)

    server = Elsewhere()
    with_elsewhere(server, sync, model, weights=WeightFolder(tmp_path))
    at = {path: place for place, path in enumerate(server.requests)}
    assert ("/reset_encoder_cache" in at) is (model == "tiny_vision")
    weights, last = at["/collective_rpc"], at["/reset_prefix_cache"]
    assert weights < at.get("/reset_encoder_cache", last) <= last


def test_a_server_that_does_not_take_its_weights_again_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def start_again(engine: VLLMServerEngine) -> None:
        await engine.sync_weights(weight_stream(tiny_model()), 1)
        await server.stop()
        with pytest.raises(RolloutError):
            await engine.complete({})
        server.hangs.add("/collective_rpc")
        await server.start()
        with pytest.raises(RolloutError, match="weights"):
            await engine.complete({})
        assert server.requests[-1] == "/collective_rpc"

    server = Elsewhere()
    monkeypatch.setattr(vllm_server, "URL_SECONDS", 60.0)
    monkeypatch.setattr(vllm_server, "START_SECONDS", 0.05)
    with_elsewhere(server, start_again, weights=WeightFolder(tmp_path))


def test_a_large_model_has_longer_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(shape: tuple[int, ...]) -> float:
        monkeypatch.setattr(vllm_server, "parameter_shapes", lambda path: {"a": shape, "b": shape})
        engine = VLLMServerEngine("tiny")
        engine._read_model(str(resolve_model("tiny")))
        return engine._start_seconds

    assert seconds((1000, 1000)) == pytest.approx(600, abs=1)
    assert seconds((10**5, 10**5)) == pytest.approx(600 + 2 * 10**10 / 25e6)


def test_a_server_on_a_cpu_does_not_decode_speculatively(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with refuses("engine.args.speculative_config"):
        VLLMServerEngine("tiny", args={"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}})


class StartedError(Exception):
    """A server would have been started, with these flags and variables."""


def started_with(
    monkeypatch: pytest.MonkeyPatch, model: str = "tiny", **settings: Any
) -> tuple[list[str], dict[str, str]]:
    """The flags and the variables with which an engine of these settings starts its server."""

    def start(flags: list[str], environment: dict[str, str], log: Path | None) -> None:
        raise StartedError(flags, environment)

    monkeypatch.setattr(vllm_server, "ServerProcess", start)
    with pytest.raises(StartedError) as started:
        asyncio.run(VLLMServerEngine(model, **settings).load())
    flags, environment = started.value.args
    return flags, environment


@pytest.mark.parametrize(("visible", "expected"), [(None, "0,2"), ("4,GPU-a,6", "4,6")])
def test_gpus_are_counted_as_this_process_sees_them(
    visible: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert started_with(monkeypatch, gpus=[0, 2])[1]["CUDA_VISIBLE_DEVICES"] == expected


def test_an_engine_of_this_process_does_not_cost_a_server_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # as it leaves it
    environment = os.environ | started_with(monkeypatch, cores=[1])[1]
    assert environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == "1"  # else vLLM's CPU build does not read the cores


@pytest.mark.parametrize(
    ("on_gpu", "method", "before", "expected"),
    [
        (True, "checkpoint", "", None),
        (True, "ipc", "", [ROOT]),
        (True, "ipc", "/else/where", [ROOT, "/else/where"]),
        (False, "checkpoint", "", [ROOT]),
    ],
)
def test_workers_that_import_this_package_find_it(
    on_gpu: bool, method: str, before: str, expected: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu)
    monkeypatch.setenv("PYTHONPATH", before)
    path = started_with(monkeypatch, sync_method=method)[1].get("PYTHONPATH")
    assert path == (None if expected is None else os.pathsep.join(expected))


@pytest.mark.parametrize(
    ("gpus", "args", "expected"),
    [
        ([0, 2], {}, ["--tensor-parallel-size", "2"]),
        ([1], {}, ["--tensor-parallel-size", "1"]),
        ([0, 2], {"data_parallel_size": 2}, ["--data-parallel-size", "2"]),
        (None, {}, []),
    ],
)
def test_a_server_of_several_gpus_uses_all_of_them(
    gpus: list[int] | None, args: dict[str, int], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags, _ = started_with(monkeypatch, gpus=gpus, args=args)
    at = [i for i, flag in enumerate(flags) if flag.endswith("-parallel-size")]
    assert [part for i in at for part in flags[i : i + 2]] == expected


@pytest.mark.parametrize("args", [{}, {"limit_mm_per_prompt": {"image": 4}, "mm_processor_cache_gb": 0}])
def test_a_server_of_a_model_that_reads_pictures_takes_prompts_with_them(
    args: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags, environment = started_with(monkeypatch, "tiny_vision", args=args)
    assert flags[flags.index("--middleware") + 1] == vllm_server.MIDDLEWARE
    assert environment["PYTHONPATH"].startswith(ROOT)
    limits = json.loads(flags[flags.index("--limit-mm-per-prompt") + 1])
    assert limits == {"video": 0, "audio": 0, **args.get("limit_mm_per_prompt", {})}
    assert "--middleware" not in started_with(monkeypatch)[0]


def test_arguments_with_parts_are_json_on_the_command_line() -> None:
    parts = {"middleware": ["a.B", "c.D"], "lora_modules": [{"name": "a", "path": "/b"}], "hf_overrides": {"c": [1]}}
    flags = command_line(parts | {"enforce_eager": True, "enable_log_requests": False, "seed": None})
    assert flags[:5] == ["--middleware", "a.B", "c.D", "--lora-modules", '{"name": "a", "path": "/b"}']
    assert flags[5:] == ["--hf-overrides", '{"c": [1]}', "--enforce-eager", "--no-enable-log-requests"]


@pytest.mark.parametrize(("sampled", "plain"), [(-3.9, -4.6), (-0.001, -0.9), (-0.001, -0.01)])
def test_a_server_elsewhere_that_tells_what_it_samples_from(sampled: float, plain: float) -> None:
    with_elsewhere(Elsewhere(sampled=sampled, plain=plain), VLLMServerEngine.load)


def test_a_server_elsewhere_that_leaves_the_temperature_out_is_refused_and_again() -> None:
    async def load_twice(engine: VLLMServerEngine) -> None:
        for _ in range(2):
            with refuses("engine.urls") as refused:
                await asyncio.gather(engine.load(), engine.load())
            assert "--logprobs-mode processed_logprobs" in str(refused.value.fix)

    with_elsewhere(Elsewhere(sampled=-4.61, plain=-4.6), load_twice)


def test_a_server_elsewhere_that_takes_no_weights_is_refused() -> None:
    async def load(engine: VLLMServerEngine) -> None:
        with refuses("engine.urls") as refused:
            await engine.load()
        assert "VLLM_SERVER_DEV_MODE=1" in str(refused.value.fix)

    server = Elsewhere()
    server.answers["/get_world_size"] = 404, {"error": {"message": "Not Found"}}
    with_elsewhere(server, load)


@pytest.mark.parametrize("answer", [(404, {"detail": "Not Found"}), (200, {"choices": [{"versions": None}]})])
def test_a_server_elsewhere_that_does_not_keep_requests_is_refused(answer: tuple[int, Any]) -> None:
    async def load(engine: VLLMServerEngine) -> None:
        with refuses("engine.urls") as refused:
            await engine.load()
        assert f"--middleware {KEEPING}" in str(refused.value.fix)

    server = Elsewhere()
    server.answers[server_requests.PATH] = answer
    with_elsewhere(server, load, keeps_requests=True)


@pytest.mark.parametrize("is_paused", [True, False])
def test_a_server_elsewhere_that_a_killed_run_has_paused_goes_on(is_paused: bool) -> None:
    server = Elsewhere()
    server.is_paused = is_paused
    with_elsewhere(server, VLLMServerEngine.load)
    assert ("/resume" in server.requests) is is_paused
    assert server.requests.index("/is_paused") < server.requests.index("/v1/completions")


@pytest.mark.parametrize("keeps_requests", [True, False])
def test_a_server_is_paused_only_if_requests_may_be_under_way(keeps_requests: bool, tmp_path: Path) -> None:
    async def sync(engine: VLLMServerEngine) -> None:
        await engine.load()
        server.requests.clear()
        await engine.sync_weights(weight_stream(tiny_model()), 1)

    server = Elsewhere()
    with_elsewhere(server, sync, weights=WeightFolder(tmp_path), keeps_requests=keeps_requests)
    changes = ["/collective_rpc", "/reset_prefix_cache"]
    around = ["/pause", *changes, "/update_weight_version", "/resume"]
    assert [path for path in server.requests if path != server_requests.PATH] == (around if keeps_requests else changes)


def test_a_server_goes_on_with_the_next_weights_after_a_sync_that_failed(tmp_path: Path) -> None:
    async def sync(engine: VLLMServerEngine) -> None:
        server.answers["/collective_rpc"] = 500, {"error": {"message": "no room"}}
        with pytest.raises(WeightSyncError, match=r"no room.*stays paused"):
            await engine.sync_weights(weight_stream(tiny_model()), 1)
        assert (server.requests[-1], engine.model_version) == ("/health", 0)
        del server.answers["/collective_rpc"]
        await engine.sync_weights(weight_stream(tiny_model()), 2)
        assert (server.requests[-1], engine.model_version) == ("/resume", 2)

    server = Elsewhere()
    with_elsewhere(server, sync, weights=WeightFolder(tmp_path), keeps_requests=True)


def test_a_server_elsewhere_that_takes_no_pictures_is_refused() -> None:
    async def load(engine: VLLMServerEngine) -> None:
        with refuses("engine.urls") as refused:
            await engine.load()
        assert "--middleware" in str(refused.value.fix)

    server = Elsewhere()
    server.answers["/picture_prompts"] = 404, {"detail": "Not Found"}
    with_elsewhere(server, load, "tiny_vision")


def test_a_server_elsewhere_that_takes_no_pictures_serves_a_run_without_any() -> None:
    async def load(engine: VLLMServerEngine) -> None:
        engine.most_pictures = 0
        await engine.load()
        assert engine.processor is None  # so that the probe has no picture

    server = Elsewhere()
    server.answers["/picture_prompts"] = 404, {"detail": "Not Found"}
    with_elsewhere(server, load, "tiny_vision")


def test_a_server_elsewhere_that_does_not_generate_is_told() -> None:
    async def load(engine: VLLMServerEngine) -> None:
        with pytest.raises(ModelLoadError, match="no such model"):
            await engine.load()

    server = Elsewhere()
    server.answers["/v1/completions"] = 400, {"error": {"message": "no such model"}}
    with_elsewhere(server, load)


FAILED: tuple[int, Any] = (500, {"error": {"message": "of this request alone"}})


@pytest.mark.parametrize(
    ("is_down", "is_slow", "is_copy", "connections"),
    [(True, False, False, 2), (False, False, False, 1), (False, True, False, 1), (True, False, True, 2)],
    ids=["down", "up", "slow", "a copy in a Ray worker"],
)
def test_a_server_elsewhere_is_connected_anew_once_it_was_down_by_who_gives_it_weights(
    is_down: bool, is_slow: bool, is_copy: bool, connections: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy has a connection of its own from the beginning."""
    server = Elsewhere()

    async def fail_once(engine: VLLMServerEngine) -> None:
        await engine.sync_weights(weight_stream(tiny_model()), 3)
        asker = pickle.loads(pickle.dumps(engine)) if is_copy else engine  # noqa: S301  # written here
        await asker.load()
        if is_down:
            await server.stop()
        server.answers["/v1/completions"] = FAILED
        if is_slow:
            server.hangs.add("/health")
            monkeypatch.setattr(vllm_server, "URL_SECONDS", 0.05)
        with pytest.raises(RolloutError):
            await asker.complete({})
        server.answers.clear()
        server.hangs.clear()
        if is_down:
            await server.start()
        await asker.complete({})
        assert server.requests.count("/v1/models") == connections
        await asker.shutdown()

    monkeypatch.setattr(vllm_server, "URL_SECONDS", 60.0)
    with_elsewhere(server, fail_once, weights=WeightFolder(tmp_path))


def test_a_machine_that_takes_no_connection_is_down_and_a_slow_server_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "CONNECT_SECONDS", 0.1)

    async def answers(backlog: int, seconds: float) -> bool:
        with socket.create_server(("127.0.0.1", 0), backlog=backlog) as listening, contextlib.ExitStack() as others:
            if backlog == 0:  # so the queue is full, and packets for more are dropped
                others.enter_context(socket.create_connection(listening.getsockname()))
            client = ServerClient(f"http://127.0.0.1:{listening.getsockname()[1]}")
            try:
                async with asyncio.timeout(seconds):
                    return await client.answers()
            finally:
                await client.close()

    assert not asyncio.run(answers(backlog=0, seconds=60))
    with pytest.raises(TimeoutError):
        asyncio.run(answers(backlog=5, seconds=1))


# -- what goes wrong --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_url_where_nothing_answers(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_server, "URL_SECONDS", 0.5)
    engine = VLLMServerEngine("tiny", url="http://127.0.0.1:9", **SETTINGS)
    with pytest.raises(ModelLoadError, match=r"127\.0\.0\.1:9"):
        driver.run(engine.load())


def test_a_server_that_closes_idle_connections_is_asked_again(driver: Driver) -> None:
    """Also if the event loop had no time to notice: the trainer trains on it."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version, timeout = "HTTP/1.1", 0.05  # vLLM's: 5

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Log nothing."""

    async def ask_twice(url: str) -> None:
        client = ServerClient(url)
        try:
            await client.post("/pause", {})
            time.sleep(0.3)  # noqa: ASYNC251, the loop is held
            await client.post("/resume", {})
        finally:
            await client.close()

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        try:
            driver.run(ask_twice(f"http://127.0.0.1:{http.server_port}"))
        finally:
            http.shutdown()


def test_a_server_elsewhere_that_was_started_again_answers_with_the_policys_weights(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Elsewhere()

    async def start_again(engine: VLLMServerEngine) -> None:
        async def weights() -> str:
            return (await engine.complete({}))["weights"]

        await engine.sync_weights(weight_stream(tiny_model()), 3)
        server.answers["/v1/completions"] = FAILED
        with pytest.raises(RolloutError, match="of this request alone"):
            await weights()
        server.answers.clear()
        assert (await weights(), server.requests.count("/collective_rpc")) == ("1", 1)  # it goes on as it was
        await server.stop()
        with pytest.raises(RolloutError) as unanswered:
            await weights()
        assert isinstance(unanswered.value.__cause__, (ClientError, OSError))
        monkeypatch.setattr(vllm_server, "URL_SECONDS", 0.05)
        with pytest.raises(ModelLoadError, match=server.url):
            await weights()
        monkeypatch.setattr(vllm_server, "URL_SECONDS", 60.0)
        await server.start()
        assert server.weights == "its own"
        assert (await weights(), engine.model_version) == ("1", 3)

    monkeypatch.setattr(vllm_server, "URL_SECONDS", 60.0)
    with_elsewhere(server, start_again, weights=WeightFolder(tmp_path))
    assert "Once it does it is given its weights again" in caplog.text


def test_a_teacher_says_what_it_finds_likeliest(engine: VLLMServerEngine, driver: Driver) -> None:
    tokens = [*PROMPT, 9, 50, 3, 22, 61]  # few of them likely
    read = Experience(tokens=tokens, prompt_length=len(PROMPT))
    whole = Experience(tokens=tokens, prompt_length=0, action_mask=[True] * len(tokens))
    masked = Experience(tokens=tokens, prompt_length=len(PROMPT), action_mask=[False] * 5)
    operator = TeacherTopK("tutor", k=30)
    operator.set_auxiliary_model({"tutor": [engine.get_openai_async_client()]})
    _, metrics = driver.run(operator.process([read, whole, masked]))
    assert "teacher_top_k" not in masked.info
    with torch.no_grad():
        expected = tiny_model()(input_ids=torch.tensor([tokens])).logits[0, :-1].log_softmax(-1).topk(30)
    for experience, start in ((read, len(PROMPT) - 1), (whole, 0)):
        top = {name: rows[-len(expected.values[start:]) :] for name, rows in experience.info["teacher_top_k"].items()}
        torch.testing.assert_close(top["logprobs"], expected.values[start:], atol=1e-4, rtol=0)
        assert (top["ids"] == expected.indices[start:]).float().mean() > 0.9  # equal ones may come in another order
    assert whole.info["teacher_top_k"]["ids"].shape == (len(tokens), 30)
    assert 0 < metrics["mass/mean"] < 1


@pytest.mark.usefixtures("engine")
def test_a_server_that_does_not_start_says_why(driver: Driver) -> None:
    engine = VLLMServerEngine("tiny", args={"no_such_thing": 1}, **SETTINGS)
    with pytest.raises(ModelLoadError, match=r"exit code 2(.|\n)*no-such-thing"):
        driver.run(engine.load())


# -- requests under way ------------------------------------------------------------------------------------------------


def test_requests_under_way_go_on_with_new_weights_and_say_which(
    engine: VLLMServerEngine, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = {version: tiny_model(scale) for version, scale in ((20, 1.0), (21, 1.5), (22, 0.7))}
    prompts, stop = [[7, 30, i] for i in range(5)], "no such text"
    change, worker = engine._change, worker_of(engine)

    def still_after_it(path: str, body: Any) -> Any:
        if path == "/resume":
            worker.suspend()  # until the samples are looked at again: none may end before
        return change(path, body)

    async def ask(i: int, n: int, **sampling: Any) -> list[Completion]:
        return await engine.generate(prompts[i], n=n, seed=i, max_tokens=250, ignore_eos=True, **sampling)

    async def sync_twice() -> tuple[list[Completion], Completion]:
        await engine.sync_weights(weight_stream(models[20]), 20)
        engine.reprefilled_tokens = 0
        calls = [ask(*request) for request in ((0, 1), (1, 3), (2, 1))]
        asked = await begun(engine, 6, *calls, ask(3, 1, stop=[stop], temperature=1.0))
        for version in (21, 22):
            await until_drawn(engine, 6)
            monkeypatch.setattr(engine, "_change", still_after_it if version == 21 else change)
            start = time.perf_counter()
            await engine.sync_weights(weight_stream(models[version]), version)
            assert 0 < (engine.pause_seconds or 0) < time.perf_counter() - start
        (later,) = await ask(4, 1)
        return [completion for task in asked for completion in await task], later

    monkeypatch.setattr(engine, "_keeps_requests", True)
    completions, later = driver.run(sync_twice())
    assert len(completions) == 6
    for completion in completions:
        assert [version for _, version in completion.versions] == [20, 21, 22]
        assert len(completion.token_ids) == 250
        check_spans(completion, lambda version, tokens: logprobs(models[version], tokens))
    assert later.versions == ((0, 22),)
    check_spans(later, lambda version, tokens: logprobs(models[version], tokens))
    # Twice the prompts, and the tokens that each had when its weights changed.
    starts = [start for completion in completions for start, _ in completion.versions]
    assert engine.reprefilled_tokens == 2 * 3 * len(completions) + sum(starts)
    assert engine._unfinished.under_way() == []


def kill(engine: VLLMServerEngine, number: int = signal.SIGKILL) -> None:
    assert engine._process is not None
    os.killpg(engine._process._process.pid, number)


def a_step(
    engine: VLLMServerEngine, on_progress: Callable[[int], None]
) -> tuple[Explorer, list[Experience], Coroutine[Any, Any, bool]]:
    """An explorer of eight tasks a step, two at a time, what came of them, and the step itself."""
    source = TaskSource(Taskset.addition(), "simple", "exact_match", SamplingConfig(max_tokens=24))
    explorer = Explorer(ExplorerConfig(batch_size=8, repeat_times=4, runner_per_model=2), [engine], source)
    experiences: list[Experience] = []

    async def sink(new: list[Experience], step: int, more: Any) -> dict[str, float]:
        experiences.extend(new)
        return {}

    class Progress(Watcher):
        def show_tasks(self, batch: int | str, done: int, total: int) -> None:
            on_progress(done)

    async def step() -> bool:
        await explorer.prepare(sink, watcher=Progress())
        return await explorer.explore_step()

    return explorer, experiences, step()


def test_a_server_that_is_killed_within_a_step_changes_nothing_of_the_step(
    engine: VLLMServerEngine, driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_model(1.5)
    driver.run(engine.sync_weights(weight_stream(model), 11))
    elsewhere = pickle.loads(pickle.dumps(engine))  # noqa: S301  # written here
    driver.run(elsewhere.load())
    killed = asyncio.Event()

    def kill_once(done: int) -> None:
        if done == 2 and not killed.is_set():
            kill(engine)
            killed.set()

    async def first_answer() -> list[float]:
        await killed.wait()
        while True:
            try:
                return await elsewhere.logprobs(PROMPT)
            except RolloutError:
                await asyncio.sleep(0.01)

    whole, expected, step = a_step(engine, lambda done: None)
    driver.run(step)
    explorer, experiences, step = a_step(engine, kill_once)

    async def disturbed() -> list[float]:
        _, answer = await asyncio.gather(step, first_answer())
        return answer

    answer = driver.run(disturbed())
    assert (whole.metrics["rollout/engine_restarts"], explorer.metrics["rollout/engine_restarts"]) == (0, 1)
    assert explorer.metrics["rollout/failed_tasks"] == 0
    disturbed_tokens, tokens = (
        [(e.eid.task, e.eid.run, e.tokens.tolist()) for e in step] for step in (experiences, expected)
    )
    assert len(tokens) == 32
    assert disturbed_tokens == tokens
    assert {e.info["model_version"] for e in experiences} == {engine.model_version} == {11}
    assert "the vLLM server died and is started again (1). It was ended by signal 9" in caplog.text
    # Nobody was ever answered with the weights that it began with.
    assert answer == pytest.approx(logprobs(model, PROMPT), abs=1e-3)
    driver.run(elsewhere.shutdown())


def test_a_server_that_dies_within_a_sync_is_started_again_with_the_new_weights(
    engine: VLLMServerEngine, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And its requests go on with them."""
    models, change = {11: tiny_model(1.5), 12: tiny_model(0.7)}, engine._change
    known: list[list[int]] = []

    def dying(path: str, body: Any) -> Any:
        if path == "/collective_rpc":
            monkeypatch.setattr(engine, "_change", change)
            known.extend([*sample.written().token_ids] for sample in engine._unfinished.under_way())
            kill(engine)
        return change(path, body)

    async def sync() -> list[Completion]:
        await engine.sync_weights(weight_stream(models[11]), 11)
        [samples] = await begun(engine, 3, engine.generate(PROMPT, n=3, seed=4, max_tokens=150, ignore_eos=True))
        await until_drawn(engine, 3)
        monkeypatch.setattr(engine, "_change", dying)
        await engine.sync_weights(weight_stream(models[12]), 12)
        return await samples

    monkeypatch.setattr(engine, "_keeps_requests", True)
    completions = driver.run(sync())
    assert engine.model_version == 12
    assert driver.run(engine.logprobs(PROMPT)) == pytest.approx(logprobs(models[12], PROMPT), abs=1e-3)
    for completion, before in zip(completions, known, strict=True):
        assert len(completion.token_ids) == 150
        assert list(completion.token_ids[: len(before)]) == before
        assert completion.versions == ((0, 11), (len(before), 12))
        check_spans(completion, lambda version, tokens: logprobs(models[version], tokens))


def test_a_server_that_dies_too_often_is_given_up(  # the last one
    engine: VLLMServerEngine, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_server, "MAX_RESTARTS", 0)

    async def killed() -> None:
        kill(engine, signal.SIGSTOP)  # so that it does not answer before it is killed, however slow this process is
        call = asyncio.create_task(engine.generate(PROMPT, max_tokens=3))
        await asyncio.sleep(1.0)
        kill(engine)
        with pytest.raises(RolloutError, match="ended by signal 9"):
            await call

    driver.run(killed())
    for _ in range(2):
        with pytest.raises(RolloutError, match="died"):
            driver.run(engine.generate(PROMPT, max_tokens=3))
