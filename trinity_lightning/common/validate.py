"""Values that cannot work are refused before torch is imported, with the key and the fix."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from trinity_lightning.common import known_names as known
from trinity_lightning.common.checks import one_of, whole_number
from trinity_lightning.common.config import TrainConfig
from trinity_lightning.common.errors import ConfigError
from trinity_lightning.common.older_weights import check_corrected, samples_older_weights
from trinity_lightning.common.operator_config import operator_configs
from trinity_lightning.common.sampling import check_trained_sampling
from trinity_lightning.common.suggest import unknown_name
from trinity_lightning.common.trainer_settings import check_trainer_settings
from trinity_lightning.common.validate_models import check_models

# Lightning's own objects have keys that we do not know.
FREE = ("trainer", "logger", "callbacks")

AT_LEAST_ONE = (
    "steps",
    "eval_repeat_times",
    "buffer.batch_size",
)
AT_LEAST_ZERO = (
    "buffer.expert.per_step",
    "seed",
)

# Sections whose own rules are in their dataclasses.
SECTIONS = ("algorithm", "optimizer", "engine", "sampling", "explorer", "synchronizer")

# Keys that hold one of a few names; those of a second element take a dotted path too.
NAMES = {
    "workflow.name": (known.WORKFLOWS, True),
    "eval_workflow": (known.WORKFLOWS, True),
    "algorithm.policy_loss": (known.POLICY_LOSSES, True),
    "algorithm.kl.name": (known.KL_ESTIMATES, False),
    "buffer.storage": (known.BUFFER_STORAGES, False),
    "buffer.order": (known.BUFFER_ORDERS, False),
    "buffer.expert.storage": (known.EXPERT_STORAGES, False),
}


def validate(config: DictConfig) -> None:
    """Refuse values that cannot work, before anything heavy is imported.

    Raises:
        ConfigError: names the key and the fix.
    """
    _check_keys(config, "")
    _restore_left_out(config)
    for section in SECTIONS:
        OmegaConf.to_object(config[section])
    try:
        OmegaConf.to_object(config.eval_sampling)
    except ConfigError as error:
        raise ConfigError(f"eval_{error}") from error
    for key, (names, with_paths) in NAMES.items():
        one_of(key, OmegaConf.select(config, key), names, with_paths=with_paths, optional=True)
    _check_buffer(config)
    check_models(config)
    last = ""
    for label, arguments in strategies(config.add_strategy):
        if not isinstance(arguments, dict):
            raise ConfigError(f"add_strategy.{label} is {arguments!r}; give its arguments as {{name: value}}.")
        last = str(arguments.get("name", label))
        one_of("add_strategy", last, known.ADD_STRATEGIES, with_paths=True)
    if last in known.FILTERING_STRATEGIES and config.algorithm.policy_loss != "sft":
        raise ConfigError(
            f"add_strategy={last} only filters: put a strategy that sets advantages behind it, such as "
            f"add_strategy=[{last},grpo]."
        )
    for operator in operator_configs(config.operators):
        one_of("operator", operator.name, known.EXPERIENCE_OPERATORS, with_paths=True)
    expert = (config.buffer.expert.dataset,)
    for source in (config.taskset, *config.tasksets.values(), *config.eval_tasksets.values(), *expert):
        one_of(f"source of taskset '{source.name}'", source.source, known.TASK_SOURCES)
        one_of(f"order of taskset '{source.name}'", source.order, known.TASK_ORDERS)
        _check_data_file(source)
    _check_together(config)
    _check_expert(config)
    _check_numbers(config)
    _check_trainer(config)


def check_checkpoint(config: DictConfig) -> None:
    """Refuse a checkpoint to resume from that does not exist; a ConfigError."""
    if config.ckpt_path not in (None, "last") and not Path(config.ckpt_path).is_file():
        what = "is a folder, and one of its files is needed" if Path(config.ckpt_path).is_dir() else "is no file"
        raise ConfigError(f"ckpt_path: '{config.ckpt_path}' {what}: give FOLDER/checkpoints/NAME.ckpt, or last.")


def strategies(config: DictConfig | None) -> list[tuple[str, object]]:
    """Label and arguments of each add strategy of a config {label: {name: optional, ...}}, in order.

    Raises:
        ConfigError: there is none.
    """
    if not config:
        raise ConfigError("add_strategy is empty: choose one, such as add_strategy=grpo.")
    plain = OmegaConf.to_container(config, resolve=True) if OmegaConf.is_config(config) else config
    return [(str(label), {} if arguments is None else arguments) for label, arguments in dict(plain).items()]  # type: ignore[arg-type]


def _check_data_file(source: DictConfig) -> None:
    """A name with a suffix is a file, one that begins with a dot or a slash a file or folder; the rest is the hub's."""
    path = source.path
    if source.source == "dataset" and path and (Path(path).suffix or path[0] in "./~") and not Path(path).exists():
        raise ConfigError(f"path of taskset '{source.name}': there is no file or folder '{path}'.")


