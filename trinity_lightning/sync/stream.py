"""The policy's weights on their way to engines: a stream of tensors whose names and shapes are known beforehand."""

import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from trinity_lightning.common.words import listed
from trinity_lightning.config.models import model_class
from trinity_lightning.config.values import nearest
from trinity_lightning.errors import WeightSyncError

Shape = tuple[int, ...]

CPU = torch.device("cpu")


@dataclass(frozen=True)
class WeightStream:
    """Named tensors that are made one at a time, and their names and shapes, known beforehand.

    Attributes:
        shapes: shape of each tensor by its Hugging Face checkpoint name, in the order sent.
        tensors: starts the stream: yields each (name, tensor) once.
        device: the device of the tensors before they are sent.
        rest: weights that are not sent, because the engines have them and training does not change them; None: there
            are none.
    """

    shapes: Mapping[str, Shape]
    tensors: Callable[[], Iterator[tuple[str, Tensor]]]
    device: torch.device = CPU
    rest: "WeightStream | None" = None

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self.tensors()

    @property
    def all_shapes(self) -> Mapping[str, Shape]:
        """Shapes of the engines' weights after the sync: those that are sent, and the rest."""
        return self.shapes if self.rest is None else {**self.rest.shapes, **self.shapes}

    @classmethod
    def of(cls, named_tensors: Iterable[tuple[str, Tensor]]) -> "WeightStream":
        """The stream itself, or a stream of anything that yields (name, tensor), gathered first to learn the shapes."""
        if isinstance(named_tensors, WeightStream):
            return named_tensors
        gathered = list(named_tensors)
        return cls({name: tuple(tensor.shape) for name, tensor in gathered}, lambda: iter(gathered))


@contextmanager
def while_sent(stream: WeightStream) -> Iterator[WeightStream]:
    """The stream for one sync. If the sync ends early, as by its time limit, reading on raises a WeightSyncError.

    Otherwise a thread might read weights while they are trained again. With a policy in shards
    (`trainer.fsdp.Shards`), it would also communicate with other ranks at the same time as the thread that trains.
    """
    given_up = threading.Event()

    def tensors() -> Iterator[tuple[str, Tensor]]:
        source = iter(stream)
        while not given_up.is_set():
            if (named := next(source, None)) is None:
                return
            yield named
        raise WeightSyncError("the weight sync was given up: its weights are not read any further.")

    try:
        yield replace(stream, tensors=tensors)
    except BaseException:
        given_up.set()
        raise


class Sender(ABC):
    """Sends weights to all engines at once."""

    @abstractmethod
    async def send(self, stream: WeightStream, version: int) -> None:
        """Send these weights to every engine; WeightSyncError: an engine did not take them, and may hold half."""

    def close(self) -> None:  # noqa: B027  # some senders have no connection
        """Disconnect from the engines; calling it twice is allowed."""


MAX_LISTED = 8  # differences of a kind that a message names


def check_shapes(sent: Mapping[str, Shape], expected: Mapping[str, Shape]) -> None:
    """Refuse weights that lack a tensor, have one too many or a wrong shape: WeightSyncError. No engine is touched."""
    if dict(sent) != {name: tuple(shape) for name, shape in expected.items()}:
        raise misfit(sent, expected)


def misfit(sent: Mapping[str, Shape], expected: Mapping[str, Shape]) -> WeightSyncError:
    """The error for shapes by name that differ; it has the first differences of each kind, and the fix."""
    missing = [f"'{name}'" for name in expected if name not in sent]
    matches = {name: nearest(name, expected) for name in sent if name not in expected}
    unknown = [f"'{name}'" + (f" (nearest: '{match}')" if match else "") for name, match in matches.items()]
    wrong = [
        f"'{name}' {tuple(shape)}, expected {tuple(expected[name])}"
        for name, shape in sent.items()
        if name in expected and shape != expected[name]
    ]
    kinds = {"missing": missing, "unknown to the engine": unknown, "wrong shape": wrong}
    problems = [f"{len(names)} {kind}: {listed(names, MAX_LISTED)}" for kind, names in kinds.items() if names]
    return WeightSyncError(
        f"the weights do not fit the engine, which was not touched. {'. '.join(problems)}. Trainer and engine must "
        "hold the same model; send every parameter under its checkpoint name, a tied 'lm_head.weight' too."
    )


# -- the weights of a model --------------------------------------------------------------------------------------------


def weight_stream(model: nn.Module) -> WeightStream:
    """Every parameter of a Hugging Face model under its checkpoint name; a tied one under each of its names.

    A tied head is always sent, because an engine may keep a packed copy of it that would silently stay stale. Weights
    in shards (`trainer.fsdp.Shards`) are put together one by one as they are sent; adapters (`trainer.adapter.Adapter`)
    are merged into the weights.
    """
    if (parts := in_parts(model)) is not None:
        return as_checkpoint(parts.parameters(), model, parts.whole)
    return as_checkpoint(dict(model.named_parameters(remove_duplicate=False)), model)


