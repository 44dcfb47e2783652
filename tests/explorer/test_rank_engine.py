"""The engine of another rank, which is a thread here: it promises what every engine does."""

import asyncio
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from support.engine_promises import PROMPT, EnginePromises, ask
from support.errors import refuses
from support.tiny_model import tiny_model
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from trinity_lightning.common.inference import Completion
from trinity_lightning.common.ranks import Ranks
from trinity_lightning.config.engines import Capabilities, EngineConfig
from trinity_lightning.errors import ConfigError, ModelLoadError, RankError, RolloutError
from trinity_lightning.explorer.distributed import ENGINES, EngineFollower, RankWeights
from trinity_lightning.explorer.driver import Driver
from trinity_lightning.explorer.models.engine import Engine
from trinity_lightning.explorer.models.rank_engine import EngineAnswers, RankEngine
from trinity_lightning.explorer.models.transformers_engine import TransformersEngine
from trinity_lightning.sync.stream import WeightStream
from trinity_lightning.trainer.ddp import join

CONTEXT = 128
CPU = torch.device("cpu")
CAN = Capabilities()


class Apart(TransformersEngine):
    """With weights of its own, which have to be sent."""

    capabilities = CAN


def met(rank: int, port: int) -> Any:
    return join(("127.0.0.1", port), Ranks(rank, 2), CPU, timedelta(minutes=1))


class Asked(RankEngine):
    """Alone it is sent weights as all engines of a run are at once."""

    weights: RankWeights

    async def _take(self, stream: WeightStream, version: int) -> None:
        await self.weights.send(stream, version)


def apart() -> Apart:
    return Apart("tiny", max_model_len=CONTEXT, max_num_seqs=8)


def follow(port: int) -> None:
    """Do as a rank that waits for rank 0."""
    ranks = met(1, port)
    follower: Any = EngineFollower(lambda _: apart())
    follower.listen(apart(), ranks, tiny_model(), CPU)
    ranks.exchange(None, patient=True, at="the end")
    follower.teardown(None, None, "fit")


@pytest.fixture(scope="module")
def connected() -> Iterator[tuple[Asked, Driver]]:
    store: Any = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, multi_tenant=True)
    first = apart()
    first.bind(tiny_model())  # transformers does not load in two threads at once
    other = threading.Thread(target=follow, args=(store.port,))
    other.start()
    ranks = met(0, store.port)
    engine = Asked(1, "tiny", EngineConfig(max_model_len=CONTEXT), CAN)
    engine.path = path = ranks.exchange(None, at=ENGINES)[1]
    engine.weights = RankWeights(first, [engine], ranks)
    driver = Driver([first, engine])
    driver.run(engine.load())
    assert not Path(path).parent.exists()
    yield engine, driver
    driver.run(engine.shutdown())
    driver.close()
    ranks.exchange(None, at="the end")
    other.join()


@pytest.fixture
def engine(connected: tuple[Asked, Driver]) -> Asked:
    return connected[0]


@pytest.fixture
def driver(connected: tuple[Asked, Driver]) -> Driver:
    return connected[1]


class TestPromises(EnginePromises):
    misspelt_error = ConfigError
    may_go_on: ClassVar[dict[str, Any]] = {}  # it has no ignore_eos

    @contextmanager
    def end_token(self, engine: Engine, token: int) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Apart, "end_tokens", frozenset({engine.tokenizer.eos_token_id, token}))
            yield


