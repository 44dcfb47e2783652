"""The engines that hold the policy, as one: which weights they have, and giving them others."""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

from trinity_lightning.common.inference import HeldModel
from trinity_lightning.common.threads import run_in_thread
from trinity_lightning.sync.stream import Shape, WeightStream, while_sent


class PolicyEngine(HeldModel, Protocol):
    """A model that holds the policy, and may share its device with the trainer."""

    async def sleep(self) -> None:
        """Give the memory to the trainer until `wake_up`."""
        ...

    async def wake_up(self) -> None:
        """Take it again: with the weights as they were, and an empty cache."""
        ...


class WeightSender(Protocol):
    """Sends weights to several engines at once."""

    async def send(self, stream: WeightStream, version: int) -> None:
        """Give them to all engines; then each has that version."""
        ...

    def close(self) -> None:
        """Nothing is sent any more."""
        ...


E = TypeVar("E", bound=PolicyEngine)


def shares_weights(models: Iterable[HeldModel]) -> bool:
    """Whether any of these engines generates with the trainer's own weights: there are no older ones to give it."""
    return any(model.capabilities.shares_weights for model in models)


def _copy(stream: WeightStream) -> WeightStream:
    """The same tensors in the host's memory, which later training leaves as they are."""
    return WeightStream.of({name: tensor.to("cpu", copy=True) for name, tensor in stream}.items())


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
        self.group: WeightSender | None = None

    async def join(self, shapes: Mapping[str, Shape] | None = None) -> None:
        """Send weights without a file from now on; see `WeightGroup` and `SharedMemory` for errors.

        Args:
            shapes: of what is going to be sent; None: as the trainer's weights are.
        """
        from trinity_lightning.sync.servers import group_of

        stream = self._trainers()
        self.leave()
        self.group = group = group_of(self.models, stream.device, self._present)
        await group.form(stream.shapes if shapes is None else shapes)

    def leave(self) -> None:
        """Leave the group, if there is one."""
        group, self.group = self.group, None
        if group is not None:
            group.close()

    async def sync(self, version: int) -> None:
        """Give every engine the trainer's present weights; RuntimeError if they are not connected."""
        stream = self._trainers()
        if self._keeps_copy:  # first, and then sent: of a policy in shards each weight is put together once
            with while_sent(stream) as sent:
                stream = await run_in_thread(partial(_copy, sent))
        await self.send(stream, version)

    async def send(self, stream: WeightStream, version: int) -> None:
        """Give every engine these weights; a server that is started again before the next ones reads them once more."""
        with while_sent(stream) as sent:
            if self.group is not None:
                await self.group.send(sent, version)
            else:
                await asyncio.gather(*(model.sync_weights(sent, version) for model in self.models))
        self.version, self._given = version, stream

    def _present(self) -> WeightStream:
        """The weights that the engines were last given; before that, the trainer's."""
        return self._trainers() if self._given is None else self._given

    async def sleep(self) -> None:
        """Give the device's memory to the trainer, if engines can."""
        await asyncio.gather(*(model.sleep() for model in self.models))

    async def wake_up(self) -> None:
        """Take the device's memory again."""
        await asyncio.gather(*(model.wake_up() for model in self.models))

    def weight(self, name: str) -> Tensor:
        """The weight of that name that the engines were last given, or the trainer's present one if no copy is kept.

        Raises:
            KeyError: unknown name; the message has the nearest match.
            RuntimeError: the trainer's weights are not connected.
        """
        stream = self._present()
        if name not in stream.shapes:
            from trinity_lightning.sync.mismatch import unknown_weight

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
