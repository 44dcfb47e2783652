"""A GPU that runs out of memory in a micro-batch: one sentence with the plan and the knobs, and a checkpoint."""

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from support.policy import Prepare, batch_of, fit, groups, make_policy

from trinity_lightning.common.hardware import GIB
from trinity_lightning.config.algorithm import KLConfig
from trinity_lightning.config.model import OptimizerConfig
from trinity_lightning.errors import DeviceMemoryError
from trinity_lightning.explorer.interruption import FILE, StopCheckpoint
from trinity_lightning.trainer.layout import Part
from trinity_lightning.trainer.out_of_memory import Expected, out_of_memory
from trinity_lightning.trainer.passes import Passes

CUDA = torch.device("cuda", 0)
TORCHS = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.11 GiB of which 0.30 GiB ..."
PLAN = {"policy": 1 * GIB, "activations and logits": 12 * GIB}
PARTS = [Part((0, 1, 2), 9000), Part((3, 4), 8000)]


@pytest.fixture
def full_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (GIB // 2, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 70 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 72 * GIB)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)


@pytest.mark.usefixtures("full_gpu")
def test_the_message_has_the_use_the_plan_and_the_knob() -> None:
    error = out_of_memory(torch.OutOfMemoryError(TORCHS), CUDA, PARTS, 16384, Expected(PLAN))
    assert str(error) == (
        "out of memory on cuda:0 in a micro-batch (the largest of 2 has 9,000 computed tokens): 2.50 GiB more were "
        "needed, 0.5 of 80.0 GiB are free, this process's tensors take 70.0 GiB, and 2.0 GiB lie free between them; "
        "the memory plan expected 13.0 GiB while training (policy 1.0, activations and logits 12.0). Go on from the "
        "checkpoint with algorithm.max_tokens_per_micro_batch=4500 or model.gradient_checkpointing=true."
    )


FEWER, CHECKPOINTING = "algorithm.max_tokens_per_micro_batch=", "model.gradient_checkpointing=true"


@pytest.mark.usefixtures("full_gpu")
@pytest.mark.parametrize(
    ("parts", "settings", "expected", "knobs", "others"),
    [
        (PARTS, {"checkpointing": True}, Expected(), [f"{FEWER}4500."], [CHECKPOINTING, "memory plan", "sleep"]),
        (PARTS, {}, Expected(PLAN, may_sleep=True), [FEWER, CHECKPOINTING, "engine.sleep=always"], []),
        ([Part((0,), 9000)], {}, Expected(), [CHECKPOINTING, "a lower engine.max_model_len"], [FEWER]),
        ([Part((0, 1), 9000)], {"rows_of_a_unit": 2}, Expected(), ["a lower engine.max_model_len"], [FEWER]),
        ([], {}, Expected(), ["before the step's first update", f"{FEWER}8192"], ["engine.max_model_len"]),
    ],
    ids=["checkpointing", "sleep", "one row", "one pair", "no gradients yet"],
)
def test_only_knobs_that_help_are_named(
    parts: list[Part], settings: dict[str, Any], expected: Expected, knobs: list[str], others: list[str]
) -> None:
    message = str(out_of_memory(torch.OutOfMemoryError(TORCHS), CUDA, parts, 16384, expected, **settings))
    assert all(knob in message for knob in knobs), message
    assert not any(other in message for other in others), message


class FailsInThe:
    """Stands in for `Passes.through`, and for a GPU that is full at the n-th micro-batch."""

    def __init__(self, micro_batch: int) -> None:
        self.left = micro_batch
        self.held: Any = None
        self._through = Passes.through

    def __call__(self, passes: Passes, *arguments: Any) -> Any:
        self.left -= 1
        activations = torch.ones(3)
        if self.left == 0:
            self.held = weakref.ref(activations)
            raise torch.OutOfMemoryError(TORCHS)
        return self._through(passes, *arguments)


def test_a_lack_of_memory_before_the_first_update_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    batches, full, policy = [batch_of(groups())], FailsInThe(1), make_policy(kl=KLConfig("k3", 0.1))
    monkeypatch.setattr(Passes, "through", lambda *arguments: full(*arguments))
    with pytest.raises(DeviceMemoryError, match="before the step's first update, in micro-batches of at most 64 tok"):
        fit(policy, batches, Prepare(batches))


def test_a_run_that_is_out_of_memory_leaves_a_checkpoint_and_goes_on_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = [batch_of(groups(seed=seed), step=seed + 1) for seed in range(2)]
    whole = make_policy()
    fit(whole, batches)
    full = FailsInThe(len(whole.passes().shares(batches[0], range(8))[0]) + 2)  # the second step's second
    policy = make_policy()
    with monkeypatch.context() as patch:
        patch.setattr(Passes, "through", lambda *arguments: full(*arguments))
        with pytest.raises(
            DeviceMemoryError, match=r"out of memory on cpu in a micro-batch .*more were needed"
        ) as told:
            fit(policy, batches, StopCheckpoint(tmp_path))
    assert isinstance(told.value.__cause__, torch.OutOfMemoryError)
    gc.collect()
    assert full.held() is None  # though the error still has its traceback
    assert all(parameter.grad is None for parameter in policy.policy.parameters())
    resumed = make_policy()
    fit(resumed, batches, ckpt_path=tmp_path / FILE)
    assert all(torch.equal(value, resumed.state_dict()[name]) for name, value in whole.state_dict().items())


@pytest.mark.parametrize(
    ("name", "may_sleep", "knobs"),
    [
        ("adamw", False, "optimizer.name=adamw_offload"),
        ("adamw", True, "engine.sleep=always or optimizer.name=adamw_offload"),
        ("torch.optim.SGD", False, "a GPU that has more"),
    ],
)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_lack_of_memory_in_the_optimizers_step_is_not_put_down_to_micro_batches(
    name: str, may_sleep: bool, knobs: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The moments are made in the first step; what it was cut short in is not saved."""

    def full(*arguments: Any, **settings: Any) -> None:
        raise torch.OutOfMemoryError(TORCHS)

    def begin(*_: Any) -> None:  # not before: an optimizer of one's own is tried first
        for kind in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD):  # torch.compile gives each one its own
            monkeypatch.setattr(kind, "_init_group", full)

    policy = make_policy(OptimizerConfig(name=name), dtype)
    policy.expected = Expected(may_sleep=may_sleep)
    with pytest.raises(DeviceMemoryError) as told:
        fit(policy, [batch_of(groups())], LambdaCallback(on_train_start=begin))
    assert "out of memory on cpu in the optimizer's step" in str(told.value)
    assert str(told.value).endswith(f"Go on from the last checkpoint with {knobs}.")
