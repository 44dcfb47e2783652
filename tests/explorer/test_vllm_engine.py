"""With a real vLLM and the tiny model; float32, so that engine and transformers agree to rounding."""

import asyncio
import json
import os
import random
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from mmap import PAGESIZE
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine_promises import EnginePromises, as_written, ask, plain_logprobs
from support.errors import refuses
from support.metaspace import metaspace_model
from support.tiny_model import tiny_model
from support.tiny_vllm import driven_engine, standing_still, take_posted, tiny_engine, until_written

from trinity_lightning.common.inference import Completion
from trinity_lightning.config.engines import EngineConfig
from trinity_lightning.config.models import resolve_model
from trinity_lightning.errors import (
    ModelLoadError,
    RolloutError,
    WeightSyncError,
)
from trinity_lightning.explorer.driver import Driver, LoopTask
from trinity_lightning.explorer.models.bound import BoundModel
from trinity_lightning.explorer.models.record import CallRecords
from trinity_lightning.explorer.models.vllm_engine import VLLMEngine, engine_args
from trinity_lightning.sync.stream import weight_stream

pytestmark = pytest.mark.usefixtures("needs_vllm")

CONTEXT = 320
PROMPT = [7, 30, 41, 12]


def on_a_host(engine: VLLMEngine, coroutine: Coroutine[Any, Any, Any]) -> Any:
    driver = Driver([engine])
    try:
        return driver.run(coroutine)
    finally:
        driver.close()


# -- before the shared engine exists, which then shows that nothing was left behind -----------------------------------


def test_a_folder_whose_weights_do_not_fit_is_a_load_error(tmp_path: Path) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(resolve_model("tiny"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 256}))
    engine = tiny_engine(str(folder))
    with pytest.raises(ModelLoadError, match="broken"):
        on_a_host(engine, engine.load())
    assert not torch.distributed.is_initialized()


def test_the_text_of_a_sentencepiece_tokenizer_begins_with_the_space_that_vllm_gives_it(tmp_path: Path) -> None:
    engine = tiny_engine(str(metaspace_model(tmp_path / "model")), max_model_len=64)
    driver = Driver([engine])
    try:
        driver.run(engine.load())
        decoded, looked_at = (ask(engine, driver, max_tokens=4, stop=stop).text for stop in (None, ["\x00"]))
        driver.run(engine.shutdown())
    finally:
        driver.close()
    assert decoded == looked_at
    assert decoded.startswith(" word")


@pytest.fixture
def two_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


