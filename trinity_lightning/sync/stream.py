"""The policy's weights on their way: a stream whose names and shapes are known before, and the engines that get it."""

import asyncio
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from trinity_lightning.common.failures import listed
from trinity_lightning.common.inference import HeldModel
from trinity_lightning.common.threads import run_in_thread
from trinity_lightning.config.values import nearest
from trinity_lightning.errors import WeightSyncError

if TYPE_CHECKING:
    from trinity_lightning.sync.servers import Sender

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
    """A WeightSyncError if a stream lacks a tensor, brings one too many, or has a wrong shape; no engine is touched."""
    if dict(sent) != {name: tuple(shape) for name, shape in expected.items()}:
        raise misfit(sent, expected)


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


# -- the engines that hold the policy, as one: which weights they have, and giving them others -------------------------


class PolicyEngine(HeldModel, Protocol):
    """A model that holds the policy, and may share its device's memory with the trainer; see `Engine.sleep`."""

    async def sleep(self) -> None: ...

    async def wake_up(self) -> None: ...


E = TypeVar("E", bound=PolicyEngine)


def shares_weights(models: Iterable[HeldModel]) -> bool:
    """Whether any of these engines generates with the trainer's own weights: there are no older ones to give it."""
    return any(model.capabilities.shares_weights for model in models)


class PolicyEngines(Generic[E]):
    """Engines that are always given the same weights.

    Args:
        models: the engines.
        keeps_copy: whether the weights last given are kept, because the trainer's may be newer by the time that they
            are asked for.

    Attributes:
        version: explore steps that changed the weights that the engines were last given.
        source: where the trainer's present weights come from; None: not connected yet.
        group: sends weights to all engines, if not each is sent them by itself.
    """

    def __init__(self, models: Sequence[E], keeps_copy: bool) -> None:
        self.models = list(models)
        self.version = 0
        self.source: Callable[[], WeightStream] | None = None
        self._keeps_copy = keeps_copy
        self._given: WeightStream | None = None
        self._restored: tuple[dict[str, Tensor], int] | None = None
        self.group: Sender | None = None

    async def join(self, shapes: Mapping[str, Shape] | None = None) -> None:
        """Send weights, of these shapes or the trainer's, without a file from now on; errors as of a group's `form`."""
        from trinity_lightning.sync.servers import group_of

        stream = self._trainers()
        self.leave()
        self.group = group = group_of(self.models, stream.device)
        await group.form(stream.shapes if shapes is None else shapes)

    def leave(self) -> None:
        """Leave the group, if there is one."""
        group, self.group = self.group, None
        if group is not None:
            group.close()

    async def sync(self, version: int) -> None:
        """Give every engine the trainer's present weights; RuntimeError if they are not connected."""
        stream = self._trainers()
        if self._keeps_copy:  # on the host, and then sent: of a policy in shards each weight is put together once
            with while_sent(stream) as sent:
                copied = ((name, tensor.to("cpu", copy=True)) for name, tensor in sent)
                stream = await run_in_thread(lambda: WeightStream.of(copied))
        await self.send(stream, version)

    async def send(self, stream: WeightStream, version: int) -> None:
        """Give every engine these weights; a server that is started again before the next ones reads them once more."""
        with while_sent(stream) as sent:
            if self.group is not None:
                await self.group.send(sent, version)
            else:
                await asyncio.gather(*(model.sync_weights(sent, version) for model in self.models))
        self.version, self._given = version, stream

    async def sleep(self) -> None:
        """Give the device's memory to the trainer, if engines can."""
        await asyncio.gather(*(model.sleep() for model in self.models))

    async def wake_up(self) -> None:
        """Take the device's memory again."""
        await asyncio.gather(*(model.wake_up() for model in self.models))

    def weight(self, name: str) -> Tensor:
        """The weight of that name that the engines were last given, or the trainer's present one if no copy is kept.

        A KeyError has the nearest name; a RuntimeError: the trainer's weights are not connected.
        """
        stream = self._trainers() if self._given is None else self._given
        if name not in stream.shapes:
            raise unknown_weight(name, stream.shapes)
        return next(tensor for other, tensor in stream if other == name)

    def _trainers(self) -> WeightStream:
        if self.source is None:
            raise RuntimeError("prepare() the explorer with the trainer's weights first.")
        return self.source()

    # -- state --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The copy that is kept, and its version; of fresh engines what `restore` is still to give."""
        given = dict(self._given) if self._keeps_copy and self._given is not None else {}
        weights, version = self._restored or (given, self.version)
        return {"version": version, "weights": weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Remember what `restore` is to give, unless that would overwrite the trainer's own weights."""
        kept = bool(state["weights"]) and not shares_weights(self.models)
        self._restored = (state["weights"], state["version"]) if kept else None

    async def restore(self) -> bool:
        """Give fresh engines the weights that they had when the state was taken, once; whether there were any."""
        if self._restored is None:
            return False
        (weights, version), self._restored = self._restored, None
        await self.send(WeightStream.of(weights.items()), version)
        return True

    def forget_restored(self) -> None:
        """Newer weights are due: what the engines had is of no use any more."""
        self._restored = None


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


def misfit(sent: Mapping[str, Shape], expected: Mapping[str, Shape]) -> WeightSyncError:
    """Every difference between shapes by name, the first 8 of each kind, and what to do."""
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


def unknown_weight(name: str, shapes: Mapping[str, Shape]) -> KeyError:
    """The error for a name that the policy has no weight of: which one is nearest."""
    match = nearest(name, shapes)
    hint = f"Did you mean '{match}'?" if match else f"The first is '{next(iter(shapes), None)}'."
    return KeyError(f"unknown weight '{name}' (the policy has {len(shapes)}). {hint}")


MAX_LISTED = 8
