"""Servers next to a run: its auxiliary models, and the threads that they and its engines leave to the trainer."""

import os
from pathlib import Path

import lightning as L
import torch

from trinity_lightning.common.inference import HeldModel
from trinity_lightning.config.auxiliary_models import AuxiliaryConfig
from trinity_lightning.config.engines import capabilities_of
from trinity_lightning.config.schema import TrainConfig
from trinity_lightning.explorer.models.openai_api import OpenAIModel
from trinity_lightning.explorer.models.vllm_server import VLLMServerEngine, server_cores


def auxiliary_model(name: str, auxiliary: AuxiliaryConfig, config: TrainConfig, folder: Path) -> HeldModel:
    """The client of a server that is there, or a server that the run starts and ends."""
    if auxiliary.url is not None:
        return OpenAIModel(auxiliary.url, auxiliary.model, auxiliary.api_key_env)
    engine = auxiliary.engine
    [cores] = server_cores(sorted(os.sched_getaffinity(0)), engine, overlaps=config.explorer.sync_offset > 0)
    return VLLMServerEngine(auxiliary.model, engine, cores=cores, gpus=engine.gpus, log=folder / f"{name}.log")


class ThreadShare(L.Callback):
    """Train with the threads that servers of this machine leave; for runs whose servers and trainer compute on its CPUs
    at the same time.

    Several processes that train on this machine share those; how they share without servers is Lightning's.
    """

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        self._before: int | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Take fewer threads, if servers are started here, for auxiliary models or the policy."""
        config, can = self._config, capabilities_of(self._config.engine.name)
        engines = [model.engine for model in config.auxiliary_models.values() if model.url is None]
        if can.is_vllm and can.overlaps_training and not config.engine.urls:
            engines.append(config.engine)
        if engines and trainer.node_rank == 0:  # they run where rank 0 does
            cores = sorted(os.sched_getaffinity(0))
            taken = {core for engine in engines for share in server_cores(cores, engine, True) for core in share}
            self._before = torch.get_num_threads()
            torch.set_num_threads(max((len(cores) - len(taken)) // trainer.num_devices, 1))

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Give them back: another job of a sweep may follow in this process."""
        if self._before is not None:
            torch.set_num_threads(self._before)
            self._before = None

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """The same if training ends with an error."""
        self.teardown(trainer, pl_module, "fit")
