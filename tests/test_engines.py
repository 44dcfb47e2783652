"""The share of the machine that engines of a run may use: memory, cores and threads."""

import asyncio
import os
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from support.compose import composed
from support.errors import refuses
from support.tiny_model import tiny_model

from trinity_lightning import engines
from trinity_lightning.build import explorer_callback
from trinity_lightning.common import hardware
from trinity_lightning.common.hardware import GIB
from trinity_lightning.common.thoughts import answer_part
from trinity_lightning.config.engines import EngineConfig
from trinity_lightning.config.explorer import ExplorerConfig
from trinity_lightning.config.model import ModelConfig
from trinity_lightning.config.run import TrainConfig, typed_config
from trinity_lightning.engines import check_room
from trinity_lightning.explorer.models.server import server_cores
from trinity_lightning.monitor.run_monitor import RunMonitor


@pytest.mark.parametrize("thoughts", [["[T]"], ["[T]", "[T]"], ["", "[/T]"], ["[T]", "x", "[/T]"], []])
def test_markers_of_thoughts_are_two_different_texts(thoughts: list[str]) -> None:
    with refuses("model.thoughts"):
        ModelConfig("tiny", thoughts=thoughts)


def test_every_engine_of_the_policy_knows_the_markers_of_its_thoughts(tmp_path: Path) -> None:
    chosen = ("model=tiny", "engine=transformers", "model.thoughts=['[T]','[/T]']")
    config = typed_config(composed("+recipe=grpo", *chosen))
    callback = explorer_callback(config, tmp_path, {}, RunMonitor(tmp_path, 1), offload=False)
    [engine] = callback.explorer.engines.models
    engine.bind(tiny_model())

    async def answers() -> list[str | None]:
        prompts = ("Sum?[T]\n", "Sum?<think>\n")
        return [answer_part((await engine.generate(prompt, seed=0, max_tokens=8))[0].text) for prompt in prompts]

    opened, other = asyncio.run(answers())
    assert opened is None
    assert other is not None


