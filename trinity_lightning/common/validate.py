"""Values that cannot work are refused at the door: before torch is imported, with the key and the fix."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from trinity_lightning.common import known_names as known
from trinity_lightning.common.errors import ConfigError
from trinity_lightning.common.operator_config import operator_configs
from trinity_lightning.common.sampling import check_trained_sampling
from trinity_lightning.common.suggest import unknown_name
from trinity_lightning.common.validate_models import check_models

# Lightning's own objects have keys that we do not know.
FREE = ("trainer", "logger", "callbacks")

AT_LEAST_ONE = (
    "steps",
    "explorer.batch_size",
    "explorer.repeat_times",
    "explorer.runner_per_model",
    "explorer.max_repeat_times_per_runner",
    "engine.max_model_len",
    "engine.max_num_seqs",
    "engine.servers",
    "engine.cpu_cores",
    "explorer.sync_interval",
    "sampling.max_tokens",
    "eval_sampling.max_tokens",
    "eval_repeat_times",
    "buffer.batch_size",
    "algorithm.optimizer_steps",
    "algorithm.inner_epochs",
    "algorithm.max_tokens_per_micro_batch",
    "synchronizer.check_interval",
)
FINITE = (
    "optimizer.lr",
    "optimizer.eps",
    "optimizer.weight_decay",
    "algorithm.kl.coef",
    "algorithm.entropy_coef",
    "sampling.temperature",
)
AT_LEAST_ZERO = (
    "buffer.expert.per_step",
    "seed",
    "explorer.eval_interval",
    "explorer.max_retry_times",
    "explorer.max_refills",
    "explorer.sync_offset",
    "optimizer.lr",
    "optimizer.warmup_steps",
    "algorithm.kl.coef",
)

# Keys that hold one of a few names; those of a second element take a dotted path too.
NAMES = {
    "workflow.name": (known.WORKFLOWS, True),
    "eval_workflow": (known.WORKFLOWS, True),
    "algorithm.policy_loss": (known.POLICY_LOSSES, True),
    "algorithm.loss_agg_mode": (known.LOSS_AGG_MODES, False),
    "algorithm.kl.name": (known.KL_ESTIMATES, False),
    "algorithm.rollout_correction.level": (known.CORRECTION_LEVELS, False),
    "algorithm.rollout_correction.mode": (known.CORRECTION_MODES, False),
    "optimizer.lr_scheduler": (known.LR_SCHEDULERS, False),
    "buffer.storage": (known.BUFFER_STORAGES, False),
    "buffer.order": (known.BUFFER_ORDERS, False),
    "buffer.expert.storage": (known.EXPERT_STORAGES, False),
    "synchronizer.method": (known.SYNC_METHODS, False),
    "explorer.runner": (("local", "ray"), False),
}


def validate(config: DictConfig) -> None:
    """Refuse values that cannot work, before anything heavy is imported.

    Raises:
        ConfigError: names the key and the fix.
    """
    _check_keys(config, "")
    for key, (names, with_paths) in NAMES.items():
        _check_name(key, OmegaConf.select(config, key), names, with_paths)
    _check_buffer(config)
    check_models(config)
    last = ""
    for label, arguments in strategies(config.add_strategy):
        if not isinstance(arguments, dict):
            raise ConfigError(f"add_strategy.{label} is {arguments!r}; give its arguments as {{name: value}}.")
        last = str(arguments.get("name", label))
        _check_name("add_strategy", last, known.ADD_STRATEGIES, with_paths=True)
    if last in known.FILTERING_STRATEGIES and config.algorithm.policy_loss != "sft":
        raise ConfigError(
            f"add_strategy={last} only filters: put a strategy that sets advantages behind it, such as "
            f"'~add_strategy' '+add_strategy={{{last}: {{}}, grpo: {{}}}}'."
        )
    for operator in operator_configs(config.operators):
        _check_name("operator", operator.name, known.EXPERIENCE_OPERATORS, with_paths=True)
    expert = (config.buffer.expert.dataset,)
    for source in (config.taskset, *config.tasksets.values(), *config.eval_tasksets.values(), *expert):
        _check_name(f"source of taskset '{source.name}'", source.source, known.TASK_SOURCES)
        _check_name(f"order of taskset '{source.name}'", source.order, known.TASK_ORDERS)
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
    algorithm = config.algorithm
    if config.buffer.storage != "memory" and (
        algorithm.kl.coef > 0 or algorithm.optimizer_steps > 1 or algorithm.inner_epochs > 1
    ):
        raise ConfigError(
            "without rollouts (buffer.storage) there is no reference and one optimizer step a read: set "
            "algorithm.kl.coef=0, algorithm.optimizer_steps=1 and algorithm.inner_epochs=1."
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
    mu = config.algorithm.policy_loss_args.get("mu", 0.1)
    if loss == "mix" and not (isinstance(mu, int | float) and 0 <= mu <= 1):
        raise ConfigError(f"algorithm.policy_loss_args.mu is {mu!r}; give a number from 0 to 1.")
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


def _check_name(key: str, value: str | None, names: Sequence[str], with_paths: bool = False) -> None:
    if value is None or value in names or (with_paths and "." in value):
        return
    raise ConfigError(unknown_name(key, value, names) + (" Your own goes by its dotted path." if with_paths else ""))


def _check_numbers(config: DictConfig) -> None:
    for least, keys in ((1, AT_LEAST_ONE), (0, AT_LEAST_ZERO)):
        for key in keys:
            value = OmegaConf.select(config, key)
            if value is not None and value < least:
                raise ConfigError(f"{key} is {value}; give {least} or more.")
    for key in FINITE:
        if not math.isfinite(OmegaConf.select(config, key)):
            raise ConfigError(f"{key} is {OmegaConf.select(config, key)}; give a finite number.")
    if len(config.optimizer.betas) != 2 or not all(0 <= beta < 1 for beta in config.optimizer.betas):
        raise ConfigError(f"optimizer.betas is {list(config.optimizer.betas)}; give two numbers in [0, 1).")
    if config.seed >= 2**32:
        raise ConfigError(f"seed is {config.seed}; give a number below 2**32.")
    _check_explorer(config)
    if not 0 < (timeout := config.synchronizer.sync_timeout) < math.inf:
        raise ConfigError(f"synchronizer.sync_timeout is {timeout}; give seconds above 0, and a finite number of them.")
    for sampling in ("sampling", "eval_sampling"):
        if config[sampling].max_tokens >= config.engine.max_model_len:
            raise ConfigError(
                f"{sampling}.max_tokens ({config[sampling].max_tokens}) leaves no room for a prompt in "
                f"engine.max_model_len ({config.engine.max_model_len})."
            )
    if not config.eval_sampling.temperature >= 0:
        raise ConfigError(f"eval_sampling.temperature is {config.eval_sampling.temperature}; give 0 (greedy) or more.")
    check_trained_sampling(OmegaConf.to_container(config.sampling))  # type: ignore[arg-type]


def _check_explorer(config: DictConfig) -> None:
    explorer = config.explorer
    if not explorer.max_timeout > 0:
        raise ConfigError(f"explorer.max_timeout is {explorer.max_timeout}; give seconds above 0.")
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
    if (devices := trainer.get("devices", 1)) not in (1, "1"):
        raise ConfigError(f"trainer.devices is {devices}: an engine in this process serves one device, give 1.")
    if str(trainer.get("precision", "")).startswith("16"):
        raise ConfigError(
            "trainer.precision: 16-bit float needs a gradient scaler; use bf16-mixed, or model.dtype=bf16."
        )
