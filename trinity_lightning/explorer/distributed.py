"""Explore steps of several training processes: rank 0 rolls out, alone or with engines of all ranks."""

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor

from trinity_lightning.common.ranks import BEAT_SECONDS, Ranks, ranks_of
from trinity_lightning.config.engines import EngineConfig
from trinity_lightning.config.run import TrainConfig
from trinity_lightning.config.trainer import processes_of
from trinity_lightning.engines import engines_of
from trinity_lightning.explorer.callback import data_of, epochs_of, let_monitor, policy_of
from trinity_lightning.explorer.driver import Driver
from trinity_lightning.explorer.explorer import Explorer
from trinity_lightning.explorer.models.engine import Engine
from trinity_lightning.explorer.models.rank_engine import EngineAnswers, RankEngine
from trinity_lightning.monitor.csv_logger import step_of
from trinity_lightning.sync.stream import Sender, Shape, WeightStream, parameter_stream

logger = logging.getLogger(__name__)

# Names of the calls and exchanges between ranks, for messages too.
ENGINES, TAKE, WEIGHT, TAKEN = "engines", "take_weights", "a weight for engines", "weights in all engines"
LOOK_SECONDS = 0.005  # limit for one wait for requests of rank 0, after which a rank looks if rank 0 has arrived

# -- ranks other than 0 ------------------------------------------------------------------------------------------------


class ExplorerFollower(L.Callback):
    """Replaces ExplorerCallback on ranks other than 0: takes over the explore steps that rank 0 hands out."""

    def __init__(self) -> None:
        self._step = 0  # the step that is ready to be trained on

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Begin at step 1 with a Trainer that has not trained. A checkpoint is loaded later."""
        self._step = 0
        if not epochs_of(trainer).ready:
            data_of(trainer).storage.clear()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Take the step here already: Lightning may skip `on_train_epoch_start` when it resumes."""
        self.on_train_epoch_start(trainer, pl_module)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Wait without a limit until the step is rolled out, and help to prepare it, unless a checkpoint held it."""
        data, step = data_of(trainer), step_of(trainer)
        if self._step == step:
            return
        if data.storage.batch != step:
            data.storage.advance(step, policy_of(pl_module).prepare_step(data.share(step)))
        trainer.strategy.barrier()
        self._step = step

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Take over the metrics of rank 0: checkpoints and early stopping depend on them, on all ranks alike."""
        let_monitor(trainer, pl_module, {})

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Move this rank's share of the weights to the device if rank 0 evaluates: see ExplorerCallback."""
        if trainer.strategy.broadcast(None):
            trainer.strategy.model_to_device()
            trainer.strategy.barrier()
            trainer.strategy.teardown()


# -- engines of all ranks (engine.per_rank): their weights -------------------------------------------------------------


class RankWeights(Sender):
    """Sends the same weights from rank 0 to the engines of all ranks at once; see `PolicyEngines.group`.

    A tensor is broadcast to the other ranks when the engine of rank 0 reads it, by the connection that gradients use.

    Args:
        engine: the engine of rank 0.
        others: the engines of the other ranks.
        ranks: the connection to the other ranks.
    """

    def __init__(self, engine: Engine, others: Sequence[RankEngine], ranks: Ranks) -> None:
        self._engine, self._others, self.ranks = engine, others, ranks

    async def send(self, stream: WeightStream, version: int) -> None:
        """Give the weights to all engines; RankError: the engine of another rank did not take them."""
        handed_out = replace(stream, tensors=partial(self._handed_out, stream, version))
        await self._engine.sync_weights(handed_out, version)
        for engine in self._others:
            engine.took(version)

    def _handed_out(self, stream: WeightStream, version: int) -> Iterator[tuple[str, Tensor]]:
        shared = self._engine.capabilities.shares_weights  # then each engine has the weights that its rank trains
        self.ranks.call(TAKE, version, None if shared else dict(stream.shapes))
        for name, tensor in stream:
            if not shared:
                self.ranks.exchange((name, tensor.dtype, tensor.device.type), at=WEIGHT)
                _spread(tensor.contiguous(), name, self.ranks)
            yield name, tensor
        self.ranks.exchange(None, at=TAKEN)


def _spread(tensor: Tensor, name: str, ranks: Ranks) -> None:
    """Copy rank 0's values into this contiguous tensor of every rank."""
    data = tensor.view(-1).view(torch.uint8)
    ranks.wait(lambda limit: ranks.group.broadcast(data, 0, limit), name, data.device)


# -- engines of all ranks: rank 0, which drives them -------------------------------------------------------------------


def with_rank_engines(engine: Engine, config: TrainConfig) -> list[Engine]:
    """The engine of rank 0, and those of the other ranks."""
    others = range(1, processes_of(config.trainer))
    capabilities = replace(engine.capabilities, keeps_unsent=False)
    return [engine, *(RankEngine(rank, config.model.name, config.engine, capabilities) for rank in others)]