def test_a_request_that_is_given_up_ends_in_the_other_rank(
    engine: RankEngine, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, began, aborted = Apart._step, threading.Event(), threading.Event()

    def step(self: Apart) -> Any:
        began.set()
        return [] if not aborted.is_set() else steps(self)  # it does not end by itself

    async def given_up() -> None:
        request = asyncio.create_task(engine.generate(PROMPT, n=8, seed=0, max_tokens=100))
        assert await asyncio.to_thread(began.wait, 30)
        request.cancel()
        assert await asyncio.to_thread(aborted.wait, 30)

    abort = Apart._abort
    with monkeypatch.context() as patch:
        patch.setattr(Apart, "_step", step)
        patch.setattr(Apart, "_abort", lambda self, request: (abort(self, request), aborted.set()))
        driver.run(given_up())
    assert len(ask(engine, driver).token_ids) <= 12
    assert not engine._waiting


def test_settings_reach_the_other_rank_as_they_are(
    engine: RankEngine, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    add, seen = Apart._add, []

    def record(self: Apart, request_id: str, token_ids: list[int], n: int, sampling: dict[str, Any]) -> None:
        seen.append((token_ids, sampling.pop("logit_bias")))
        add(self, request_id, token_ids, n, sampling)

    monkeypatch.setattr(Apart, "_add", record)
    driver.run(engine.generate(list(np.array(PROMPT)), seed=0, max_tokens=2, logit_bias={7: -1.5}))
    assert seen == [(PROMPT, {7: -1.5})]


def test_a_setting_that_cannot_be_sent_is_refused(engine: RankEngine, driver: Driver) -> None:
    with pytest.raises(RolloutError, match=r"sampling\.stop"):
        ask(engine, driver, stop=object())


def test_an_answer_that_cannot_be_sent_fails_its_request(
    engine: RankEngine, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def generate(*_: Any, **__: Any) -> list[Completion]:
        return [Completion([1], [2], [torch.tensor(0.0)], "", "stop")]  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(Apart, "generate", generate)
    with pytest.raises(TypeError):
        ask(engine, driver)


def test_an_engine_that_could_not_be_loaded_is_loaded_again(
    engine: RankEngine, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(self: Apart) -> None:
        raise ModelLoadError("no such model")

    monkeypatch.setattr(engine, "_loaded", False)
    with monkeypatch.context() as patch:
        patch.setattr(Apart, "load", fail)
        for _ in range(2):
            with pytest.raises(ModelLoadError, match="no such model"):
                driver.run(engine.load())
    ask(engine, driver)


@pytest.mark.parametrize("method", ["load", "sleep", "wake_up"])
def test_a_rank_whose_main_thread_hangs_is_not_waited_for(
    engine: RankEngine, driver: Driver, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    async def hang(self: Apart) -> None:
        await asyncio.sleep(3600)

    monkeypatch.setattr(Apart, method, hang)
    monkeypatch.setattr(engine, "limit", 0.1)
    monkeypatch.setattr(engine, "_loaded", method != "load")
    with pytest.raises(RankError, match="rank 1"):
        driver.run(getattr(engine, method)())


def test_a_folder_that_is_too_long_for_a_socket_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (long := tmp_path / ("a" * 100)).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    answers = EngineAnswers(apart())
    with refuses(None) as refused:
        asyncio.run(answers.listen())
    assert "TMPDIR" in str(refused.value.fix)
    asyncio.run(answers.close())
    assert not any(long.iterdir())


@pytest.mark.parametrize(("hook", "argument"), [("on_exception", ValueError()), ("teardown", "fit")])
def test_an_engine_that_does_not_end_leaves_the_trained_model_or_the_error_of_the_run(
    hook: str, argument: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    follower: Any = EngineFollower(lambda _: apart())
    ranks: Any = SimpleNamespace(serve=None, beat=lambda: None, exchange=lambda *_, **__: None)
    follower.listen(apart(), ranks, tiny_model(), CPU)

    async def fail(self: Apart) -> None:
        raise RuntimeError("it hangs on")

    monkeypatch.setattr(Apart, "shutdown", fail)
    getattr(follower, hook)(None, None, argument)
    assert "the engine did not end as it should: RuntimeError: it hangs on" in caplog.text


def test_a_step_that_fails_there_ends_its_requests_here_and_the_engine_goes_on(
    engine: RankEngine, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Apart) -> Any:
        raise MemoryError("no room")

    before = ask(engine, driver)
    with monkeypatch.context() as patch:
        patch.setattr(Apart, "_step", fail)
        with pytest.raises(RolloutError, match="no room"):
            ask(engine, driver)
    assert ask(engine, driver) == before
