"""What engines of a run may use of the machine, and where their weights go."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from trinity_lightning.common.config import EngineConfig
from trinity_lightning.common.errors import WeightSyncError
from trinity_lightning.common.weight_folder import WeightFolder
from trinity_lightning.common.weights import WeightStream
from trinity_lightning.engines import server_cores


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
    folder, first, second = WeightFolder(tmp_path / "weights"), stream(1.0), stream(2.0)
    place = folder.write(first, torch.bfloat16)
    assert folder.write(first, torch.bfloat16) == place
    weights = load_file(place / "model.safetensors")
    assert weights.keys() == {"embed.weight", "lm_head.weight"}
    assert all(tensor.dtype == torch.bfloat16 and (tensor == 1).all() for tensor in weights.values())
    newer = folder.write(second, torch.float32)
    assert newer != place
    assert [each.name for each in (tmp_path / "weights").iterdir()] == [newer.name]
    folder.close()
    assert list((tmp_path / "weights").iterdir()) == []


def test_a_place_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(WeightSyncError, match=r"file.*synchronizer\.folder"):
        WeightFolder(tmp_path / "file" / "weights").write(stream(1.0), torch.float32)