@pytest.mark.parametrize(
    ("engine", "refused"),
    [
        ({"max_model_len": 513}, "engine.max_model_len"),
        ({"max_model_len": 513, "args": {"hf_overrides": {"max_position_embeddings": 600}}}, None),
        ({"max_model_len": 513, "name": "transformers"}, None),
        ({"max_model_len": 513, "name": "vllm_server", "urls": ["http://node7:8000"]}, None),
        ({"max_model_len": 512, "name": "vllm_server", "gpus": [1, 2, 3]}, "engine.gpus"),  # 2 heads
        ({"max_model_len": 512, "kv_cache_gb": 1.0}, None),
        ({"max_model_len": 512, "kv_cache_gb": 5.0}, "engine.kv_cache_gb"),
        ({"max_model_len": 512, "kv_cache_gb": 2.0, "name": "vllm_server", "servers": 3}, "engine.kv_cache_gb"),
        ({"max_model_len": 512, "kv_cache_gb": 2.0, "per_rank": True}, None),
        ({"max_model_len": 512, "kv_cache_gb": 2.5, "per_rank": True}, "engine.kv_cache_gb"),
    ],
)
def test_what_vllm_has_no_room_for(
    engine: dict[str, Any], refused: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(hardware, "free_memory", lambda: 4 * GIB)
    run = TrainConfig(model=ModelConfig("tiny"), engine=EngineConfig(**engine), trainer={"devices": 2})
    with refuses(refused) if refused else nullcontext():
        check_room(run)


@pytest.mark.parametrize(
    ("settings", "key"),
    [({}, "max_model_len"), ({"gpus": [1, 2, 3]}, "gpus")],
)
def test_a_judge_that_vllm_has_no_room_for(settings: dict[str, Any], key: str) -> None:
    engine, judge = EngineConfig(name="transformers"), {"model": "tiny", "engine": settings}
    run = TrainConfig(model=ModelConfig("tiny"), engine=engine, auxiliary_models={"judge": judge})
    with refuses(f"auxiliary_models.judge.engine.{key}"):
        check_room(run)


def test_a_teacher_whose_context_is_the_policys_says_what_the_policys_has_to_be() -> None:
    settings = {
        "engine": EngineConfig(name="transformers", max_model_len=512),
        "auxiliary_models": {"teacher": {"model": "tiny"}},
    }
    run = TrainConfig(model=ModelConfig("tiny"), operators={"teacher_top_k": {}}, **settings)
    with refuses("auxiliary_models.teacher.engine.max_model_len") as refused:
        check_room(run)
    assert str(refused.value.fix).startswith("give engine.max_model_len=511")


@pytest.mark.parametrize(
    ("cores", "engine", "overlaps", "expected"),
    [
        ([0, 1], EngineConfig(), True, [[1]]),
        ([0, 1], EngineConfig(), False, [[0, 1]]),
        (list(range(8)), EngineConfig(), True, [[4, 5, 6, 7]]),
        (list(range(8)), EngineConfig(servers=2), True, [[4, 5], [6, 7]]),
        (list(range(8)), EngineConfig(cpu_cores=3), True, [[5, 6, 7]]),
        ([0, 1], EngineConfig(servers=3), True, [[0], [1], [0]]),  # more servers than cores: they share
    ],
)
def test_servers_and_trainer_share_the_cores(
    cores: list[int], engine: EngineConfig, overlaps: bool, expected: list[list[int]]
) -> None:
    assert server_cores(cores, engine, overlaps) == expected


@pytest.mark.parametrize(
    ("engine", "sync_offset", "expected"), [({}, 0, [0, 1, 2, 3]), ({}, 1, [2, 3]), ({"cpu_cores": 1}, 0, [3])]
)
def test_a_judges_server_has_the_cores_that_it_was_given(
    engine: dict[str, int], sync_offset: int, expected: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started: dict[str, Any] = {}
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr(engines, "VLLMServerEngine", lambda model, config, **settings: started.update(settings))
    config = TrainConfig(
        explorer=ExplorerConfig(sync_offset=sync_offset),
        auxiliary_models={"judge": {"model": "tiny", "engine": {**engine, "gpus": [1]}}},
    )
    engines.auxiliary_models_of(config, tmp_path)
    assert started == {"cores": expected, "gpus": [1], "log": tmp_path / "judge.log"}


@pytest.mark.parametrize(
    ("name", "judge", "sync_offset", "trainer", "left"),
    [
        ("vllm_server", None, 1, {}, [2, 7]),
        ("vllm_server", None, 1, {"num_devices": 2}, [1, 7]),  # which share them
        ("vllm_server", None, 1, {"node_rank": 1}, []),  # the servers are on another machine
        ("vllm_server", {"model": "tiny", "engine": {"cpu_cores": 3}}, 1, {}, [1, 7]),
        ("vllm_server", {"model": "some-model", "url": "http://node7/v1"}, 1, {}, [2, 7]),
        ("vllm_server", {"model": "tiny"}, 0, {}, []),
        ("vllm", None, 0, {}, []),
    ],
)
def test_the_trainer_has_the_threads_that_servers_leave_and_gives_them_back(
    name: str,
    judge: dict[str, Any] | None,
    sync_offset: int,
    trainer: dict[str, int],
    left: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: list[int] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    config = TrainConfig(
        engine=EngineConfig(name=name),
        explorer=ExplorerConfig(sync_offset=sync_offset),
        auxiliary_models={} if judge is None else {"judge": judge},
    )
    of_trainer: Any = SimpleNamespace(**{"num_devices": 1, "node_rank": 0} | trainer)
    for share in engines.thread_share(config):
        share.setup(of_trainer, L.LightningModule(), "fit")
        share.teardown(of_trainer, L.LightningModule(), "fit")
    assert threads == left
