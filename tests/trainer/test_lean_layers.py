"""Layers that keep less for the backward pass, against transformers' own."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GemmaConfig, GemmaForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated

from trinity_lightning.trainer.lean_layers import LeanFeedForward, LeanNorm, lean_layers

SMALL: dict[str, Any] = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
TOKENS = torch.arange(40).view(2, 20)


def lean_parts(model: nn.Module) -> list[int]:
    """How many norms, and how many feed-forward parts, are lean."""
    return [sum(isinstance(each, kind) for each in model.modules()) for kind in (LeanNorm, LeanFeedForward)]


def trained(model: Any) -> dict[str, torch.Tensor]:
    """Hidden states, and gradients by name."""
    states = model.base_model(input_ids=TOKENS).last_hidden_state
    weights = torch.linspace(-1, 1, states.numel(), dtype=states.dtype).view_as(states)
    (states * weights).sum().backward()
    return {"": states.detach()} | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("kind", "config", "norms"),
    [(LlamaForCausalLM, LlamaConfig, 2 * 2 + 1), (Qwen3ForCausalLM, Qwen3Config, 4 * 2 + 1)],
)
def test_results_are_the_same_to_the_bit_and_gradients_as_exact(kind: Any, config: Any, norms: int) -> None:
    torch.manual_seed(0)
    plain = kind(config(**SMALL)).bfloat16()
    lean, exact = copy.deepcopy(plain), copy.deepcopy(plain).double()
    lean_layers(lean)
    assert lean_parts(lean) == [norms, 2]
    truth, found, expected = trained(exact), trained(lean), trained(plain)
    assert torch.equal(found.pop(""), expected.pop(""))
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        errors = [float((each - truth[name]).norm() / truth[name].norm()) for each in (gradient, expected[name])]
        assert errors[0] < 1.2 * errors[1] + 1e-3


def test_layers_that_compute_something_else_stay_as_they_are() -> None:
    model = nn.ModuleList([GemmaForCausalLM(GemmaConfig(**SMALL)).bfloat16(), MambaRMSNormGated(32).bfloat16()])
    lean_layers(model)
    assert lean_parts(model) == [0, 0]


def test_other_dtypes_are_left_to_transformers() -> None:
    torch.manual_seed(0)
    plain = LlamaForCausalLM(LlamaConfig(**SMALL)).bfloat16()
    lean = copy.deepcopy(plain)
    lean_layers(lean)
    found, expected = trained(lean.float()), trained(plain.float())
    assert all(torch.equal(found[name], expected[name]) for name in expected)
