"""Low-rank adapters: what is trained, merged, saved and resumed, against peft itself and against the frozen weights."""

import copy
import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from peft import PeftModel
from support.compose import composed
from support.errors import refuses
from support.policy import (
    Gradients,
    Prepare,
    assert_same_gradients,
    batch_of,
    fit,
    groups,
    load_tiny,
    make_experiences,
    make_policy,
    naive_grpo,
)
from support.replicas import move_adapters
from support.runs import SHARDS
from support.tiny_model import logprobs, train_a_little
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from trinity_lightning.config.algorithm import KLConfig
from trinity_lightning.config.model import LoRAConfig, ModelConfig, OptimizerConfig
from trinity_lightning.config.models import resolve_model
from trinity_lightning.config.run import validate
from trinity_lightning.evaluation import Evaluation
from trinity_lightning.sync.proof import perturbed
from trinity_lightning.sync.stream import WeightStream, parameter_shapes, weight_stream
from trinity_lightning.trainer.adapter import Adapter, check_adapter
from trinity_lightning.trainer.policy import PolicyModule

TINY = str(resolve_model("tiny"))
LORA = LoRAConfig(r=4)
FAST = OptimizerConfig(lr=0.1)
TEXT = list(range(4, 40))
ADAPTER = ("model.lora.r=4", "synchronizer.lora=adapter")
SERVER = ("engine=vllm_server",)


def with_adapters(lora: LoRAConfig = LORA, dtype: str = "fp32", model: Any = None, **settings: Any) -> PolicyModule:
    torch.manual_seed(0)  # A is random
    return make_policy(FAST, dtype, {"lora": lora} | (model or {}), **settings)


def trained(**settings: Any) -> PolicyModule:
    """A policy whose adapters are no longer zero."""
    policy = with_adapters(**settings)
    fit(policy, items())
    return policy


def items() -> list[Any]:
    return [batch_of(make_experiences(seed=seed)) for seed in range(2)]


def assert_same_model(model: Any, policy: PolicyModule) -> None:
    computed, expected = torch.tensor(logprobs(model, TEXT)), torch.tensor(policy.sequence_logprobs(TEXT))
    assert float((computed - expected).abs().max()) < 1e-4


def of_stream(stream: WeightStream) -> Any:
    """A plain model with these weights, as an engine takes them."""
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    model.load_state_dict(dict(stream))
    return model


# -- what it computes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "lora", [LORA, LoRAConfig(r=2, alpha=7, targets=["q_proj", "down_proj"]), replace(LORA, rslora=True)]
)
def test_trainer_engine_and_what_is_saved_are_what_peft_merges(lora: LoRAConfig, tmp_path: Path) -> None:
    policy, plain = trained(lora=lora), load_tiny()
    assert policy.sequence_logprobs(TEXT) != pytest.approx(logprobs(plain, TEXT), abs=0.05)
    assert weight_stream(policy.policy).shapes == weight_stream(plain).shapes == parameter_shapes(TINY)
    assert_same_model(of_stream(weight_stream(policy.policy)), policy)
    policy.save_pretrained(tmp_path)
    assert_same_model(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32), policy)
    loaded = PeftModel.from_pretrained(plain, str(tmp_path / "adapter")).eval()
    assert_same_model(loaded, policy)
    assert_same_model(loaded.merge_and_unload(), policy)


def test_transposed_weights_are_merged() -> None:
    """GPT-2's layers are Conv1D."""
    model = GPT2LMHeadModel(GPT2Config(vocab_size=100, n_positions=64, n_embd=16, n_layer=2, n_head=2)).eval()
    plain = copy.deepcopy(model)
    adapter = Adapter(model, LORA, "gpt2")
    train_a_little(model)
    adapted = logprobs(model.eval(), TEXT)
    assert adapted != pytest.approx(logprobs(plain, TEXT), abs=1e-2)
    plain.load_state_dict(adapter.merged(), strict=False)
    assert adapted == pytest.approx(logprobs(plain, TEXT), abs=1e-4)


def test_bfloat16_is_rounded_once() -> None:
    """However often it is merged: W itself stays as it is."""
    policy = trained(dtype="bf16")
    name, projection = "model.layers.0.mlp.up_proj.weight", policy.policy.model.layers[0].mlp.up_proj
    a, b = (factor["default"].weight.double() for factor in (projection.lora_A, projection.lora_B))
    w = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.bfloat16).get_parameter(name)
    exact = w.double() + 2 * b @ a
    merged = w
    for _ in range(3):
        merged = dict(weight_stream(policy.policy))[name]
        assert merged.dtype == torch.bfloat16
        assert float((merged == exact.bfloat16()).double().mean()) > 0.999  # float32 sums, on the edge of two
    assert torch.equal(projection.base_layer.weight, w)
    assert not torch.equal(merged, w)


