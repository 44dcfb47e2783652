"""Builds a training run from a validated configuration; no other module connects the parts of a run."""

import functools
import logging
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import hydra.utils
import lightning as L
import torch
from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars
from hydra.errors import InstantiationException
from lightning.pytorch.callbacks import Checkpoint, LambdaCallback, ModelCheckpoint
from lightning.pytorch.loggers import Logger, WandbLogger
from omegaconf import DictConfig, OmegaConf
from transformers.utils.logging import disable_progress_bar

from trinity_lightning.buffer.datamodule import ExperienceDataModule, step_keeper
from trinity_lightning.buffer.offline import expert_data, offline_parts, summary
from trinity_lightning.common.files import disk_full_named, write_atomically
from trinity_lightning.common.inference import HeldModel
from trinity_lightning.config.checkpoints import checkpoints_in, holds_a_run, resume_command
from trinity_lightning.config.engines import SENT, EngineConfig, capabilities_of, gpu_count
from trinity_lightning.config.models import load_tokenizer
from trinity_lightning.config.own_code import where
from trinity_lightning.config.registry import SINGLE_RESPONSE_WORKFLOWS
from trinity_lightning.config.run import TrainConfig, typed_config, workflow_arguments
from trinity_lightning.config.servers import sync_method
from trinity_lightning.config.trainer import trains_together
from trinity_lightning.engines import (
    auxiliary_models_of,
    check_pictures,
    check_room,
    engines_of,
    settle_dtypes,
    tell_settings,
    thread_share,
)
from trinity_lightning.errors import ConfigError, ModelNotSavedError, TrinityError, causes, configured_at
from trinity_lightning.explorer.callback import ExplorerCallback
from trinity_lightning.explorer.distributed import RankEngines, follower_of, with_rank_engines
from trinity_lightning.explorer.explorer import Explorer
from trinity_lightning.explorer.models.engine import Engine
from trinity_lightning.explorer.models.vllm_adapter import adapter_engines
from trinity_lightning.explorer.task_source import TaskSource
from trinity_lightning.explorer.tasks.dataset import warn_of_trained_entries
from trinity_lightning.explorer.tasks.taskset import Taskset, mixture_of
from trinity_lightning.monitor.machine import CPULoad
from trinity_lightning.monitor.presentation import summary_table
from trinity_lightning.monitor.run_monitor import RunMonitor
from trinity_lightning.monitor.tokens import TokenKeeper
from trinity_lightning.monitor.wandb_logger import RunLogger, run_id
from trinity_lightning.plan.gpu import follower_plan, tokens_on_a_cpu, trains_on_gpus, with_memory_plan
from trinity_lightning.plan.memory import MemoryPlan
from trinity_lightning.plan.run import rows_on_a_cpu
from trinity_lightning.plan.start import rows_on_a_gpu
from trinity_lightning.report import write_report
from trinity_lightning.resume import checkpoint_to_resume, log_changes
from trinity_lightning.trainer.adapter import check_adapter, shapes_alone
from trinity_lightning.trainer.checkpoint import AtomicCheckpointIO
from trinity_lightning.trainer.ddp import follows, ranks_here
from trinity_lightning.trainer.frozen import trained_skeleton, trained_weights
from trinity_lightning.trainer.out_of_memory import Expected
from trinity_lightning.trainer.policy import PolicyModule

logger = logging.getLogger(__name__)


