"""The whole configuration of a run, and the rules between its sections; a section's own rules are in its own file.

Lightning's objects (trainer, loggers, callbacks) are free `_target_` nodes without a schema: `lightning_objects.py`.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING, DictConfig, OmegaConf, open_dict

from trinity_lightning.config.algorithm import (
    AlgorithmConfig,
    KLConfig,
    Layout,
    check_corrected,
    check_expert,
    check_older_weights,
    check_strategies,
    why_older,
)
from trinity_lightning.config.buffer import (
    BufferConfig,
    check_steps,
    check_without_rollouts,
    operator_configs,
)
from trinity_lightning.config.critic import check_critic, check_value_model
from trinity_lightning.config.engines import (
    ENGINE_KEYS,
    Capabilities,
    EngineConfig,
    SynchronizerConfig,
    capabilities_of,
    engine_arguments,
    require_vllm,
    unread_key,
)
from trinity_lightning.config.explorer import (
    ExplorerConfig,
    SamplingConfig,
    WorkflowConfig,
    asked_model,
    auxiliary_configs,
    check_asked,
    check_sight_of_judge,
    check_teachers,
    check_trained_sampling,
    check_vocabularies,
)
from trinity_lightning.config.lightning_objects import FREE, lightning_objects
from trinity_lightning.config.loss_arguments import check_loss
from trinity_lightning.config.losses import LOSSES
from trinity_lightning.config.model import ModelConfig, OptimizerConfig
from trinity_lightning.config.models import (
    check_model_name,
    check_on_hub,
    check_processor_args_of,
    check_trainable,
)
from trinity_lightning.config.registry import ASKING_WORKFLOWS, PARTS, import_object
from trinity_lightning.config.sections import Section, checked, choice_of, strategies, unknown_key
from trinity_lightning.config.servers import check_adapters, check_servers, check_synchronizer, check_vllm
from trinity_lightning.config.staleness import check_staleness
from trinity_lightning.config.taskset import TasksetConfig
from trinity_lightning.config.trainer import check_trainer
from trinity_lightning.config.values import number, one_of, text, whole_number
from trinity_lightning.errors import ConfigError


@dataclass
class SweepConfig(Section, key="sweep"):
    """The metric by which the jobs of a sweep (`--multirun`) are compared.

    Attributes:
        metric: the metric whose last value a sweeper such as Optuna optimises, by its name in metrics.csv. Null:
            eval/<taskset>/mean@<k> of the first of `eval_tasksets`, or reward/mean without evaluations. In runs without
            rollouts: eval/loss with held-out examples, otherwise actor/pg_loss; both need
            hydra.sweeper.direction=minimize.
    """

    metric: str | None = checked(None, text, optional=True)


@dataclass
class TrainConfig(Section, root=True):
    """A whole training run.

    In a mapping of named parts, null removes an entry: `eval_tasksets: {addition_heldout: null}` in a recipe that
    builds on another one. (These mappings are tasksets, eval_tasksets, auxiliary_models, reward, reward_solved,
    operators, add_strategy, logger, callbacks, and the streams of algorithm=streams.)

    Operators, strategies and auxiliary models are plain mappings for Hydra, because its command line cannot add entries
    to a mapping of dataclasses. Here each entry becomes an OperatorConfig, a PartConfig or an AuxiliaryConfig.

    Attributes:
        name: the experiment's name: its folder under `outputs/` and its group in W&B.
        steps: explore steps of the run; one is one Lightning epoch.
        seed: seed of everything random.
        ckpt_path: a checkpoint to resume from. `last` goes on in the newest folder of this name that has a checkpoint.
            `auto` goes on from the last checkpoint in `output_dir`, or without `output_dir` in the newest run of this
            configuration; if there is none, the run begins.
        output_root: folder in which run folders are made.
        output_dir: this run's folder.
        taskset: the tasks to train on.
        tasksets: several tasksets to train on, by name, each with its `weight`, in place of `taskset`.
        eval_tasksets: tasksets to evaluate on, by name.
        workflow: the workflow that tries a task.
        auxiliary_models: judges and teachers that workflows and operators ask, {name: {model, url, api_key_env,
            engine}}: a vLLM server of `model` that the run starts, or the endpoint `url`.
        reward: the reward of a response: a registered name, a dotted path, or {name: weight}; null: the workflow's own.
        reward_solved: {component: least value}. A rollout counts as solved, for pass@k and taskset.order=by_difficulty,
            if it reaches all of these values. A component is a reward function, a part that one returns, another
            metric, or `reward`, the sum. Null: the component `math` or `accuracy`, or the only component, at 1; with
            several other components there is no pass@k.
        sampling: sampling of training rollouts.
        eval_sampling: sampling of evaluation rollouts.
        eval_workflow: the workflow that tries an evaluation task, by a registered name or a dotted path; null: that of
            training tasks.
        eval_repeat_times: rollouts of each evaluation task (the k of mean@k).
        operators: experience operators, applied in order before the strategies: {name: {args: {...}, on_error}}; a key
            `name` overrides the name.
        add_strategy: strategies that turn rewards into advantages, in order: {name: {args: {...}}}; a key `name`
            overrides the name.
        sweep: the metric by which a sweep's jobs are compared.
        trainer, logger, callbacks: Lightning objects, as `_target_` nodes.
        save_model: write the trained policy to `<output_dir>/model` at the end.
    """

    name: str = "run"
    steps: int = checked(30, whole_number, least=1)
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
    reward_solved: Any = None
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    eval_sampling: SamplingConfig = field(default_factory=SamplingConfig)
    eval_workflow: str | None = checked(None, one_of, names=PARTS["workflow"], with_paths=True, optional=True)
    eval_repeat_times: int = checked(1, whole_number, least=1)
    explorer: ExplorerConfig = field(default_factory=ExplorerConfig)
    operators: dict[str, Any] = field(default_factory=dict)
    add_strategy: dict[str, Any] = field(default_factory=dict)
    buffer: BufferConfig = field(default_factory=BufferConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    synchronizer: SynchronizerConfig = field(default_factory=SynchronizerConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)
    trainer: Any = None
    logger: Any = None
    callbacks: Any = None
    save_model: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_seed(self.seed)
        self.operators = operator_configs(self.operators)
        self.add_strategy = strategies(self.add_strategy)
        check_solved(self.reward_solved)
        self.auxiliary_models = auxiliary_configs(self)

    @property
    def score(self) -> str:
        """The metric that a sweep optimises: `sweep.metric`, or the metric for which null stands."""
        if self.sweep.metric is not None:
            return self.sweep.metric
        if not self.buffer.has_rollouts:
            return "eval/loss" if self.buffer.dataset.held_out.given else "actor/pg_loss"
        evaluated = next(iter(self.eval_tasksets.values()), None)
        if evaluated is None or self.explorer.eval_interval == 0:
            return "reward/mean"
        return f"eval/{evaluated.name}/mean@{self.eval_repeat_times}"

    @property
    def items(self) -> int:
        """Optimizer steps in a Lightning epoch."""
        return self.algorithm.optimizer_steps * self.algorithm.inner_epochs if self.buffer.has_rollouts else 1


def check_solved(reward_solved: Any) -> None:
    """Refuse anything but null and a mapping of components to their least values; a ConfigError."""
    if not isinstance(reward_solved, Mapping | None):
        raise ConfigError(
            f"reward_solved is {reward_solved!r}: give {{COMPONENT: LEAST VALUE}}, or null.", key="reward_solved"
        )
    for component, least in (reward_solved or {}).items():
        number(f"reward_solved.{component}", least)


def check_seed(seed: int) -> None:
    """Refuse a seed that a random generator does not take; a ConfigError."""
    whole_number("seed", seed, least=0)
    if seed >= 2**32:
        raise ConfigError(f"seed is {seed}", key="seed", fix="give a number below 2**32")


# -- from Hydra's configuration to dataclasses -------------------------------------------------------------------------


def typed_config(config: DictConfig) -> TrainConfig:
    """The configuration as dataclasses, without Lightning's objects; each section is checked by its own rules.

    Raises:
        ConfigError: a section refuses a value.
        OmegaConfBaseException: a value is missing.
    """
    config = OmegaConf.merge(config, dict.fromkeys(FREE))  # type: ignore[assignment]
    settle_parts(config)
    try:
        return OmegaConf.to_object(config)  # type: ignore[return-value]
    except ConfigError:
        _check_sections_with_other_keys(config)
        raise


def _check_sections_with_other_keys(config: DictConfig) -> None:
    """Check again the sections whose key is not that of their class, so that the message names the right key.

    Raises:
        ConfigError: a section refuses a value.
    """
    groups = ("tasksets", "eval_tasksets")
    sections = {f"{group}.{name}": section for group in groups for name, section in config[group].items()}
    sections |= {"buffer.expert.dataset": config.buffer.expert.dataset, "eval_sampling": config.eval_sampling}
    for key, section in sections.items():
        usual_key = "sampling" if key == "eval_sampling" else "taskset"
        try:
            OmegaConf.to_object(section)
        except ConfigError as error:
            in_text = re.compile(rf"(?<![\w./'-]){usual_key}\.")
            message = in_text.sub(lambda _: f"{key}.", str(error))  # noqa: B023  # used at once
            full_key = None if error.key is None else in_text.sub(lambda _: f"{key}.", error.key)  # noqa: B023
            raise ConfigError(message, key=full_key) from error


# Mappings of named parts, in which null removes a part.
NAMED_PARTS = (
    *("tasksets", "eval_tasksets", "auxiliary_models", "reward", "reward_solved", "operators", "add_strategy"),
    *("logger", "callbacks", "algorithm.policy_loss.args.streams"),
)


def settle_parts(config: DictConfig) -> None:
    """Remove named parts that are null, and evaluations that the run skips; name tasksets by their keys.

    An evaluation is skipped if the run trains on no taskset of the source in its `held_out_of`. A taskset that has a
    name keeps it.
    """
    for key in NAMED_PARTS:
        if key in config and key not in (*FREE, "reward", "reward_solved") and config[key] is None:
            config[key] = {}
        parts = _section(config, key)
        _remove(parts, [name for name in parts if not OmegaConf.is_missing(parts, name) and parts[name] is None])
    evaluated = _section(config, "eval_tasksets")
    for name, taskset in (*_section(config, "tasksets").items(), *evaluated.items()):
        if OmegaConf.is_missing(taskset, "name"):
            taskset.name = name
    has_rollouts = OmegaConf.select(config, "buffer.storage") == "memory"
    tasksets = list(_section(config, "tasksets").values()) or [_section(config, "taskset")]
    trained = {taskset.get("source") for taskset in tasksets if has_rollouts}
    held_out = {name: taskset.get("held_out_of") for name, taskset in evaluated.items()}
    _remove(evaluated, [name for name, source in held_out.items() if source is not None and source not in trained])


def _section(config: DictConfig, key: str) -> DictConfig:
    """The mapping at a dotted key; an empty one if there is none."""
    node = OmegaConf.select(config, key)
    return node if isinstance(node, DictConfig) else DictConfig({})


def _remove(parts: DictConfig, names: list[Any]) -> None:
    with open_dict(parts):
        for name in names:
            del parts[name]


# -- all rules, checked without torch ----------------------------------------------------------------------------------


def validate(config: DictConfig, *, trains: bool = True, here: bool = True) -> TrainConfig:
    """The configuration as dataclasses, checked by all rules, without importing torch.

    Args:
        config: the composed configuration.
        trains: False for an evaluation: it has rollouts even if the recipe trains without, and none to train on.
        here: False for the plan of a run on another machine: devices and packages that this one lacks are not refused.

    Raises:
        ConfigError: names the key and the fix.
        OmegaConfBaseException: a value is missing.
    """
    _check_keys(config, "")
    _restore_left_out(config)
    settle_parts(config)
    if OmegaConf.is_missing(config.model, "name"):
        raise ConfigError("model=custom needs model.name=FOLDER or model.name=org/name.", key="model")
    check_seed(config.seed)  # checked before explorer.seed, which has the same value
    run, trainer = typed_config(config), config.trainer or {}
    check_model_name(run.model.name)
    check_trainable(run.model.name)
    check_processor_args_of(run.model.name, run.model.processor_args)
    if run.buffer.has_rollouts:
        check_strategies(run)
        check_teachers(run)
    check_critic(run)
    if not run.buffer.has_rollouts:
        check_without_rollouts(run)
    _check_training(run)
    check_expert(run)
    _check_sampling(run, trains)
    if trains:
        _check_score(run)
    check_trainer(run, trainer, here)
    if run.buffer.has_rollouts or not trains:
        _check_rollouts(run, trainer, here)
    elif here:
        check_steps(run.buffer)
    lightning_objects(config)
    return run


def _check_keys(node: DictConfig, prefix: str) -> None:
    """Refuse keys that the schema does not have. Hydra accepts them if they are written as `+key=value`."""
    schema = OmegaConf.get_type(node)
    fields = [field.name for field in dataclasses.fields(schema)] if dataclasses.is_dataclass(schema) else None
    for key in map(str, node):
        name = f"{prefix}{key}"
        if fields is not None and key not in fields:
            raise ConfigError(unknown_key(name, fields), key=name)
        if name in FREE and not isinstance(node[key], DictConfig | None):  # `logger: csv` in a recipe
            raise ConfigError(choice_of(name), key=name)
        skipped = OmegaConf.is_missing(node, key) or OmegaConf.is_interpolation(node, key) or name in FREE
        if not skipped and isinstance(node[key], DictConfig):
            _check_keys(node[key], f"{name}.")


def _restore_left_out(config: DictConfig) -> None:
    """Add the sections that `~NAME` removed again, with their defaults."""
    if left_out := [option.name for option in dataclasses.fields(TrainConfig) if option.name not in list(config)]:
        defaults = OmegaConf.structured(TrainConfig)
        with open_dict(config):
            for name in left_out:
                config[name] = defaults._get_node(name)


def _check_training(run: TrainConfig) -> None:
    """Refuse an objective that does not fit its experiences, the model or the optimizer; a ConfigError."""
    algorithm, optimizer = run.algorithm, run.optimizer
    check_loss(algorithm)
    if run.explorer.samples_older_weights or not run.buffer.has_rollouts:
        check_corrected(algorithm, why_older(run))
    loss = algorithm.policy_loss.name
    if run.buffer.has_rollouts and loss in LOSSES and LOSSES[loss].needs.pairs:
        raise ConfigError(
            f"algorithm.policy_loss={loss} learns from preference pairs",
            key="algorithm.policy_loss",
            fix="set buffer=dataset and buffer.path=FILE of them",
        )
    _check_steps(run)
    _check_schedule(run)
    if algorithm.kl.name not in ("none", KLConfig.name) and algorithm.kl.coef == 0:  # older checkpoints may hold it
        raise ConfigError(
            f"algorithm.kl.name={algorithm.kl.name} has no effect without algorithm.kl.coef",
            key="algorithm.kl.name",
            fix="set that, or leave it out",
        )
    if optimizer.lr == 0 and "." not in optimizer.lr_scheduler.name and algorithm.critic is None:
        raise ConfigError(
            "optimizer.lr is 0, and nothing would be trained",
            key="optimizer.lr",
            fix="give a number above 0, such as 1e-6",
        )
    if algorithm.layout is Layout.shared_prefix and run.model.attn_implementation != "sdpa":
        raise ConfigError(
            f"algorithm.layout=shared_prefix needs model.attn_implementation=sdpa, not {run.model.attn_implementation}",
            key="algorithm.layout",
            fix="choose that one, or algorithm.layout=padded",
        )


ENDING = ("cosine", "linear")  # schedules that end at learning rate 0; polynomial stays at its lr_end


def _check_steps(run: TrainConfig) -> None:
    """Refuse more optimizer steps than an explore step has prompts; a ConfigError."""
    algorithm, prompts = run.algorithm, run.explorer.batch_size
    if run.buffer.has_rollouts and algorithm.optimizer_steps > prompts:
        raise ConfigError(
            f"algorithm.optimizer_steps ({algorithm.optimizer_steps}) is more than explorer.batch_size "
            f"({prompts}), and the rollouts of a prompt stay together",
            key="algorithm.optimizer_steps",
            fix="give fewer",
        )


def _check_schedule(run: TrainConfig) -> None:
    """Refuse a schedule that ends before the run or never reaches the peak learning rate; a ConfigError."""
    optimizer, schedule, steps = run.optimizer, run.optimizer.lr_scheduler.name, run.steps * run.items
    horizon = optimizer.total_steps or steps
    if schedule in ENDING and horizon < steps:
        raise ConfigError(
            f"optimizer.total_steps is {horizon}, and optimizer.lr_scheduler={schedule} ends there; the run takes "
            f"{steps} optimizer steps",
            key="optimizer.total_steps",
            fix="give at least as many, or leave it out",
        )
    if optimizer.warmup_steps >= horizon:
        raise ConfigError(
            f"optimizer.warmup_steps is {optimizer.warmup_steps}, and there are {horizon} optimizer steps: the "
            "learning rate would not reach optimizer.lr. Give fewer, or optimizer.total_steps of a longer run.",
            key="optimizer.warmup_steps",
        )


def _check_sampling(run: TrainConfig, trains: bool) -> None:
    """Refuse sampling that leaves no room for a prompt, and settings that training rollouts must not have."""
    has_responses = run.buffer.storage != "dataset"
    in_use = {"sampling": trains and has_responses, "eval_sampling": run.buffer.has_rollouts or not trains}
    for name in filter(in_use.get, in_use):
        if (most := getattr(run, name).max_tokens) >= run.engine.max_model_len:
            raise ConfigError(
                f"{name}.max_tokens ({most}) leaves no room for a prompt in engine.max_model_len "
                f"({run.engine.max_model_len}).",
                key=f"{name}.max_tokens",
            )
    check_trained_sampling(vars(run.sampling))
    if run.eval_repeat_times > 1 and run.eval_sampling.temperature == 0:
        raise ConfigError(
            f"eval_repeat_times is {run.eval_repeat_times}, and all are the same at eval_sampling.temperature=0",
            key="eval_repeat_times",
            fix="set eval_sampling.temperature=1, or eval_repeat_times=1",
        )


def _check_score(run: TrainConfig) -> None:
    """Refuse to compare a sweep's jobs by an evaluation metric that the run does not measure; a ConfigError."""
    if not run.score.startswith("eval/"):
        return
    if run.buffer.has_rollouts:
        names = [taskset.name for taskset in run.eval_tasksets.values() if run.explorer.eval_interval != 0]
        measured = [f"eval/{name}/" for name in names]
    else:
        measured = ["eval/loss", "eval/accuracy", "eval/margin"] if run.buffer.dataset.held_out.given else []
    if not run.score.startswith(tuple(measured)):
        names = ", ".join(f"{name}..." if name.endswith("/") else name for name in measured) or "nothing"
        raise ConfigError(
            f"sweep.metric is {run.score}, and the evaluations of this run measure {names}",
            key="sweep.metric",
            fix="choose another metric, or set eval_tasksets and explorer.eval_interval",
        )