@pytest.mark.parametrize("layout", ["padded", "shared_prefix"])
@pytest.mark.parametrize("tokens", [24, 4096])
@pytest.mark.parametrize("recomputed", [False, True])
def test_loss_and_gradient_in_any_layout_and_split(layout: str, tokens: int, recomputed: bool) -> None:
    """Compared with a loss written out by hand, over the same model."""
    experiences, seen = groups(), Gradients()
    policy = with_adapters(
        layout=layout, max_tokens_per_micro_batch=tokens, model={"gradient_checkpointing": recomputed}
    )
    move_adapters(policy)
    expected = naive_grpo(policy.policy, experiences)
    expected.backward()
    gradients = {name: p.grad.clone() for name, p in policy.policy.named_parameters() if p.grad is not None}
    assert len(gradients) == 2 * 7 * 2  # A and B of seven layers in each of two blocks, and nothing else
    policy.zero_grad()
    fit(policy, [batch_of(experiences)], seen)
    assert seen.losses[0] == pytest.approx(expected.item(), rel=1e-5)
    assert_same_gradients(seen.steps[0], gradients)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_reference_is_the_model_without_adapters(dtype: str) -> None:
    references: list[list[Tensor]] = []
    starts: list[list[float]] = []
    for lora in (LoRAConfig(), LORA):
        policy = with_adapters(lora, dtype, kl=KLConfig("k3", 0.5))
        move_adapters(policy)
        batches, before = [batch_of(make_experiences())], policy.sequence_logprobs(TEXT)
        fit(policy, batches, Prepare(batches), asks := Asks())
        assert asks.logprobs == before  # the adapters are there again
        references.append(batches[0].columns["ref_logprobs"])
        starts.append(before)
    assert starts[0] != pytest.approx(starts[1], abs=0.05)
    assert policy.reference is None
    for with_them, without in zip(*references, strict=True):
        assert torch.equal(with_them, without)


class Asks(L.Callback):
    """Keeps the log-probabilities of a text at the start."""

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.logprobs = pl_module.sequence_logprobs(TEXT)


# -- what is trained, saved and resumed --------------------------------------------------------------------------------


def test_a_checkpoint_has_adapters_alone(tmp_path: Path) -> None:
    policy = with_adapters(dtype="bf16")
    fit(policy, items()).save_checkpoint(tmp_path / "it.ckpt")
    checkpoint = torch.load(tmp_path / "it.ckpt", weights_only=True)
    assert len(checkpoint["state_dict"]) == 2 * 7 * 2
    assert all(".lora_" in name for name in checkpoint["state_dict"])
    numbers = sum(p.numel() for p in policy.policy.parameters() if p.requires_grad)
    (optimizer,) = checkpoint["optimizer_states"]
    assert sum(master.numel() for master in optimizer["state"]["masters"]) == numbers
    plain = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.bfloat16)
    assert policy.adapter is not None
    frozen = policy.adapter.parameters()
    assert all(torch.equal(frozen[name], weight) for name, weight in plain.named_parameters())
    again = PolicyModule.load_from_checkpoint(tmp_path / "it.ckpt", weights_only=True)
    torch.testing.assert_close(dict(again.state_dict()), dict(policy.state_dict()), rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "dropout"), [("fp32", 0.2), ("bf16", 0.0)])
def test_a_resumed_run_has_the_same_bits(dtype: str, dropout: float, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"lora": replace(LORA, dropout=dropout), "dtype": dtype}
    fit(undisturbed := with_adapters(**settings), items(), max_epochs=2)
    fit(with_adapters(**settings), items()).save_checkpoint(tmp_path / "it.ckpt")
    resumed = with_adapters(**settings)
    torch.manual_seed(5)
    fit(resumed, items(), ckpt_path=tmp_path / "it.ckpt", max_epochs=2)
    torch.testing.assert_close(dict(resumed.state_dict()), dict(undisturbed.state_dict()), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("saved", "loaded", "key"),
    [
        (LORA, replace(LORA, r=8), "model.lora.r"),
        (LORA, replace(LORA, targets=["q_proj"]), "model.lora.targets"),
        (LORA, LoRAConfig(), "model.lora.r"),
        (LoRAConfig(), LORA, "model.lora"),
    ],
)
def test_adapters_of_another_kind_are_not_resumed(
    saved: LoRAConfig, loaded: LoRAConfig, key: str, tmp_path: Path
) -> None:
    fit(with_adapters(saved), items()).save_checkpoint(tmp_path / "it.ckpt")
    with refuses(key):
        fit(with_adapters(loaded), items(), ckpt_path=tmp_path / "it.ckpt", max_epochs=2)


def test_adapters_of_another_base_are_not_resumed(tmp_path: Path) -> None:
    fit(with_adapters(), items()).save_checkpoint(tmp_path / "it.ckpt")
    other = with_adapters()
    other.configure_model()
    with torch.no_grad():
        other.policy.model.norm.weight[0] += 1e-3
    with refuses("model.name"):
        fit(other, items(), ckpt_path=tmp_path / "it.ckpt", max_epochs=2)


