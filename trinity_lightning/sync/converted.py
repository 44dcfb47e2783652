"""Weights that transformers holds in another form than their checkpoints, converted back as they are sent."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trinity_lightning.sync.stream import Shape, WeightStream


def converted(
    tensors: Mapping[str, Tensor],
    groups: Sequence[Sequence[str]],
    take: Callable[[str], Tensor],
    model: Any,
    conversions: list[Any],
    device: torch.device,
) -> WeightStream:
    """The tensors that `take` gives, as checkpoints have them; see `as_checkpoint`.

    Args:
        tensors: by a model's own parameter names; only their shapes and dtypes are read.
        groups: names by layer, which are converted together, or all at once if some conversion joins layers.
        take: the tensor of a name, when its turn comes to be sent.
        model: whose names they are.
        conversions: how transformers makes its parameters from its checkpoints.
        device: where the tensors come from.
    """
    plain = copy.copy(model)
    plain._weight_conversions = conversions
    shapes = _shapes(tensors, groups, plain)
    if len(groups) > 1 and shapes != (whole := _shapes(tensors, [list(tensors)], plain)):
        groups, shapes = [list(tensors)], whole

    def stream() -> Iterator[tuple[str, Tensor]]:
        for names in groups:
            yield from _reverted({name: take(name) for name in names}, plain).items()

    return WeightStream(shapes, stream, device)


def _shapes(tensors: Mapping[str, Tensor], groups: Sequence[Sequence[str]], model: Any) -> dict[str, Shape]:
    """Names and shapes of what is streamed, in its order."""
    empty = (
        {n: torch.empty(tensors[n].shape, dtype=tensors[n].dtype, device="meta") for n in names} for names in groups
    )
    return {name: tuple(tensor.shape) for group in empty for name, tensor in _reverted(group, model).items()}


def _reverted(tensors: dict[str, Tensor], model: Any) -> dict[str, Tensor]:
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, tensors)