def _check_rollouts(run: TrainConfig, trainer: Mapping[str, Any], here: bool) -> None:
    """Refuse engines, runners and models that contradict each other; if `here`, also those that this machine lacks."""
    capabilities = capabilities_of(run.engine.name)
    if here and capabilities.is_vllm and not run.engine.urls:
        require_vllm()
    _check_engine(run, capabilities, here)
    check_synchronizer(run, capabilities)
    check_adapters(run, trainer, here)
    check_servers(run, capabilities, trainer, here)
    models = list(run.auxiliary_models)
    workflow_arguments(run.workflow.name, run.workflow.args, models)
    if run.eval_workflow is not None:
        workflow_arguments(run.eval_workflow, {}, models, "eval_workflow")
    check_asked(run)


def _check_engine(run: TrainConfig, capabilities: Capabilities, here: bool) -> None:
    """Refuse settings of the policy's engine that have no effect, contradict each other, or cannot be met."""
    engine, label = run.engine, f"engine={run.engine.name}"
    if "." in engine.name:
        engine_class: Any = import_object(engine.name)
        engine_arguments(engine_class, run.model.name, engine)
    if unread := engine.changed(*(key for key in ENGINE_KEYS if key not in capabilities.keys)):
        raise ConfigError(unread_key(unread[0], label), key=f"engine.{unread[0]}")
    check_older_weights(run.explorer, label, capabilities)
    check_staleness(run, capabilities)
    if capabilities.is_vllm:
        check_vllm(run, in_process=not capabilities.overlaps_training, here=here)


def workflow_arguments(
    workflow: str, args: Mapping[str, Any], models: Sequence[str], section: str = "workflow"
) -> dict[str, Any]:
    """A workflow's arguments, with the number of the auxiliary model that it asks in place of the model's name.

    Args:
        workflow: name of the workflow.
        args: arguments of the workflow as configured.
        models: names of the auxiliary models.
        section: key of the workflow, for messages.

    Raises:
        ConfigError: the workflow asks a model that does not exist.
    """
    key = ASKING_WORKFLOWS.get(workflow)
    if key is None:
        return dict(args)
    return {**args, key: asked_model(section, workflow, args, models)}


def check_there(run: TrainConfig) -> None:
    """Refuse models that cannot be found, and a teacher or critic whose vocabulary differs; a ConfigError."""
    for name in (run.model.name, *(model.model for model in run.auxiliary_models.values() if model.url is None)):
        check_on_hub(name)
    if run.buffer.has_rollouts:
        check_vocabularies(run)
        check_sight_of_judge(run)
    check_value_model(run)
