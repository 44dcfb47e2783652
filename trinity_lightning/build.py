"""From a validated configuration to the parts of a run: engine, explorer, policy, data, trainer."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import hydra.utils
import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import Logger, WandbLogger
from omegaconf import DictConfig, OmegaConf

from trinity_lightning.buffer.datamodule import ExperienceDataModule
from trinity_lightning.common.compose import last_checkpoint
from trinity_lightning.common.config import EngineConfig, EngineDtype, EngineKind, TasksetConfig, TrainConfig
from trinity_lightning.common.validate import strategies
from trinity_lightning.explorer.callback import ExplorerCallback
from trinity_lightning.explorer.explorer import Explorer
from trinity_lightning.explorer.host import Host
from trinity_lightning.explorer.models.in_process import InProcessEngine
from trinity_lightning.explorer.models.transformers_engine import TransformersEngine
from trinity_lightning.explorer.models.vllm_engine import VLLMEngine
from trinity_lightning.explorer.task_source import TaskSource
from trinity_lightning.explorer.tasks.mixture import TasksetMixture
from trinity_lightning.explorer.tasks.taskset import Taskset
from trinity_lightning.monitor.run_monitor import RunMonitor
from trinity_lightning.monitor.step_line import summary_table
from trinity_lightning.trainer.checkpoint_io import AtomicCheckpointIO
from trinity_lightning.trainer.policy import PolicyModule
from trinity_lightning.trainer.weight_sync import checkpoint_weights

logger = logging.getLogger(__name__)

ENGINES: dict[EngineKind, type[InProcessEngine]] = {
    EngineKind.vllm: VLLMEngine,
    EngineKind.transformers: TransformersEngine,
}


@dataclass
class Run:
    """Everything a training run is made of."""

    config: TrainConfig
    folder: Path
    trainer: L.Trainer
    policy: PolicyModule
    data: ExperienceDataModule
    monitor: RunMonitor
    checkpoint: str | None

    def announce(self) -> None:
        """Print the one table that says what is about to happen."""
        print(summary_table(_summary(self)), flush=True)

    def finish(self) -> None:
        """Write the trained policy and close W&B, so that the next job of a sweep gets a run of its own."""
        self._save_last_checkpoint()
        if self.config.save_model:
            self.policy.save_pretrained(self.folder / "model")
        parts = ", ".join(f"{name} {gb:.1f}" for name, gb in self.monitor.memory.by_part.items())
        print(f"peak memory {self.monitor.memory.peak_gb:.1f} GB ({parts}); everything is in {self.folder}", flush=True)
        _finish(self.trainer.loggers)

    def _save_last_checkpoint(self) -> None:
        """For a run to be continued with more steps: the end of it, unless ModelCheckpoint has just written that."""
        checkpoint = self.trainer.checkpoint_callback
        if not isinstance(checkpoint, ModelCheckpoint) or checkpoint.dirpath is None:
            return
        if checkpoint._last_global_step_saved != self.trainer.global_step:
            self.trainer.save_checkpoint(Path(checkpoint.dirpath) / "final.ckpt")


def build(config: DictConfig) -> Run:
    """The parts of a run, connected.

    Raises:
        ConfigError, ValueError, TypeError: a name or an argument that a part does not know.
    """
    typed: TrainConfig = OmegaConf.to_object(_typed_part(config))  # type: ignore[assignment]
    folder = Path(config.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    record_config(config, folder / "config.yaml")
    L.seed_everything(typed.seed, verbose=False)
    data = ExperienceDataModule(
        _strategies(typed),
        optimizer_steps=typed.algorithm.optimizer_steps,
        inner_epochs=typed.algorithm.inner_epochs,
        seed=typed.seed,
    )
    policy = PolicyModule(
        typed.model.name,
        typed.algorithm,
        typed.optimizer,
        dtype=typed.model.dtype,
        gradient_checkpointing=typed.model.gradient_checkpointing,
        attn_implementation=typed.model.attn_implementation,
    )
    explorer = Explorer(typed.explorer, [_engine(typed)], _train_source(typed), _eval_sources(typed))
    monitor = RunMonitor(folder, typed.steps, lambda: callback.metrics)
    callback = ExplorerCallback(
        explorer, typed.synchronizer, observer=monitor.keep_completions, progress=monitor.show_tasks
    )
    return Run(
        config=typed,
        folder=folder,
        trainer=_trainer(config, [monitor, callback]),
        policy=policy,
        data=data,
        monitor=monitor,
        checkpoint=str(last_checkpoint(folder)) if typed.ckpt_path == "last" else typed.ckpt_path,
    )


@dataclass
class Evaluation:
    """Everything an evaluation is made of."""

    explorer: Explorer
    engine: InProcessEngine
    checkpoints: list[Path]
    folder: Path
    monitor: RunMonitor
    loggers: list[Logger]

    def run(self) -> dict[int, dict[str, float]]:
        """Evaluate the model or each checkpoint, log and print the metrics, and free the engine."""
        host = Host([self.engine])
        try:
            host.run(self.explorer.prepare())
            results: dict[int, dict[str, float]] = {}
            for weights in [checkpoint_weights(path) for path in self.checkpoints] or [None]:
                found = host.run(self.explorer.benchmark(weights and [weights]))
                results |= found
                self._show(found)
        finally:
            host.run(self.explorer.shutdown(), interruptible=False)
            host.close()
            _finish(self.loggers)
        print(f"everything is in {self.folder}", flush=True)
        return results

    def _show(self, results: dict[int, dict[str, float]]) -> None:
        for step, metrics in results.items():
            for each in self.loggers:
                each.log_metrics(metrics | {"explore_step": float(step)}, step=step)
            rows = [(name.removeprefix("eval/"), f"{value:.4g}") for name, value in metrics.items()]
            print(summary_table([("explore step", str(step)), *rows]), flush=True)


def build_evaluation(config: DictConfig, checkpoints: list[Path]) -> Evaluation:
    """The parts of an evaluation, connected.

    Raises:
        ConfigError, ValueError, TypeError: a name or an argument that a part does not know.
    """
    typed: TrainConfig = OmegaConf.to_object(_typed_part(config))  # type: ignore[assignment]
    folder = Path(config.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    record_config(config, folder / "config.yaml")
    L.seed_everything(typed.seed, verbose=False)
    engine = _engine(typed)
    if isinstance(engine, TransformersEngine):
        policy = PolicyModule(typed.model.name, dtype=typed.model.dtype)
        policy.configure_model()
        engine.bind(policy.policy)
    loggers = _loggers(config)
    monitor = RunMonitor(folder, total_steps=0)
    explorer = Explorer(typed.explorer, [engine], None, _eval_sources(typed))
    explorer.connect(observer=monitor.keep_completions, progress=monitor.show_tasks)
    return Evaluation(explorer, engine, checkpoints, folder, monitor, loggers)


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


def _typed_part(config: DictConfig) -> DictConfig:
    """The configuration without Lightning's own objects, which are instantiated apart."""
    free = ("trainer", "logger", "callbacks")
    return OmegaConf.merge(config, dict.fromkeys(free))  # type: ignore[return-value]


