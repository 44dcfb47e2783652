"""The engine of another rank, which is a thread here: it promises what every engine does."""

import asyncio
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, ClassVar

import pytest
import torch
from support.engine_promises import PROMPT, EnginePromises, ask
from support.tiny_model import tiny_model
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from trinity_lightning.common.ranks import Ranks
from trinity_lightning.config.engines import Capabilities, EngineConfig
from trinity_lightning.errors import ConfigError, RolloutError
from trinity_lightning.explorer.driver import Driver
from trinity_lightning.explorer.models.rank_engine import RankEngine
from trinity_lightning.explorer.models.transformers_engine import TransformersEngine
from trinity_lightning.explorer.rank_engines import ENGINES, RankWeights, ServedEngine
from trinity_lightning.trainer.ddp import join

CONTEXT = 128
CPU = torch.device("cpu")
CAN = Capabilities()


class Apart(TransformersEngine):
    """With weights of its own, which have to be sent."""

    capabilities = CAN


def met(rank: int, port: int) -> Any:
    return join(("127.0.0.1", port), Ranks(rank, 2), CPU, timedelta(minutes=1))


def follow(port: int) -> None:
    """What a rank does that waits for rank 0."""
    ranks = met(1, port)
    engine = Apart("tiny", max_model_len=CONTEXT, max_num_seqs=8)
    engine.bind(model := tiny_model())
    served = ServedEngine(engine, ranks, model, CPU)
    ranks.exchange(None, patient=True, at="the end")
    served.close()


@pytest.fixture(scope="module")
def connected() -> Iterator[tuple[RankEngine, Driver]]:
    store: Any = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, multi_tenant=True)
    other = threading.Thread(target=follow, args=(store.port,))
    other.start()
    ranks = met(0, store.port)
    engine = RankEngine(1, "tiny", EngineConfig(max_model_len=CONTEXT), CAN)
    engine.path, engine.weights = ranks.exchange(None, at=ENGINES)[1], RankWeights([engine], ranks)
    driver = Driver([engine])
    driver.run(engine.load())
    yield engine, driver
    driver.run(engine.shutdown())
    driver.close()
    ranks.exchange(None, at="the end")
    other.join()


@pytest.fixture
def engine(connected: tuple[RankEngine, Driver]) -> RankEngine:
    return connected[0]


@pytest.fixture
def driver(connected: tuple[RankEngine, Driver]) -> Driver:
    return connected[1]


class TestPromises(EnginePromises):
    misspelt_error = ConfigError
    may_go_on: ClassVar[dict[str, Any]] = {}  # it has no ignore_eos


def test_a_request_that_is_given_up_ends_in_the_other_rank(engine: RankEngine, driver: Driver) -> None:
    async def given_up() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.generate(PROMPT, n=8, seed=0, max_tokens=100), 0.05)

    for _ in range(3):
        driver.run(given_up())
    assert len(ask(engine, driver).token_ids) <= 12
    assert not engine._waiting


def test_a_step_that_fails_there_ends_its_requests_here_and_the_engine_goes_on(
    engine: RankEngine, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Apart) -> Any:
        raise MemoryError("no room")

    before = ask(engine, driver)
    with monkeypatch.context() as patch:
        patch.setattr(Apart, "_step", fail)
        with pytest.raises(RolloutError, match="the engine failed while generating: MemoryError: no room"):
            ask(engine, driver)
    assert ask(engine, driver) == before
