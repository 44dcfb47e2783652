"""The policy's weights on their way to an engine: what will come, told before anything is sent."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from trinity_lightning.common.errors import WeightSyncError
from trinity_lightning.common.suggest import nearest

Shape = tuple[int, ...]


@dataclass(frozen=True)
class WeightStream:
    """Named tensors that are made one at a time, and their names and shapes, known beforehand.

    Attributes:
        shapes: shape of each tensor by its Hugging Face checkpoint name, in the order sent.
        tensors: starts the stream: yields each (name, tensor) once.
    """

    shapes: Mapping[str, Shape]
    tensors: Callable[[], Iterator[tuple[str, Tensor]]]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self.tensors()

    @classmethod
    def of(cls, named_tensors: Iterable[tuple[str, Tensor]]) -> "WeightStream":
        """A stream as it is; anything else that yields (name, tensor) is gathered first, to learn its shapes."""
        if isinstance(named_tensors, WeightStream):
            return named_tensors
        gathered = list(named_tensors)
        return cls({name: tuple(tensor.shape) for name, tensor in gathered}, lambda: iter(gathered))


def check_shapes(sent: Mapping[str, Shape], expected: Mapping[str, Shape]) -> None:
    """Refuse a stream that lacks a tensor, brings one too many, or has a wrong shape, before an engine is touched.

    Raises:
        WeightSyncError: lists every difference (the first 8 of each kind).
    """
    problems = [f"'{name}' is missing" for name in expected if name not in sent][:8]
    unknown = [name for name in sent if name not in expected][:8]
    for name in unknown:
        match = nearest(name, expected)
        problems.append(f"'{name}' is unknown to the engine" + (f" (nearest: '{match}')" if match else ""))
    wrong = [name for name in sent if name in expected and tuple(sent[name]) != tuple(expected[name])][:8]
    problems += [f"'{name}' has shape {tuple(sent[name])}, expected {tuple(expected[name])}" for name in wrong]
    if problems:
        raise WeightSyncError("the weights do not fit the engine, which was not touched: " + "; ".join(problems) + ".")


def parameter_shapes(path: str) -> dict[str, Shape]:
    """Names and shapes of every parameter of the Hugging Face model in a folder (or of a hub name), from its config.

    Tied parameters are listed under each of their names: an engine may keep a copy of its own of a tied head.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
    return {name: tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=False)}
