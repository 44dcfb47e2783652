"""Log-probabilities and entropies against log_softmax of all logits in float64."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from trinity_lightning.trainer import fused, head
from trinity_lightning.trainer.head import Head, token_logprobs

HIDDEN, VOCABULARY = 8, 13
CHUNK, BLOCK = 12, 5  # tokens


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Few tokens are several chunks, and each of them several blocks."""
    monkeypatch.setattr(head, "CHUNK_BYTES", CHUNK * VOCABULARY * 4)
    monkeypatch.setattr(head, "BLOCK_BYTES", BLOCK * VOCABULARY * 4)


def case(n, seed=0, bias=True):
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        projection = nn.Linear(HIDDEN, VOCABULARY, bias=bias)
    hidden = torch.randn(n, HIDDEN, generator=generator).requires_grad_()
    targets = torch.randint(0, VOCABULARY, (n,), generator=generator)
    temperature = 0.5 + torch.rand(n, generator=generator)
    weights = torch.randn(2, n, generator=generator)
    return SimpleNamespace(
        projection=projection, hidden=hidden, targets=targets, temperature=temperature, weights=weights
    )


def naive(c, softcap, scale):
    """The same in float64 and in one piece, with gradients of a weighted sum of both results."""
    projection = copy.deepcopy(c.projection).double()
    hidden = c.hidden.detach().double().requires_grad_()
    logits = projection(hidden)
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    log_p = torch.log_softmax(logits * scale / c.temperature.double()[:, None], -1)
    logprobs, entropies = log_p[range(len(c.targets)), c.targets], -(log_p.exp() * log_p).sum(-1)
    (c.weights[0] * logprobs + c.weights[1] * entropies).sum().backward()
    return logprobs, entropies, [hidden.grad, *(p.grad for p in projection.parameters())]


