"""The settings that a run would take here, told by the code that decides."""

import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from trinity_lightning.config.model import WeightDtype
from trinity_lightning.monitor.machine import CPULoad
from trinity_lightning.plan import here
from trinity_lightning.plan.here import tell_companions, tell_gpu, tell_login, tell_run
from trinity_lightning.plan.trial import Tell

Findings = dict[tuple[str, str], dict[str, Any]]


def of_a_run(told: tuple[Tell, Any], *overrides: str) -> Findings:
    tell, read = told
    load = CPULoad()
    tell_run(tell, overrides, load)
    return read()


SMALL = ("+recipe=grpo", "model=tiny", "trainer=cpu", "reward=contains_digits", "logger=csv")


@pytest.mark.slow
def test_the_settings_of_a_run_without_vllm(told: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    findings = of_a_run(told, *SMALL, "engine=transformers", "model.dtype=fp32", "optimizer.lr=3e-4")
    texts = {name: finding["text"] for (_, name), finding in findings.items()}
    assert texts["engine"] == "transformers, context 256: as given"
    assert texts["dtype"] == "trainer fp32, engine fp32: as given"
    assert texts["attention"] == "trainer sdpa, FlexAttention where rows share a prefix"
    assert texts["weight sync"] == "none: the engine generates with the trainer's own weights"
    assert texts["optimizer"] == "adamw, lr 0.0003, schedule constant"
    assert texts["micro-batches"] == "at most 512 computed tokens"
    assert texts["threads"].endswith("OMP_NUM_THREADS says so")
    assert "GiB free" in texts["memory"]
    assert "a checkpoint takes about" in texts["disk"]
    assert findings["run", "threads"]["level"] == (
        "note" if torch.get_num_threads() < len(os.sched_getaffinity(0)) else "good"
    )


@pytest.mark.slow
def test_the_machine_decides_on_the_dtype_and_on_room_for_checkpoints(
    told: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = {WeightDtype.bf16: 0.001, WeightDtype.fp32: 0.003}, 2
    monkeypatch.setattr("trinity_lightning.common.hardware.timed_product", lambda: times)
    monkeypatch.setattr(here, "timed_product", lambda: times)
    monkeypatch.setattr(here, "CHECKPOINT_BYTES", 1 << 40)
    findings = of_a_run(told, "+recipe=grpo", "trainer=cpu", "engine=transformers", "logger=csv")
    expected = "trainer bf16, engine bf16: a product takes bf16 1.00 ms and fp32 3.00 ms with 2 threads"
    assert findings["run", "dtype"]["text"] == expected
    assert findings["run", "disk"]["level"] == "note"
    assert findings["run", "disk"]["fix"] == "give output_root=FOLDER on a larger disk"


@pytest.mark.slow
def test_a_run_on_a_gpu(told: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in: the plan asks for sizes and names alone."""
    answers: dict[str, Any] = {
        "is_available": True,
        "device_count": 2,
        "mem_get_info": (78 << 30, 79 << 30),
        "get_device_capability": (9, 0),
        "get_device_name": "NVIDIA H100 80GB HBM3",
        "is_bf16_supported": True,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    findings = of_a_run(told, "+recipe=grpo", "logger=csv")
    assert ("run", "refused") not in findings, findings
    texts = {name: finding["text"] for (_, name), finding in findings.items()}
    assert texts["devices"] == "1 of 2 GPUs for the trainer: NVIDIA H100 80GB HBM3"
    assert texts["dtype"] == "trainer bf16, engine bf16: 16 bits on a GPU, fp16 if it has no bfloat16"
    assert texts["attention"].startswith("trainer sdpa (flash)")
    assert texts["weight sync"] == "within this process"
    assert texts["micro-batches"].endswith("by the memory plan")
    assert any(name not in ("disk", "memory") and "GiB" in text for name, text in texts.items())  # rows of the plan
    assert "threads" not in texts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("+recipe=grpo", "optimizer.lr=-1"), "optimizer.lr"),
        (("+recipe=grop",), "Did you mean 'grpo'?"),
        (("+recipe=grpo", "steps="), "steps"),
    ],
)
def test_a_refused_run_is_one_sentence(told: Any, overrides: tuple[str, ...], message: str) -> None:
    [finding] = of_a_run(told, *overrides).values()
    assert (finding["name"], finding["level"]) == ("refused", "bad")
    assert message in finding["text"]


@pytest.mark.slow
def test_without_vllm_its_run_is_refused_with_the_command_that_gets_it(
    told: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = here.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *a: None if name == "vllm" else find_spec(name, *a))
    [finding] = of_a_run(told, *SMALL).values()
    assert "vLLM is not installed" in finding["text"]
    assert "pip install 'trinity-lightning[cpu]'" in finding["text"]


def test_a_companion_of_another_torch(told: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tell, read = told
    monkeypatch.setattr(here, "COMPANIONS", ("companion_of_another_torch", "companion_that_is_missing"))
    (tmp_path / "companion_of_another_torch.py").write_text("raise RuntimeError('operator nms does not exist')")
    monkeypatch.syspath_prepend(tmp_path)
    tell_companions(tell)
    [finding] = read().values()
    assert "operator nms does not exist" in finding["text"]
    assert finding["fix"].startswith("pip uninstall companion_of_another_torch")


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees a GPU")
def test_a_driver_that_torch_does_not_use(told: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tell, read = told
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(here, "has_driver", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    tell_gpu(tell)
    assert "torch is a build for CPUs" in read()["traps", "GPU"]["text"]
    monkeypatch.setattr(torch.version, "cuda", "13.0")

    def too_old() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old")

    monkeypatch.setattr(torch.cuda, "init", too_old)
    tell_gpu(tell)
    assert "driver on your system is too old" in read()["traps", "GPU"]["text"]


@pytest.mark.parametrize(("login", "count"), [(True, 0), (False, 1)])
def test_a_login_of_wandb(told: Any, monkeypatch: pytest.MonkeyPatch, login: bool, count: int) -> None:
    tell, read = told
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    wandb = types.SimpleNamespace(login=lambda **_: login, Error=RuntimeError)
    monkeypatch.setitem(sys.modules, "wandb", wandb)  # pyright: ignore[reportArgumentType]
    tell_login(tell)
    assert len(read()) == count