def _check_together(config: DictConfig) -> None:
    """Refuse combinations that would fail late, or train on something else than they seem to."""
    named = [str(getattr(args, "get", {}.get)("name", label)) for label, args in strategies(config.add_strategy)]
    step_wise = config.workflow.args.get("step_reward") == "own"
    if "gigpo" in named and config.workflow.name in ("multi_turn", "tool_use") and not step_wise:
        raise ConfigError(
            "add_strategy=gigpo sums the rewards of an episode's steps: set workflow.args.step_reward=own, as `return` "
            "gives every step the whole episode's."
        )
    _check_step_rewards(config, named)
    algorithm, explorer = config.algorithm, config.explorer
    if samples_older_weights(explorer) or config.buffer.storage != "memory":
        check_corrected(algorithm)
    if config.buffer.storage != "memory" and (
        algorithm.kl.coef > 0 or algorithm.optimizer_steps > 1 or algorithm.inner_epochs > 1
    ):
        raise ConfigError(
            "without rollouts (buffer.storage) there is no reference and one optimizer step a read: set "
            "algorithm.kl.coef=0, algorithm.optimizer_steps=1 and algorithm.inner_epochs=1."
        )


def _check_step_rewards(config: DictConfig, strategies: Sequence[str]) -> None:
    """Refuse a strategy that compares runs by one reward where the steps of a run would have different ones."""
    args = config.workflow.args
    one_a_run = [name for name in strategies if name in known.ADD_STRATEGIES and name not in known.STEP_STRATEGIES]
    if args.get("mode") != "step_wise" or not one_a_run:
        return
    if args.get("step_reward") == "own":
        raise ConfigError(
            "workflow.args.step_reward=own gives the steps of a run different rewards, and "
            f"add_strategy={one_a_run[0]} compares runs by one: choose add_strategy=step_wise_grpo or gigpo, or "
            "step_reward=return."
        )
    for operator in operator_configs(config.operators):
        if operator.name in known.SHAPING_OPERATORS:
            raise ConfigError(
                f"operator '{operator.name}' gives the steps of a run (workflow.args.mode=step_wise) different "
                f"rewards, and add_strategy={one_a_run[0]} compares runs by one: choose add_strategy=step_wise_grpo or "
                "gigpo."
            )


def _check_buffer(config: DictConfig) -> None:
    buffer = config.buffer
    if buffer.storage not in ("file", "sql"):
        return
    path = None if OmegaConf.is_missing(buffer, "path") else buffer.path
    if path is None and (buffer.storage == "file" or buffer.url is None):
        raise ConfigError(
            f"buffer.storage={buffer.storage} reads what another run wrote: give buffer.path=PLACE, such as the folder "
            "outputs/grpo/TIME/experiences of a run with buffer.keep=true."
        )
    if path is not None and not Path(path).exists():
        raise ConfigError(f"buffer.path: there is no file or folder '{path}'.")


