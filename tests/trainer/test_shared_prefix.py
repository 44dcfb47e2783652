"""Attention over shared prefixes on a CPU, against one dense mask."""

import pytest
import torch
from hypothesis import example, given, settings
from layout_cases import SCALE, dense, segments, states

from trinity_lightning.trainer.attention import SHORT_TOKENS, CpuSharedPrefix, Segments


def attend(layout: Segments, inputs: list[torch.Tensor]) -> torch.Tensor:
    query, key, value = inputs
    return CpuSharedPrefix.of(layout)(query, key, value, SCALE)


def with_gradients(result: torch.Tensor, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    weights = torch.linspace(-1, 1, result.numel(), dtype=torch.float64).view(result.shape).to(result.dtype)
    return [result.detach(), *torch.autograd.grad((result * weights).sum(), inputs)]


@settings(deadline=None, max_examples=40)
@given(segments())
@example(Segments([700], [2], [1100, 600]))  # longer than the 512 keys that torch's kernel takes at once
def test_attention_and_its_gradients_are_those_of_a_dense_mask(layout):
    inputs = states(layout.starts()[-1], torch.float64)
    mine = with_gradients(attend(layout, inputs), inputs)
    for found, expected in zip(mine, with_gradients(dense(layout, inputs), inputs), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("length", [20, SHORT_TOKENS + 40])
def test_bfloat16_is_as_exact_as_its_rounding(length):
    layout = Segments([length, 9], [3, 2], [5, length, 3, 8, 11, 2])
    inputs = states(layout.starts()[-1], torch.bfloat16)
    exact = [each.detach().double().requires_grad_() for each in inputs]
    found = with_gradients(attend(layout, inputs), inputs)
    for mine, truth in zip(found, with_gradients(dense(layout, exact), exact), strict=True):
        assert mine.dtype == torch.bfloat16
        assert float((mine.double() - truth).norm() / truth.norm()) < (0.004 if length < SHORT_TOKENS else 0.012)


def test_padding_among_queries_cannot_overflow():
    layout = Segments([], [], [40, 1])
    inputs = states(41, torch.float32)
    with torch.no_grad():
        inputs[0][:, :, 0], inputs[1][:, :, 0] = -90.0, 90.0  # the first score is far below any other
    assert all(each.isfinite().all() for each in with_gradients(attend(layout, inputs), inputs))