def changing_stream(model: nn.Module) -> WeightStream:
    """As `weight_stream`, for engines that had all weights once: the layers in which nothing is trained are its `rest`.

    Other layers are sent whole, because an engine may hold several weights of a layer in one tensor.
    """
    whole, parts = weight_stream(model), in_parts(model)
    if hasattr(model, "adapter"):
        return whole
    parameters = dict(model.named_parameters(remove_duplicate=False)) if parts is None else parts.parameters()
    groups = _layers(parameters, by_module=True)
    trained = {name for group in groups if any(parameters[name].requires_grad for name in group) for name in group}
    sent, rest = ({n: p for n, p in parameters.items() if (n in trained) is kind} for kind in (True, False))
    if not rest:
        return whole
    read = None if parts is None else parts.whole
    streams = as_checkpoint(sent, model, read), as_checkpoint(rest, model, read)
    stream = replace(streams[0], rest=streams[1])
    return stream if stream.all_shapes == whole.shapes else whole  # else a weight of checkpoints is made from both


def parameter_stream(model: nn.Module) -> WeightStream:
    """Every parameter under the model's own name for it, for an engine that generates with this same model."""
    tensors = dict(model.named_parameters(remove_duplicate=False))
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return WeightStream(shapes, lambda: ((name, tensor.detach()) for name, tensor in tensors.items()))


class Parts(Protocol):
    """The weights of a model that has them in parts: shards, or frozen weights and adapters."""

    def parameters(self) -> Mapping[str, Tensor]:
        """Tensors with the names and shapes of the whole weights."""
        ...

    def whole(self, name: str) -> Tensor:
        """A weight, put together."""
        ...

    def perturbed(self) -> AbstractContextManager[Callable[[float], None]]:
        """A context as that of `sync.proof.perturbed`."""
        ...


def in_parts(model: nn.Module) -> Parts | None:
    """The parts of a model's weights; None if it has them whole."""
    return getattr(model, "adapter", None) or getattr(model, "shards", None)


def skeleton(path: str) -> Any:
    """The Hugging Face model in a folder (or of a hub name), from its config, without any weights in memory."""
    from transformers import AutoConfig

    kind = model_class(path)
    with torch.device("meta"):
        return kind.from_config(AutoConfig.from_pretrained(path))


def parameter_shapes(path: str) -> dict[str, Shape]:
    """Checkpoint names and shapes of every parameter of the Hugging Face model in a folder (or of a hub name).

    Tied parameters are listed under each of their names, because an engine may keep a second copy of a tied head.
    """
    model = skeleton(path)
    return dict(as_checkpoint(dict(model.named_parameters(remove_duplicate=False)), model).shapes)


# -- parameters as checkpoints have them -------------------------------------------------------------------------------

_LAYER = re.compile(r".*?\.\d+(?=\.)")


def as_checkpoint(
    tensors: Mapping[str, Tensor], model: Any, read: Callable[[str], Tensor] | None = None
) -> WeightStream:
    """Convert tensors from a model's parameter names to the names and forms that `save_pretrained` would write.

    Transformers holds some weights in another form, such as all experts of a layer in one tensor. They are converted
    layer by layer, so that no whole copy is made, unless a tensor of the checkpoint is made from several layers.

    Args:
        tensors: the weights.
        model: the Hugging Face model whose names they have; its own weights are not read.
        read: returns the tensor of a name when it is about to be sent; None: the tensors are sent as they are.
    """
    device, take = next(iter(tensors.values())).device, read or (lambda name: tensors[name].detach())
    if conversions := _conversions(model):  # few models have any
        return _converted(tensors, take, model, conversions, device)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return WeightStream(shapes, lambda: ((name, take(name)) for name in shapes), device)


def check_conversion(tensors: Mapping[str, Tensor], model: Any) -> None:
    """Convert tensors of these shapes, without any data, as `save_pretrained` will; errors are transformers'."""
    _shapes(tensors, [list(tensors)], model)


def _conversions(model: Any) -> list[Any]:
    """The conversions by which transformers makes the parameters of a model of this class from its checkpoints.

    The conversions that the model itself was loaded with are not used: its file may have lacked a prefix.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange

    conversions = get_model_conversion_mapping(model, add_legacy=False)
    return [conversion for conversion in conversions if not isinstance(conversion, PrefixChange)]


def _converted(
    tensors: Mapping[str, Tensor],
    take: Callable[[str], Tensor],
    model: Any,
    conversions: list[Any],
    device: torch.device,
) -> WeightStream:
    """Convert the tensors that `take` returns to the form of checkpoints, a layer at a time.

    Args:
        tensors, model: as for `as_checkpoint`.
        take: returns the tensor of a name.
        conversions: the conversions by which transformers makes the model's parameters from its checkpoints.
        device: the device of the tensors.
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
    """Names and shapes of the converted tensors, in the order of the stream."""
    # Not empty_like, which of a shard makes a shard, and rank 0 alone cannot put shards together.
    empty = (
        {n: torch.empty(tensors[n].shape, dtype=tensors[n].dtype, device="meta") for n in names} for names in groups
    )
    return {name: tuple(tensor.shape) for group in empty for name, tensor in _reverted(group, model).items()}


def _reverted(tensors: dict[str, Tensor], model: Any) -> dict[str, Tensor]:
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, tensors)


def _layers(names: Iterable[str], by_module: bool = False) -> list[list[str]]:
    """Names by the layer that they belong to (`model.layers.3`).

    A name without a number is a group of its own, or `by_module` in one with the others of its module.
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        layer, module = _LAYER.match(name), name.rpartition(".")[0]
        groups.setdefault(layer.group() if layer else module if by_module else name, []).append(name)
    return list(groups.values())
