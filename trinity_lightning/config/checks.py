"""Rules between the sections of a configuration, before torch is imported; a section's own are in its dataclass.

After those, whether Lightning's own objects have the arguments that the configuration gives them.
"""

import dataclasses
import importlib.util
import inspect
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from trinity_lightning import config as late
from trinity_lightning.config.engines import ENGINE_KEYS, SENT, Capabilities, EngineSleep, capabilities_of, require_vllm
from trinity_lightning.config.models import BUILT_IN_MODELS, check_model_name
from trinity_lightning.config.registry import ASKING_WORKFLOWS, FILTERING_STRATEGIES, import_object
from trinity_lightning.config.schema import (
    FREE,
    TrainConfig,
    check_seed,
    check_trained_sampling,
    config_dir,
    settle_parts,
    typed_config,
)
from trinity_lightning.config.training import KLConfig, Layout
from trinity_lightning.errors import ConfigError


def validate(config: DictConfig, *, trains: bool = True, here: bool = True) -> TrainConfig:
    """The typed configuration, checked before anything heavy is imported.

    Args:
        trains: False for an evaluation: it generates, whatever the recipe trains on, but nothing to train on.
        here: False for the plan of a run on another machine: what this machine lacks is not refused.

    Raises:
        ConfigError: names the key and the fix.
        OmegaConfBaseException: a value is missing.
    """
    _check_keys(config, "")
    _restore_left_out(config)
    settle_parts(config)
    if OmegaConf.is_missing(config.model, "name"):
        raise ConfigError("model=custom needs model.name=FOLDER or model.name=org/name.")
    check_seed(config.seed)  # before explorer.seed, which follows it
    run, trainer = typed_config(config), config.trainer or {}
    check_model_name(run.model.name)
    if run.model.name not in BUILT_IN_MODELS:
        late.own_models.check_trainable(run.model.name)
    rollouts = run.buffer.has_rollouts
    if rollouts:
        _check_weighing(run)
    if run.algorithm.critic is not None or (rollouts and "critic" in [each.name for each in run.add_strategy.values()]):
        late.objectives.check_critic(run)
    _check_training(run)
    if run.buffer.expert.per_step > 0 or run.algorithm.policy_loss.name in ("mix", "streams", "teacher_kl"):
        late.objectives.check_expert(run)
    if rollouts and (run.auxiliary_models or run.operators):
        late.auxiliary_models.check_teachers(run)
    _check_sampling(run, trains)
    if trains:
        _check_score(run)
    usual = OmegaConf.load(config_dir("conf") / "trainer" / "auto.yaml")
    own = not config.trainer or OmegaConf.to_container(config.trainer) != OmegaConf.to_container(usual)
    if own or run.engine.per_rank:
        late.trainer.check_trainer(run, trainer, here)
    if rollouts or not trains:
        _check_rollouts(run, trainer, here)
    elif here and run.buffer.storage == "file":
        late.stored.check_steps(Path(run.buffer.path or ""))
    _lightning_objects(config)
    return run


# -- the tree ----------------------------------------------------------------------------------------------------------


def _check_keys(node: DictConfig, prefix: str) -> None:
    """Refuse keys that the schema does not have, or has by another name; `+key=value` gets them past Hydra."""
    schema = OmegaConf.get_type(node)
    fields = [field.name for field in dataclasses.fields(schema)] if dataclasses.is_dataclass(schema) else None
    for key in map(str, node):
        name = f"{prefix}{key}"
        if fields is not None and key not in fields:
            raise ConfigError(late.explain.unknown_key(name, fields))
        if name in FREE and not isinstance(node[key], DictConfig | None):  # `logger: csv` in a recipe
            raise ConfigError(late.explain.choice_of(name))
        apart = OmegaConf.is_missing(node, key) or OmegaConf.is_interpolation(node, key) or name in FREE
        if not apart and isinstance(node[key], DictConfig):
            _check_keys(node[key], f"{name}.")