# -- a training run ---------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """The parts of a training run.

    Attributes:
        config: the configuration, with the memory plan's values.
        checkpoint: checkpoint from which the run resumes; None: the run begins.
        plan: the memory plan of this process's GPU; None: the run has no such plan.
        why_folder: the reason why synchronizer=auto took a folder, in words; "" if it did not.
    """

    config: TrainConfig
    folder: Path
    trainer: L.Trainer
    policy: PolicyModule
    data: L.LightningDataModule
    monitor: RunMonitor
    checkpoint: str | None
    plan: MemoryPlan | None
    why_folder: str = ""

    def announce(self) -> None:
        """Print the table that sums up the run before it starts."""
        if self.trainer.is_global_zero:
            print(summary_table(_summary(self)), flush=True)

    def fit(self) -> None:
        """Train, and save the model. It is saved even if an error follows the last step, such as an engine's.

        Raises:
            ModelNotSavedError: the model or the last checkpoint could not be written. Everything else was written.
        """
        try:
            self.trainer.fit(self.policy, self.data, ckpt_path=self.checkpoint, weights_only=True)
        except Exception:
            if self.trainer.current_epoch >= self.config.steps and self.trainer.world_size == 1:
                try:
                    self._save()
                except ModelNotSavedError as unsaved:  # the error of the training is raised, not this one
                    logger.error("%s", unsaved, exc_info=unsaved)
            raise
        self._finish()

    def _finish(self) -> None:
        """Write the model, the last checkpoint and the report, and close the loggers.

        The weights are written first. If one of these parts fails, the others are written all the same.
        """
        self._warn_of_an_early_stop()
        try:
            self._save()
        finally:
            if self.trainer.is_global_zero:
                self._write_report()
        if self.trainer.is_global_zero:
            finish(self.trainer.loggers)
            parts = ", ".join(f"{name} {gb:.1f}" for name, gb in self.monitor.memory.by_part.items())
            peak = f"peak memory {self.monitor.memory.peak_gb:.1f} GB ({parts})"
            print(f"{peak}; everything is in {self.folder}", flush=True)

    def _save(self) -> None:
        """Write the model and the last checkpoint, each even if the other fails.

        Raises:
            ModelNotSavedError: at least one of them could not be written.
        """
        failed: dict[str, Exception] = {}
        for name, write in (("model", self._save_model), ("last checkpoint", self._save_last_checkpoint)):
            try:
                write()
            except Exception as error:  # from the disk, or from a model's own code
                failed[name] = error
            self.trainer.strategy.barrier()  # other ranks hold a share of the weights
        if failed:
            raise _not_saved(failed, self.folder) from ExceptionGroup("not saved", [*failed.values()])

    def _save_model(self) -> None:
        if self.trainer.is_global_zero and self.config.save_model:
            with disk_full_named(self.folder / "model"):
                self.policy.save_pretrained(self.folder / "model")

    def _save_last_checkpoint(self) -> None:
        """Save a checkpoint after the last step, unless ModelCheckpoint has just done so.

        From this checkpoint the run can go on with more steps.
        """
        savers = (saver for saver in self.trainer.checkpoint_callbacks if isinstance(saver, ModelCheckpoint))
        saver = next(savers, None)
        if saver and saver.dirpath and saver._last_global_step_saved != self.trainer.global_step:
            self.trainer.save_checkpoint(Path(saver.dirpath) / "final.ckpt")

    def _write_report(self) -> None:
        try:
            write_report(self.folder)
        except Exception as error:  # the model is saved: a missing report does not fail the run
            unforeseen = None if isinstance(error, TrinityError | OSError) else error
            logger.warning("report.html was not written: %s", error, exc_info=unforeseen)

    def _warn_of_an_early_stop(self) -> None:
        """Warn if a callback ended the run before its last step, with the callback's reason if it gives one."""
        done, steps = self.trainer.current_epoch, self.config.steps
        if done < steps and self.trainer.is_global_zero:
            callbacks = vars(self.trainer)["callbacks"]
            reasons = [getattr(callback, "stopping_reason_message", None) for callback in callbacks]
            reason = next(filter(None, reasons), "a callback, or the trainer's own limits, ended it.")
            logger.warning("training stopped after step %d of %d: %s", done, steps, reason)


