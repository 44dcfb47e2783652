"""Handles the engines that hold the policy as one: keeps track of their weights, and sends new ones."""

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

from trinity_lightning.common.inference import HeldModel
from trinity_lightning.common.threads import run_in_thread
from trinity_lightning.config.values import nearest
from trinity_lightning.sync.servers import sender_to
from trinity_lightning.sync.stream import Sender, Shape, WeightStream, while_sent


class PolicyEngine(HeldModel, Protocol):
    """A model that holds the policy, and may share its device's memory with the trainer; see `Engine.sleep`."""

    async def sleep(self) -> None: ...

    async def sleep_until_sync(self) -> bool: ...

    async def wake_up(self) -> None: ...


E = TypeVar("E", bound=PolicyEngine)


def shares_weights(models: Iterable[HeldModel]) -> bool:
    """True if an engine generates with the trainer's own weights, so that it cannot have older ones."""
    return any(model.capabilities.shares_weights for model in models)


class PolicyEngines(Generic[E]):
    """Engines that are always sent the same weights.

    Args:
        models: the engines.
        keeps_copy: True to keep a copy of the weights last sent, because the trainer's may be newer when they are asked
            for.

    Attributes:
        version: version of the weights last sent; see `WeightVersions`.
        source: returns the trainer's present weights; None: not connected yet.
        group: sends weights to all engines at once; None: weights are sent to each engine separately.
        lack_weights: True if an engine gave up its weights in its sleep, and weights must be sent before any request.
    """

    def __init__(self, models: Sequence[E], keeps_copy: bool) -> None:
        self.models = list(models)
        self.version = 0
        self.source: Callable[[], WeightStream] | None = None
        self._keeps_copy = keeps_copy
        self._last_sent: WeightStream | None = None
        self._to_restore: tuple[dict[str, Tensor], int] | None = None
        self.group: Sender | None = None
        self.lack_weights = False

    async def join(self, shapes: Mapping[str, Shape] | None = None) -> None:
        """Connect with servers, to which weights are sent without a file from now on.

        Args:
            shapes: shapes of the weights; None: the trainer's.

        Raises:
            ConfigError, WeightSyncError: as in `sender_to` and `ToServers.form`.
        """
        stream = self._trainers()
        self.leave()
        self.group = group = sender_to(self.models, stream.device)
        await group.form(stream.shapes if shapes is None else shapes)

    def leave(self) -> None:
        """Leave the group, if there is one."""
        group, self.group = self.group, None
        if group is not None:
            group.close()

    async def sync(self, version: int) -> None:
        """Send the trainer's present weights to every engine; RuntimeError: they are not connected."""
        stream = self._trainers()
        if self._keeps_copy:  # copied to the host before, so that weights in shards are put together only once
            copied = await _copied(stream, stream.shapes)
            stream = replace(WeightStream.of(copied.items()), rest=stream.rest)
        await self.send(stream, version)

    async def send(self, stream: WeightStream, version: int) -> None:
        """Send these weights to every engine; a server that is restarted before the next sync gets them again."""
        with while_sent(stream) as sent:
            if self.group is not None:
                await self.group.send(sent, version)
            else:
                await asyncio.gather(*(model.sync_weights(sent, version) for model in self.models))
        self.version, self._last_sent, self.lack_weights = version, stream, False

    async def sleep(self, until_sync: bool = False) -> None:
        """Have the engines give up the device's memory to the trainer, as far as they can.

        `until_sync`: weights will be sent before the next request, so that the engines need not keep theirs.
        """
        if until_sync:
            self.lack_weights |= any(await asyncio.gather(*(model.sleep_until_sync() for model in self.models)))
        else:
            await asyncio.gather(*(model.sleep() for model in self.models))

    async def wake_up(self) -> None:
        """Have the engines take the device's memory back."""
        await asyncio.gather(*(model.wake_up() for model in self.models))

    def weight(self, name: str) -> Tensor:
        """The weight called `name`, as last sent to the engines, or the trainer's present one if no copy is kept.

        Raises:
            KeyError: unknown name; the message has the nearest one.
            RuntimeError: the trainer's weights are not connected.
        """
        stream = self._trainers() if self._last_sent is None else self._last_sent
        if name not in stream.all_shapes:
            raise unknown_weight(name, stream.all_shapes)
        return next(tensor for other, tensor in chain(stream, stream.rest or ()) if other == name)

    def _trainers(self) -> WeightStream:
        """The trainer's present weights; RuntimeError: they are not connected."""
        if self.source is None:
            raise RuntimeError("prepare() the explorer with the trainer's weights first.")
        return self.source()

    # -- state --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The copy that is kept, and its version; or the weights that `restore` has not sent yet."""
        copy = dict(self._last_sent) if self._keeps_copy and self._last_sent is not None else {}
        weights, version = self._to_restore or (copy, self.version)
        return {"version": version, "weights": weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Remember weights for `restore`, unless the engines share the trainer's, which would be overwritten."""
        has_weights = bool(state["weights"]) and not shares_weights(self.models)
        self._to_restore = (state["weights"], state["version"]) if has_weights else None

    async def restore(self) -> bool:
        """Send fresh engines, once, the weights of the loaded state; True if there were any."""
        if self._to_restore is None:
            return False
        (weights, version), self._to_restore = self._to_restore, None
        rest = None
        if self.source is not None:
            trainers = self.source()
            rest = trainers.rest
            # The copy lacks frozen weights if the engines that it was sent to had them, and these may be other engines.
            if weights.keys() < trainers.shapes.keys():
                weights = weights | await _copied(trainers, trainers.shapes.keys() - weights.keys())
        await self.send(replace(WeightStream.of(weights.items()), rest=rest), version)
        return True

    def forget_restored(self) -> None:
        """Forget the weights that `restore` would send, because newer ones are due."""
        self._to_restore = None


async def _copied(stream: WeightStream, names: Collection[str]) -> dict[str, Tensor]:
    """Copies of the weights with these names in the host's memory, made beside the event loop."""
    with while_sent(stream) as sent:
        chosen = ((name, tensor) for name, tensor in sent if name in names)
        return await run_in_thread(lambda: {name: tensor.to("cpu", copy=True) for name, tensor in chosen})


def unknown_weight(name: str, shapes: Mapping[str, Shape]) -> KeyError:
    """The error for a name that no weight of the policy has, with the nearest name."""
    match = nearest(name, shapes)
    hint = f"Did you mean '{match}'?" if match else f"The first is '{next(iter(shapes), None)}'."
    return KeyError(f"unknown weight '{name}' (the policy has {len(shapes)}). {hint}")