class RankEngines(L.Callback):
    """Connects the explorer of rank 0 with the engines of the other ranks; before `ExplorerCallback`, on rank 0."""

    def __init__(self, explorer: Explorer, config: EngineConfig) -> None:
        self._explorer = explorer
        self._config = config

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Give the other ranks the engine's settings, and learn the sockets on which they listen."""
        ranks: Any = ranks_of(trainer)
        first, *models = self._explorer.engines.models
        others = [model for model in models if isinstance(model, RankEngine)]
        if not others:
            return
        ranks.exchange(self._config, at=ENGINES)
        self._explorer.engines.group = RankWeights(first, others, ranks)
        for engine, engine.path in zip(others, ranks.exchange(None, at=ENGINES)[1:], strict=True):
            engine.limit = ranks.timeout.total_seconds()


# -- engines of all ranks: the others ----------------------------------------------------------------------------------


class EngineFollower(ExplorerFollower):
    """An ExplorerFollower with an engine, which computes on the main thread while this rank waits for rank 0.

    Args:
        make: returns an engine with the settings that it is given.
    """

    def __init__(self, make: Callable[[EngineConfig], Engine]) -> None:
        super().__init__()
        self._make = make
        self._listening = False

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Learn the engine's settings from rank 0, which asks later for the engine to be loaded."""
        ranks: Any = ranks_of(trainer)
        engine = self._make(ranks.exchange(None, patient=True, at=ENGINES)[0])
        self.listen(engine, ranks, policy_of(pl_module).policy, trainer.strategy.root_device)

    def listen(self, engine: Engine, ranks: Ranks, model: Any, device: torch.device) -> None:
        """Listen on a socket, and tell rank 0 its path.

        Args:
            engine: this rank's engine.
            ranks: the connection to the other ranks.
            model: the policy.
            device: the device that the policy is trained on.
        """
        self._engine, self._ranks, self._model, self._device = engine, ranks, model, device
        engine.bind(model)
        self._answers = EngineAnswers(engine)
        self._driver, self._listening = Driver([engine]), True
        path = self._driver.run(self._answers.listen())
        self._driver.start(self._beats())
        self._serve_others, ranks.serve = ranks.serve, self._serve
        ranks.meanwhile = self._compute
        ranks.exchange(path, at=ENGINES)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._close()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._close()

    def _close(self) -> None:
        """End the engine; requests under way fail.

        An error is only logged: the trained model, or the run's own error, matters more.
        """
        if not self._listening:
            return
        self._ranks.meanwhile, self._listening = None, False
        try:
            try:
                self._driver.end(self._answers.close())
            finally:
                self._driver.close()
        except Exception as error:
            logger.warning("the engine did not end as it should: %s: %s", type(error).__name__, error)

    def _compute(self) -> None:
        self._driver.pump(LOOK_SECONDS)

    async def _beats(self) -> None:
        """Tell rank 0 at intervals that this rank is alive: a step of the engine may outlast SILENT_SECONDS."""
        while True:
            await asyncio.to_thread(self._ranks.beat)
            await asyncio.sleep(BEAT_SECONDS)

    def _serve(self, name: str, arguments: tuple[Any, ...]) -> None:
        if name == TAKE:
            self._take(*arguments)
        else:
            self._serve_others(name, arguments)

    def _take(self, version: int, shapes: Mapping[str, Shape] | None) -> None:
        """Give the engine the weights that rank 0 hands out or, without shapes, those that this rank trains."""
        stream = parameter_stream(self._model)
        if shapes is not None:
            stream = WeightStream(shapes, partial(self._received, shapes), self._device)
        self._ranks.meanwhile = None  # the engine waits for tensors, and cannot compute
        self._driver.run(self._engine.sync_weights(stream, version))
        self._ranks.meanwhile = self._compute
        self._ranks.exchange(None, patient=True, at=TAKEN)

    def _received(self, shapes: Mapping[str, Shape]) -> Iterator[tuple[str, Tensor]]:
        for _ in shapes:
            messages: list[Any] = self._ranks.exchange(None, patient=True, at=WEIGHT)
            name, dtype, device_type = messages[0]
            device = self._device if device_type == self._device.type else torch.device(device_type)
            tensor = torch.empty(shapes[name], dtype=dtype, device=device)
            _spread(tensor, name, self._ranks)
            yield name, tensor


def follower_of(config: TrainConfig, folder: Path) -> ExplorerFollower:
    """The callback of a rank other than 0, which takes part in the explore steps of rank 0; `folder` is the run's."""
    if config.engine.per_rank:
        return EngineFollower(lambda engine: engines_of(replace(config, engine=engine), folder)[0])
    return ExplorerFollower()