def _not_saved(failed: Mapping[str, Exception], folder: Path) -> ModelNotSavedError:
    """The error for parts that could not be written: the reasons, the place of the weights, and the command to repeat.

    Args:
        failed: the error of each part by its name: "model", "last checkpoint".
        folder: the run's folder.
    """
    reasons = " ".join(
        str(error) if isinstance(error, TrinityError) else f"The {name} could not be written: {_one_line(error)}."
        for name, error in failed.items()
    )
    errors = [cause for error in failed.values() for cause in causes(error)]
    saved = "".join(f" {note}" for error in errors for note in getattr(error, "__notes__", ()))
    if "model" not in failed and (folder / "model").is_dir():
        saved = f" The model is in '{folder / 'model'}', whole."
    checkpoints = checkpoints_in(folder / "checkpoints")
    newest = f"The newest checkpoint is '{checkpoints[-1]}'." if checkpoints else "There is no checkpoint."
    command = resume_command(folder) if checkpoints else None
    fix = f" Once this is mended, write what is missing with: {command}" if command else ""
    return ModelNotSavedError(f"training came to its end, and not all of it is saved. {reasons}{saved} {newest}{fix}")


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(".")


def build(config: DictConfig, load: CPULoad | None = None) -> Run:
    """The run with its parts connected.

    Args:
        config: a validated configuration.
        load: the load of this machine since the process began; it decides the number of threads.

    Raises:
        ConfigError, ValueError, TypeError: a part has no such name or argument.
    """
    folder = Path(config.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    quiet_libraries()
    follower = trains_together(config.trainer) and follows()  # a rank other than 0
    checkpoint = checkpoint_of(config, folder, begins=not follower)
    settle_dtypes(config, checkpoint)
    typed, plan = replace(typed_config(config), trainer=config.trainer), None
    if follower:  # rank 0 alone starts engines, and plans for them
        local_rank, _ = ranks_here()
        plan = follower_plan(typed, local_rank, checkpoint)
    else:
        typed, plan = with_memory_plan(typed, checkpoint, folder / "config.yaml")
    typed, why_folder = with_sync_method(typed)
    L.seed_everything(typed.seed, verbose=False)
    policy = _policy(typed, plan)
    monitor = RunMonitor(folder, typed.steps, load)
    data: L.LightningDataModule
    callbacks: list[L.Callback]
    if not typed.buffer.has_rollouts:
        data, callbacks = offline_parts(typed, folder, policy, monitor, checkpoint, response_budget(typed), follower)
    elif follower:
        data, callbacks = ExperienceDataModule(**_dealing(typed)), [*thread_share(typed), follower_of(typed, folder)]
    else:
        data, callbacks = online_parts(typed, folder, monitor, offload=plan is not None and plan.offload)
    if not follower:
        # Recorded only after the checkpoint is loaded: a resume that is refused must not change the record.
        record = LambdaCallback(
            on_fit_start=lambda *_: policy.try_saving(folder) if typed.save_model else None,
            on_train_start=lambda *_: _record(config, typed.engine, policy, folder, checkpoint),
        )
        callbacks[:0] = [record, TokenKeeper(folder)]
    trainer = _trainer(config, callbacks, run_id(folder, checkpoint))
    return Run(typed, folder, trainer, policy, data, monitor, checkpoint, plan, why_folder)


def with_sync_method(config: TrainConfig) -> tuple[TrainConfig, str]:
    """The configuration with ipc or nccl in place of synchronizer=auto where they work; else the reason, in words."""
    if not config.buffer.has_rollouts:
        return config, ""
    method, why = sync_method(config, capabilities_of(config.engine.name), config.trainer or {}, gpu_count())
    if method in SENT:
        config = replace(config, synchronizer=replace(config.synchronizer, method=method))
    return config, why


def checkpoint_of(config: TrainConfig | DictConfig, folder: Path, begins: bool = True) -> str | None:
    """The checkpoint to resume from, checked before anything is loaded; None: the run begins.

    Args:
        config: the run's configuration.
        folder: the run's folder.
        begins: False for a rank that joins a run: the folder then holds the record of that run.

    Raises:
        ConfigError: as `resume.checkpoint_to_resume`; or the run begins, and its folder holds another run.
    """
    if config.ckpt_path is not None:
        return checkpoint_to_resume(config, folder)
    if begins and (folder / "config.yaml").exists():
        raise holds_a_run(folder)
    return None


def _record(
    config: DictConfig, engine: EngineConfig, policy: PolicyModule, folder: Path, checkpoint: str | None
) -> None:
    """Write the configuration. The values of the policy and of the memory plan replace `auto` and null."""
    for key in ("max_num_seqs", "kv_cache_gb", "sleep"):
        config.engine[key] = getattr(engine, key)
    config.algorithm.max_tokens_per_micro_batch = policy.max_tokens
    record_config(config, folder / "config.yaml", checkpoint)


def _policy(config: TrainConfig, plan: MemoryPlan | None) -> PolicyModule:
    if config.model.lora.r is not None:
        check_adapter(config.model)
    if config.model.freeze:
        trained_skeleton(config.model)  # before anything is loaded
    steps = config.optimizer.total_steps or config.steps * config.items
    on_cpu = None if trains_on_gpus(config) else tokens_on_a_cpu(config)
    policy = PolicyModule(
        config.model.name,
        config.algorithm,
        replace(config.optimizer, total_steps=steps),
        dtype=config.model.dtype,
        dropout=config.model.dropout,
        compile_layers=config.model.compile,
        gradient_checkpointing=config.model.gradient_checkpointing,
        attn_implementation=config.model.attn_implementation,
        lora=config.model.lora,
        freeze=config.model.freeze,
        planned_tokens=on_cpu if plan is None else plan.micro_batch_tokens,
    )
    if plan is not None:
        may_sleep = plan.shared and not plan.sleep and not capabilities_of(config.engine.name).overlaps_training
        policy.expected = Expected(plan.training, may_sleep)
    return policy


def _trainer(config: DictConfig, callbacks: list[L.Callback], wandb_id: str | None) -> L.Trainer:
    loggers = instances_of(config.logger)
    for run_logger in loggers:
        if isinstance(run_logger, RunLogger) and wandb_id is not None:
            run_logger.adopt(wandb_id)
    callbacks += instances_of(config.callbacks)
    return instantiate(
        config.trainer,
        logger=loggers,
        callbacks=callbacks,
        plugins=[AtomicCheckpointIO()],
        # Without a callback that saves, Lightning would add its own, which saves after every step.
        enable_checkpointing=any(isinstance(callback, Checkpoint) for callback in callbacks),
    )


def _summary(run: Run) -> list[tuple[str, str]]:
    config, device, count = run.config, run.trainer.strategy.root_device, run.trainer.world_size
    rows = [
        ("run", f"{config.name}, seed {config.seed}, in {run.folder}"),
        ("model", f"{config.model.name} ({config.model.dtype.value})"),
        ("devices", f"{count} x {device.type}" if count > 1 else str(device)),
    ]
    if config.model.freeze or config.model.lora.r is not None:
        rows.insert(2, ("trained", trained_weights(config.model)))
    if config.buffer.has_rollouts:
        rows += _online_steps(config)
    else:
        rows += summary(config)
    if device.type == "cpu":
        rows += rows_on_a_cpu(config)
    elif device.type == "cuda":
        tokens, capability = run.plan and run.plan.micro_batch_tokens, torch.cuda.get_device_capability(device)
        rows += rows_on_a_gpu(config, capability, tokens, count, run.why_folder)
        rows += run.plan.rows() if run.plan is not None else []
    return [*rows, ("resumed from", run.checkpoint or "nothing")]


def _online_steps(config: TrainConfig) -> list[tuple[str, str]]:
    explorer, engine, items = config.explorer, config.engine, config.items
    rollouts, expert = explorer.batch_size * explorer.repeat_times, config.buffer.expert.per_step
    dtype = (config.model if capabilities_of(engine.name).shares_weights else engine).dtype.value
    spread = ", one in each process" if engine.per_rank else ""
    weighing = [strategy.name for strategy in config.add_strategy.values()]
    return [
        ("engine", f"{engine.name} ({dtype}){spread}, context {engine.max_model_len}"),
        (
            "explore step",
            f"{explorer.batch_size} prompts x {explorer.repeat_times} = {rollouts} rollouts of at most "
            f"{config.sampling.max_tokens} new tokens" + (f", and {expert} of an expert" if expert else ""),
        ),
        ("training", f"{config.steps} explore steps x {items} optimizer steps = {config.steps * items}"),
        ("objective", f"policy loss {config.algorithm.policy_loss.name}, add strategy {' then '.join(weighing)}"),
    ]


# -- rollouts and data -------------------------------------------------------------------------------------------------


def online_parts(
    config: TrainConfig, folder: Path, monitor: RunMonitor, offload: bool
) -> tuple[ExperienceDataModule, list[L.Callback]]:
    """The buffer of a run with rollouts, and its callbacks; `offload`: see ExplorerCallback."""
    check_room(config)
    auxiliary_models = auxiliary_models_of(config, folder)
    explorer = explorer_callback(config, folder, auxiliary_models, monitor, offload)
    callbacks = [monitor, *thread_share(config), explorer]
    if config.engine.per_rank:
        callbacks.insert(0, RankEngines(explorer.explorer, config.engine))
    return online_data(config, folder, auxiliary_models), callbacks


def explorer_callback(
    config: TrainConfig, folder: Path, auxiliary_models: Mapping[str, HeldModel], monitor: RunMonitor, offload: bool
) -> ExplorerCallback:
    """The callback that rolls out; `offload`: see ExplorerCallback."""
    trained = config.tasksets.values() if config.tasksets else [config.taskset]
    warn_of_trained_entries(trained, config.eval_tasksets.values())
    models = [[model] for model in auxiliary_models.values()]
    engines = _engines(config, folder)
    source, evaluated = train_source(config), eval_sources(config)
    check_pictures(config, [source, *evaluated])
    tell_settings(engines, config, [source, *evaluated])
    explorer = Explorer(config.explorer, engines, source, evaluated, models)
    return ExplorerCallback(
        explorer,
        config.synchronizer,
        folder=folder / "checkpoints",
        command=lambda: resume_command(folder),
        watcher=monitor,
        offload=offload,
    )


def _engines(config: TrainConfig, folder: Path) -> list[Engine]:
    """The engines that generate. Adapters reach them merged into the weights, or apart, for vLLM to compute with."""
    if config.engine.per_rank:
        return with_rank_engines(engines_of(config, folder)[0], config)
    if config.synchronizer.lora == "merged":
        return engines_of(config, folder)
    return adapter_engines(config, folder, shapes_alone(config.model))


def train_source(config: TrainConfig) -> TaskSource:
    """The source of the training tasks."""
    taskset = mixture_of(config.tasksets) if config.tasksets else Taskset.from_config(config.taskset)
    with configured_at("workflow"):
        return TaskSource(
            taskset,
            config.workflow.name,
            config.reward,
            config.sampling,
            _arguments(config),
            reward_solved=config.reward_solved,
            chat_template_kwargs=config.model.chat_template_kwargs,
            chat_template=_chat_template(config.model.name),
        )


def eval_sources(config: TrainConfig) -> list[TaskSource]:
    """The sources of the evaluation tasks."""
    workflow, args = config.eval_workflow or config.workflow.name, {} if config.eval_workflow else _arguments(config)
    settings = (workflow, config.reward, config.eval_sampling, args, config.eval_repeat_times, config.reward_solved)
    rendering = (config.model.chat_template_kwargs, _chat_template(config.model.name))
    tasksets = [
        Taskset.from_config(taskset, epochs=1, key=f"eval_tasksets.{name}")
        for name, taskset in config.eval_tasksets.items()
    ]
    with configured_at("eval_workflow" if config.eval_workflow else "workflow"):
        return [TaskSource(taskset, *settings, *rendering) for taskset in tasksets]


@functools.lru_cache(maxsize=1)
def _chat_template(model: str) -> str | None:
    """The chat template of a model; None if it has none or several."""
    template = load_tokenizer(model).chat_template
    return template if isinstance(template, str) else None


def _arguments(config: TrainConfig) -> dict[str, Any]:
    return workflow_arguments(config.workflow.name, config.workflow.args, list(config.auxiliary_models))


def online_data(config: TrainConfig, folder: Path, auxiliary_models: Mapping[str, HeldModel]) -> ExperienceDataModule:
    """The buffer that the rollouts of this run fill."""
    return ExperienceDataModule(
        config.add_strategy,
        operators=config.operators,
        auxiliary_models={name: [model.get_openai_async_client()] for name, model in auxiliary_models.items()},
        folder=folder,
        keep=step_keeper(config.buffer, folder) if config.buffer.keep else None,
        experts=expert_data(config) if config.buffer.expert.per_step > 0 else None,
        **_dealing(config),
    )


def _dealing(config: TrainConfig) -> dict[str, Any]:
    """The settings by which a buffer deals out its experiences. The buffers of ranks other than 0 need no others."""
    return {
        "optimizer_steps": config.algorithm.optimizer_steps,
        "inner_epochs": config.algorithm.inner_epochs,
        "seed": config.seed,
        "max_response_length": response_budget(config),
    }


def response_budget(config: TrainConfig) -> int:
    """Longest response in tokens: the whole context if the workflow may take several turns."""
    single = config.workflow.name in SINGLE_RESPONSE_WORKFLOWS
    return config.sampling.max_tokens if single else config.engine.max_model_len


# -- loggers and records ----------------------------------------------------------------------------------------------


def instantiate(node: Any, **arguments: Any) -> Any:
    """Call `hydra.utils.instantiate`. Errors of this package pass unchanged; others become a sentence with the key."""
    try:
        return hydra.utils.instantiate(node, **arguments)
    except InstantiationException as error:
        if isinstance(error.__cause__, TrinityError):
            raise error.__cause__ from None
        _, named, key = str(error).rpartition("full_key: ")
        cause = error.__cause__ or error
        message = f"{key if named else 'a node'}: {cause}{where(cause)}"
        raise ConfigError(message, key=key if named else None) from error


def instances_of(nodes: DictConfig | None) -> list[Any]:
    """The objects of `_target_` nodes: callbacks or loggers. A W&B logger does not begin its run yet."""
    return [instantiate(node) for node in (nodes or {}).values()]


@contextmanager
def logging_to(loggers: Collection[Logger], config: DictConfig) -> Iterator[None]:
    """Log the configuration. An error or a stop inside the block ends the loggers, and is then raised again."""
    settings: Any = OmegaConf.to_container(config, resolve=True)
    try:
        for run_logger in loggers:
            run_logger.log_hyperparams(settings)
        yield
    except BaseException as error:
        with suppress(Exception):  # the first error matters more
            finish(loggers, failed=isinstance(error, Exception))  # an interrupted run has not failed
        raise


def finish(loggers: Collection[Logger], failed: bool = False) -> None:
    """Write the rows that the loggers still hold, and end the W&B run: a sweep's next job needs a run of its own."""
    with ExitStack() as ends:  # calls all callbacks, even if one raises
        if any(isinstance(run_logger, WandbLogger) for run_logger in loggers):
            import wandb

            # not by `WandbLogger.experiment`, which would begin a run
            ends.callback(wandb.finish, exit_code=int(failed))
        for run_logger in loggers:
            ends.callback(run_logger.flush if isinstance(run_logger, RunLogger) else run_logger.save)


def quiet_libraries() -> None:
    """Reduce the output of libraries. Lightning's warnings go to the run's handlers, once.

    The progress bars of transformers are turned off, since its work takes seconds. The bars of downloads stay.
    """
    log = logging.getLogger("lightning.pytorch")
    log.handlers.clear()
    log.setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", ".*LeafSpec.*")  # torch deprecates it, and Lightning uses it
    warnings.filterwarnings("ignore", "Checkpoint directory .* is not empty")  # at every resume
    downloads = not are_progress_bars_disabled()
    disable_progress_bar()
    if downloads:
        enable_progress_bars()


def record_config(config: DictConfig, file: Path, checkpoint: str | None = None) -> None:
    """Write the resolved configuration. If the run was resumed, first warn of values that have changed.

    Args:
        config: the run's configuration.
        file: the record, in the run's folder.
        checkpoint: the checkpoint that is resumed, perhaps in the folder of an earlier run.
    """
    earlier = file if checkpoint is None or file.is_file() else Path(checkpoint).parents[1] / file.name
    if config.ckpt_path is not None and earlier.is_file():
        log_changes(config, earlier)
    write_atomically(file, OmegaConf.to_yaml(config, resolve=True).encode())
