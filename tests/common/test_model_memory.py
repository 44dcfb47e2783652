"""`algorithm.max_tokens_per_micro_batch=auto` stands for tokens that fit into free memory, chosen once a run."""

import gc
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from support.policy import batch_of, fit, make_experiences, make_policy
from support.shapes import SMOLLM2
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForImageTextToText, LlamaConfig, LlamaForCausalLM

from trinity_lightning.common import model_memory
from trinity_lightning.common.hardware import GIB
from trinity_lightning.common.model_config import TowerSizes
from trinity_lightning.common.model_memory import (
    CPU_TOKENS,
    GPU_TOKENS,
    ModelShape,
    Training,
    activations,
    gradient_bytes,
    layer_bytes,
    tokens_that_fit,
    tower_bytes,
    useful_tokens,
)
from trinity_lightning.config.models import resolve_model
from trinity_lightning.trainer import head


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets how many bytes of memory are free."""
    return lambda size: monkeypatch.setattr(model_memory, "free_memory", lambda: size)


# Gradients and moments of SmolLM2 take 1.5 GiB, a token 0.8 MiB.
@pytest.mark.parametrize(
    ("gib", "tokens"), [(1, 256), (2, 256), (2.5, 512), (3.3, 1024), (5.5, 2048), (6, 4096), (100, 4096)]
)
def test_a_cpu_computes_what_fits_beside_gradients_and_moments(gib: float, tokens: int) -> None:
    assert tokens_that_fit(SMOLLM2, width=2, free=int(gib * GIB)) == tokens


def test_a_value_model_takes_as_much_again() -> None:
    assert tokens_that_fit(SMOLLM2, width=2, free=int(3.3 * GIB), value_model=SMOLLM2) == 256
    assert tokens_that_fit(SMOLLM2, width=2, free=100 * GIB, value_model=SMOLLM2) == 4096


def test_what_is_free_matters_on_a_cpu_alone(free: Any) -> None:
    policy = make_policy()
    policy.configure_model()
    free(100 * GIB)
    assert useful_tokens(policy.policy, torch.device("cpu")) == CPU_TOKENS[0]
    assert useful_tokens(policy.policy, torch.device("cpu"), trainers=10**6) == CPU_TOKENS[-1]
    free(0)
    assert useful_tokens(policy.policy, torch.device("cpu")) == CPU_TOKENS[-1]


def test_the_tensors_of_pictures_are_counted() -> None:
    """The backward pass of a tower saves about as many bytes."""
    model: Any = AutoModelForImageTextToText.from_pretrained(resolve_model("tiny_vision"))
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    pixels: Any = torch.rand(1, 4, 3, 64, 64)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.get_image_features(pixels)
    tower = ModelShape.of(model).tower
    assert tower is not None
    with_mask = pixels.nbytes + pixels.nbytes * 2 // 3 + sum(saved.values())
    counted = 4 * 16 * tower_bytes(tower, Training(4, 0))
    assert 0.8 * with_mask < counted < 1.2 * with_mask
    frozen = tower_bytes(tower, Training(4, 0, adapters=1))
    assert frozen == tower_bytes(replace(tower, layers=1), Training(4, 0))  # the layer that is computed now


def test_a_model_that_reads_pictures_computes_fewer_tokens_at_once(free: Any) -> None:
    tower = TowerSizes(layers=12, hidden=768, intermediate=3072, edge=16, patches=16)
    smolvlm = replace(SMOLLM2, tower=tower)
    assert tokens_that_fit(SMOLLM2, width=2, free=8 * GIB) == 4096
    assert tokens_that_fit(smolvlm, width=2, free=8 * GIB) < 1024


SMOLLM2_TRAINED = 12 * SMOLLM2.parameters  # gradients and moments


@pytest.mark.parametrize(("gib", "tokens"), [(1, 4096), (10, 4096), (20, 8192), (40, 16384)])
def test_a_gpu_computes_more_tokens_where_they_fit(gib: int, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tokens_that_fit(SMOLLM2, width=2, free=SMOLLM2_TRAINED + gib * GIB, on_cpu=False) == tokens
    policy = make_policy()
    policy.configure_model()
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (gib * GIB, 80 * GIB))
    assert useful_tokens(policy.policy, torch.device("cuda")) in GPU_TOKENS


class PlainLinear(torch.nn.Linear):
    """A head whose gradient autograd makes on a CPU too, as it does on a GPU."""


@pytest.mark.parametrize(("tokens", "a_weight"), [(8, 2 + 4), (9, 4 + 2 + 4), (32, 4 + 2 + 4)])
def test_the_heads_gradient_takes_more_with_several_chunks_of_logits(
    tokens: int, a_weight: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes at the peak, besides the sum of micro-batches."""
    vocabulary, hidden, chunk = 512, 2048, 8  # the weight is much larger than logits and hidden states
    monkeypatch.setattr(head, "CHUNK_BYTES", chunk * vocabulary * 2)
    monkeypatch.setattr(model_memory, "GPU_CHUNK_BYTES", chunk * vocabulary * 2)
    projection = PlainLinear(hidden, vocabulary, bias=False, dtype=torch.bfloat16)
    projection.weight.grad_dtype = torch.float32
    projection.weight.grad = torch.zeros(vocabulary, hidden)
    states, targets = torch.randn(tokens, hidden).bfloat16(), torch.zeros(tokens, dtype=torch.long)
    logprobs, _ = head.token_logprobs(head.Head(projection), states, targets, torch.ones(tokens))
    peak = peak_of(logprobs.sum().backward)
    assert peak == pytest.approx(a_weight * vocabulary * hidden, rel=0.05)
    shape = replace(SMOLLM2, vocabulary=vocabulary, largest=vocabulary * hidden)
    assert gradient_bytes(shape, Training(2, 0), tokens) == a_weight * vocabulary * hidden
    assert gradient_bytes(shape, Training(2, 0, shards=2), tokens) == (2 + 4) * vocabulary * hidden
    for frozen in (Training(2, 0, adapters=1), Training(2, 0, on_cpu=True)):
        assert gradient_bytes(shape, frozen, tokens) == 0


