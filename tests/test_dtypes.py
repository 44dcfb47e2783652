"""The dtype that `auto` stands for: the faster one here, the checkpoint's, or the trainer's."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig
from support.compose import composed
from support.errors import refuses

from trinity_lightning.build import build
from trinity_lightning.common import hardware
from trinity_lightning.config.engines import EngineDtype
from trinity_lightning.config.model import WeightDtype
from trinity_lightning.engines import settle_dtypes
from trinity_lightning.errors import ConfigError
from trinity_lightning.monitor.machine import describe_environment
from trinity_lightning.resume import check_resumed_dtype
from trinity_lightning.trainer.policy import PolicyModule

AUTO, BF16, FP32 = WeightDtype.auto, WeightDtype.bf16, WeightDtype.fp32


def settled_config(*overrides: str, checkpoint: Path | None = None) -> DictConfig:
    """The configuration of a run with its dtypes settled."""
    config = composed("output_dir=x", "ckpt_path=null", *overrides)
    assert config.model.dtype is AUTO or any("model.dtype" in override for override in overrides)
    settle_dtypes(config, checkpoint)
    return config


def settled(*overrides: str, checkpoint: Path | None = None) -> tuple[str, str]:
    """`model.dtype` and `engine.dtype`, once settled."""
    config = settled_config(*overrides, checkpoint=checkpoint)
    return config.model.dtype.value, config.engine.dtype.value


@pytest.fixture
def faster(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes one dtype the faster."""

    def make(dtype: WeightDtype) -> None:
        timed = {BF16: 1.0, FP32: 2.0 if dtype is BF16 else 0.5}, 1
        monkeypatch.setattr(hardware, "timed_product", lambda: timed)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    return make


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_auto_takes_the_faster_dtype_and_the_engine_follows(dtype: WeightDtype, faster: Any) -> None:
    faster(dtype)
    assert settled() == (dtype.value, dtype.value)
    assert settled("engine.dtype=fp32") == (dtype.value, "fp32")


@pytest.mark.parametrize(("has_bfloat16", "dtype"), [(True, "bf16"), (False, "fp16")])
def test_a_gpu_computes_in_bfloat16_if_it_has_it_unless_it_is_not_used(
    has_bfloat16: bool, dtype: str, faster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    faster(FP32)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_bfloat16)
    assert settled() == (dtype, dtype)
    assert settled("trainer=cpu") == ("fp32", "fp32")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("model.dtype=fp32",), ("fp32", "fp32")),
        (("model.dtype=fp16",), ("fp16", "fp16")),
        (("model.dtype=fp32", "+trainer.precision=bf16-mixed"), ("fp32", "bf16")),
        (("model.dtype=fp32", "+trainer.precision=bf16-mixed", "engine=transformers"), ("fp32", "auto")),
    ],
)
def test_the_engine_computes_in_what_the_trainer_computes_in(
    overrides: tuple[str, ...], expected: tuple[str, str], faster: Any
) -> None:
    faster(BF16)
    assert settled(*overrides) == expected


def save_checkpoint(path: Path, dtype: torch.dtype) -> Path:
    """Write a checkpoint of a run whose weights have `dtype`, as far as it is looked into."""
    processed = {"epoch_progress": {"current": {"processed": 3}}}
    weights = {"model.norm": torch.ones(2), "model.lm_head": torch.ones(2, dtype=dtype)}
    settings = {"optimizer": {"name": "adamw"}}
    torch.save({"loops": {"fit_loop": processed}, "state_dict": weights, "hyper_parameters": settings}, path)
    return path


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_resumed_run_keeps_the_dtype_it_was_trained_in(dtype: torch.dtype, faster: Any, tmp_path: Path) -> None:
    faster(FP32 if dtype == torch.bfloat16 else BF16)
    expected = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]
    assert settled(checkpoint=save_checkpoint(tmp_path / "it.ckpt", dtype)) == (expected, expected)


@pytest.mark.parametrize(
    ("dtype", "overrides", "refused"),
    [
        (torch.bfloat16, ("model.dtype=fp32",), True),
        (torch.float32, ("model.dtype=bf16",), True),
        (torch.float16, ("model.dtype=bf16",), True),
        (torch.bfloat16, ("model.dtype=fp16",), True),
        (torch.float16, ("model.dtype=fp16",), False),
        (torch.float32, ("model.dtype=fp32", "+trainer.precision=bf16-mixed"), False),
        (torch.bfloat16, (), False),
    ],
)
def test_another_dtype_than_the_checkpoints_is_refused(
    dtype: torch.dtype, overrides: tuple[str, ...], refused: bool, faster: Any, tmp_path: Path
) -> None:
    faster(FP32)
    checkpoint = save_checkpoint(tmp_path / "it.ckpt", dtype)
    config = settled_config(*overrides, checkpoint=checkpoint)
    with refuses("model.dtype") if refused else nullcontext():
        check_resumed_dtype(config, checkpoint)


def test_a_run_refuses_another_dtype_before_a_model_is_loaded(
    faster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoint = save_checkpoint(tmp_path / "it.ckpt", torch.bfloat16)
    config = composed("model=tiny", "model.dtype=fp32", "output_dir=x", f"ckpt_path={checkpoint}")
    with refuses("model.dtype"):
        build(config)


def test_the_product_is_timed_within_a_second_and_recorded_with_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    hardware.timed_product.cache_clear()
    seconds, threads = hardware.timed_product()
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads + 1)  # as later in a run
    assert seconds.keys() == {BF16, FP32}
    assert all(0 < value < 1 for value in seconds.values())
    assert hardware.faster_dtype("cpu") is min(seconds, key=lambda dtype: seconds[dtype])
    told = describe_environment()["matrix product"]
    assert all(f"{dtype.value} {1000 * value:.2f} ms" in told for dtype, value in seconds.items())
    assert told.endswith(f", {threads} threads)")


def test_a_policy_of_a_script_is_given_its_dtype() -> None:
    with pytest.raises(ConfigError, match="give bf16, fp16, fp32"):
        PolicyModule("tiny", dtype="auto")
    assert EngineDtype(hardware.faster_dtype("cpu").value) is not EngineDtype.auto
