"""The typed schema of our own knobs, and where the configuration files are found.

Light on purpose: no torch here, so that a misspelt key is refused within a second. Lightning's own objects (trainer,
loggers, callbacks) are free `_target_` nodes and have no schema here.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from trinity_lightning.common.config_buffer import BufferConfig as BufferConfig
from trinity_lightning.common.config_buffer import ExpertConfig as ExpertConfig
from trinity_lightning.common.config_engine import AuxiliaryConfig as AuxiliaryConfig
from trinity_lightning.common.config_engine import EngineConfig as EngineConfig
from trinity_lightning.common.config_engine import EngineDtype as EngineDtype
from trinity_lightning.common.config_engine import EngineKind as EngineKind
from trinity_lightning.common.config_engine import EngineSleep as EngineSleep
from trinity_lightning.common.config_engine import SynchronizerConfig as SynchronizerConfig
from trinity_lightning.common.config_sections import AlgorithmConfig as AlgorithmConfig
from trinity_lightning.common.config_sections import Dropout as Dropout
from trinity_lightning.common.config_sections import DynamicTimeoutConfig as DynamicTimeoutConfig
from trinity_lightning.common.config_sections import ExplorerConfig as ExplorerConfig
from trinity_lightning.common.config_sections import KLConfig as KLConfig
from trinity_lightning.common.config_sections import Layout as Layout
from trinity_lightning.common.config_sections import ModelConfig as ModelConfig
from trinity_lightning.common.config_sections import OptimizerConfig as OptimizerConfig
from trinity_lightning.common.config_sections import OverRolloutConfig as OverRolloutConfig
from trinity_lightning.common.config_sections import RolloutCorrectionConfig as RolloutCorrectionConfig
from trinity_lightning.common.config_sections import SamplingConfig as SamplingConfig
from trinity_lightning.common.config_sections import TasksetConfig as TasksetConfig
from trinity_lightning.common.config_sections import WeightDtype as WeightDtype
from trinity_lightning.common.config_sections import WorkflowConfig as WorkflowConfig
from trinity_lightning.common.config_sections import runners_per_model as runners_per_model

PACKAGE_DIR = Path(__file__).resolve().parents[1]


@dataclass
class TrainConfig:
    """A whole training run.

    Attributes:
        name: the experiment's name: its folder under `outputs/` and its group in W&B.
        steps: explore steps of the run; one is one Lightning epoch.
        seed: seed of everything random.
        ckpt_path: a checkpoint to resume from; `last` goes on in the newest folder of this name.
        output_root: where run folders are made.
        output_dir: this run's folder.
        taskset: what to train on,
        tasksets: or several, by name, each with its `weight`; then `taskset` is not used.
        eval_tasksets: what to evaluate on, by name.
        workflow: how a task is tried.
        auxiliary_models: judges and teachers that workflows and operators ask, {name: {model, url, api_key_env,
            engine}}: a vLLM server of `model` that the run starts, or the endpoint `url`; workflows number them from 0.
        reward: what a response is worth: a registered name, a dotted path, or {name: weight}; null: the workflow's own.
        sampling: how training rollouts are drawn.
        eval_sampling: how evaluation rollouts are drawn.
        eval_workflow: how an evaluation task is tried: a registered name or a dotted path; null: as a task to train on.
        eval_repeat_times: rollouts an evaluation task (the k of mean@k).
        operators: what tidies experiences before they are weighed, in order: {name: {args: {...}, on_error}}; a key
            `name` overrides the name.
        add_strategy: how rewards become advantages, in order: {name: arguments}; a key `name` overrides the name.
        trainer, logger, callbacks: Lightning objects, as `_target_` nodes.
        save_model: whether the trained policy is written to `<output_dir>/model` at the end.
    """

    name: str = "run"
    steps: int = 30
    seed: int = 42
    ckpt_path: str | None = None
    output_root: str = "outputs"
    output_dir: str = MISSING
    model: ModelConfig = field(default_factory=ModelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    taskset: TasksetConfig = field(default_factory=TasksetConfig)
    tasksets: dict[str, TasksetConfig] = field(default_factory=dict)
    eval_tasksets: dict[str, TasksetConfig] = field(default_factory=dict)
    workflow: WorkflowConfig = field(default_factory=WorkflowConfig)
    auxiliary_models: dict[str, Any] = field(default_factory=dict)
    reward: Any = None
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    eval_sampling: SamplingConfig = field(default_factory=SamplingConfig)
    eval_workflow: str | None = None
    eval_repeat_times: int = 1
    explorer: ExplorerConfig = field(default_factory=ExplorerConfig)
    operators: dict[str, Any] = field(default_factory=dict)
    add_strategy: dict[str, Any] = field(default_factory=dict)
    buffer: BufferConfig = field(default_factory=BufferConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    synchronizer: SynchronizerConfig = field(default_factory=SynchronizerConfig)
    trainer: Any = None
    logger: Any = None
    callbacks: Any = None
    save_model: bool = True


def config_dir(name: str) -> Path:
    """The folder `conf` or `recipes`: inside the package in a wheel, beside it in a checkout."""
    for parent in (PACKAGE_DIR, PACKAGE_DIR.parent):
        if (parent / name).is_dir():
            return parent / name
    raise FileNotFoundError(
        f"the folder '{name}' is neither inside {PACKAGE_DIR} nor beside it: reinstall the package."
    )


def options(group: str) -> list[str]:
    """Names of the choices of a config group, or of the recipes."""
    folder = config_dir("recipes") if group == "recipe" else config_dir("conf") / group
    return sorted(path.stem for path in folder.glob("*.yaml"))