def _restore_left_out(config: DictConfig) -> None:
    """A section that `~NAME` left out is as if nothing had been said of it."""
    if left_out := [each.name for each in dataclasses.fields(TrainConfig) if each.name not in list(config)]:
        defaults = OmegaConf.structured(TrainConfig)
        with open_dict(config):
            for name in left_out:
                config[name] = defaults._get_node(name)


# -- weighing ----------------------------------------------------------------------------------------------------------

STRATEGIES_WITH_RULES = ("asymre", "gigpo", "on_policy_distill")


def _check_weighing(run: TrainConfig) -> None:
    """Refuse strategies that set no advantages, or do not go together with the loss, the workflow or the group size."""
    named = [strategy.name for strategy in run.add_strategy.values()]
    if not named:
        raise ConfigError("add_strategy is empty: choose one, such as add_strategy=grpo.")
    if named[-1] in FILTERING_STRATEGIES and run.algorithm.policy_loss.name != "sft":
        raise ConfigError(f"add_strategy={named[-1]} only filters: choose, say, add_strategy=[{named[-1]},grpo].")
    one_run, step_wise = run.explorer.repeat_times == 1, run.workflow.args.get("mode") == "step_wise"
    if one_run or step_wise or len(named) > 1 or not set(named).isdisjoint(STRATEGIES_WITH_RULES):
        late.objectives.check_strategies(run, named)


# -- training ----------------------------------------------------------------------------------------------------------


def _check_training(run: TrainConfig) -> None:
    """Refuse an objective that does not fit where its experiences come from."""
    algorithm, optimizer, rollouts = run.algorithm, run.optimizer, run.buffer.has_rollouts
    if run.explorer.samples_older_weights or not rollouts:
        late.objectives.check_corrected(algorithm, late.objectives.why_older(run))
    if not rollouts:
        late.stored.check_without_rollouts(run)
    elif algorithm.policy_loss.name == "dpo":
        raise ConfigError(
            "algorithm.policy_loss=dpo learns from preference pairs: set buffer=dataset and buffer.path=FILE of them."
        )
    if algorithm.optimizer_steps > 1 or algorithm.kl != KLConfig() or optimizer.warmup_steps or optimizer.total_steps:
        late.optimization.check_optimization(run)
    if optimizer.lr == 0 and "." not in optimizer.lr_scheduler.name and algorithm.critic is None:
        raise ConfigError("optimizer.lr is 0, and nothing would be trained: give a number above 0, such as 1e-6.")
    if algorithm.layout is Layout.shared_prefix and run.model.attn_implementation != "sdpa":
        raise ConfigError(
            "algorithm.layout=shared_prefix needs model.attn_implementation=sdpa, not "
            f"{run.model.attn_implementation}: choose that one, or algorithm.layout=padded."
        )


def _check_sampling(run: TrainConfig, trains: bool) -> None:
    """Refuse sampling that leaves no room for a prompt, where it is read; and what no engine should draw."""
    stored = run.buffer.storage != "dataset"
    read = {"sampling": trains and stored, "eval_sampling": run.buffer.has_rollouts or not trains}
    for name in filter(read.get, read):
        if (most := getattr(run, name).max_tokens) >= run.engine.max_model_len:
            raise ConfigError(
                f"{name}.max_tokens ({most}) leaves no room for a prompt in engine.max_model_len "
                f"({run.engine.max_model_len})."
            )
    check_trained_sampling(vars(run.sampling))
    if run.eval_repeat_times > 1 and run.eval_sampling.temperature == 0:
        raise ConfigError(
            f"eval_repeat_times is {run.eval_repeat_times}, and all are the same at eval_sampling.temperature=0: set "
            "eval_sampling.temperature=1, or eval_repeat_times=1."
        )


