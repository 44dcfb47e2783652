"""vLLM's sleep beside a trainer on a GPU: when its weights are dropped, and that no request is answered without them.

vLLM's own engine is a stand-in that has wrong weights after a sleep of level 2: the CPU build does not sleep.
"""

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from support.fake_model import FakeModel
from support.rollouts import training_rollouts

from trinity_lightning.config.engines import EngineConfig, EngineSleep
from trinity_lightning.config.explorer import ExplorerConfig
from trinity_lightning.errors import ConfigError, RolloutError, WeightSyncError
from trinity_lightning.explorer.explorer import Explorer
from trinity_lightning.explorer.models import vllm_engine
from trinity_lightning.explorer.models.vllm_engine import VLLMEngine, args_of_gpu
from trinity_lightning.explorer.rollouts import PendingSteps, TrainingRollouts
from trinity_lightning.explorer.task_source import TaskSource
from trinity_lightning.explorer.tasks.taskset import Taskset
from trinity_lightning.sync.stream import WeightStream

GIB = 1 << 30
SHAPES = {"w": (1,)}


@dataclass
class LLMEngine:
    """Stands in for vLLM's engine on a GPU."""

    calls: list[str] = field(default_factory=list)
    weights: float | None = 0.0  # None: given up
    is_multimodal_model = False
    engine_core: ClassVar[Any] = SimpleNamespace(
        engine_core=SimpleNamespace(scheduler=SimpleNamespace(running=[]))  # no request is under way
    )

    @property
    def model_config(self) -> Any:
        return SimpleNamespace(is_multimodal_model=self.is_multimodal_model)

    @property
    def vllm_config(self) -> Any:
        return SimpleNamespace(device_config=SimpleNamespace(device_type="cuda"))

    def sleep(self, level: int, mode: str) -> None:
        assert mode == "keep", "requests under way are not lost"
        self.calls.append(f"sleep {level}")
        self.weights = None if level == 2 else self.weights

    def wake_up(self) -> None:
        self.calls.append("wake up")

    def collective_rpc(self, method: str, kwargs: dict[str, Any]) -> None:
        self.calls.append(method)
        [(_, tensor)] = kwargs["weights_iterator"]
        self.weights = float(tensor)

    def reset_prefix_cache(self, **_: Any) -> bool:
        return True

    def has_unfinished_requests(self) -> bool:
        return False


def loaded(monkeypatch: pytest.MonkeyPatch, built: LLMEngine, **config: Any) -> VLLMEngine:
    """An engine over the stand-in."""
    monkeypatch.setattr(vllm_engine, "require_vllm", lambda: None)
    engine = VLLMEngine("tiny", EngineConfig(sleep=EngineSleep.always, **config))
    engine._engine, engine._loaded, engine._packed = built, True, None
    engine._weight_shapes, engine._tokenizer, engine._dtype = dict(SHAPES), None, torch.float32
    return engine


@pytest.mark.parametrize(
    ("config", "multimodal", "level"),
    [
        ({}, False, 2),
        ({}, True, 1),
        ({"args": {"enable_lora": True}}, False, 1),
        ({"args": {"quantization": "fp8"}}, False, 1),
        ({"args": {"speculative_config": {"method": "eagle"}}}, False, 1),
    ],
    ids=["all weights are sent", "parts for images", "adapters", "quantised", "a draft model"],
)
def test_weights_are_dropped_only_if_a_sync_fills_all_of_them(
    config: dict[str, Any], multimodal: bool, level: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_engine, "check_vllm_args", lambda *_, **__: None)  # some are refused without a GPU
    built = LLMEngine()
    built.is_multimodal_model = multimodal
    engine = loaded(monkeypatch, built, **config)
    gave_up = asyncio.run(engine.sleep_until_sync())
    assert (built.calls, gave_up) == ([f"sleep {level}"], level == 2)


def test_an_engine_without_its_weights_answers_nothing_until_it_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = loaded(monkeypatch, LLMEngine())

    async def turns() -> None:
        assert await engine.sleep_until_sync()
        assert await engine.sleep_until_sync()  # it sleeps already
        await engine.wake_up()
        with pytest.raises(RolloutError, match="none were sent since: sync_weights first"):
            await engine.logprobs([1, 2, 3])
        await engine.sync_weights(WeightStream.of([("w", torch.ones(1))]), version=1)
        assert not engine._lacks_weights
        await engine.sleep()
        await engine.wake_up()
        assert not engine._lacks_weights

    asyncio.run(turns())
    assert engine._engine.calls == ["sleep 2", "wake up", "reload_weights", "sleep 1", "wake up"]


def test_a_cache_of_old_weights_that_stays_is_a_failed_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(**_: Any) -> bool:
        raise RuntimeError("Failed to reset KV cache even when all the running requests are preempted")

    engine = loaded(monkeypatch, LLMEngine())
    monkeypatch.setattr(engine._engine, "reset_prefix_cache", fails)
    with pytest.raises(WeightSyncError, match=r"Failed to reset KV cache .*build another engine"):
        asyncio.run(engine.sync_weights(WeightStream.of([("w", torch.ones(1))]), version=1))