def test_the_trainer_keeps_its_threads_where_vllm_wants_one(two_threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's worker for GPUs leaves the process one thread, for which its layers are compiled."""
    from vllm.usage.usage_lib import is_usage_stats_enabled

    monkeypatch.delenv("VLLM_NO_USAGE_STATS", raising=False)
    build, engine, at_work = VLLMEngine._build, tiny_engine(max_model_len=64), []

    def build_as_on_a_gpu(engine: VLLMEngine, path: str) -> Any:
        assert not is_usage_stats_enabled()  # which that worker would send
        built = build(engine, path)
        torch.set_num_threads(1)
        step = built.step
        monkeypatch.setattr(built, "step", lambda: (at_work.append(torch.get_num_threads()), step())[1])
        return built

    monkeypatch.setattr(VLLMEngine, "_build", build_as_on_a_gpu)
    driver = Driver([engine])
    try:
        driver.run(engine.load())
        assert torch.get_num_threads() == 2
        ask(engine, driver, max_tokens=4)
        assert torch.get_num_threads() == 2
        driver.run(engine.shutdown())
    finally:
        driver.close()
    assert set(at_work) == {1}


def test_a_folder_without_a_model_is_a_load_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    engine = tiny_engine(str(tmp_path))
    with pytest.raises(ModelLoadError, match=re.escape(str(tmp_path))):
        on_a_host(engine, engine.generate(PROMPT))


def test_a_model_is_not_spread_over_devices_from_within_a_process() -> None:
    with refuses("engine.args.tensor_parallel_size"):
        VLLMEngine("tiny", args={"tensor_parallel_size": 2})


def test_a_cpu_does_not_decode_speculatively() -> None:
    with refuses("engine.args.speculative_config"):
        VLLMEngine("tiny", args={"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}})


def test_vllm_reads_how_n_grams_are_proposed() -> None:
    from vllm.config import SpeculativeConfig

    arguments = engine_args("model", EngineConfig(speculative=3), on_cpu=False)["speculative_config"]
    assert set(arguments) <= set(SpeculativeConfig.__dataclass_fields__)
    assert (arguments["method"], arguments["num_speculative_tokens"]) == ("ngram", 3)
    assert "speculative_config" not in engine_args("model", EngineConfig(), on_cpu=False)


def test_the_trainer_compiles_with_as_many_threads_as_before_vllm_was_imported() -> None:
    code = f"import {VLLMEngine.__module__}, vllm; from torch._inductor import config; print(config.compile_threads)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "3"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split()[-1] == "3"


def test_an_argument_that_vllm_does_not_know_is_a_configuration_error() -> None:
    engine = tiny_engine(args={"max_num_batched_token": 4096})
    with refuses("engine.args.max_num_batched_token"):
        on_a_host(engine, engine.load())


# -- one engine for all others ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def driven() -> Iterator[tuple[VLLMEngine, Driver]]:
    random.seed(5)
    torch.manual_seed(5)
    expected = random.random(), torch.rand(1).item()
    random.seed(5)
    torch.manual_seed(5)
    with driven_engine(CONTEXT) as engine_and_host:
        after = random.random(), torch.rand(1).item()
        assert after == expected, "loading an engine must not touch the trainer's seeds"
        yield engine_and_host


@pytest.fixture
def engine(driven: tuple[VLLMEngine, Driver]) -> Iterator[VLLMEngine]:
    yield driven[0]
    assert not driven[0]._engine.has_unfinished_requests()
    assert not driven[0]._waiting


@pytest.fixture
def driver(driven: tuple[VLLMEngine, Driver]) -> Driver:
    return driven[1]


def test_torch_can_still_be_given_threads(engine: VLLMEngine) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(before + 1)
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)


def test_the_tokenizer_serves_several_threads_at_once(engine: VLLMEngine) -> None:
    """vLLM's own copies for threads, which are made when they are needed, read alike."""
    texts = [f"{number} + {number * number}" for number in range(200)]
    expected = [engine.tokenizer.encode(text) for text in texts]
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(engine.tokenizer.encode, texts)) == expected


# -- generating --------------------------------------------------------------------------------------------------------


class TestPromises(EnginePromises):
    value_error = "VLLMValidationError"
    misspelt_error = TypeError


def test_looking_for_a_stop_string_changes_nothing(engine: VLLMEngine, driver: Driver) -> None:
    for seed in range(5):
        plain, looked_at = (ask(engine, driver, seed=seed, max_tokens=30, stop=stop) for stop in (None, ["\x00"]))
        assert plain == looked_at
        assert plain.text


def test_a_stop_token_that_was_asked_for_is_in_the_text_unless_it_is_left_out(
    engine: VLLMEngine, driver: Driver
) -> None:
    whole = ask(engine, driver, max_tokens=30)
    for place in (0, 5):
        stop = {"stop_token_ids": [whole.token_ids[place]], "max_tokens": 30}
        completion = ask(engine, driver, **stop)
        assert completion.stop_reason == whole.token_ids[place]
        assert completion.text == as_written(engine, completion)
        cut = ask(engine, driver, **stop, include_stop_str_in_output=False)
        assert cut.text == as_written(engine, replace(cut, token_ids=cut.token_ids[:-1]))


def test_text_is_made_on_the_way_only_where_it_must_be(engine: VLLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(engine, "_submit", lambda *_, detokenize, **__: asked.append(detokenize))
    shown = {"include_stop_str_in_output": False, "skip_special_tokens": True}
    for settings in ({}, {"stop": []}, shown, {"stop": ["."]}):
        engine._add("it", PROMPT, 1, settings)
    assert asked == [False] * 3 + [True]


def test_samples_of_a_prompt_share_its_blocks(
    engine: VLLMEngine, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = engine._engine.model_executor
    execute = executor.execute_model
    computed: list[int] = []

    def count(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        computed.append(scheduled.total_num_scheduled_tokens)
        return execute(scheduled, *args, **kwargs)

    monkeypatch.setattr(executor, "execute_model", count)
    prompt = [5 + i % 90 for i in range(100)]  # three blocks of 32, and four tokens more
    together = driver.run(engine.generate(prompt, n=5, seed=0, max_tokens=20, ignore_eos=True))
    assert computed[0] == 100 + 4 * 4
    alone = [driver.run(engine.generate(prompt, seed=i, max_tokens=20, ignore_eos=True))[0] for i in range(5)]
    assert [sample.token_ids for sample in together] == [sample.token_ids for sample in alone]
    for sample in together:
        assert list(sample.logprobs) == pytest.approx(plain_logprobs(sample), abs=1e-4)


# -- errors -----------------------------------------------------------------------------------------------------------


def test_a_bad_request_is_its_callers_alone(engine: VLLMEngine, driver: Driver) -> None:
    async def mixed() -> list[Any]:
        calls = [
            engine.generate([]),
            engine.generate([5, 10**6]),
            engine.generate(PROMPT, temprature=1.0),
            engine.generate(PROMPT, temperature=-1.0),
            engine.generate(PROMPT, n=0),
            engine.logprobs([]),
            engine.generate(PROMPT, seed=5, max_tokens=12),
        ]
        return await asyncio.gather(*calls, return_exceptions=True)

    *refused, answer = driver.run(mixed())
    assert [type(error).__name__ for error in refused] == ["VLLMValidationError"] * 2 + ["TypeError"] + [
        "VLLMValidationError"
    ] * 3
    assert "temprature" in str(refused[2])
    assert answer == [ask(engine, driver)]


def test_cancelling_aborts_in_the_engine(engine: VLLMEngine, driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = engine._engine.model_executor
    execute = executor.execute_model
    third_step, cancelled = threading.Event(), threading.Event()
    tokens: list[int] = []

    def wait_at_the_third(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        tokens.append(scheduled.total_num_scheduled_tokens)
        if len(tokens) == 3:
            third_step.set()
            assert cancelled.wait(60)
        return execute(scheduled, *args, **kwargs)

    async def cancel_two_of_three() -> Completion:
        all_posted = standing_still(engine)
        tasks = [asyncio.create_task(engine.generate(PROMPT, n=n, seed=3, ignore_eos=True)) for n in (1, 4)]
        uncancelled = asyncio.create_task(engine.generate(PROMPT, seed=5, max_tokens=12))
        await asyncio.sleep(0)
        all_posted.set()
        await asyncio.to_thread(third_step.wait, 60)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert all(task.cancelled() for task in tasks)
        cancelled.set()
        return (await uncancelled)[0]

    monkeypatch.setattr(executor, "execute_model", wait_at_the_third)
    answer = driver.run(cancel_two_of_three())
    assert (tokens[1], tokens[-1]) == (6, 1)
    monkeypatch.undo()
    assert answer == ask(engine, driver)
    assert engine._engine.get_num_unfinished_requests() == 0


def test_a_failing_step_fails_its_requests_and_no_later_ones(
    engine: VLLMEngine, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = ask(engine, driver)
    executor = engine._engine.model_executor
    execute = executor.execute_model
    calls = 0

    def fail_at_the_third(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise RuntimeError("out of memory, say")
        return execute(*args, **kwargs)

    monkeypatch.setattr(executor, "execute_model", fail_at_the_third)

    async def several() -> list[Any]:
        all_posted = standing_still(engine)
        calls = [engine.generate([5 + i], n=2, seed=i, max_tokens=30, ignore_eos=True) for i in range(5)]
        tasks = [asyncio.create_task(call) for call in calls]
        await asyncio.sleep(0)
        all_posted.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    errors = driver.run(several())
    assert [str(error) for error in errors] == [
        "the engine failed while generating: RuntimeError: out of memory, say"
    ] * 5
    assert all(isinstance(error, RolloutError) for error in errors)
    assert ask(engine, driver) == before


# -- weights ----------------------------------------------------------------------------------------------------------


def test_vllm_failing_in_the_middle_of_a_sync_is_told(
    engine: VLLMEngine, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise MemoryError("too much")

    monkeypatch.setattr(engine._packed, "take", fail)
    with pytest.raises(WeightSyncError, match="too much"):
        driver.run(engine.sync_weights(weight_stream(tiny_model()), 9))
    assert engine.model_version == 0


def several(engine: VLLMEngine) -> Coroutine[Any, Any, list[list[Completion]]]:
    """Requests of different lengths, numbers of samples and temperatures."""
    settings: list[dict[str, Any]] = [
        {"n": 1, "max_tokens": 30},
        {"n": 2, "max_tokens": 20, "temperature": 0.7},
        {"n": 1, "max_tokens": 6},
    ]
    calls = [
        engine.generate([5 + i] * (40 - 15 * i), seed=10 * i, ignore_eos=True, **values)
        for i, values in enumerate(settings)
    ]

    async def ask_all() -> list[list[Completion]]:
        return await asyncio.gather(*calls)

    return ask_all()


def sync(engine: VLLMEngine, driver: Driver, model: Any, version: int) -> None:
    """Send weights; no step is made between the call and their arrival."""
    task = driver.start(engine.sync_weights(weight_stream(model), version))
    take_posted(engine)
    driver.wait(task)


def on_driver(engine: VLLMEngine, driver: Driver, command: Callable[[], object]) -> None:
    """Run a command on the thread of the engine, which does not step meanwhile."""
    engine._post(command)
    engine.run_commands()


def test_responses_go_on_with_the_weights_that_come_meanwhile(engine: VLLMEngine, driver: Driver) -> None:
    """Each span has the log-probabilities of its own weights, given the exact tokens before it."""
    models = [tiny_model(), tiny_model(1.05), tiny_model(0.95)]
    engine.reprefilled_tokens = 0
    try:
        task = driver.start(several(engine))
        take_posted(engine, 3)
        until_written(engine, driver, 4)
        sync(engine, driver, models[1], 1)
        until_written(engine, driver, 9)  # the shortest request has ended
        late = driver.start(engine.generate(PROMPT, seed=9, max_tokens=3, ignore_eos=True))
        take_posted(engine)  # begun, and not yet stepped
        sync(engine, driver, models[2], 2)
        later = driver.run(engine.generate(PROMPT, seed=9, max_tokens=3, ignore_eos=True))
        [[long], two, [short]], late = driver.wait(task), driver.wait(late)
    finally:
        driver.run(engine.sync_weights(weight_stream(tiny_model()), 0))
    assert [completion.versions for completion in (long, *two)] == [((0, 0), (4, 1), (9, 2))] * 3
    assert [completion.versions for completion in (short, *late, *later)] == [((0, 0), (4, 1)), *[((0, 2),)] * 2]
    assert late == later
    assert [len(completion.token_ids) for completion in (long, *two, short)] == [30, 20, 20, 6]
    assert engine.reprefilled_tokens == (40 + 2 * 25 + 10 + 4 * 3) + (40 + 2 * 25 + 3 * 8)
    for completion, temperature in ((long, 1.0), (two[0], 0.7), (two[1], 0.7), (short, 1.0), (late[0], 1.0)):
        rescored = [plain_logprobs(completion, temperature, model) for model in models]
        starts = [start for start, _ in completion.versions]
        ends = [*starts[1:], len(completion.token_ids)]
        expected = [
            logprob
            for (start, version), end in zip(completion.versions, ends, strict=True)
            for logprob in rescored[version][start:end]
        ]
        assert list(completion.logprobs) == pytest.approx(expected, rel=0, abs=1e-5)
        assert completion is late[0] or list(completion.logprobs) != pytest.approx(rescored[0], rel=0, abs=1e-3)


def test_a_sync_neither_repeats_nor_loses_noise(engine: VLLMEngine, driver: Driver) -> None:
    undisturbed = driver.run(several(engine))
    try:
        task = driver.start(several(engine))
        take_posted(engine, 3)
        until_written(engine, driver, 4)
        sync(engine, driver, tiny_model(), 1)
        disturbed = driver.wait(task)
    finally:
        driver.run(engine.sync_weights(weight_stream(tiny_model()), 0))
    for befores, afters in zip(undisturbed, disturbed, strict=True):
        for before, after in zip(befores, afters, strict=True):
            assert after.token_ids == before.token_ids
            assert (before.versions, after.versions) == (((0, 0),), ((0, 0), (4, 1)))


# -- sleep: on a CPU the cache alone is given up; of vLLM's own sleep, the pause and the forgotten prefixes ------------


def cache_of(engine: VLLMEngine) -> torch.Tensor:
    """All bytes of vLLM's cache."""
    [caches] = engine._engine.collective_rpc(lambda worker: worker.model_runner.kv_caches)
    return torch.empty(0, dtype=torch.uint8).set_(caches[0].untyped_storage())


def test_an_idle_engine_gives_the_memory_of_its_cache_to_the_trainer(engine: VLLMEngine, driver: Driver) -> None:
    before, cache = ask(engine, driver), cache_of(engine)
    assert cache.any()
    driver.run(engine.sleep())
    assert not cache[PAGESIZE:-PAGESIZE].any()
    driver.run(engine.wake_up())
    assert ask(engine, driver) == before


def test_an_engine_that_slept_has_its_weights_and_goes_on(
    engine: VLLMEngine, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = ask(engine, driver)
    driver.run(engine.sleep())
    assert not engine._engine.is_sleeping()  # it shares no GPU
    monkeypatch.setattr(engine, "_sleeps", True)
    driver.run(engine.sleep())
    driver.run(engine.sleep())
    assert engine._engine.is_sleeping()
    driver.run(engine.wake_up())
    assert not engine._engine.is_sleeping()
    assert ask(engine, driver) == before
    driver.run(engine.wake_up())


@pytest.mark.parametrize("sleeps", [False, True])
def test_requests_under_way_go_on_after_a_sleep(
    engine: VLLMEngine, driver: Driver, monkeypatch: pytest.MonkeyPatch, sleeps: bool
) -> None:
    monkeypatch.setattr(engine, "_sleeps", sleeps)
    undisturbed = driver.run(several(engine))
    task = driver.start(several(engine))
    until_written(engine, driver, 4)
    on_driver(engine, driver, lambda: engine._fall_asleep() if sleeps else engine._empty_cache())
    assert sleeps or not cache_of(engine)[PAGESIZE:-PAGESIZE].any()
    on_driver(engine, driver, engine._awake)
    assert driver.wait(task) == undisturbed


# -- life: last, for it takes the engine away -------------------------------------------------------------------------


def test_responses_go_on_in_an_engine_of_another_process(engine: VLLMEngine, driver: Driver) -> None:
    """Their tokens are kept, and each span has the log-probabilities of its weights."""
    models = [tiny_model(), tiny_model(1.05), tiny_model(0.95)]

    def start(records: CallRecords) -> LoopTask[list[Completion]]:
        settings = {"max_tokens": 24, "ignore_eos": True, "temperature": 0.7}
        bound = [
            BoundModel(engine, run_seed=5, batch=1, task=0, run=run, record=records.begin(1, 0, run)) for run in (0, 2)
        ]

        async def ask_all() -> list[Completion]:
            one, two = bound[0].generate(PROMPT, n=2, **settings), bound[1].generate([5] * 40, n=1, **settings)
            return [completion for completions in await asyncio.gather(one, two) for completion in completions]

        return driver.start(ask_all())

    task = start(records := CallRecords())
    take_posted(engine, 2)
    until_written(engine, driver, 4)
    sync(engine, driver, models[1], 1)
    until_written(engine, driver, 9)
    state = records.state_dict()
    driver.run(engine.shutdown())
    with pytest.raises(RolloutError):
        driver.wait(task)
    driver.run(engine.sync_weights(weight_stream(models[2]), 2))
    (later := CallRecords()).load_state_dict(state)
    completions = driver.wait(start(later))
    driver.run(engine.sync_weights(weight_stream(models[0]), 0))
    assert later.state_dict()["tokens"].tolist() == [t for completion in completions for t in completion.token_ids]
    for i, completion in enumerate(completions):
        assert list(completion.token_ids)[:9] == state["tokens"].tolist()[9 * i : 9 * i + 9]
        assert completion.versions == ((0, 0), (4, 1), (9, 2))
        assert (len(completion.token_ids), completion.finish_reason) == (24, "length")
        assert completion.text == as_written(engine, completion)
        rescored = [plain_logprobs(completion, 0.7, model) for model in models]
        expected = [*rescored[0][:4], *rescored[1][4:9], *rescored[2][9:]]
        assert list(completion.logprobs) == pytest.approx(expected, rel=0, abs=1e-5)


def test_shutdown_twice_and_an_engine_after_it(engine: VLLMEngine, driver: Driver) -> None:
    before = ask(engine, driver)
    driver.run(engine.shutdown())
    driver.run(engine.shutdown())
    assert not torch.distributed.is_initialized()
    assert ask(engine, driver) == before
