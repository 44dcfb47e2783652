"""`python -m trinity_lightning.train +recipe=grpo`: compose, build, fit.

The configuration is composed and validated before torch is imported, so that a misspelt key is refused at once.
"""

import math
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from trinity_lightning.common.files import disk_full_named
from trinity_lightning.config import explain
from trinity_lightning.config import hydra as compose
from trinity_lightning.config.checkpoints import check_checkpoint, settle_auto
from trinity_lightning.config.lightning_objects import check_loggers, check_targets
from trinity_lightning.config.model_files import BUILT_IN_MODELS
from trinity_lightning.config.registry import config_dir
from trinity_lightning.config.run import TrainConfig, check_there, typed_config, validate, workflow_arguments
from trinity_lightning.config.signatures import check_arguments
from trinity_lightning.config.taskset import tasksets_of
from trinity_lightning.config.trainer import STARTED_BY, trains_together
from trinity_lightning.config.values import unknown_name
from trinity_lightning.errors import ConfigError, causes

if TYPE_CHECKING:
    import lightning as L


def train(config: DictConfig, record: Callable[[], None] = lambda: None) -> "L.Trainer":
    """Run a whole training: fit, then write the trained policy; `record` is called once nothing was refused."""
    from trinity_lightning.monitor.machine import CPULoad

    load = CPULoad()
    load.start()  # what others take of the cores while this run imports and loads
    from trinity_lightning.build import build, given

    try:
        run = build(config, load)
    except (ValueError, TypeError) as error:  # an argument that a part does not have: the part's own words say it best
        raise ConfigError(str(error)) from error
    record()
    run.announce()
    with disk_full_named(run.folder), given(run.trainer.loggers, config):
        run.fit()
    return run.trainer


def check(config: DictConfig, here: bool = True) -> None:
    """Refuse what cannot work on this machine, or, if not `here`, on any, before anything is loaded; a ConfigError."""
    run = validate(config, here=here)
    if here and config.ckpt_path is not None:
        check_checkpoint(config)
    if here and run.buffer.has_rollouts and STARTED_BY not in os.environ:  # or the process that starts others has
        from trinity_lightning.explorer.tasks.taskset import check_tasksets

        check_tasksets(tasksets_of(run))
    check_models(run)
    from trinity_lightning.explorer.workflows.workflow import check_workflow
    from trinity_lightning.trainer.objective import Objective

    try:
        Objective(run.algorithm)
    except (ValueError, TypeError) as error:
        raise ConfigError(str(error)) from error
    if run.sweep.metric is not None:
        check_metric(run.sweep.metric)
    check_targets(config)
    if here:
        check_loggers(config)
    if run.buffer.has_rollouts:
        arguments = workflow_arguments(run.workflow.name, run.workflow.args, list(run.auxiliary_models))
        check_workflow(run.workflow.name, arguments)
        if run.eval_workflow is not None:
            check_workflow(run.eval_workflow, {})
        check_weighing(run)


def check_metric(name: str) -> None:
    """ConfigError unless sweep.metric is the name of a metric."""
    from trinity_lightning.monitor.presentation import find_metric

    if find_metric(name) is None:
        raise ConfigError(
            f"sweep.metric: '{name}' is no metric of a run; docs/metrics.md has their names.", key="sweep.metric"
        )


def check_weighing(run: TrainConfig) -> None:
    """Refuse strategies and operators that are none, or have other arguments than they are given; a ConfigError."""
    from trinity_lightning.algorithm.add_strategy.compose import check_strategy

    try:
        for label, strategy in run.add_strategy.items():
            check_strategy(strategy.name, strategy.args, f"add_strategy.{label}.args")
        if run.operators:
            from trinity_lightning.buffer.operators.experience_operator import operator_class

            for label, each in run.operators.items():
                what, key = f"operator '{label}'", f"operators.{label}.args"
                check_arguments(what, operator_class(each.name), each.args, key)
    except ConfigError:
        raise
    except (ValueError, TypeError) as error:
        raise ConfigError(str(error)) from error


def check_models(run: TrainConfig) -> None:
    """Refuse models that cannot be found, a teacher or critic of another tokenizer, and unknown rewards."""
    from trinity_lightning.explorer.rewards import resolve_rewards

    if run.model.name not in BUILT_IN_MODELS or run.auxiliary_models or run.algorithm.critic is not None:
        check_there(run)
    resolve_rewards(run.reward)


def _follows() -> bool:
    """True if this process is one of a run on several devices, and not its first."""
    from trinity_lightning.trainer.ddp import follows

    return follows()


@hydra.main(version_base="1.3", config_path=str(config_dir("conf")), config_name="train")
def _main(config: DictConfig) -> float | None:
    compose.register()  # a sweep's launcher may have another process run this function alone
    with compose.errors_as_sentences(config.output_dir):
        compose.check_overrides(config)
        compose.check_folder(config)
        compose.check_read(config)
        compose.check_processes(config)
        leads = not (trains_together(config.trainer) and _follows())
        with compose.sole_writer(Path(config.output_dir)) if leads else nullcontext():
            record = partial(compose.record_composition, compose.composition(config), Path(config.output_dir))
            settle_auto(config, leads)
            begins = not Path(config.output_dir, "config.yaml").exists()
            if leads and begins:  # at once: the report of a sweep names jobs that were refused
                record()
            check(config)
            try:
                trainer = train(config, record if leads and not begins else lambda: None)
            except Exception as error:
                if HydraConfig.get().mode == RunMode.MULTIRUN:
                    release(error)
                raise
        in_sweep = HydraConfig.get().mode == RunMode.MULTIRUN
        return score(trainer, typed_config(config)) if in_sweep else None


def score(trainer: "L.Trainer", run: TrainConfig) -> float | None:
    """The last value of the metric that a sweep optimises; None if it is no finite number, which fails the trial.

    ConfigError: sweep.metric names one that the run has not measured.
    """
    value = trainer.callback_metrics.get(run.score)
    if value is None and run.sweep.metric is not None:
        raise ConfigError(unknown_name("metric of sweep.metric", run.score, trainer.callback_metrics))
    return None if value is None or not math.isfinite(value) else float(value)


def main() -> None:
    """Console entry point: configuration errors are one message and exit code 2.

    `trinity-lightning plan ...` is `python -m trinity_lightning.plan ...`, and so with the other programs.
    """
    if (name := "".join(sys.argv[1:2])) in explain.PROGRAMS:
        del sys.argv[1]
        import_module(f"trinity_lightning.{name}").main()
    else:
        compose.run_command(_main)


if __name__ == "__main__":
    main()


def release(error: BaseException) -> None:
    """Let go of what the functions that raised an error hold, such as a policy; its traceback stays as it is.

    Hydra keeps the error of a sweep's job until all jobs have run, and the next one needs that memory.
    """
    for each in causes(error):
        traceback.clear_frames(each.__traceback__)
