"""The policy's weights on their way to an engine: what will come, known before anything is sent."""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trinity_lightning.errors import WeightSyncError

if TYPE_CHECKING:
    from trinity_lightning.sync.converted import Parts

Shape = tuple[int, ...]

CPU = torch.device("cpu")


@dataclass(frozen=True)
class WeightStream:
    """Named tensors that are made one at a time, and their names and shapes, known beforehand.

    Attributes:
        shapes: shape of each tensor by its Hugging Face checkpoint name, in the order sent.
        tensors: starts the stream: yields each (name, tensor) once.
        device: where they come from.
    """

    shapes: Mapping[str, Shape]
    tensors: Callable[[], Iterator[tuple[str, Tensor]]]
    device: torch.device = CPU

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self.tensors()

    @classmethod
    def of(cls, named_tensors: Iterable[tuple[str, Tensor]]) -> "WeightStream":
        """A stream as it is; anything else that yields (name, tensor) is gathered first, to learn its shapes."""
        if isinstance(named_tensors, WeightStream):
            return named_tensors
        gathered = list(named_tensors)
        return cls({name: tuple(tensor.shape) for name, tensor in gathered}, lambda: iter(gathered))


@contextmanager
def while_sent(stream: WeightStream) -> Iterator[WeightStream]:
    """The stream for one sync. If that ends early, by its time limit say, a thread that still reads it is refused.

    Else it would go on to read weights that are trained again; and of a policy in shards (`trainer.shards`), take part
    in rounds of all processes at the same time as the thread that trains or saves.
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


def check_shapes(sent: Mapping[str, Shape], expected: Mapping[str, Shape]) -> None:
    """Refuse a stream that lacks a tensor, brings one too many, or has a wrong shape, before an engine is touched.

    Raises:
        WeightSyncError: lists the differences and says what to do.
    """
    if _as_tuples(sent) != _as_tuples(expected):
        from trinity_lightning.sync.mismatch import misfit

        raise misfit(sent, expected)


def _as_tuples(shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    return {name: tuple(shape) for name, shape in shapes.items()}


def weight_stream(model: nn.Module) -> WeightStream:
    """Every parameter of a Hugging Face model under its checkpoint name; a tied one under each of its names.

    The tied head is always sent: an engine may keep a packed copy of it that would silently stay stale. Of a model in
    shards (`trainer.shards`), each is put together as it is sent; adapters (`trainer.adapter.Adapter`) are merged.
    """
    if (parts := in_parts(model)) is not None:
        return as_checkpoint(parts.parameters(), model, parts.whole)
    return as_checkpoint(dict(model.named_parameters(remove_duplicate=False)), model)


def in_parts(model: nn.Module) -> "Parts | None":
    """The parts of a model's weights; None if it has them whole."""
    return getattr(model, "adapter", None) or getattr(model, "shards", None)


def parameter_stream(model: nn.Module) -> WeightStream:
    """The same under the names of the model's own parameters: for an engine that generates with this very model."""
    tensors = dict(model.named_parameters(remove_duplicate=False))
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return WeightStream(shapes, lambda: ((name, tensor.detach()) for name, tensor in tensors.items()))


def skeleton(path: str) -> Any:
    """The Hugging Face model in a folder (or of a hub name), from its config, without any weights in memory."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))


def parameter_shapes(path: str) -> dict[str, Shape]:
    """Checkpoint names and shapes of every parameter of the Hugging Face model in a folder (or of a hub name).

    Tied parameters are listed under each of their names: an engine may keep a copy of its own of a tied head.
    """
    model = skeleton(path)
    return dict(as_checkpoint(dict(model.named_parameters(remove_duplicate=False)), model).shapes)


def as_checkpoint(
    tensors: Mapping[str, Tensor], model: Any, read: Callable[[str], Tensor] | None = None
) -> WeightStream:
    """Tensors by a model's own parameter names, as its checkpoints have them: what `save_pretrained` would write.

    Transformers holds some of them in another form, such as all experts of a layer in one tensor. They are converted
    back one layer at a time, if no tensor of a checkpoint is made of several layers: nothing is copied as a whole.

    Args:
        tensors: the weights.
        model: the Hugging Face model whose names they have; its own weights are not read.
        read: the tensor of a name, when its turn comes to be sent; None: as they are.
    """
    device, take = next(iter(tensors.values())).device, read or (lambda name: tensors[name].detach())
    if conversions := _conversions(model):  # of few models
        from trinity_lightning.sync.converted import converted

        return converted(tensors, take, model, conversions, device)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return WeightStream(shapes, lambda: ((name, take(name)) for name in shapes), device)


def _conversions(model: Any) -> list[Any]:
    """How transformers makes the parameters of such a model from its checkpoints.

    Those of its class: the file that this one was loaded from may have lacked a prefix.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange

    every = get_model_conversion_mapping(model, add_legacy=False)
    return [conversion for conversion in every if not isinstance(conversion, PrefixChange)]
