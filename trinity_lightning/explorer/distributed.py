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
from trinity_lightning.config.engine import EngineConfig
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

ENGINES, TAKE, WEIGHT, TAKEN = "engines", "take_weights", "a weight for engines", "weights in all engines"
LOOK_SECONDS = 0.005  # how often a waiting rank checks whether rank 0 has arrived or has requests

# -- ranks other than 0 ------------------------------------------------------------------------------------------------


class ExplorerFollower(L.Callback):
    """In the place of ExplorerCallback on ranks other than 0: takes over the explore steps that rank 0 hands over."""

    def __init__(self) -> None:
        self._step = 0  # what is prepared to be trained on

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """A Trainer that has not trained begins at step 1; a checkpoint is loaded after this."""
        self._step = 0
        if not epochs_of(trainer).ready:
            data_of(trainer).storage.clear()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """As ExplorerCallback: Lightning may skip `on_train_epoch_start` when it resumes."""
        self.on_train_epoch_start(trainer, pl_module)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Wait for the step, however long it is rolled out, and help to prepare it; a checkpoint may have had it."""
        data, step = data_of(trainer), step_of(trainer)
        if self._step == step:
            return
        if data.storage.batch != step:
            data.storage.advance(step, policy_of(pl_module).prepare_step(data.share(step)))
        trainer.strategy.barrier()
        self._step = step

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Take over what was measured: checkpoints and early stopping are decided by it, on all ranks alike."""
        let_monitor(trainer, pl_module, {})

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Rank 0 may evaluate, and need this rank's share of the weights on the device: see ExplorerCallback."""
        if trainer.strategy.broadcast(None):
            trainer.strategy.model_to_device()
            trainer.strategy.barrier()
            trainer.strategy.teardown()


# -- engines of all ranks (engine.per_rank): their weights -------------------------------------------------------------


class RankWeights(Sender):
    """On rank 0: gives all engines the same weights at once, rank 0's own among them; see `PolicyEngines.group`.

    Each tensor is handed to the other ranks as rank 0's own engine reads it, by the connection of gradients.
    """

    def __init__(self, own: Engine, others: Sequence[RankEngine], ranks: Ranks) -> None:
        self._own, self._others, self.ranks = own, others, ranks

    async def send(self, stream: WeightStream, version: int) -> None:
        """Give them to all engines; RankError: another rank's did not take them."""
        handed_out = replace(stream, tensors=partial(self._handed_out, stream, version))
        await self._own.sync_weights(handed_out, version)
        for each in self._others:
            each.took(version)

    def _handed_out(self, stream: WeightStream, version: int) -> Iterator[tuple[str, Tensor]]:
        own = self._own.capabilities.shares_weights  # every rank has the weights that are trained
        self.ranks.call(TAKE, version, None if own else dict(stream.shapes))
        for name, tensor in stream:
            if not own:
                self.ranks.exchange((name, tensor.dtype, tensor.device.type), at=WEIGHT)
                _spread(tensor.contiguous(), name, self.ranks)
            yield name, tensor
        self.ranks.exchange(None, at=TAKEN)


def _spread(tensor: Tensor, name: str, ranks: Ranks) -> None:
    """Copy rank 0's values into this contiguous tensor of every rank."""
    data = tensor.view(-1).view(torch.uint8)
    ranks.wait(lambda limit: ranks.group.broadcast(data, 0, limit), name, data.device)


# -- engines of all ranks: rank 0, which drives them -------------------------------------------------------------------


def with_rank_engines(own: Engine, config: TrainConfig) -> list[Engine]:
    """Rank 0's own engine, and those of the other ranks."""
    others = range(1, processes_of(config.trainer))
    return [own, *(RankEngine(rank, config.model.name, config.engine, own.capabilities) for rank in others)]


class RankEngines(L.Callback):
    """On rank 0, before `ExplorerCallback`: connect its explorer with the engines of the other ranks."""

    def __init__(self, explorer: Explorer, config: EngineConfig) -> None:
        self._explorer = explorer
        self._config = config

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Give the others the engine's knobs, planned or not, and learn where they listen."""
        ranks: Any = ranks_of(trainer)
        own, *models = self._explorer.engines.models
        others = [each for each in models if isinstance(each, RankEngine)]
        if not others:
            return
        ranks.exchange(self._config, at=ENGINES)
        self._explorer.engines.group = RankWeights(own, others, ranks)
        for each, each.path in zip(others, ranks.exchange(None, at=ENGINES)[1:], strict=True):
            each.limit = ranks.timeout.total_seconds()


# -- engines of all ranks: the others ----------------------------------------------------------------------------------


class EngineFollower(ExplorerFollower):
    """As ExplorerFollower, with an engine that computes for rank 0 on the main thread whenever that waits for it."""

    def __init__(self, make: Callable[[EngineConfig], Engine]) -> None:
        super().__init__()
        self._make = make
        self._listening = False

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Learn the engine's knobs from rank 0, which asks for the engine to be loaded."""
        ranks: Any = ranks_of(trainer)
        engine = self._make(ranks.exchange(None, patient=True, at=ENGINES)[0])
        self.listen(engine, ranks, policy_of(pl_module).policy, trainer.strategy.root_device)

    def listen(self, engine: Engine, ranks: Ranks, model: Any, device: torch.device) -> None:
        """Listen to rank 0, and tell it where; `device`: where the model, which is the policy, is trained."""
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
        """Requests under way fail; an error is logged: the trained model, or the run's own error, matters more."""
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
        """Let rank 0 know that this rank waits for it: a step of the engine may take longer than SILENT_SECONDS."""
        while True:
            await asyncio.to_thread(self._ranks.beat)
            await asyncio.sleep(BEAT_SECONDS)

    def _serve(self, name: str, arguments: tuple[Any, ...]) -> None:
        if name == TAKE:
            self._take(*arguments)
        else:
            self._serve_others(name, arguments)

    def _take(self, version: int, shapes: Mapping[str, Shape] | None) -> None:
        """Give the engine what rank 0 hands out; without shapes, the weights that this rank trains."""
        stream = parameter_stream(self._model)
        if shapes is not None:
            stream = WeightStream(shapes, partial(self._received, shapes), self._device)
        self._ranks.meanwhile = None  # the engine waits for tensors, and cannot do anything else
        self._driver.run(self._engine.sync_weights(stream, version))
        self._ranks.meanwhile = self._compute
        self._ranks.exchange(None, patient=True, at=TAKEN)

    def _received(self, shapes: Mapping[str, Shape]) -> Iterator[tuple[str, Tensor]]:
        for _ in shapes:
            handed_in: list[Any] = self._ranks.exchange(None, patient=True, at=WEIGHT)
            name, dtype, kind = handed_in[0]
            device = self._device if kind == self._device.type else torch.device(kind)
            tensor = torch.empty(shapes[name], dtype=dtype, device=device)
            _spread(tensor, name, self._ranks)
            yield name, tensor


def follower_of(config: TrainConfig, folder: Path) -> ExplorerFollower:
    """What takes part in the explore steps of rank 0, on a rank of its own; `folder`: the run's."""
    if config.engine.per_rank:
        return EngineFollower(lambda engine: engines_of(replace(config, engine=engine), folder)[0])
    return ExplorerFollower()
