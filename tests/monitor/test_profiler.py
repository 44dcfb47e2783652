"""The profiler's callback in real fits of the tiny model."""

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hydra.utils
import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from support.errors import refuses
from support.policy import batch_of, fit, make_experiences, make_policy
from torch.autograd import _profiler_enabled as is_profiling  # pyright: ignore[reportPrivateImportUsage]

from trinity_lightning.common.optimizer_batch import OptimizerBatch
from trinity_lightning.config import hydra as compose
from trinity_lightning.config.registry import config_dir
from trinity_lightning.monitor.profiler import StepProfiler


@pytest.mark.slow
def test_one_step_is_profiled_as_configured(tmp_path: Path) -> None:
    compose.register()
    with initialize_config_dir(str(config_dir("conf")), version_base="1.3"):
        config = hydra_compose("train", [f"output_dir={tmp_path}", "ckpt_path=null", "callbacks=profiler"])
    assert "checkpoint" in config.callbacks
    profiler = hydra.utils.instantiate(config.callbacks.profiler)
    steps = [batch_of(make_experiences(), step=step) for step in (1, 2, 2, 3)]  # the second has two optimizer steps
    fit(make_policy(), steps, profiler, max_epochs=2)  # all of them twice
    assert sorted(file.name for file in (tmp_path / "profile").iterdir()) == ["step_2.json.gz", "step_2.txt"]
    events = json.loads(gzip.decompress((tmp_path / "profile" / "step_2.json.gz").read_bytes()))["traceEvents"]
    names = [event.get("name", "") for event in events]
    assert "aten::mm" in names
    assert any("Backward" in name for name in names)
    updates = [name for name in names if name.startswith("Optimizer.step")]
    assert len(updates) == 1
    assert "aten::mm" in (tmp_path / "profile" / "step_2.txt").read_text()


def test_a_run_that_ends_before_the_step_is_refused(tmp_path: Path) -> None:
    with refuses("callbacks.profiler.step"):
        fit(make_policy(), [batch_of(make_experiences())], StepProfiler(tmp_path / "profile", step=7))


@pytest.mark.parametrize(("done", "last", "warned"), [(0, 2, 0), (1, 3, 0), (0, -1, 0), (2, 3, 1)])
def test_a_step_that_a_resumed_run_has_behind_it_is_warned_of(
    done: int, last: int, warned: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer: Any = SimpleNamespace(current_epoch=done, max_epochs=last)
    profiler = StepProfiler(tmp_path, step=2)
    profiler.setup(trainer, make_policy(), "fit")
    profiler.on_train_start(trainer, make_policy())
    warning = "callbacks.profiler.step is 2, and this run goes on with step 3: nothing is profiled."
    assert [record.message for record in caplog.records] == [warning] * warned


def test_a_step_that_raises_ends_the_profile_and_leaves_nothing(tmp_path: Path) -> None:
    policy = make_policy()

    def fail(batch: OptimizerBatch, batch_idx: int) -> None:
        raise RuntimeError(f"profiled: {is_profiling()}")

    policy.training_step = fail  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="profiled: True"):
        fit(policy, [batch_of(make_experiences())], StepProfiler(tmp_path / "profile", step=1))
    assert not is_profiling()
    assert not (tmp_path / "profile").exists()


def test_rank_0_alone_profiles_for_the_others_would_write_the_same_files(tmp_path: Path) -> None:
    profiler = StepProfiler(tmp_path, step=1)
    trainer: Any = SimpleNamespace(is_global_zero=False)
    batch = batch_of(make_experiences())
    profiler.on_train_batch_start(trainer, make_policy(), batch, 0)
    assert not is_profiling()
    profiler.on_train_batch_end(trainer, make_policy(), None, batch, 0)
    assert list(tmp_path.iterdir()) == []


def test_steps_are_counted_from_one(tmp_path: Path) -> None:
    with refuses("callbacks.profiler.step"):
        StepProfiler(tmp_path, step=0)