def _check_score(run: TrainConfig) -> None:
    """Refuse a metric to compare the jobs of a sweep by that no evaluation of the run measures."""
    if not run.score.startswith("eval/"):
        return
    if run.buffer.has_rollouts:
        names = [taskset.name for taskset in run.eval_tasksets.values() if run.explorer.eval_interval != 0]
        measured = [f"eval/{name}/" for name in names]
    else:
        measured = ["eval/loss", "eval/accuracy", "eval/margin"] if run.buffer.dataset.held_out.given else []
    if not run.score.startswith(tuple(measured)):
        given = ", ".join(f"{name}..." if name.endswith("/") else name for name in measured) or "nothing"
        raise ConfigError(
            f"sweep.metric is {run.score}, and the evaluations of this run measure {given}: choose another metric, or "
            "set eval_tasksets and explorer.eval_interval."
        )


# -- rollouts: engines, and the models that are asked -----------------------------------------------------------------


def _check_rollouts(run: TrainConfig, trainer: Mapping[str, Any], here: bool) -> None:
    """Refuse engines, runners and models that do not go together, or, for a run here, are not there."""
    can, sent = capabilities_of(run.engine.name), run.synchronizer.method in SENT
    if here and can.is_vllm and not run.engine.urls:
        require_vllm()
    _check_engine(run, can, here)
    if run.synchronizer.method != "auto" or run.synchronizer.folder is not None:
        late.servers.check_synchronizer(run, can)
    if run.synchronizer.lora == "adapter":
        late.optimization.check_adapters(run)
    if "servers" in can.keys or run.auxiliary_models or run.explorer.runner == "ray" or sent:
        late.servers.check_servers(run, can, trainer, here)
    models = list(run.auxiliary_models)
    workflow_arguments(run.workflow.name, run.workflow.args, models)
    if run.eval_workflow is not None:
        workflow_arguments(run.eval_workflow, {}, models, "eval_workflow")
    if models or run.operators:
        late.auxiliary_models.check_asked(run)


def _check_engine(run: TrainConfig, can: Capabilities, here: bool) -> None:
    """Refuse settings of the policy's engine that have no effect, contradict each other, or ask for too much."""
    engine, label = run.engine, f"engine={run.engine.name}"
    if "." in engine.name:
        own: Any = import_object(engine.name)
        late.parts.engine_arguments(own, run.model.name, engine)
    if given := engine.changed(*(key for key in ENGINE_KEYS if key not in can.keys)):
        raise ConfigError(late.explain.unread_key(given[0], label))
    if run.explorer.samples_older_weights:
        late.objectives.check_older_weights(run.explorer, label, can)
    if can.is_vllm and (engine.args or engine.speculative or engine.sleep is EngineSleep.always):
        late.servers.check_vllm(run, in_process=not can.overlaps_training, here=here)


def workflow_arguments(
    workflow: str, args: Mapping[str, Any], models: Sequence[str], section: str = "workflow"
) -> dict[str, Any]:
    """A workflow's arguments; the auxiliary model that it asks, if it does, by its number, as workflows know it.

    `models` are the names of the auxiliary models; a ConfigError, which names `section`: there is no such model.
    """
    key = ASKING_WORKFLOWS.get(workflow)
    if key is None:
        return dict(args)
    return {**args, key: late.auxiliary_models.asked_model(section, workflow, args, models)}


# -- Lightning's own objects (`trainer`, `logger`, `callbacks`) --------------------------------------------------------


HANDED_ON = {"WandbLogger": "wandb.init"}  # what takes the arguments that a class does not have itself


def check_targets(config: DictConfig) -> None:
    """Refuse a `_target_` that is not there, which is imported, and keys that are no argument of it; a ConfigError."""
    for key, entry in _lightning_objects(config).items():
        _check_arguments(key, entry)


