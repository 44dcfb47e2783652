"""Hydra's side of the configuration: schema, recipes and resolvers are registered, errors are made readable."""

import dataclasses
import importlib.util
from datetime import datetime
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trinity_lightning.common.config import TrainConfig, config_dir, options
from trinity_lightning.common.errors import ConfigError
from trinity_lightning.common.model_files import check_model_name
from trinity_lightning.common.suggest import nearest, unknown_name

TASK_SOURCES = ("addition", "reasoning_gym", "dataset")
NAMED_GROUPS = {"workflow": lambda c: [c.workflow.name], "add_strategy": lambda c: strategy_names(c.add_strategy)}


def register() -> None:
    """Make the schema, the recipes and our resolvers known to Hydra; calling it twice is allowed."""
    store = ConfigStore.instance()
    store.store(name="schema", node=TrainConfig)
    for path in config_dir("recipes").glob("*.yaml"):
        store.store(group="recipe", name=path.stem, node=OmegaConf.load(path), package="_global_")
    OmegaConf.register_new_resolver("trinity.run_dir", run_dir, replace=True, use_cache=True)
    OmegaConf.register_new_resolver("trinity.group", _group, replace=True)


def run_dir(root: str, name: str, ckpt_path: str | None) -> str:
    """A new folder for this run; with `ckpt_path=last` the newest one of that name that holds a checkpoint.

    Raises:
        ConfigError: nothing to resume.
    """
    if ckpt_path != "last":
        return str(Path(root) / name / datetime.now().strftime("%Y-%m-%d_%H-%M-%S"))
    found = list(Path(root, name).glob("**/checkpoints/*.ckpt"))
    if not found:
        raise ConfigError(f"ckpt_path=last: there is no checkpoint under {Path(root, name)} to resume from.")
    return str(max(found, key=lambda path: path.stat().st_mtime).parents[1])


def last_checkpoint(folder: str | Path) -> Path:
    """The newest checkpoint of a run's folder."""
    return max(Path(folder, "checkpoints").glob("*.ckpt"), key=lambda path: path.stat().st_mtime)


def _group(name: str, mode: Any, sweep_dir: str) -> str:
    """W&B group of a run: the jobs of a sweep share one of their own."""
    return f"{name}/{Path(sweep_dir).name}" if str(mode).endswith("MULTIRUN") else name


def strategy_names(strategies: Any) -> list[str]:
    """The add strategies of a config {label: {name: optional, ...}} in order: registered names or dotted paths."""
    return [str((arguments or {}).get("name", label)) for label, arguments in strategies.items()]


def validate(config: DictConfig) -> None:
    """Refuse values that cannot work, before anything heavy is imported.

    Raises:
        ConfigError: names the key and the fix.
    """
    _check_keys(config, "")
    if OmegaConf.is_missing(config.model, "name"):
        raise ConfigError("model=custom needs model.name=FOLDER or model.name=org/name.")
    check_model_name(config.model.name)
    if config.engine.kind.value == "vllm" and importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "vLLM is not installed. Install it with `pip install 'trinity-lightning[cpu]'` (no GPU) or "
            "`pip install 'trinity-lightning[vllm]'` (NVIDIA GPU), or choose engine=transformers."
        )
    for group, names in NAMED_GROUPS.items():
        for name in names(config):
            if "." not in name and name not in options(group):
                raise ConfigError(unknown_name(group, name, options(group)) + " Your own goes by its dotted path.")
    _check_ranges(config)


def _check_keys(node: DictConfig, prefix: str) -> None:
    """Refuse keys that the schema does not have; `+key=value` gets them past Hydra."""
    schema = OmegaConf.get_type(node)
    fields = [field.name for field in dataclasses.fields(schema)] if dataclasses.is_dataclass(schema) else None
    for key in node:
        name = f"{prefix}{key}"
        if fields is not None and key not in fields:
            raise ConfigError(unknown_name("key", name, [f"{prefix}{field}" for field in fields]))
        apart = OmegaConf.is_missing(node, key) or OmegaConf.is_interpolation(node, key)
        if fields is not None and not apart and isinstance(node[key], DictConfig):
            _check_keys(node[key], f"{name}.")


def _check_ranges(config: DictConfig) -> None:
    at_least_one = (
        "steps",
        "explorer.batch_size",
        "explorer.repeat_times",
        "explorer.runner_per_model",
        "engine.max_model_len",
        "engine.max_num_seqs",
        "sampling.max_tokens",
        "eval_sampling.max_tokens",
        "eval_repeat_times",
        "algorithm.optimizer_steps",
        "algorithm.inner_epochs",
        "algorithm.max_tokens_per_micro_batch",
        "synchronizer.check_interval",
    )
    for key in at_least_one:
        value = OmegaConf.select(config, key)
        if value < 1:
            raise ConfigError(f"{key} is {value}; give 1 or more.")
    for source in (config.taskset, *config.eval_tasksets.values()):
        if source.source not in TASK_SOURCES:
            raise ConfigError(unknown_name("source of tasks", source.source, TASK_SOURCES))
    if config.sampling.max_tokens >= config.engine.max_model_len:
        raise ConfigError(
            f"sampling.max_tokens ({config.sampling.max_tokens}) leaves no room for a prompt in engine.max_model_len "
            f"({config.engine.max_model_len})."
        )
    for name in ("storage", "buffer"), ("method", "synchronizer"):
        value, group = config[name[1]][name[0]], name[1]
        if value not in options(group):
            raise ConfigError(unknown_name(f"{group}.{name[0]}", value, options(group)))


# -- errors as sentences ----------------------------------------------------------------------------------------------

CONFIG_ERRORS = (ConfigError, HydraException, OmegaConfBaseException)


def explain(error: BaseException) -> str:
    """One readable message of a configuration error: the key, what is allowed, the nearest match."""
    if isinstance(error, OverrideParseException):
        return f"cannot read the override '{error.override}': {str(error).strip().splitlines()[0]}."
    if isinstance(error, MissingConfigException) and error.options is not None and error.missing_cfg_file:
        group, _, name = error.missing_cfg_file.rpartition("/")
        return unknown_name(group or "config", name, error.options)
    root = _root(error)
    if isinstance(root, ConfigError) or not isinstance(root, OmegaConfBaseException):
        return str(root).strip()
    key = str(root.full_key or root.key or "")
    if root.parent_node is not None and root.key is not None and "not in" in str(root):
        allowed = [str(k) for k in root.parent_node] if isinstance(root.parent_node, DictConfig) else []
        return unknown_name("key", key, allowed) if not nearest(str(root.key), allowed) else _misspelt(root, key, allowed)
    first_line = str(root).strip().splitlines()[0]
    return f"{key}: {first_line}" if key else first_line


def _misspelt(root: OmegaConfBaseException, key: str, allowed: list[str]) -> str:
    prefix = key.rpartition(".")[0]
    match = nearest(str(root.key), allowed)
    meant = f"{prefix}.{match}" if prefix else match
    return f"unknown key '{key}'. Did you mean '{meant}'? Known here: {', '.join(sorted(allowed))}."


def _root(error: BaseException) -> BaseException:
    """The innermost configuration error: Hydra wraps OmegaConf's, which wrap resolvers' own."""
    cause = error.__cause__
    wrapped = isinstance(error, ConfigCompositionException | OmegaConfBaseException)
    return _root(cause) if wrapped and isinstance(cause, CONFIG_ERRORS) else error