def test_a_checkpoint_is_evaluated_with_merged_weights(tmp_path: Path) -> None:
    policy = with_adapters()
    fit(policy, items()).save_checkpoint(tmp_path / "it.ckpt")
    nothing: Any = None
    evaluation = Evaluation(TINY, nothing, [], [], tmp_path, nothing, [])
    step, weights = evaluation._weights(tmp_path / "it.ckpt")
    assert step == 1
    assert_same_model(of_stream(weights), policy)


# -- what an engine is proven by ---------------------------------------------------------------------------------------


def test_the_drill_moves_weights_and_adapters_alike() -> None:
    policy = trained()
    model, adapter = policy.policy, policy.adapter
    assert adapter is not None
    frozen, weights_before = adapter.parameters(), copy.deepcopy(model.state_dict())
    before = {name: merged - frozen[name] for name, merged in weight_stream(model)}
    with perturbed(model) as perturb:
        for scale in (0.1, 0.5):
            perturb(scale)
            assert not any(
                torch.equal(weight, weights_before.get(name))
                for name, weight in frozen.items()
                if name in weights_before
            )
            moved = {n: _size(new - frozen[n] - before[n]) / _size(frozen[n]) for n, new in weight_stream(model)}
            adapted = [size for name, size in moved.items() if "_proj" in name]
            assert len(adapted) == 14
            assert all(0.5 * scale < size < 2 * scale for size in adapted)
            assert sum(size > 0 for size in moved.values()) == 14
    assert all(torch.equal(value, weights_before[name]) for name, value in model.state_dict().items())


def _size(weight: Tensor) -> float:
    return float(weight.double().square().mean().sqrt())


# -- wrong input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "overrides"),
    [
        ("model.lora.r", ["model.lora.r=0"]),
        ("model.lora.alpha", ["model.lora.alpha=8"]),
        ("model.lora.targets", ["model.lora.r=4", "model.lora.targets=[]"]),
        ("model.lora.dropout", ["model.lora.r=4", "model.lora.dropout=1"]),
        ("synchronizer.lora", ["synchronizer.lora=adapter"]),
        ("synchronizer.lora", [*ADAPTER, "engine=transformers"]),
        ("synchronizer.lora", [*ADAPTER, "engine.name=my_engine.PlainEngine"]),
        ("synchronizer.lora", [*ADAPTER, *SERVER, "engine.urls=[http://node7:8000]"]),
        ("synchronizer.lora", [*ADAPTER, *SERVER, "synchronizer=nccl"]),
        ("synchronizer.lora", [*ADAPTER, *SERVER, "explorer.max_staleness=1"]),
        ("synchronizer.lora", [*ADAPTER, "+engine.args.quantization=fp8"]),
        ("synchronizer.lora", [*ADAPTER, "+engine.args.quantization_config={linear: fp8}"]),
        ("model.lora.r", [*ADAPTER, "model.lora.r=513"]),
        ("synchronizer.lora", [*ADAPTER, "+engine.args.enable_lora=true"]),
        ("synchronizer.lora", [*ADAPTER, *SHARDS]),
    ],
)
def test_settings_that_cannot_work_are_refused(key: str, overrides: list[str]) -> None:
    with refuses(key):
        validate(composed("model=tiny", *overrides))


@pytest.mark.parametrize("overrides", [["model.dtype=fp32"], ["model.dtype=bf16", "engine.dtype=fp32"]])
def test_adapters_are_not_computed_in_float32_by_vllm_on_a_gpu(
    overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    validate(composed("model=tiny", *ADAPTER, *overrides))  # without one they are
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with refuses("engine.dtype"):
        validate(composed("model=tiny", *ADAPTER, *overrides))
    validate(composed("model=tiny", *ADAPTER, *overrides, "engine.dtype=bf16"))


def test_an_unknown_setting_of_adapters_is_refused() -> None:
    with refuses("model.lora.modules_to_save"):
        validate(composed("model=tiny", "model.lora.r=4", "+model.lora.modules_to_save=[lm_head]"))


def test_a_target_that_is_not_there_is_refused_with_those_that_are() -> None:
    for target in ("q_prj", "lm_head", "embed_tokens"):
        with refuses("model.lora.targets") as refused:
            with_adapters(LoRAConfig(r=4, targets=["v_proj", target])).configure_model()
        assert all(name in str(refused.value) for name in (target, "down_proj", "gate_proj", "q_proj"))


def test_targets_and_rank_are_checked_without_the_weights() -> None:
    check_adapter(ModelConfig(name="tiny", lora=LoRAConfig(r=64)))
    with refuses("model.lora.targets"):
        check_adapter(ModelConfig(name="tiny", lora=LoRAConfig(r=4, targets=["q_prj"])))
    with refuses("model.lora.r"):
        check_adapter(ModelConfig(name="tiny", lora=LoRAConfig(r=65)))


def test_without_peft_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with refuses("model.lora") as refused:
        LoRAConfig(r=4)
    assert refused.value.fix == "pip install 'trinity-lightning[lora]'"
    LoRAConfig()