# What Lightning's loggers need, and how it is installed; the first of several packages, one of which is enough.
LOGGER_PACKAGES = {
    "TensorBoardLogger": (("tensorboard", "tensorboardX"), "'trinity-lightning[tensorboard]'"),
    "MLFlowLogger": (("mlflow",), "mlflow"),
    "CometLogger": (("comet_ml",), "comet_ml"),
    "NeptuneLogger": (("neptune",), "neptune"),
}


def check_loggers(config: DictConfig) -> None:
    """Refuse loggers whose package is not installed, and W&B online without a login; a ConfigError."""
    for key, node in (config.logger or {}).items():
        kind = node["_target_"].rpartition(".")[2]
        packages, install = LOGGER_PACKAGES.get(kind, ((), ""))
        if packages and not any(importlib.util.find_spec(name) for name in packages):
            raise ConfigError(
                f"logger.{key} needs the package {packages[0]}, which is not installed: pip install {install}, or "
                "choose logger=csv."
            )
        if kind in (*HANDED_ON, "RunLogger") and not node.get("offline"):
            _check_login(f"logger.{key}")


def _check_login(key: str) -> None:
    """Refuse W&B online without a key of its API: asked for in the middle of a run, nobody may be there to answer."""
    import wandb

    try:
        if wandb.setup().settings.mode != "online" or wandb.login(prompt=False, verify=False):
            return
        problem = "this machine has no login"
    except wandb.Error as error:  # a key that can be none
        problem = str(error).rstrip(".")
    raise ConfigError(
        f"{key} uploads to W&B, and {problem}: run `wandb login`, set WANDB_API_KEY, or choose logger=wandb_offline."
    )


def _lightning_objects(config: DictConfig) -> dict[str, Mapping[str, Any]]:
    """What `_target_` describes (trainer, callbacks, loggers), by key; a ConfigError: an entry that does not."""
    objects: dict[str, Any] = {}
    for name in FREE:
        node: Any = OmegaConf.to_container(config[name], resolve=False) if config[name] else {}
        objects |= {name: node} if name == "trainer" else {f"{name}.{key}": entry for key, entry in node.items()}
    for key, entry in objects.items():
        if not isinstance(entry, Mapping) or "_target_" not in entry:
            raise ConfigError(f"{key} is {entry!r}; give {{_target_: DOTTED.PATH, ARGUMENT: VALUE}}.")
    return objects


def _check_arguments(key: str, node: Mapping[str, Any]) -> None:
    if "_target_" in node:
        try:
            part = import_object(node["_target_"])
        except ConfigError as error:
            raise ConfigError(f"{key}._target_: {error}") from error
        check_arguments(key, part, [name for name in node if not name.startswith("_")])
    for name, value in node.items():
        if isinstance(value, Mapping):
            _check_arguments(f"{key}.{name}", value)


def check_arguments(key: str, part: Any, names: Iterable[str]) -> None:
    """Refuse names, which stand under the key, that a class or function has no argument for; a ConfigError."""
    known = _arguments(part)
    for name in names if known else ():
        if name not in known:
            raise ConfigError(late.explain.unknown_key(f"{key}.{name}", known))


def _arguments(part: Any) -> set[str]:
    """Names of arguments; none if it takes any. A class of this package hands further keywords on to its bases."""
    makers = [each.__init__ for each in part.__mro__ if "__init__" in vars(each)] if isinstance(part, type) else [part]
    known: set[str] = set()
    for maker in makers:
        parameters = inspect.signature(maker).parameters.values()
        known |= {each.name for each in parameters if each.kind is not each.VAR_KEYWORD and each.name != "self"}
        if all(each.kind is not each.VAR_KEYWORD for each in parameters):
            return known
        if not part.__module__.startswith("trinity_lightning."):
            break
    names = [each.__name__ for each in part.__mro__] if isinstance(part, type) else []
    handed_on = next((HANDED_ON[name] for name in names if name in HANDED_ON), None)
    return known | _arguments(import_object(handed_on)) if handed_on else set()
