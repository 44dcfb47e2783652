"""model.compile: loss and gradients of plain layers, few graphs whatever the lengths, names of weights as before."""

import gc
from dataclasses import replace

import pytest
import torch
from support.errors import refuses
from support.policy import Gradients, Prepare, assert_same_gradients, batch_of, fit, groups, load_tiny, make_policy
from support.replicas import Metrics
from torch._dynamo.utils import counters
from torch._inductor import config as inductor
from transformers import AutoModelForCausalLM

from trinity_lightning.common.hardware import name_vectors
from trinity_lightning.config.algorithm import KLConfig, Layout
from trinity_lightning.config.model import OptimizerConfig
from trinity_lightning.sync.stream import weight_stream
from trinity_lightning.trainer import compiled
from trinity_lightning.trainer.passes import Compiled, in_one_row

pytestmark = [
    pytest.mark.slow,  # compilers are started
    # torch's own, of its compiler
    pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]
MOST_GRAPHS = 4
STILL = OptimizerConfig(lr=1e-12)  # every batch is trained with the same weights


def trained(batches, layout, **model):
    """The policy and the losses and gradients of its steps."""
    policy, seen = make_policy(STILL, layout=layout, model=model), Gradients()
    fit(policy, batches, seen)
    return policy, seen


@pytest.fixture
def graphs():
    """Counts the graphs compiled since the test began."""
    gc.collect()  # vLLM's layers left by other tests: their __del__ reads a tensor, which fails while torch traces
    torch._dynamo.reset()
    counters.clear()
    return lambda: counters["stats"]["unique_graphs"]


# Layers are compiled, and recomputed, without knowing the layout: each layout once, and both ways of the backward pass.
@pytest.mark.parametrize(("layout", "checkpointing"), [(Layout.padded, False), (Layout.shared_prefix, True)])
def test_ragged_batches_have_their_loss_and_gradients_through_few_graphs(layout, checkpointing, graphs, tmp_path):
    batches = [batch_of(groups(count=12, seed=seed)) for seed in range(4)]
    _, plain = trained(batches, layout)
    policy, seen = trained(batches, layout, compile_layers=True, gradient_checkpointing=checkpointing)
    assert seen.losses == pytest.approx(plain.losses, rel=1e-5)
    for mine, expected in zip(seen.steps, plain.steps, strict=True):
        assert_same_gradients(mine, expected)
    assert 0 < graphs() <= MOST_GRAPHS
    policy.sequence_logprobs([5, 17, 4, 60, 33])
    compiled_once = graphs()
    policy.sequence_logprobs([5, 17, 4, 60, 33, 8, 9])
    assert graphs() == compiled_once
    tiny = load_tiny()
    assert policy.policy.state_dict().keys() == tiny.state_dict().keys()
    assert weight_stream(policy.policy).shapes == weight_stream(tiny).shapes
    policy.save_pretrained(tmp_path)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).state_dict().keys() == tiny.state_dict().keys()


@pytest.mark.parametrize("layout", [Layout.auto, Layout.padded])
def test_many_kinds_of_graphs_stay_those_of_training(layout, graphs):
    """Both layouts, one row and several, a reference, columns before the step: the first ratio is 1, the first KL 0.

    Checked in bfloat16 for the first item, whose graphs are as new as the columns' graphs, and for the last one. In
    between, Layout.auto pads a single row, which shared its prompt when the columns of all were computed.
    """
    several, one = groups(), groups()[:1]
    batches = [batch_of(rows) for rows in (several, one, several)]
    settings = {"layout": layout, "optimizer_steps": 2, "kl": KLConfig(coef=0.01)}
    policy = make_policy(STILL, dtype="bf16", model={"compile_layers": True}, **settings)
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        fit(policy, batches, Prepare(batches), logged := Metrics())
    for name in ("actor/ppo_kl", "actor/kl_loss"):
        assert [item[name] for item in (logged.items[0], logged.items[-1])] == [0.0, 0.0]
    shared = [item["perf/shared_prefix"] for item in logged.items]
    assert shared == ([1.0, 0.0, 1.0] if layout == Layout.auto else [0.0] * 3)
    assert graphs() > 0


def test_a_model_without_layers_of_transformers_is_refused_before_training(monkeypatch):
    monkeypatch.setattr(compiled, "layers_of", lambda model: [])
    with refuses("model.compile"):
        trained([batch_of(groups())], Layout.padded, compile_layers=True)


def test_a_machine_without_a_compiler_is_refused_before_training(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with refuses("model.compile"):
        trained([batch_of(groups())], Layout.padded, compile_layers=True)


class OnAGpu:
    """Calls of `compile_layers` as on a GPU: the models are on the CPU, and kernels are taken to work."""

    def __init__(self, **model):
        self.policy = make_policy(model=model)
        self.policy.configure_model()

    def compiles(self, setting, critic=None):
        passes = replace(self.policy.passes(), device=torch.device("cuda"))
        return compiled.compile_layers(setting, passes, self.policy.policy, None, critic)


@pytest.mark.parametrize("works", [True, False])
def test_auto_compiles_where_kernels_work_on_the_gpu(works, monkeypatch, caplog):
    monkeypatch.setattr(compiled.fused, "is_usable", lambda *arguments: works)
    result = OnAGpu().compiles("auto")
    assert result == (Compiled(one_row=True, has_dropout=False) if works else None)
    assert ("torch.compile does not work on this GPU" in caplog.text) is not works


def test_auto_compiles_nothing_on_a_cpu():
    policy = make_policy()
    policy.configure_model()
    assert compiled.compile_layers("auto", policy.passes(), policy.policy, None, None) is None
    assert all(layer._compiled_call_impl is None for layer in compiled.layers_of(policy.policy))


def test_a_model_whose_rows_stay_apart_is_compiled_only_if_that_is_asked_for(monkeypatch, caplog):
    monkeypatch.setattr(compiled.fused, "is_usable", lambda *arguments: True)
    monkeypatch.setattr(compiled, "one_row_obstacle", lambda model, function: "has layers of another kind")
    gpu = OnAGpu()
    assert gpu.compiles("auto") is None
    assert "has layers of another kind" in caplog.text
    assert gpu.compiles(True) == Compiled(one_row=False, has_dropout=False)


def test_shards_are_not_compiled(monkeypatch, caplog):
    gpu = OnAGpu()
    monkeypatch.setattr(gpu.policy.policy, "shards", None, raising=False)
    assert gpu.compiles("auto") is None
    assert "in shards" in caplog.text


@pytest.mark.parametrize("rows", [1, 3])
def test_rows_in_one_row_have_their_results(rows):
    policy = make_policy()
    policy.configure_model()
    tokens = torch.randint(4, 90, (rows, 11), generator=torch.Generator().manual_seed(0))
    apart = policy.policy.base_model(input_ids=tokens).last_hidden_state
    together = policy.policy.base_model(**in_one_row({"input_ids": tokens})).last_hidden_state
    torch.testing.assert_close(together.view_as(apart), apart)


def test_code_for_other_vectors_is_other_code(monkeypatch):
    """Else the cache on disk mixes them, and a process that takes code for shorter vectors is aborted."""
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    with inductor.patch({"cpp.simdlen": None}):
        name_vectors()
        assert inductor.cpp.simdlen == 256
