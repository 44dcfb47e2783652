"""Two small bfloat16 parameters, gradients for them, and an AdamW with every setting that matters."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn


def adamw(groups: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1, fused=True)


def make_parameters(seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator).bfloat16()) for shape in ((4, 3), (5,))]


def set_gradients(parameters: Sequence[Any], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.grad_dtype)
