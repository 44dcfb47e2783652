"""`python -m trinity_lightning.train +recipe=grpo`: compose the configuration, build the run, train.

The configuration is composed and validated before torch is imported, so that a misspelt key is refused at once.
"""

import math
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
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
from trinity_lightning.config.lightning_objects import check_loggers, check_modules, check_targets
from trinity_lightning.config.own_parts import check_own_parts
from trinity_lightning.config.registry import config_dir
from trinity_lightning.config.run import TrainConfig, check_there, typed_config, validate, workflow_arguments
from trinity_lightning.config.signatures import check_arguments
from trinity_lightning.config.taskset import tasksets_of
from trinity_lightning.config.trainer import RANKED, STARTED_BY, trains_together
from trinity_lightning.config.values import unknown_name
from trinity_lightning.errors import ConfigError, causes, configured_at

if TYPE_CHECKING:
    import lightning as L


def train(config: DictConfig, record: Callable[[], None] = lambda: None) -> "L.Trainer":
    """Train the policy and write it; `record` is called as soon as nothing can be refused any more."""
    from trinity_lightning.monitor.machine import CPULoad

    load = CPULoad()
    load.start()  # measures what other programs take of the cores while this run imports and loads
    from trinity_lightning.build import build, logging_to

    with refusals_of_parts():
        run = build(config, load)
    record()
    run.announce()
    with disk_full_named(run.folder), logging_to(run.trainer.loggers, config):
        run.fit()
    return run.trainer


@contextmanager
def refusals_of_parts() -> Iterator[None]:
    """Turn a ValueError or TypeError into a ConfigError. A part raises one for an unknown argument, for example."""
    try:
        yield
    except ConfigError:
        raise
    except (ValueError, TypeError) as error:
        raise ConfigError(str(error)) from error


def check(config: DictConfig, here: bool = True) -> None:
    """Refuse what cannot work, before anything is loaded.

    Args:
        config: the composed configuration.
        here: True if the run is to work on this machine; False if it is planned for another one.

    Raises:
        ConfigError: something cannot work.
    """
    run = validate(config, here=here)
    check_own_parts(run)
    check_modules(config)
    if here:
        check_loggers(config)
    if here and config.ckpt_path is not None:
        check_checkpoint(config)
    reads_tasks = here and run.buffer.has_rollouts
    if reads_tasks and STARTED_BY not in os.environ:  # else the process that started this one has checked the tasks
        from trinity_lightning.explorer.tasks.taskset import check_tasksets

        check_tasksets(tasksets_of(run))
    check_models(run)
    from trinity_lightning.explorer.workflows.workflow import check_workflow
    from trinity_lightning.trainer.objective import Objective

    with refusals_of_parts():
        Objective(run.algorithm)
    if run.buffer.has_rollouts:
        arguments = workflow_arguments(run.workflow.name, run.workflow.args, list(run.auxiliary_models))
        with configured_at("workflow"):
            check_workflow(run.workflow.name, arguments)
        if run.eval_workflow is not None:
            with configured_at("eval_workflow"):
                check_workflow(run.eval_workflow, {})
        check_weighing(run)
    check_metric(run.sweep.metric)  # imports Lightning, as the next line does, which takes longest
    check_targets(config)


def check_metric(name: str | None) -> None:
    """Refuse a sweep.metric that no run measures; a ConfigError."""
    from trinity_lightning.monitor.presentation import find_metric

    if name is not None and find_metric(name) is None:
        raise ConfigError(
            f"sweep.metric: '{name}' is no metric of a run; docs/metrics.md has their names.", key="sweep.metric"
        )


def check_weighing(run: TrainConfig) -> None:
    """Refuse unknown strategies, operators, and arguments of them; a ConfigError."""
    from trinity_lightning.algorithm.add_strategy.compose import check_strategy
    from trinity_lightning.buffer.operators.experience_operator import operator_class

    for label, strategy in run.add_strategy.items():
        with configured_at(f"add_strategy.{label}"), refusals_of_parts():
            check_strategy(strategy.name, strategy.args, f"add_strategy.{label}.args")
    for label, operator in run.operators.items():
        with configured_at(f"operators.{label}"), refusals_of_parts():
            kind = operator_class(operator.name)
            check_arguments(f"operator '{label}'", kind, operator.args, f"operators.{label}.args")


def check_models(run: TrainConfig) -> None:
    """Refuse models that cannot be found, unknown rewards, and a teacher or critic with another vocabulary."""
    from trinity_lightning.explorer.rewards import resolve_rewards

    check_there(run)
    resolve_rewards(run.reward)


def _follows(config: DictConfig) -> bool:
    """True if this process is a rank other than 0 of a run on several devices."""
    if not trains_together(config.trainer) or not any(name in os.environ for name in RANKED):
        return False
    from trinity_lightning.trainer.ddp import follows  # imports torch

    return follows()


@hydra.main(version_base="1.3", config_path=str(config_dir("conf")), config_name="train")
def _main(config: DictConfig) -> float | None:
    compose.register()  # a sweep's launcher may call this function alone, in another process
    with compose.errors_as_sentences(config.output_dir):
        compose.check_overrides(config)
        compose.check_folder(config)
        compose.check_processes(config)
        leads = not _follows(config)
        with compose.sole_writer(Path(config.output_dir)) if leads else nullcontext():
            record = partial(compose.record_composition, compose.composition(config), Path(config.output_dir))
            settle_auto(config, leads)
            begins = not Path(config.output_dir, "config.yaml").exists()
            if leads and begins:  # before the checks, because the report of a sweep also names the refused jobs
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


def release(error: BaseException) -> None:
    """Free the local variables of the functions that raised an error; a policy may be among them.

    The traceback stays. Hydra keeps the error of a sweep's job until all jobs have run, and the next job needs the
    memory.
    """
    for cause in causes(error):
        traceback.clear_frames(cause.__traceback__)


def score(trainer: "L.Trainer", run: TrainConfig) -> float | None:
    """The last value of the metric that a sweep optimises. None if it is not finite: the trial then fails.

    Raises:
        ConfigError: the run has not measured `sweep.metric`.
    """
    value = trainer.callback_metrics.get(run.score)
    if value is None and run.sweep.metric is not None:
        message = unknown_name("metric of sweep.metric", run.score, trainer.callback_metrics)
        raise ConfigError(message, key="sweep.metric")
    return None if value is None or not math.isfinite(value) else float(value)


def main() -> None:
    """Console entry point. A configuration error is one message and exit code 2.

    Without arguments nothing is trained: a run takes minutes, and the arguments may have been forgotten.
    `trinity-lightning plan ...` runs `python -m trinity_lightning.plan ...`. `evaluate` and `report` work likewise.
    """
    if (name := "".join(sys.argv[1:2])) in explain.PROGRAMS:
        del sys.argv[1]
        import_module(explain.PROGRAMS[name]).main()
    elif not name:
        print("trinity-lightning: give what to train, such as +recipe=grpo; --help lists all of it.", file=sys.stderr)
        sys.exit(2)
    else:
        compose.run_command(_main)


if __name__ == "__main__":
    main()
