"""Attention against a dense mask in float64, and layers that keep less against transformers' own."""

import copy
import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from support.layouts import HEADS, KEY_HEADS, SCALE, dense, segments, states
from support.policy import make_policy
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated

from trinity_lightning.trainer import layers
from trinity_lightning.trainer.layers import (
    SHORT_TOKENS,
    CpuSharedPrefix,
    Segments,
    attention,
    attention_implementation,
)
from trinity_lightning.trainer.lean import LeanFeedForward, LeanNorm, lean_layers

# -- attention of short sequences in 16 bits on the CPU: as transformers', closer to the truth -------------------------


MODULE: Any = SimpleNamespace(is_causal=True, num_key_value_groups=3)


def tensors(length, dtype, queries=None):
    generator = torch.Generator().manual_seed(length)
    shapes = [(2, 6, queries or length, 16), (2, 2, length, 16), (2, 2, length, 16)]
    return [(2 * torch.randn(shape, generator=generator)).to(dtype).requires_grad_() for shape in shapes]


def run(attention, inputs, mask=None):
    inputs = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    output, _ = attention(MODULE, *inputs, mask, scaling=0.25)
    output.backward(torch.linspace(-1, 1, output.numel(), dtype=torch.float64).view(output.shape).to(output.dtype))
    return [output.detach(), *(tensor.grad for tensor in inputs)]


