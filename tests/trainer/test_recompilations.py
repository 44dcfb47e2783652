"""Recompilations of whole training steps, counted as TORCH_LOGS=recompiles prints them.

torch's tracer and its guards are the real ones; the traced functions then run as plain torch, which takes seconds where
a compiler takes minutes. The head's softmax and FlexAttention are compiled on a GPU alone: here they are, too.
"""

import gc
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from support.policy import batch_of, fit, groups, make_policy
from torch._dynamo.utils import counters
from torch._logging._internal import set_logs
from torch.nn.attention import flex_attention

from trinity_lightning.common.optimizer_batch import OptimizerBatch
from trinity_lightning.config.algorithm import KLConfig, Layout
from trinity_lightning.config.model import LoRAConfig, OptimizerConfig
from trinity_lightning.trainer import fused, layers, layout, model, passes, policy

pytestmark = [
    pytest.mark.slow,  # layers are traced
    # torch's own, of its tracer
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]
FRAMES = 4  # functions of a layer that become graphs: attention divides it, and its attention part
OTHERS = 3  # the softmax of the head, its gradient, FlexAttention
SOURCE = "torch._dynamo.guards.__recompiles"  # the logger of TORCH_LOGS=recompiles


@dataclass
class Counted:
    """Graphs so far, and the reasons of recompilations."""

    reasons: list[str] = field(default_factory=list)

    @property
    def graphs(self) -> int:
        return counters["stats"]["unique_graphs"]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counted]:
    result = Counted()

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            result.reasons.append(record.getMessage())

    gc.collect()  # vLLM's layers left by other tests: their __del__ reads a tensor, which fails while torch traces
    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    compile_module = torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda self, **settings: compile_module(self, backend="eager", **settings)
    )
    handler, source = Keep(), logging.getLogger(SOURCE)
    set_logs(recompiles=True)
    source.addHandler(handler)
    yield result
    source.removeHandler(handler)
    set_logs()
    torch._dynamo.reset()
    layers._compiled.cache_clear()


@pytest.fixture
def like_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile the head's softmax and FlexAttention on the CPU, too."""
    monkeypatch.setattr(fused, "is_usable", lambda *arguments: True)
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *states: None)  # it refuses gradients on a CPU
    layers._compiled.cache_clear()
    shared, collate = layout._shared, layout.collate

    def collated(*arguments: Any) -> Any:
        micro = collate(*arguments)
        tables = micro.inputs.get("shared_prefix")
        if isinstance(tables, layers.FlexTables):
            micro.inputs["shared_prefix"] = tables.attention(tables.tensors)
        return micro

    monkeypatch.setattr(layout, "_shared", lambda rows, positions, part, _: shared(rows, positions, part, False))
    for module in (model, passes, policy):
        monkeypatch.setattr(module, "collate", collated)


class Probe(L.Callback):
    """Computes columns before the first step, and a probe after each; notes the graphs after each step."""

    def __init__(self, batches: list[OptimizerBatch], counted: Counted) -> None:
        self.batches = batches
        self.counted = counted
        self.graphs: list[int] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        for batch in self.batches:
            batch.columns = pl_module.prepare_step(batch.experiences)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        pl_module.sequence_logprobs([5, 17, 4, 60, 33, *range(len(self.graphs))])
        self.graphs.append(self.counted.graphs)


# One row and several, of a batch and of a micro-batch; the first micro-batch of the first has as many tokens (64) as a
# state has elements.
SIZES = (12, 1, 9, 4)


@pytest.mark.parametrize(
    ("settings", "arguments"),
    [
        ({"layout": Layout.auto, "kl": KLConfig(coef=0.01)}, {}),
        ({"layout": Layout.padded}, {"lora": LoRAConfig(r=4)}),
        ({"layout": Layout.shared_prefix, "max_tokens_per_micro_batch": 600}, {"gradient_checkpointing": True}),
    ],
)
def test_ragged_steps_compile_each_function_once(
    settings: dict[str, Any], arguments: dict[str, Any], counted: Counted, like_a_gpu: None
) -> None:
    batches = [batch_of(groups(count=count, seed=seed)) for seed, count in enumerate(SIZES)]
    settled = make_policy(OptimizerConfig(lr=1e-3), model={"compile_layers": True, **arguments}, **settings)
    fit(settled, batches, probe := Probe(batches, counted))
    assert counted.reasons == []
    shares = settings["layout"] is not Layout.padded
    assert probe.graphs == [FRAMES + OTHERS - (not shares)] * len(SIZES)
