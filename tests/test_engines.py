"""What engines of a run may use of the machine, and where their weights go."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from safetensors.torch import load_file

from trinity_lightning import engines
from trinity_lightning.common.weight_folder import WeightFolder
from trinity_lightning.common.weights import WeightStream
from trinity_lightning.config.engines import EngineConfig, EngineKind
from trinity_lightning.config.schema import ExplorerConfig, TrainConfig
from trinity_lightning.engines import server_cores
from trinity_lightning.errors import WeightSyncError


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


def stream(value: float) -> WeightStream:
    tied = torch.full((2, 3), value)
    return WeightStream.of([("embed.weight", tied), ("lm_head.weight", tied)])


def test_weights_are_written_once_for_all_engines_and_replace_the_last(tmp_path: Path) -> None:
    folder, first = WeightFolder(tmp_path / "weights"), stream(1.0)
    place = folder.write(first, torch.bfloat16)
    assert folder.write(first, torch.bfloat16) == place
    weights = load_file(place / "model.safetensors")
    assert weights.keys() == {"embed.weight", "lm_head.weight"}
    assert all(tensor.dtype == torch.bfloat16 and (tensor == 1).all() for tensor in weights.values())
    newer = [folder.write(stream(value), torch.float32) for value in (2.0, 3.0, 4.0)]
    assert not place.exists()
    assert [each.exists() for each in newer] == [False, True, True]  # one engine may be slow
    folder.close()
    assert list((tmp_path / "weights").iterdir()) == []


def test_engines_ask_for_weights_at_once_and_runs_share_a_place(tmp_path: Path) -> None:
    folders = [WeightFolder(tmp_path) for _ in range(2)]
    with ThreadPoolExecutor(8) as pool:
        for value in range(1, 20):
            sent = stream(float(value))
            asked = [pool.submit(folder.write, sent, torch.float32) for folder in folders for _ in range(4)]
            places = [each.result() for each in asked]
            assert len(set(places)) == 2
            assert all((load_file(place / "model.safetensors")["embed.weight"] == value).all() for place in places)


def test_a_place_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(WeightSyncError, match=r"file.*synchronizer\.folder"):
        WeightFolder(tmp_path / "file" / "weights").write(stream(1.0), torch.float32)


@pytest.mark.parametrize(
    ("engine", "sync_offset", "expected"), [({}, 0, [0, 1, 2, 3]), ({}, 1, [2, 3]), ({"cpu_cores": 1}, 0, [3])]
)
def test_a_judges_server_has_the_cores_that_it_was_given(
    engine: dict[str, int], sync_offset: int, expected: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started: dict[str, Any] = {}
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr(engines, "VLLMServerEngine", lambda model, config, **given: started.update(given))
    config = TrainConfig(
        explorer=ExplorerConfig(sync_offset=sync_offset),
        auxiliary_models={"judge": {"model": "tiny", "engine": {**engine, "gpus": [1]}}},
    )
    engines.auxiliary_models_of(config, tmp_path)
    assert started == {"cores": expected, "gpus": [1], "log": tmp_path / "judge.log"}


@pytest.mark.parametrize(
    ("kind", "judge", "sync_offset", "left"),
    [
        (EngineKind.vllm_server, None, 1, [2, 7]),
        (EngineKind.vllm_server, {"model": "tiny", "engine": {"cpu_cores": 3}}, 1, [1, 7]),
        (EngineKind.vllm_server, {"model": "some-model", "url": "http://node7/v1"}, 1, [2, 7]),
        (EngineKind.vllm_server, {"model": "tiny"}, 0, []),
        (EngineKind.vllm, None, 0, []),
    ],
)
def test_the_trainer_has_the_threads_that_servers_leave_and_gives_them_back(
    kind: EngineKind, judge: dict[str, Any] | None, sync_offset: int, left: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    config = TrainConfig(
        engine=EngineConfig(kind=kind),
        explorer=ExplorerConfig(sync_offset=sync_offset),
        auxiliary_models={} if judge is None else {"judge": judge},
    )
    share, parts = engines.ThreadShare(config), (L.Trainer.__new__(L.Trainer), L.LightningModule())
    share.setup(*parts, "fit")
    share.teardown(*parts, "fit")
    assert threads == left