@pytest.mark.parametrize(
    ("chunk", "settings"),
    [
        (64, {"tie_word_embeddings": False}),
        (64, {"tie_word_embeddings": True}),
        (256, {"tie_word_embeddings": False}),
        (64, {"tie_word_embeddings": False, "checkpointing": True}),
        (256, {"tie_word_embeddings": True, "vocab_size": 500}),  # most is in the layers
        (256, {"tie_word_embeddings": True, "vocab_size": 500, "checkpointing": True}),
    ],
)
def test_a_pass_takes_no_more_than_is_counted_and_not_much_less(
    chunk: int, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that autograd allocates in a forward and backward pass, in the way of a GPU."""
    sizes: dict[str, Any] = {"vocab_size": 4000, "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 3}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "attn_implementation": "sdpa"}
    checkpointing = bool(settings.get("checkpointing"))
    model: Any = LlamaForCausalLM(LlamaConfig(**sizes | heads | settings)).bfloat16().train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.lm_head.__class__ = PlainLinear
    for parameter in model.parameters():
        parameter.grad_dtype = torch.float32
        parameter.grad = torch.zeros(parameter.shape)
    vocabulary = model.config.vocab_size
    monkeypatch.setattr(head, "CHUNK_BYTES", chunk * vocabulary * 2)
    monkeypatch.setattr(head, "BLOCK_BYTES", 8 * vocabulary * 4)
    monkeypatch.setattr(model_memory, "GPU_CHUNK_BYTES", chunk * vocabulary * 2)
    monkeypatch.setattr(model_memory, "GPU_BLOCK_BYTES", 8 * vocabulary * 4)
    rows, length = 2, 128
    targets = torch.zeros(rows * length, dtype=torch.long)

    def passes() -> None:
        states = model.model(input_ids=targets.view(rows, length), use_cache=False).last_hidden_state.flatten(0, 1)
        logprobs, _ = head.token_logprobs(head.Head(model.lm_head), states, targets, torch.ones(len(targets)))
        logprobs.sum().backward()

    counted = activations(ModelShape.of(model), Training(2, length, checkpointing=checkpointing), len(targets))
    assert 0.8 * counted < peak_of(passes) < counted


def peak_of(work: Callable[[], Any]) -> int:
    """The most bytes that were allocated at once."""
    gc.collect()  # or it frees what an earlier profile has seen, and this one counts as negative
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        work()
    events: Any = profiled.profiler
    changes = [event for event in events.kineto_results.events() if event.name() == "[memory]"]
    return max(accumulate(event.nbytes() for event in sorted(changes, key=lambda event: event.start_ns())))


def test_where_keys_are_repeated_each_head_of_the_queries_has_its_own() -> None:
    repeated, shared = (layer_bytes(SMOLLM2, Training(2, 256, repeats_keys=repeats)) for repeats in (True, False))
    assert repeated - shared == 2 * 2 * (SMOLLM2.query_width - SMOLLM2.key_width)
    alike = replace(SMOLLM2, key_width=SMOLLM2.query_width)
    assert activations(SMOLLM2, Training(2, 256, repeats_keys=True), 512) == activations(alike, Training(2, 256), 512)


def test_a_resumed_run_keeps_the_tokens_that_it_began_with(free: Any, tmp_path: Path) -> None:
    batches = [batch_of(make_experiences())]
    free(0)
    first = make_policy(max_tokens_per_micro_batch="auto")
    fit(first, batches).save_checkpoint(tmp_path / "it.ckpt")
    free(100 * GIB)
    assert first.max_tokens == CPU_TOKENS[-1]  # settled: memory that is freed later changes nothing
    resumed = make_policy(max_tokens_per_micro_batch="auto")
    fit(resumed, batches, ckpt_path=tmp_path / "it.ckpt", max_epochs=2)
    assert resumed.max_tokens == CPU_TOKENS[-1]
    chosen = make_policy(max_tokens_per_micro_batch=77)
    fit(chosen, batches, ckpt_path=tmp_path / "it.ckpt", max_epochs=2)
    assert chosen.max_tokens == 77


def test_a_script_that_computes_on_the_cpu_first_trains_with_the_tokens_of_its_device(free: Any) -> None:
    free(100 * GIB)
    policy = make_policy(max_tokens_per_micro_batch="auto")
    policy.configure_model()
    policy.sequence_logprobs([5, 17, 4])
    assert policy.max_tokens == CPU_TOKENS[0]
    policy.to("meta")  # another device, of which nothing is computed
    assert policy.max_tokens == CPU_TOKENS[0]
    policy.check_trainable()  # training starts
    assert policy.max_tokens == GPU_TOKENS[-1]
    policy.to_empty(device="cpu")  # as after training on a GPU, where a last checkpoint is written
    assert policy.max_tokens == GPU_TOKENS[-1]
