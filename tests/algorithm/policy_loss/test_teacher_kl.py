"""KL to a teacher's likeliest tokens: against float64 numpy, and against the KL over a whole vocabulary."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.errors import refuses
from support.losses import batch, with_gradient
from torch import Tensor

from trinity_lightning.algorithm.policy_loss.likelihood import DIRECTIONS, teacher_kl, with_rest

VOCABULARY = 12


def distributions(seed: int, scale: float = 2.0) -> tuple[Tensor, Tensor]:
    """Log-probabilities of policy and teacher over a small vocabulary at each of the batch's tokens, float64."""
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(2, 5, 7, VOCABULARY, generator=generator, dtype=torch.float64)
    policy, teacher = logits.log_softmax(-1)
    return policy, teacher


def top_k(seed: int, k: int) -> dict[str, Any]:
    policy, teacher = distributions(seed)
    likeliest = teacher.topk(k)
    return {"teacher_top_k_logprobs": likeliest.values, "top_k_logprobs": policy.gather(-1, likeliest.indices)}


def numpy_kl(p: Any, q: Any) -> Any:
    return (p * (np.log(p) - np.log(q))).sum(-1)


@pytest.mark.parametrize("direction", DIRECTIONS)
@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 1000), k=st.integers(1, VOCABULARY - 1))
def test_it_equals_numpy(direction: str, seed: int, k: int) -> None:
    tensors, candidates = batch(seed), top_k(seed, k)
    p, q = (np.exp(candidates[name].numpy()) for name in ("top_k_logprobs", "teacher_top_k_logprobs"))
    p, q = (np.concatenate([masses, 1 - masses.sum(-1, keepdims=True)], -1) for masses in (p, q))
    expected = numpy_kl(p, q) if direction == "reverse" else numpy_kl(q, p)
    loss, metrics = teacher_kl(*tensors, **candidates, direction=direction)
    assert loss.item() == pytest.approx(expected[tensors[2].numpy()].mean(), rel=1e-9)
    assert metrics == {"pg_loss": loss}


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_more_tokens_come_closer_to_the_whole_divergence_from_below(direction: str) -> None:
    tensors = batch()
    policy, teacher = distributions(0)
    p, q = (policy, teacher) if direction == "reverse" else (teacher, policy)
    whole = (p.exp() * (p - q)).sum(-1)[tensors[2]].mean().item()
    by_k = [teacher_kl(*tensors, **top_k(0, k), direction=direction)[0].item() for k in range(1, VOCABULARY + 1)]
    assert by_k == pytest.approx(sorted(by_k), rel=1e-12)  # the last ones differ by rounding alone
    assert by_k[-1] == pytest.approx(whole, rel=1e-5)
    assert 0 < by_k[0] < whole


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_it_is_least_at_the_teacher_and_finite_in_float32(direction: str) -> None:
    tensors = batch()
    teacher = torch.tensor([0.0, -40.0]).expand(5, 7, 2)  # sure of one token: nothing is left for the rest
    for policy, least in ((teacher, True), (torch.tensor([-30.0, -1e-7]).expand(5, 7, 2), False)):
        arguments = {"teacher_top_k_logprobs": teacher, "direction": direction}
        loss, gradient, _ = with_gradient(
            lambda leaf, *rest, kwargs=arguments: teacher_kl(*rest, top_k_logprobs=leaf, **kwargs),
            policy.clone(),
            *tensors,
        )
        assert gradient.isfinite().all()
        assert (loss == 0) == least
    assert with_rest(teacher).exp().sum(-1).allclose(torch.ones(()))


def test_an_unknown_direction_is_refused() -> None:
    with refuses("algorithm.policy_loss.args.direction"):
        teacher_kl(*batch(), **top_k(0, 2), direction="revers")