def test_without_sleep_mode_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = loaded(monkeypatch, LLMEngine())
    engine._sleeps = False
    assert not asyncio.run(engine.sleep_until_sync())
    assert engine._engine.calls == []
    assert not asyncio.run(FakeModel().sleep_until_sync())  # an engine that knows `sleep` alone


# -- within a run ------------------------------------------------------------------------------------------------------


class Trained:
    """Rollouts of a run whose trainer changes its only weight, or does not, in every step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, interval: int, **explorer: Any) -> None:
        self.weight, self.step, self.built = 0.0, 0, LLMEngine()
        engine = loaded(monkeypatch, self.built)
        config = ExplorerConfig(batch_size=1, repeat_times=1, sync_interval=interval, **explorer)
        source = TaskSource(Taskset([{"prompt": "1"}] * 9, name="sums"), "simple", "contains_digits")
        self.explorer = Explorer(config, [engine], source)
        self.rollouts: TrainingRollouts = training_rollouts(self.explorer, PendingSteps())
        self.explorer.engines.source = lambda: WeightStream.of([("w", torch.full((1,), self.weight))])
        sync: Any = self.rollouts.sync
        sync.policy = SimpleNamespace(policy=None)
        self.probed: list[int] = []  # steps whose rollouts' sync is probed for the sake of the sleep
        sync._synchronizer = SimpleNamespace(sync=self._sync, drill_scale=None, probes_next=False)

    def _sync(self) -> dict[str, float]:
        sync: Any = self.rollouts.sync
        if sync._synchronizer.probes_next:
            sync._synchronizer.probes_next = False
            self.probed.append(self.explorer.step + 1)
        self.rollouts.driver.run(self.explorer.sync_weight(sync._sending))
        return {}

    def roll_out(self) -> float | None:
        """Give the engine its turn, and return the weights with which it would roll out."""
        self.rollouts._engines_turn()
        self.rollouts.sync.sync_if_due(self.step)
        self.explorer.step += 1
        return self.built.weights

    def train(self, change: float) -> None:
        self.rollouts.trainers_turn()
        self.weight += change
        self.step += change != 0


@pytest.mark.parametrize(
    ("interval", "levels"),
    [(1, [2, 2, 2, 2]), (2, [1, 2, 1, 2])],
)
def test_engines_have_the_right_weights_whatever_was_trained(
    interval: int, levels: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after the second step, which trains nothing."""
    run, seen = Trained(monkeypatch, interval), []
    try:
        for change in (1.0, 0.0, 1.0, 1.0):
            seen.append(run.roll_out())
            run.train(change)
        seen.append(run.roll_out())
    finally:
        run.rollouts.driver.close()
    assert seen == ([0.0, 1.0, 1.0, 2.0, 3.0] if interval == 1 else [0.0, 0.0, 1.0, 1.0, 3.0])
    assert [call for call in run.built.calls if "sleep" in call] == [f"sleep {level}" for level in levels]
    assert not run.explorer.engines.lack_weights
    assert run.probed == [interval + 1]  # a probe proves once that a sync fills all weights


@pytest.mark.parametrize(("in_flight", "level"), [("continue", 1), ("wait", 2)])
def test_engines_keep_their_weights_if_rollouts_under_way_may_ask_for_more_before_the_sync(
    in_flight: str, level: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Trained(monkeypatch, 1, max_staleness=1, in_flight=in_flight)
    try:
        run.roll_out()
        run.train(1.0)
        assert run.roll_out() == 1.0
    finally:
        run.rollouts.driver.close()
    assert run.built.calls[1:3] == [f"sleep {level}", "wake up"]


# -- an engine beside a policy in plain Python -------------------------------------------------------------------------


@dataclass
class Args:
    """Stands in for vLLM's EngineArgs."""

    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.92


@pytest.mark.parametrize(
    ("free", "arguments", "utilization"),
    [
        (79, {}, 0.92),
        (20, {}, None),
        (20, {"gpu_memory_utilization": 0.2}, 0.2),
        (20, {"gpu_memory_utilization": 0.3}, None),
        (20, {"kv_cache_memory_bytes": GIB}, 0.2375),
    ],
)
def test_vllm_is_not_asked_for_more_of_a_gpu_than_is_free(
    free: int, arguments: dict[str, Any], utilization: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    if utilization is None:
        with pytest.raises(ConfigError, match=r"20\.0 GiB are free: a policy in this process") as refused:
            args_of_gpu(Args, arguments)
        assert refused.value.key == "engine.kv_cache_gb"
        return
    assert args_of_gpu(Args, arguments).gpu_memory_utilization == utilization
