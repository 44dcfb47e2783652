"""Gradients of embeddings and head that are added up in place, against autograd's."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

from trinity_lightning.trainer import head
from trinity_lightning.trainer.head import Head, LeanEmbedding, lean_embeddings, token_logprobs

PADDING = 3


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head of 50 rows has several, and 24 tokens are several chunks, all but the first computed again."""
    monkeypatch.setattr(head, "GRADIENT_BLOCK_BYTES", 4 * 16 * 20)
    monkeypatch.setattr(head, "CHUNK_BYTES", 4 * 50 * 7)


def make_model(tied: bool) -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "attn_implementation": "sdpa"}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=tied, pad_token_id=PADDING))


def gradients(model: Any, lean: bool) -> dict[str, Tensor]:
    """Gradients of the log-probabilities of two batches, one backward pass each."""
    generator = torch.Generator().manual_seed(1)
    if lean:
        lean_embeddings(model)
    for _ in range(2):
        tokens = torch.randint(0, 50, (3, 9), generator=generator)
        tokens[0, 2:4] = PADDING
        weights = torch.randn(24, generator=generator)
        if lean:
            states = model.base_model(input_ids=tokens).last_hidden_state[:, :-1].flatten(0, 1)
            values, _ = token_logprobs(Head.of(model), states, tokens[:, 1:].flatten(), torch.ones(24))
        else:
            logits = model(input_ids=tokens).logits[:, :-1].flatten(0, 1)
            values = logits.log_softmax(-1).gather(1, tokens[:, 1:].reshape(-1, 1)).squeeze(1)
        (values * weights).sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("tied", [True, False])
def test_gradients_are_those_of_autograd(tied: bool) -> None:
    model = make_model(tied)
    expected = gradients(copy.deepcopy(model).double(), lean=False)
    lean = gradients(model, lean=True)
    assert lean.keys() == expected.keys()
    for name, gradient in lean.items():
        torch.testing.assert_close(gradient.double(), expected[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("frozen", ["model.embed_tokens.weight", "lm_head.weight"])
def test_what_is_frozen_gets_no_gradient(frozen: str) -> None:
    model = make_model(tied=False)
    model.get_parameter(frozen).requires_grad_(False)
    expected = gradients(copy.deepcopy(model), lean=False)
    lean = gradients(model, lean=True)
    assert lean.keys() == expected.keys() == dict(model.named_parameters()).keys() - {frozen}
    for name, gradient in lean.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("hooks", ["computed again", "saved elsewhere"])
def test_embeddings_get_their_gradient_however_tensors_are_kept_for_the_backward_pass(hooks: str) -> None:
    torch.manual_seed(0)
    embeddings = LeanEmbedding(50, 16)
    ids = torch.randint(0, 50, (3, 9))
    if hooks == "computed again":
        vectors = checkpoint(embeddings, ids, use_reentrant=False)
    else:
        with save_on_cpu():
            vectors = embeddings(ids)
    vectors.sum().backward()
    expected = torch.bincount(ids.flatten(), minlength=50).float()[:, None].expand(50, 16)
    torch.testing.assert_close(embeddings.weight.grad, expected)


def test_bfloat16_weights_have_float32_gradients_nearer_to_the_truth() -> None:
    model = make_model(tied=True).bfloat16()
    for parameter in model.parameters():
        parameter.grad_dtype = torch.float32
    truth = gradients(copy.deepcopy(model).double(), lean=False)
    usual = gradients(copy.deepcopy(model), lean=False)
    lean = gradients(model, lean=True)

    def error(computed: dict[str, Tensor]) -> float:
        name = "model.embed_tokens.weight"
        return float((computed[name].double() - truth[name]).norm())

    assert all(gradient.dtype == torch.float32 for gradient in lean.values())
    assert error(lean) < error(usual)


def test_embeddings_that_do_more_are_left_alone() -> None:
    class Scaled(nn.Embedding):
        pass

    for embedding in (Scaled(5, 2), nn.Embedding(5, 2, max_norm=1.0), nn.Embedding(5, 2, scale_grad_by_freq=True)):
        model = make_model(tied=False)
        model.set_input_embeddings(embedding)
        lean_embeddings(model)
        assert not isinstance(model.get_input_embeddings(), LeanEmbedding)
