"""From a validated configuration to a training run: policy, data, explorer, trainer."""

import logging
from dataclasses import dataclass, replace
from pathlib import Path

import lightning as L
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from omegaconf import DictConfig, OmegaConf

from trinity_lightning.buffer.datamodule import OfflineExperienceDataModule
from trinity_lightning.buffer.reader import create_reader
from trinity_lightning.common.memory_plan import MemoryPlan
from trinity_lightning.config.engines import EngineConfig, capabilities_of
from trinity_lightning.config.hydra import last_checkpoint, resume_command
from trinity_lightning.config.parts import strategies
from trinity_lightning.config.schema import TrainConfig, typed_config
from trinity_lightning.dtypes import check_resumed_dtype, settle_dtypes
from trinity_lightning.engines import ThreadShare, auxiliary_models_of, check_experts, with_memory_plan
from trinity_lightning.errors import ConfigError, TrinityError
from trinity_lightning.explorer.interruption import StopCheckpoint
from trinity_lightning.monitor.run_monitor import RunMonitor
from trinity_lightning.monitor.step_line import summary_table
from trinity_lightning.parts import (
    explorer_callback,
    finish,
    instantiate,
    loggers_of,
    online_data,
    quiet_lightning,
    record_config,
    response_budget,
)
from trinity_lightning.report import write_report
from trinity_lightning.sync.stream import checkpoint_weights
from trinity_lightning.trainer.checkpoint_io import AtomicCheckpointIO
from trinity_lightning.trainer.policy import PolicyModule

logger = logging.getLogger(__name__)


@dataclass
class Run:
    """Everything a training run is made of."""

    config: TrainConfig
    folder: Path
    trainer: L.Trainer
    policy: PolicyModule
    data: L.LightningDataModule
    monitor: RunMonitor
    checkpoint: str | None
    plan: MemoryPlan | None

    def announce(self) -> None:
        """Print the one table that says what is about to happen."""
        print(summary_table(_summary(self)), flush=True)

    def finish(self) -> None:
        """Write the trained policy and close the loggers, so that the next job of a sweep gets a W&B run of its own."""
        self._save_last_checkpoint()
        if self.config.save_model:
            self.policy.save_pretrained(self.folder / "model")
        finish(self.trainer.loggers)
        try:
            write_report(self.folder)
        except (TrinityError, OSError) as error:  # a picture of the run: what was trained is saved, and counts
            logger.warning("report.html was not written: %s", error)
        parts = ", ".join(f"{name} {gb:.1f}" for name, gb in self.monitor.memory.by_part.items())
        print(f"peak memory {self.monitor.memory.peak_gb:.1f} GB ({parts}); everything is in {self.folder}", flush=True)

    def _save_last_checkpoint(self) -> None:
        """For a run to be continued with more steps: the end of it, unless ModelCheckpoint has just written that."""
        found = [each for each in self.trainer.checkpoint_callbacks if isinstance(each, ModelCheckpoint)]
        if not found or found[0].dirpath is None:
            return
        checkpoint = found[0]
        if checkpoint._last_global_step_saved != self.trainer.global_step:
            self.trainer.save_checkpoint(Path(str(checkpoint.dirpath)) / "final.ckpt")