def errors(results, exact):
    return [float((mine.double() - truth).norm() / truth.norm()) for mine, truth in zip(results, exact, strict=True)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("length", [1, 7, 69])
def test_short_sequences_are_computed_in_float32(length, dtype):
    inputs, limit = tensors(length, dtype), 0.003 if dtype == torch.bfloat16 else 0.0004
    exact = run(sdpa_attention_forward, [tensor.double() for tensor in inputs])
    mine, theirs = run(attention, inputs), run(sdpa_attention_forward, inputs)
    assert all(result.dtype == dtype for result in mine)
    assert max(errors(mine[:1], exact[:1])) < limit
    if length > 1:
        assert max(errors(mine[1:3], exact[1:3])) < limit < max(errors(theirs[1:3], exact[1:3]))


def test_a_mask_is_obeyed():
    inputs = tensors(5, torch.bfloat16)
    diagonal = torch.eye(5, dtype=torch.bool)[None, None]  # each token attends to itself: its own value comes out
    additive = torch.zeros(1, 1, 5, 5, dtype=torch.bfloat16).masked_fill(~diagonal, float("-inf"))
    for mask in (diagonal, additive):
        output = run(attention, inputs, mask)[0]
        torch.testing.assert_close(output, inputs[2].detach().repeat_interleave(3, 1).transpose(1, 2), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("length", "dtype", "queries"),
    [(SHORT_TOKENS + 1, torch.bfloat16, None), (12, torch.float32, None), (12, torch.bfloat16, 1)],
    ids=["long", "float32", "one token before a cache"],
)
def test_everything_else_is_transformers_own(length, dtype, queries):
    inputs = tensors(length, dtype, queries)
    for mine, theirs in zip(run(attention, inputs), run(sdpa_attention_forward, inputs), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("mask", [None, torch.ones(9, 9, dtype=torch.bool).tril()[None, None]])
def test_heads_are_repeated_for_gpus_without_flash_attention(mask, monkeypatch):
    """torch is handed as many heads of keys and values as of queries, by us or by transformers."""
    monkeypatch.setattr(layers, "is_before_ampere", lambda device: True)
    inputs, heads = tensors(9, torch.float64), []
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def watched(query, key, value, **settings):
        heads.append((query.shape[1], key.shape[1], value.shape[1]))
        return sdpa(query, key, value, **settings)

    expected = run(sdpa_attention_forward, inputs, mask)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    for mine, theirs in zip(run(attention, inputs, mask), expected, strict=True):
        torch.testing.assert_close(mine, theirs)
    assert heads == [(6, 6, 6)]


def test_only_sdpa_is_replaced():
    assert attention_implementation("eager") == "eager"
    assert attention_implementation("sdpa") == "sdpa_short"


def test_a_policy_uses_it_without_a_mask_and_saves_nothing_of_it(tmp_path, monkeypatch):
    policy = make_policy(dtype="bf16")
    policy.configure_model()
    assert policy.policy.config._attn_implementation == "sdpa_short"
    masks = []

    def spy(query, key, value, attn_mask=None, is_causal=False, **settings):
        masks.append((attn_mask, is_causal, query.dtype))
        return original(query, key, value, attn_mask=attn_mask, is_causal=is_causal, **settings)

    original = torch.nn.functional.scaled_dot_product_attention
    policy.sequence_logprobs([5, 6])  # the first call finds out how they are computed
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    policy.sequence_logprobs([5, 6, 7, 8])
    assert masks == [(None, True, torch.float32)] * 2  # no mask: torch's fast causal path
    policy.policy.save_pretrained(tmp_path)
    assert "sdpa_short" not in json.dumps(json.loads((tmp_path / "config.json").read_text()))
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config._attn_implementation == "sdpa"


# -- attention over shared prefixes on a CPU, against one dense mask ---------------------------------------------------


def attend(layout: Segments, inputs: list[torch.Tensor]) -> torch.Tensor:
    query, key, value = inputs
    return CpuSharedPrefix(layout)(query, key, value, SCALE)


def with_gradients(result: torch.Tensor, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    weights = torch.linspace(-1, 1, result.numel(), dtype=torch.float64).view(result.shape).to(result.dtype)
    return [result.detach(), *torch.autograd.grad((result * weights).sum(), inputs)]


@pytest.mark.slow
@settings(deadline=None, max_examples=40)
@given(segments())
@example(Segments([700], [2], [1100, 600]))  # longer than the 512 keys that torch's kernel takes at once
@example(Segments([300, 300, 200], [1, 1, 1], [1, 1, 1]))  # the last row sees none of the first 512 of its tile
def test_attention_and_its_gradients_are_those_of_a_dense_mask(layout):
    inputs = states(layout.starts()[-1], torch.float64)
    mine = with_gradients(attend(layout, inputs), inputs)
    for computed, expected in zip(mine, with_gradients(dense(layout, inputs), inputs), strict=True):
        torch.testing.assert_close(computed, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-9), (torch.bfloat16, 0.004)])
def test_values_may_be_narrower_than_keys(dtype, limit):
    layout = Segments([20, 9], [3, 2], [5, 20, 3, 8, 11, 2])
    query, key, value = states(layout.starts()[-1], dtype)
    inputs = [query, key, value[..., :3].detach().requires_grad_()]
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    mine = with_gradients(attend(layout, inputs), inputs)
    for computed, truth in zip(mine, with_gradients(dense(layout, exact), exact), strict=True):
        assert float((computed.double() - truth).norm() / truth.norm()) < limit


def test_values_may_be_rounded_where_queries_are_not():
    layout = Segments([20, 9], [3, 2], [5, 20, 3, 8, 11, 2])
    query, key, value = states(layout.starts()[-1], torch.float32)
    rounded = value.detach().bfloat16().requires_grad_()
    exact = rounded.detach().float().requires_grad_()
    mine, truth = (
        with_gradients(attend(layout, inputs), inputs) for inputs in ([query, key, rounded], [query, key, exact])
    )
    assert all(
        torch.equal(computed, expected.to(computed.dtype)) for computed, expected in zip(mine, truth, strict=True)
    )


def test_one_layout_serves_models_with_other_numbers_of_key_heads():
    layout = Segments([20, 9], [3, 2], [5, 20, 3, 8, 11, 2])
    inputs = states(layout.starts()[-1], torch.float64)
    attention, truth = CpuSharedPrefix(layout), with_gradients(dense(layout, inputs), inputs)
    for times in (1, HEADS // KEY_HEADS, 1):
        query, key, value = inputs
        result = attention(query, key.repeat_interleave(times, 1), value.repeat_interleave(times, 1), SCALE)
        for computed, expected in zip(with_gradients(result, inputs), truth, strict=True):
            torch.testing.assert_close(computed, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("length", [20, SHORT_TOKENS + 40])
def test_bfloat16_is_as_exact_as_its_rounding(length):
    layout = Segments([length, 9], [3, 2], [5, length, 3, 8, 11, 2])
    inputs = states(layout.starts()[-1], torch.bfloat16)
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    computed = with_gradients(attend(layout, inputs), inputs)
    for mine, truth in zip(computed, with_gradients(dense(layout, exact), exact), strict=True):
        assert mine.dtype == torch.bfloat16
        assert float((mine.double() - truth).norm() / truth.norm()) < (0.004 if length < SHORT_TOKENS else 0.012)


def test_mixed_precision_rounds_nothing_of_it():
    layout = Segments([20, 9], [3, 2], [5, 20, 3, 8, 11, 2])
    inputs = states(layout.starts()[-1], torch.float32)
    alone = with_gradients(attend(layout, inputs), inputs)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = with_gradients(attend(layout, inputs), inputs)
    assert all(map(torch.equal, mixed, alone))


def test_padding_among_queries_cannot_overflow():
    layout = Segments([], [], [50, 40])  # two tiles that are computed together
    inputs = states(90, torch.float32)
    with torch.no_grad():
        inputs[0][:, :, 50], inputs[1][:, :, 50] = -90.0, 90.0  # the token that pads; its score is far below any other
    assert all(tensor.isfinite().all() for tensor in with_gradients(attend(layout, inputs), inputs))


# -- layers that keep less for the backward pass -----------------------------------------------------------------------

SMALL: dict[str, Any] = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
TOKENS = torch.arange(40).view(2, 20)


def lean_parts(model: nn.Module) -> list[int]:
    """Numbers of lean norms and lean feed-forward parts."""
    return [sum(isinstance(module, kind) for module in model.modules()) for kind in (LeanNorm, LeanFeedForward)]


def trained(model: Any) -> dict[str, torch.Tensor]:
    """Hidden states, and gradients by name."""
    states = model.base_model(input_ids=TOKENS).last_hidden_state
    weights = torch.linspace(-1, 1, states.numel(), dtype=states.dtype).view_as(states)
    (states * weights).sum().backward()
    return {"": states.detach()} | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("kind", "config", "norms"),
    [(LlamaForCausalLM, LlamaConfig, 2 * 2 + 1), (Qwen3ForCausalLM, Qwen3Config, 4 * 2 + 1)],
)
def test_results_are_the_same_to_the_bit_and_gradients_as_exact(
    kind: Any, config: Any, norms: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    plain = kind(config(**SMALL)).to(dtype)
    lean, exact = copy.deepcopy(plain), copy.deepcopy(plain).double()
    lean_layers(lean)
    assert lean_parts(lean) == [norms, 2]
    truth, computed, expected = trained(exact), trained(lean), trained(plain)
    assert torch.equal(computed.pop(""), expected.pop(""))
    assert computed.keys() == expected.keys()
    for name, gradient in computed.items():
        errors = [float((result - truth[name]).norm() / truth[name].norm()) for result in (gradient, expected[name])]
        assert errors[0] < 1.2 * errors[1] + 1e-3


def test_torchs_default_device_is_none_of_its_business() -> None:
    """Lightning makes a model on a GPU with that as the default, which no generator of the CPU draws on."""
    model = LlamaForCausalLM(LlamaConfig(**SMALL)).bfloat16()
    with torch.device("meta"):
        lean_layers(model)
    assert min(lean_parts(model)) > 0


def test_layers_that_compute_something_else_stay_as_they_are() -> None:
    model = nn.ModuleList([GemmaForCausalLM(GemmaConfig(**SMALL)).bfloat16(), MambaRMSNormGated(32).bfloat16()])
    lean_layers(model)
    assert lean_parts(model) == [0, 0]


def test_other_dtypes_are_left_to_transformers() -> None:
    torch.manual_seed(0)
    plain = LlamaForCausalLM(LlamaConfig(**SMALL)).bfloat16()
    lean = copy.deepcopy(plain)
    lean_layers(lean)
    computed, expected = trained(lean.float()), trained(plain.float())
    assert all(torch.equal(computed[name], expected[name]) for name in expected)
