"""Explore steps on the ranks other than 0, if several processes train: rank 0 rolls out, and hands each step over."""

from dataclasses import replace
from pathlib import Path

import lightning as L

from trinity_lightning.config.schema import TrainConfig
from trinity_lightning.engines import engines_of
from trinity_lightning.explorer.callback import data_of, epochs_of, let_monitor, policy_of
from trinity_lightning.monitor.csv_logger import step_of


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
        """As ExplorerCallback: a resumed run may not come by `on_train_epoch_start`."""
        self.on_train_epoch_start(trainer, pl_module)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Wait for the step, however long it is rolled out, and help to prepare it; a checkpoint may have had it."""
        data, step = data_of(trainer), step_of(trainer)
        if self._step == step:
            return
        if data.batch != step:
            data.advance(step, policy_of(pl_module).prepare_step(data.share(step)))
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


def follower_of(config: TrainConfig, folder: Path) -> ExplorerFollower:
    """What takes part in the explore steps of rank 0, on a rank of its own; `folder`: the run's."""
    if config.engine.per_rank:
        from trinity_lightning.explorer.rank_engines import EngineFollower

        return EngineFollower(lambda engine: engines_of(replace(config, engine=engine), folder)[0])
    return ExplorerFollower()