def build(config: DictConfig) -> Run:
    """The parts of a run, connected.

    Raises:
        ConfigError, ValueError, TypeError: a name or an argument that a part does not know.
    """
    folder = Path(config.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    quiet_lightning()
    checkpoint = checkpoint_of(config, folder)
    settle_dtypes(config, checkpoint)
    if checkpoint is not None:
        check_resumed_dtype(config, checkpoint)
    typed = typed_config(config)
    typed, plan = with_memory_plan(replace(typed, trainer=config.trainer), checkpoint, folder / "config.yaml")
    L.seed_everything(typed.seed, verbose=False)
    policy = _policy(typed, plan)
    monitor = RunMonitor(folder, typed.steps)
    # Recorded once the checkpoint is loaded: a resume that is refused must not change what the run was.
    recorder = LambdaCallback(on_train_start=lambda *_: _record(config, typed.engine, policy, folder))
    callbacks: list[L.Callback] = [recorder, monitor]
    stop = StopCheckpoint(folder / "checkpoints", resume_command(folder))
    data: L.LightningDataModule
    if typed.buffer.storage == "memory":
        check_experts(typed)
        auxiliary_models = auxiliary_models_of(typed, folder)
        data = online_data(typed, folder, auxiliary_models)
        offload = plan is not None and plan.offload
        callbacks += [ThreadShare(typed), explorer_callback(typed, folder, auxiliary_models, monitor, stop, offload)]
    else:
        callbacks.append(stop)
        data = OfflineExperienceDataModule(
            create_reader(typed.buffer, typed.seed),
            batch_size=typed.buffer.batch_size,
            steps_per_epoch=1,
            max_response_length=response_budget(typed),
        )
    return Run(
        config=typed,
        folder=folder,
        trainer=_trainer(config, callbacks),
        policy=policy,
        data=data,
        monitor=monitor,
        checkpoint=checkpoint,
        plan=plan,
    )


def _policy(config: TrainConfig, plan: MemoryPlan | None) -> PolicyModule:
    steps = config.optimizer.total_steps or config.steps * _items(config)
    return PolicyModule(
        config.model.name,
        config.algorithm,
        replace(config.optimizer, total_steps=steps),
        dtype=config.model.dtype,
        dropout=config.model.dropout,
        compile_layers=config.model.compile,
        gradient_checkpointing=config.model.gradient_checkpointing,
        attn_implementation=config.model.attn_implementation,
        planned_tokens=None if plan is None else plan.micro_batch_tokens,
    )


def _record(config: DictConfig, engine: EngineConfig, policy: PolicyModule, folder: Path) -> None:
    """Write the configuration, with what `auto` and null stand for of the policy and of the memory plan."""
    for key in ("max_num_seqs", "kv_cache_gb", "sleep"):
        config.engine[key] = getattr(engine, key)
    config.algorithm.max_tokens_per_micro_batch = policy.max_tokens
    record_config(config, folder / "config.yaml")


def checkpoint_of(config: TrainConfig | DictConfig, folder: Path) -> str | None:
    """The checkpoint to resume from, looked into before anything is loaded.

    Raises:
        ConfigError: it is none, of another model, or of a later step than the last one asked for; or a run is not to be
            resumed, and its folder holds another one.
    """
    if config.ckpt_path is None:
        if (folder / "config.yaml").exists():
            resume = "go on with it (ckpt_path=last)" if any(folder.glob("checkpoints/*.ckpt")) else "delete this one"
            raise ConfigError(f"'{folder}' holds a run already: give another folder, or {resume}.")
        return None
    path = last_checkpoint(folder) if config.ckpt_path == "last" else Path(config.ckpt_path)
    step, _ = checkpoint_weights(path)
    if step > config.steps:
        raise ConfigError(f"steps is {config.steps}, and '{path}' was written after step {step}: give more steps.")
    if step == config.steps:
        logger.warning("all %d steps are done in '%s': give more steps to go on.", step, path)
    record = folder / "config.yaml"
    before = OmegaConf.select(OmegaConf.load(record), "model.name") if record.is_file() else config.model.name
    if before != config.model.name:
        raise ConfigError(f"model.name is {config.model.name}, and the run to resume trains {before}: choose that one.")
    return str(path)


def _trainer(config: DictConfig, callbacks: list[L.Callback]) -> L.Trainer:
    loggers = loggers_of(config)
    callbacks += [instantiate(node) for node in (config.callbacks or {}).values()]
    return instantiate(config.trainer, logger=loggers, callbacks=callbacks, plugins=[AtomicCheckpointIO()])


def _summary(run: Run) -> list[tuple[str, str]]:
    config = run.config
    policy = [
        ("run", f"{config.name}, seed {config.seed}, in {run.folder}"),
        ("model", f"{config.model.name} ({config.model.dtype.value})"),
        ("device", str(run.trainer.strategy.root_device)),
    ]
    steps = _online_steps(config) if config.buffer.storage == "memory" else _offline_steps(config)
    memory = [] if run.plan is None else run.plan.rows()
    return [*policy, *steps, *memory, ("resumed from", run.checkpoint or "nothing")]


def _items(config: TrainConfig) -> int:
    """Optimizer steps a Lightning epoch."""
    online = config.buffer.storage == "memory"
    return config.algorithm.optimizer_steps * config.algorithm.inner_epochs if online else 1


def _online_steps(config: TrainConfig) -> list[tuple[str, str]]:
    explorer, engine = config.explorer, config.engine
    rollouts = explorer.batch_size * explorer.repeat_times
    expert = config.buffer.expert.per_step
    items = _items(config)
    dtype = (config.model if capabilities_of(engine.name).shares_weights else engine).dtype.value
    weighing = [name for name, _ in strategies(config.add_strategy)]
    return [
        ("engine", f"{engine.name} ({dtype}), context {engine.max_model_len}"),
        (
            "explore step",
            f"{explorer.batch_size} prompts x {explorer.repeat_times} = {rollouts} rollouts, at most "
            f"{rollouts * config.sampling.max_tokens} new tokens" + (f", and {expert} of an expert" if expert else ""),
        ),
        ("training", f"{config.steps} explore steps x {items} optimizer steps = {config.steps * items}"),
        ("objective", f"{config.algorithm.policy_loss.name}, {' then '.join(weighing)}"),
    ]


def _offline_steps(config: TrainConfig) -> list[tuple[str, str]]:
    return [
        ("experiences", f"{config.buffer.storage} {config.buffer.path or config.buffer.url}, no rollouts"),
        ("training", f"{config.steps} optimizer steps x {config.buffer.batch_size} experiences"),
        ("objective", config.algorithm.policy_loss.name),
    ]
