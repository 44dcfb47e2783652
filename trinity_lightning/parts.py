"""The parts of runs and evaluations, each made from its piece of the configuration."""

import logging
import warnings
from collections.abc import Iterable, Mapping
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import hydra.utils
from hydra.errors import InstantiationException
from lightning.pytorch.loggers import Logger, WandbLogger
from omegaconf import DictConfig, OmegaConf

from trinity_lightning.buffer.datamodule import ExperienceDataModule, StepKeeper
from trinity_lightning.buffer.step_files import FOLDER, folder_id, keep_step
from trinity_lightning.common.inference import HeldModel
from trinity_lightning.config.checks import workflow_arguments
from trinity_lightning.config.parts import operator_configs, strategies
from trinity_lightning.config.registry import SINGLE_RESPONSE_WORKFLOWS
from trinity_lightning.config.schema import BufferConfig, TasksetConfig, TrainConfig
from trinity_lightning.engines import engines_of
from trinity_lightning.errors import TrinityError
from trinity_lightning.experts import expert_data
from trinity_lightning.explorer.callback import ExplorerCallback
from trinity_lightning.explorer.explorer import Explorer, TaskSource
from trinity_lightning.explorer.interruption import StopCheckpoint
from trinity_lightning.explorer.tasks.taskset import Taskset, TasksetMixture
from trinity_lightning.monitor.run_monitor import RunMonitor

logger = logging.getLogger(__name__)


def quiet_lightning() -> None:
    """Leave Lightning's log to the run's own handlers, and only what matters: it would print everything twice."""
    log = logging.getLogger("lightning.pytorch")
    log.handlers.clear()
    log.setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", ".*LeafSpec.*")  # of torch's pytrees, which Lightning uses


def record_config(config: DictConfig, file: Path) -> None:
    """Write the resolved configuration; of a resumed run, say what is no longer as it was."""
    if config.ckpt_path is not None and file.is_file():
        before, now = (_flat(OmegaConf.to_container(each, resolve=True)) for each in (OmegaConf.load(file), config))
        changed = [key for key in sorted(before.keys() | now.keys()) if before.get(key) != now.get(key)]
        for key in changed:
            if key not in ("ckpt_path", "output_dir"):
                logger.warning("resuming with %s = %s; it was %s", key, now.get(key), before.get(key))
    file.write_text(OmegaConf.to_yaml(config, resolve=True))


def _flat(node: Any, prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, with dotted keys; enumerations by their names, as a file has them."""
    if not isinstance(node, dict):
        return {prefix: node.name if isinstance(node, Enum) else node}
    return {k: v for key, value in node.items() for k, v in _flat(value, f"{prefix}.{key}" if prefix else key).items()}


def online_data(config: TrainConfig, folder: Path, auxiliary_models: Mapping[str, HeldModel]) -> ExperienceDataModule:
    """The buffer that this run's rollouts fill."""
    clients: dict[str | int, Any] = {
        name: [model.get_openai_async_client()] for name, model in auxiliary_models.items()
    }
    return ExperienceDataModule(
        strategies(config.add_strategy),
        optimizer_steps=config.algorithm.optimizer_steps,
        inner_epochs=config.algorithm.inner_epochs,
        seed=config.seed,
        operators=operator_configs(config.operators),
        auxiliary_models=clients,
        folder=folder,
        keep=step_keeper(config.buffer, folder),
        experts=expert_data(config),
        max_response_length=response_budget(config),
    )


def response_budget(config: TrainConfig) -> int:
    """Longest response in tokens; with several turns, as your own workflow may have, all that the context holds."""
    single = config.workflow.name in SINGLE_RESPONSE_WORKFLOWS
    return config.sampling.max_tokens if single else config.engine.max_model_len


def explorer_callback(
    config: TrainConfig,
    folder: Path,
    auxiliary_models: Mapping[str, HeldModel],
    monitor: RunMonitor,
    stop: StopCheckpoint,
    offload: bool,
) -> ExplorerCallback:
    """What rolls out, watched by the monitor; stopped early, it saves by `stop`; `offload`: see ExplorerCallback."""
    explorer = Explorer(
        config.explorer,
        engines_of(config, folder),
        train_source(config),
        eval_sources(config),
        auxiliary_models=[[model] for model in auxiliary_models.values()],
    )
    return ExplorerCallback(
        explorer,
        config.synchronizer,
        stop=stop,
        observer=monitor.keep_completions,
        progress=monitor.show_tasks,
        measured=monitor.keep_metrics,
        offload=offload,
    )


def step_keeper(buffer: BufferConfig, folder: Path) -> StepKeeper | None:
    """What keeps the experiences of every explore step of the run in that folder; None if nothing is to be kept.

    Raises:
        ConfigError: the database's URL is none, or a package for it is missing.
        StorageError: there is no such database, or it is of something else.
    """
    if buffer.keep == "sql":
        from trinity_lightning.buffer import sql

        place = buffer.url or buffer.path or folder / f"{FOLDER}.db"
        sql.SqlStorage(place).close()  # what cannot be written to is refused before a model is loaded
        return lambda step, experiences: sql.keep_step(place, folder_id(folder), step, experiences)
    return partial(keep_step, folder / FOLDER) if buffer.keep else None


def train_source(config: TrainConfig) -> TaskSource:
    """What is trained on."""
    taskset = _mixture(list(config.tasksets.values())) if config.tasksets else Taskset.from_config(config.taskset)
    return TaskSource(taskset, config.workflow.name, config.reward, config.sampling, _arguments(config))


def _arguments(config: TrainConfig) -> dict[str, Any]:
    return workflow_arguments(config.workflow, list(config.auxiliary_models))


def _mixture(configs: list[TasksetConfig]) -> TasksetMixture:
    return TasksetMixture([Taskset.from_config(config) for config in configs], [config.weight for config in configs])


def eval_sources(config: TrainConfig) -> list[TaskSource]:
    """What is evaluated on."""
    return [
        TaskSource(
            Taskset.from_config(taskset),
            config.eval_workflow or config.workflow.name,
            config.reward,
            config.eval_sampling,
            {} if config.eval_workflow else _arguments(config),
            config.eval_repeat_times,
        )
        for taskset in config.eval_tasksets.values()
    ]


def instantiate(node: Any, **arguments: Any) -> Any:
    """`hydra.utils.instantiate`, whose errors are our own again if they were: one sentence each."""
    try:
        return hydra.utils.instantiate(node, **arguments)
    except InstantiationException as error:
        if isinstance(error.__cause__, TrinityError):
            raise error.__cause__ from None
        raise


def loggers_of(config: DictConfig) -> list[Logger]:
    """The loggers, which have been given the configuration."""
    loggers = [instantiate(node) for node in (config.logger or {}).values()]
    for each in loggers:
        each.log_hyperparams(OmegaConf.to_container(config, resolve=True))
    return loggers


def finish(loggers: Iterable[Logger]) -> None:
    """Write what is left, and close W&B: the next job of a sweep gets a run of its own."""
    for each in loggers:
        each.save()
        if isinstance(each, WandbLogger):
            each.experiment.finish()