def _strategies(config: TrainConfig) -> list[tuple[str, dict[str, Any]]]:
    entries = [(label, dict(arguments)) for label, arguments in strategies(config.add_strategy)]  # type: ignore[call-overload]
    return [(str(arguments.pop("name", label)), arguments) for label, arguments in entries]


def _engine(config: TrainConfig) -> InProcessEngine:
    engine: EngineConfig = config.engine
    if engine.dtype is EngineDtype.auto:
        engine.dtype = EngineDtype(config.model.dtype.value)
    return ENGINES[engine.kind](config.model.name, engine)


def _train_source(config: TrainConfig) -> TaskSource:
    taskset = _mixture(list(config.tasksets.values())) if config.tasksets else Taskset.from_config(config.taskset)
    return TaskSource(taskset, config.workflow.name, config.reward, config.sampling, config.workflow.args)


def _mixture(configs: list[TasksetConfig]) -> TasksetMixture:
    return TasksetMixture([Taskset.from_config(config) for config in configs], [config.weight for config in configs])


def _eval_sources(config: TrainConfig) -> list[TaskSource]:
    return [
        TaskSource(
            Taskset.from_config(taskset),
            config.workflow.name,
            config.reward,
            config.eval_sampling,
            config.workflow.args,
            config.eval_repeat_times,
        )
        for taskset in config.eval_tasksets.values()
    ]


def _loggers(config: DictConfig) -> list[Logger]:
    loggers = [hydra.utils.instantiate(node) for node in (config.logger or {}).values()]
    for each in loggers:
        each.log_hyperparams(OmegaConf.to_container(config, resolve=True))
    return loggers


def _finish(loggers: Iterable[Logger]) -> None:
    """Write what is left, and close W&B: the next job of a sweep gets a run of its own."""
    for each in loggers:
        each.save()
        if isinstance(each, WandbLogger):
            each.experiment.finish()


def _trainer(config: DictConfig, callbacks: list[L.Callback]) -> L.Trainer:
    loggers = _loggers(config)
    callbacks += [hydra.utils.instantiate(node) for node in (config.callbacks or {}).values()]
    return hydra.utils.instantiate(config.trainer, logger=loggers, callbacks=callbacks, plugins=[AtomicCheckpointIO()])


def _summary(run: Run) -> list[tuple[str, str]]:
    config, explorer = run.config, run.config.explorer
    rollouts = explorer.batch_size * explorer.repeat_times
    items = config.algorithm.optimizer_steps * config.algorithm.inner_epochs
    return [
        ("run", f"{config.name}, seed {config.seed}, in {run.folder}"),
        ("model", f"{config.model.name} ({config.model.dtype.value})"),
        ("engine", f"{config.engine.kind.value} ({config.engine.dtype.value}), context {config.engine.max_model_len}"),
        ("device", str(run.trainer.strategy.root_device)),
        (
            "explore step",
            f"{explorer.batch_size} prompts x {explorer.repeat_times} = {rollouts} rollouts, at most "
            f"{rollouts * config.sampling.max_tokens} new tokens",
        ),
        ("training", f"{config.steps} explore steps x {items} optimizer steps = {config.steps * items}"),
        ("objective", f"{config.algorithm.policy_loss}, {' then '.join(name for name, _ in _strategies(config))}"),
        ("resumed from", run.checkpoint or "nothing"),
    ]
