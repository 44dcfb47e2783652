"""What `auto` stands for: the faster dtype here, what a checkpoint was trained in, what the trainer computes in."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose as hydra_compose
from hydra import initialize_config_dir

import trinity_lightning.common.product_speed as product_speed
from trinity_lightning.common import compose
from trinity_lightning.common.config import EngineDtype, WeightDtype, config_dir
from trinity_lightning.common.errors import ConfigError
from trinity_lightning.dtypes import settle_dtypes
from trinity_lightning.monitor.environment import describe_environment
from trinity_lightning.trainer.policy import PolicyModule

AUTO, BF16, FP32 = WeightDtype.auto, WeightDtype.bf16, WeightDtype.fp32


def settled(*overrides: str, checkpoint: Path | None = None) -> tuple[str, str]:
    """`model.dtype` and `engine.dtype` of the recipe grpo, once settled."""
    compose.register()
    with initialize_config_dir(str(config_dir("conf")), version_base="1.3"):
        config = hydra_compose("train", ["output_dir=x", "ckpt_path=null", *overrides])
    assert config.model.dtype is AUTO or any("model.dtype" in each for each in overrides)
    settle_dtypes(config, checkpoint)
    return config.model.dtype.value, config.engine.dtype.value


@pytest.fixture
def faster(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes one dtype the faster."""

    def make(dtype: WeightDtype) -> None:
        monkeypatch.setattr(product_speed, "product_seconds", lambda: {BF16: 1.0, FP32: 2.0 if dtype is BF16 else 0.5})
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    return make


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_auto_takes_the_faster_dtype_and_the_engine_follows(dtype: WeightDtype, faster: Any) -> None:
    faster(dtype)
    assert settled() == (dtype.value, dtype.value)
    assert settled("engine.dtype=fp32") == (dtype.value, "fp32")


def test_a_gpu_computes_in_bfloat16_unless_it_is_not_used(faster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    faster(FP32)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert settled() == ("bf16", "bf16")
    assert settled("trainer=cpu") == ("fp32", "fp32")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("model.dtype=fp32",), ("fp32", "fp32")),
        (("model.dtype=fp32", "+trainer.precision=bf16-mixed"), ("fp32", "bf16")),
        (("model.dtype=fp32", "+trainer.precision=bf16-true"), ("bf16", "bf16")),
        (("model.dtype=fp32", "+trainer.precision=bf16-mixed", "engine=transformers"), ("fp32", "auto")),
    ],
)
def test_the_engine_computes_in_what_the_trainer_computes_in(
    overrides: tuple[str, ...], expected: tuple[str, str], faster: Any
) -> None:
    faster(BF16)
    assert settled(*overrides) == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_resumed_run_keeps_the_dtype_it_was_trained_in(dtype: torch.dtype, faster: Any, tmp_path: Path) -> None:
    faster(FP32 if dtype == torch.bfloat16 else BF16)
    processed = {"epoch_progress": {"current": {"processed": 3}}}
    weights = {"model.norm": torch.ones(2), "model.lm_head": torch.ones(2, dtype=dtype)}
    torch.save({"loops": {"fit_loop": processed}, "state_dict": weights}, tmp_path / "it.ckpt")
    expected = "bf16" if dtype == torch.bfloat16 else "fp32"
    assert settled(checkpoint=tmp_path / "it.ckpt") == (expected, expected)


def test_the_product_is_timed_within_a_second_and_recorded() -> None:
    product_speed.product_seconds.cache_clear()
    seconds = product_speed.product_seconds()
    assert seconds.keys() == {BF16, FP32}
    assert all(0 < value < 1 for value in seconds.values())
    assert product_speed.faster_dtype("cpu") is min(seconds, key=lambda dtype: seconds[dtype])
    told = describe_environment()["matrix product"]
    assert all(f"{dtype.value} {1000 * value:.2f} ms" in told for dtype, value in seconds.items())


def test_a_policy_of_a_script_is_given_its_dtype() -> None:
    with pytest.raises(ConfigError, match="give bf16, fp32"):
        PolicyModule("tiny", dtype="auto")
    assert EngineDtype(product_speed.faster_dtype("cpu").value) is not EngineDtype.auto