def _check_expert(config: DictConfig) -> None:
    """Expert data and the loss that learns from them go together."""
    expert, loss, rollouts = config.buffer.expert, config.algorithm.policy_loss, config.buffer.storage == "memory"
    if expert.per_step > 0 and loss in known.POLICY_LOSSES and loss != "mix":
        raise ConfigError(
            f"buffer.expert.per_step is {expert.per_step}, and algorithm.policy_loss={loss} learns nothing from expert "
            "data, which have no advantages: choose algorithm.policy_loss=mix, or buffer.expert.per_step=0."
        )
    if expert.per_step > 0 and not rollouts:
        raise ConfigError("buffer.expert joins rollouts (buffer.storage=memory): set buffer.expert.per_step=0.")
    if expert.per_step == 0 and loss == "mix" and rollouts:
        raise ConfigError(
            "algorithm.policy_loss=mix needs expert data: give buffer.expert.per_step=8 and "
            "buffer.expert.dataset.path=FILE of prompts and answers."
        )
    if expert.per_step == 0:
        return
    if expert.storage == "dataset":
        if (expert.dataset.source == "addition") != (expert.dataset.path is None):
            raise ConfigError(
                "buffer.expert needs prompts and answers: give buffer.expert.dataset.source=dataset and "
                "buffer.expert.dataset.path=FILE; the source `addition` has no path."
            )
    elif expert.path is None and (expert.storage == "file" or expert.url is None):
        raise ConfigError(f"buffer.expert.storage={expert.storage} reads stored experiences: give buffer.expert.path.")
    elif expert.path is not None and not Path(expert.path).exists():
        raise ConfigError(f"buffer.expert.path: there is no file or folder '{expert.path}'.")


def _restore_left_out(config: DictConfig) -> None:
    """A section that `~NAME` left out is as if nothing had been said of it."""
    defaults = OmegaConf.structured(TrainConfig)
    present = list(config)
    with open_dict(config):
        for name in (str(each) for each in defaults if each not in present):
            config[name] = defaults._get_node(name)


def _check_keys(node: DictConfig, prefix: str) -> None:
    """Refuse keys that the schema does not have; `+key=value` gets them past Hydra."""
    schema = OmegaConf.get_type(node)
    fields = [field.name for field in dataclasses.fields(schema)] if dataclasses.is_dataclass(schema) else None
    for key in map(str, node):
        name = f"{prefix}{key}"
        if fields is not None and key not in fields:
            raise ConfigError(unknown_name("key", name, [f"{prefix}{field}" for field in fields]))
        apart = OmegaConf.is_missing(node, key) or OmegaConf.is_interpolation(node, key) or name in FREE
        if not apart and isinstance(node[key], DictConfig):
            _check_keys(node[key], f"{name}.")


def _check_numbers(config: DictConfig) -> None:
    for least, keys in ((1, AT_LEAST_ONE), (0, AT_LEAST_ZERO)):
        for key in keys:
            whole_number(key, OmegaConf.select(config, key), least=least)
    if config.seed >= 2**32:
        raise ConfigError(f"seed is {config.seed}; give a number below 2**32.")
    _check_explorer(config)
    for sampling in ("sampling", "eval_sampling"):
        if config[sampling].max_tokens >= config.engine.max_model_len:
            raise ConfigError(
                f"{sampling}.max_tokens ({config[sampling].max_tokens}) leaves no room for a prompt in "
                f"engine.max_model_len ({config.engine.max_model_len})."
            )
    check_trained_sampling(OmegaConf.to_container(config.sampling))  # type: ignore[arg-type]


def _check_explorer(config: DictConfig) -> None:
    explorer = config.explorer
    if config.algorithm.optimizer_steps > explorer.batch_size and config.buffer.storage == "memory":
        raise ConfigError(
            f"algorithm.optimizer_steps ({config.algorithm.optimizer_steps}) is more than explorer.batch_size "
            f"({explorer.batch_size}): the rollouts of a prompt stay together, so some optimizer steps would be empty."
        )


def _check_trainer(config: DictConfig) -> None:
    trainer: Any = config.trainer or {}
    for key in ("callbacks", "logger", "plugins"):
        if trainer.get(key) is not None:
            raise ConfigError(f"trainer.{key} is set by the run itself: use the groups `callbacks` and `logger`.")
    if (epochs := trainer.get("max_epochs")) != config.steps:
        raise ConfigError(f"trainer.max_epochs is {epochs}, and a run has `steps` of them ({config.steps}): set steps.")
    check_trainer_settings(trainer)