@pytest.mark.parametrize("bias", [True, False])  # without one, the weight's gradient is added up in place
@pytest.mark.parametrize("n", [1, CHUNK, CHUNK + 1, 3 * CHUNK - 1])
@pytest.mark.parametrize(("softcap", "scale"), [(None, 1.0), (2.0, 1.0), (None, 0.25), (1.5, 3.0)])
def test_values_and_gradients_equal_float64(n, softcap, scale, bias):
    c = case(n, bias=bias)
    logprobs, entropies = token_logprobs(Head(c.projection, softcap, scale), c.hidden, c.targets, c.temperature)
    (c.weights[0] * logprobs + c.weights[1] * entropies).sum().backward()
    expected_logprobs, expected_entropies, gradients = naive(c, softcap, scale)
    torch.testing.assert_close(logprobs.double(), expected_logprobs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropies.double(), expected_entropies, rtol=1e-5, atol=1e-5)
    for mine, expected in zip([c.hidden.grad, *(p.grad for p in c.projection.parameters())], gradients, strict=True):
        torch.testing.assert_close(mine.double(), expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


def test_gradient_of_logprobs_alone():
    c = case(7)
    logprobs, _ = token_logprobs(Head(c.projection), c.hidden, c.targets, c.temperature)
    (c.weights[0] * logprobs).sum().backward()
    c.weights[1] = 0
    expected = naive(c, None, 1.0)[2][0]
    torch.testing.assert_close(c.hidden.grad.double(), expected, rtol=1e-5, atol=1e-6)


def test_gradient_of_entropies_alone():
    c = case(7)
    _, entropies = token_logprobs(Head(c.projection), c.hidden, c.targets, c.temperature)
    (c.weights[1] * entropies).sum().backward()
    c.weights[0] = 0
    expected = naive(c, None, 1.0)[2][0]
    torch.testing.assert_close(c.hidden.grad.double(), expected, rtol=1e-5, atol=1e-6)


def test_no_targets_give_an_empty_result_that_is_still_part_of_the_graph():
    c = case(0)
    logprobs, entropies = token_logprobs(Head(c.projection), c.hidden, c.targets, c.temperature)
    assert logprobs.shape == entropies.shape == (0,)
    logprobs.sum().backward()
    assert c.hidden.grad.shape == (0, HIDDEN)


def test_without_gradients_the_values_are_the_same():
    c = case(CHUNK + 3)
    with_graph = token_logprobs(Head(c.projection), c.hidden, c.targets, c.temperature)
    with torch.no_grad():
        without = token_logprobs(Head(c.projection), c.hidden, c.targets, c.temperature)
    for a, b in zip(with_graph, without, strict=True):
        assert torch.equal(a, b)
        assert not b.requires_grad


def test_logits_of_the_first_chunk_are_kept_and_those_of_others_computed_again():
    c = case(2 * CHUNK + 1)
    tokens = []
    c.projection.register_forward_hook(lambda module, inputs, output: tokens.append(len(output)))
    logprobs, _ = token_logprobs(Head(c.projection), c.hidden, c.targets, c.temperature)
    assert tokens == [CHUNK, CHUNK, 1]
    logprobs.sum().backward()
    assert sorted(tokens) == sorted([CHUNK, CHUNK, 1, CHUNK, 1])


def test_logits_that_their_module_needs_again_are_left_alone():
    """The backward pass of a tanh reads its result."""
    c = case(CHUNK + 1)
    projection = nn.Sequential(c.projection, nn.Tanh())
    logprobs, entropies = token_logprobs(Head(projection), c.hidden, c.targets, c.temperature)
    (c.weights[0] * logprobs + c.weights[1] * entropies).sum().backward()
    expected = naive(c, 1.0, 1.0)[2]
    for mine, other in zip([c.hidden.grad, *(p.grad for p in c.projection.parameters())], expected, strict=True):
        torch.testing.assert_close(mine.double(), other, rtol=1e-4, atol=1e-5 * float(other.abs().max()))


def test_bfloat16_states_give_float32_results_and_float32_softmax():
    c = case(6, bias=False)
    c.projection.bfloat16()
    logits = c.projection(c.hidden.detach().bfloat16()).double() / c.temperature.double()[:, None]
    expected = logits.log_softmax(-1)
    with torch.autocast("cpu", torch.bfloat16):
        logprobs, entropies = token_logprobs(Head(c.projection), c.hidden.bfloat16(), c.targets, c.temperature)
    assert logprobs.dtype == entropies.dtype == torch.float32
    torch.testing.assert_close(logprobs.double(), expected[range(6), c.targets], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(entropies.double(), -(expected.exp() * expected).sum(-1), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("config", "softcap", "scale"),
    [
        ({}, None, 1.0),
        ({"final_logit_softcapping": 30.0}, 30.0, 1.0),
        ({"logit_scale": 0.0625}, None, 0.0625),
        ({"logits_scaling": 8.0}, None, 0.125),
        ({"lm_head_multiplier": 0.5}, None, 0.5),
        ({"logits_soft_cap": 30.0}, 30.0, 1.0),
    ],
)
def test_head_reads_what_the_config_says_of_the_logits(config, softcap, scale):
    projection = nn.Linear(2, 3)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(**config))

        def get_output_embeddings(self):
            return projection

    assert Head.of(Model()) == Head(projection, softcap, scale)


# -- on a GPU: one kernel a pass ---------------------------------------------------------------------------------------


@pytest.fixture
def compiled(monkeypatch):
    """The kernels that a GPU gets, made for this CPU."""
    monkeypatch.setattr(fused, "is_usable", lambda *arguments: True)
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated:DeprecationWarning")
@pytest.mark.parametrize("bias", [True, False])
def test_compiled_passes_have_the_values_and_gradients_of_float64_for_any_number_of_rows(bias, compiled):
    before = counters["stats"]["unique_graphs"]
    for n in (2, CHUNK, CHUNK + 3, 3 * CHUNK - 1):
        c = case(n, bias=bias)
        logprobs, entropies = token_logprobs(Head(c.projection, 1.5, 3.0), c.hidden, c.targets, c.temperature)
        (c.weights[0] * logprobs + c.weights[1] * entropies).sum().backward()
        expected_logprobs, expected_entropies, gradients = naive(c, 1.5, 3.0)
        torch.testing.assert_close(logprobs.double(), expected_logprobs, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(entropies.double(), expected_entropies, rtol=1e-5, atol=1e-5)
        for mine, expected in zip(
            [c.hidden.grad, *(p.grad for p in c.projection.parameters())], gradients, strict=True
        ):
            torch.testing.assert_close(mine.double(), expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))
    assert counters["stats"]["unique_graphs"] - before == 2  # one for each pass
