"""Weights that are held in another form than checkpoints have, converted back or put together as they are sent."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import Tensor

from trinity_lightning.sync.stream import Shape, WeightStream

_LAYER = re.compile(r".*?\.\d+(?=\.)")


class Parts(Protocol):
    """The weights of a model that has them in parts: shards, or frozen weights and adapters."""

    def parameters(self) -> Mapping[str, Tensor]:
        """Tensors of the names and shapes of the whole weights."""
        ...

    def whole(self, name: str) -> Tensor:
        """A weight, put together."""
        ...

    def perturbed(self) -> AbstractContextManager[Callable[[float], None]]:
        """As `sync.proof.perturbed`."""
        ...


def converted(
    tensors: Mapping[str, Tensor],
    take: Callable[[str], Tensor],
    model: Any,
    conversions: list[Any],
    device: torch.device,
) -> WeightStream:
    """The tensors that `take` gives, as checkpoints have them, a layer at a time; arguments as of `as_checkpoint`.

    `conversions` are how transformers makes the model's parameters from its checkpoints.
    """
    plain = SimpleNamespace(_weight_conversions=conversions, config=model.config)  # a model in shards takes no copy
    groups = _layers(tensors)
    shapes = _shapes(tensors, groups, plain)
    if len(groups) > 1 and shapes != (whole := _shapes(tensors, [list(tensors)], plain)):
        groups, shapes = [list(tensors)], whole  # some conversion joins layers

    def stream() -> Iterator[tuple[str, Tensor]]:
        for names in groups:
            yield from _reverted({name: take(name) for name in names}, plain).items()

    return WeightStream(shapes, stream, device)


def _shapes(tensors: Mapping[str, Tensor], groups: Sequence[Sequence[str]], model: Any) -> dict[str, Shape]:
    """Names and shapes of what is streamed, in its order."""
    # Not empty_like: that of a shard is a shard too, which rank 0 alone cannot put together.
    empty = (
        {n: torch.empty(tensors[n].shape, dtype=tensors[n].dtype, device="meta") for n in names} for names in groups
    )
    return {name: tuple(tensor.shape) for group in empty for name, tensor in _reverted(group, model).items()}


def check_conversion(tensors: Mapping[str, Tensor], model: Any) -> None:
    """Convert tensors of these shapes, without any data, as `save_pretrained` will; errors are transformers'."""
    _shapes(tensors, [list(tensors)], model)


def _reverted(tensors: dict[str, Tensor], model: Any) -> dict[str, Tensor]:
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, tensors)


def _layers(names: Iterable[str]) -> list[list[str]]:
    """Names by the layer that they belong to (`model.layers.3`); a name without a number is a group of its own."""
    groups: dict[str, list[str]] = {}
    for name in names:
        layer = _LAYER.match(name)
        groups.setdefault(layer.group() if layer else name, []).append(name)
    return list(groups.values())
