"""Checks that a run can go on from a checkpoint, before anything is loaded."""

import logging
import math
from collections.abc import Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import lightning as L
from omegaconf import DictConfig, OmegaConf

from trinity_lightning.common.checkpoints import contents
from trinity_lightning.common.hardware import TORCH_DTYPES
from trinity_lightning.config.buffer import BufferConfig
from trinity_lightning.config.checkpoints import NOT_OF_THE_TRAINING, last_checkpoint, recorded_run
from trinity_lightning.config.critic import critic_config
from trinity_lightning.config.model import LoRAConfig, WeightDtype
from trinity_lightning.config.models import resolve_model
from trinity_lightning.config.run import TrainConfig, typed_config
from trinity_lightning.config.sections import section_of
from trinity_lightning.errors import ConfigError, ForeignPositionError
from trinity_lightning.explorer.staleness import check_resumed_groups
from trinity_lightning.sync.files import saved_weights
from trinity_lightning.trainer.checkpoint import check_freeze, check_lora, check_resumed

logger = logging.getLogger(__name__)

# Keys of a checkpoint that hold the state of the data, of runs with and without rollouts.
ONLINE, OFFLINE = "ExperienceDataModule", "OfflineExperienceDataModule"
# Kinds of critics by the beginning of their weights' names.
CRITICS = {"critic.model": "a value model", "critic.head": "a value head"}


def checkpoint_to_resume(config: TrainConfig | DictConfig, folder: Path) -> str:
    """The path of the checkpoint that `ckpt_path` names for the run in `folder`.

    Raises:
        ConfigError: the file is no checkpoint; its run has rollouts and this one has none, or the reverse; the model,
            critic, optimizer, seed, dtype or adapters differ; groups under way in it need other settings; it was
            written in the middle of a step that is now divided into other items; or its step is later than the last
            step of this run.
    """
    path = last_checkpoint(folder) if config.ckpt_path == "last" else Path(str(config.ckpt_path))
    step, _ = saved_weights(path)
    if step > config.steps:
        raise ConfigError(
            f"steps is {config.steps}, and '{path}' was written after step {step}", key="steps", fix="give more steps"
        )
    if (record := folder / "config.yaml").is_file():  # data ordered by the seed refuse another, but late
        run = recorded_run(record)
        check_model(config.model.name, run.model.name)
        if run.get("seed", config.seed) != config.seed:
            raise ConfigError(
                f"seed is {config.seed}, and that of the run to resume is {run.seed}", key="seed", fix="choose that one"
            )
    checkpoint = contents(path)
    _check_kind(config.buffer.storage, checkpoint, path)
    _check_critic(config.algorithm.critic, checkpoint["state_dict"].keys(), path)
    check_resumed(checkpoint, config.optimizer)
    check_model(config.model.name, checkpoint["hyper_parameters"].get("model", config.model.name))
    _check_items(config.algorithm, checkpoint, path)
    check_lora(checkpoint, section_of("model.lora", LoRAConfig, config.model.lora))
    check_freeze(checkpoint, config.model.freeze)
    check_resumed_dtype(config, path)
    explorer = checkpoint.get("callbacks", {}).get("ExplorerCallback", {}).get("explorer", {})
    if "groups" in explorer:
        typed = typed_config(config) if isinstance(config, DictConfig) else config
        check_resumed_groups(typed.explorer, explorer["groups"])
    if step == config.steps:
        logger.warning("nothing is left to do: all %d steps are done in '%s'. To go on, set steps=N.", step, path)
    before = explorer.get("seed", config.seed)
    if before != config.seed:  # only in a new folder: a record in this one was compared above
        logger.warning("resuming with seed = %s; it was %s in '%s'", config.seed, before, path)
    return str(path)


def check_model(name: str, saved_name: str, may_have_moved: bool = False) -> None:
    """Refuse a model other than the checkpoint's. Even if the weights fit, tokenizer and reference would differ.

    Args:
        name: name or folder of the model of this run.
        saved_name: name or folder of the model of the checkpoint's run.
        may_have_moved: True to accept a folder as the same model if `saved_name` is not on this machine to compare.

    Raises:
        ConfigError: the models differ, or cannot be compared.
    """
    if name == saved_name:
        return
    try:
        is_same = resolve_model(name) == resolve_model(saved_name)
    except ConfigError as error:
        if may_have_moved and Path(name).expanduser().is_dir():
            logger.warning("the checkpoint's model %s is not here to compare: %s is taken for it", saved_name, name)
            return
        raise ConfigError(
            f"model.name is {name}, and the checkpoint's run trains {saved_name}, which is not here to compare: put it "
            "back there, or link it" + (", or say where it is now: model.name=FOLDER." if may_have_moved else "."),
            key="model.name",
        ) from error
    if not is_same:
        raise ConfigError(
            f"model.name is {name}, and the checkpoint's run trains {saved_name}",
            key="model.name",
            fix="choose that one",
        )


def _check_kind(storage: str, checkpoint: Mapping[str, Any], path: Path) -> None:
    """Refuse a checkpoint of a run with rollouts for a run without, and the reverse: it lacks the state of the data."""
    this_run, other_run, other_key = (
        ("with", "without", OFFLINE) if storage == "memory" else ("without", "with", ONLINE)
    )
    if other_key in checkpoint:
        raise ConfigError(
            f"'{path}' is of a run {other_run} rollouts, and buffer.storage={storage} means a run {this_run} them",
            key="ckpt_path",
            fix=(
                "give a checkpoint of such a run, or begin a new run with the trained model (model.name=FOLDER/model)"
            ),
        )


def _check_items(algorithm: Any, checkpoint: Mapping[str, Any], path: Path) -> None:
    """Refuse to finish a step that is now divided into other items: groups would be trained twice, or never."""
    loaders = checkpoint["loops"]["fit_loop"].get("state_dict", {}).get("combined_loader", [])
    position = loaders[0].get("position", 0) if loaders else 0
    saved = checkpoint["hyper_parameters"].get("algorithm", {})
    before = {key: saved[key] for key in ("optimizer_steps", "inner_epochs") if key in saved}
    items = math.prod(before.values())
    changed = [f"algorithm.{key}" for key, value in before.items() if getattr(algorithm, key) != value]
    if 0 < position < items and changed:
        raise ConfigError(
            f"'{path}' was written after item {position} of {items} of a step, which can only be finished as it was "
            "begun",
            key=changed[0],
            fix=(
                f"set {' and '.join(f'algorithm.{key}={value}' for key, value in before.items())}, or resume from "
                "the end of a step"
            ),
        )


def _check_critic(critic: Any, names: Iterable[str], path: Path) -> None:
    """Refuse a critic of a kind for which the checkpoint has no weights.

    Args:
        critic: `algorithm.critic` of this run.
        names: names of the weights in the checkpoint.
        path: the checkpoint.
    """
    saved = next((kind for part, kind in CRITICS.items() if any(name.startswith(part) for name in names)), "null")
    configured = "null"
    if critic is not None:
        configured = CRITICS["critic.head" if critic_config(critic).model is None else "critic.model"]
    if configured != saved:
        raise ConfigError(
            f"algorithm.critic is {configured}, and that of the checkpoint '{path}' is {saved}",
            key="algorithm.critic",
            fix="set algorithm.critic as in its run",
        )


def check_resumed_data(data: L.LightningDataModule, checkpoint: str, buffer: BufferConfig, folder: Path) -> None:
    """Refuse data other than those that the checkpoint's run was reading, and another way to read them.

    Args:
        data: the data of this run.
        checkpoint: path of the checkpoint.
        buffer: the section `buffer` of this run.
        folder: folder of this run. The run's record there, if there is one, names the data that were read.

    Raises:
        ConfigError: the data, or the way to read them, differ.
        StorageError: the data cannot be read.
    """
    state = contents(checkpoint).get(OFFLINE)
    if state is None:
        raise ConfigError(
            f"'{checkpoint}' does not say what its run was reading",
            key="ckpt_path",
            fix="give one of a run without rollouts",
        )
    reader = data.state_dict()["reader"]
    if reader and reader.keys() != state["reader"].keys():  # ranks other than 0 have no state
        raise ConfigError(
            f"'{checkpoint}' is of a run that read its data in another way",
            key="buffer.order",
            fix="set buffer.storage, buffer.order and buffer.repeat as in that run",
        )
    try:
        data.load_state_dict(state)
    except ForeignPositionError as error:
        place = f"buffer.path={buffer.path}" if buffer.path else f"buffer.url={buffer.url}"
        record = folder / "config.yaml"
        before = OmegaConf.select(recorded_run(record), "buffer.path") if record.is_file() else None
        hint = f": that has buffer.path={before}" if before not in (None, buffer.path) else ""
        settings = "seed; buffer.dataset: subset, split, images_field, shuffle, max_length, overlong, held_out"
        also = f", read as that run does ({settings})" if buffer.storage == "dataset" else ""
        raise ConfigError(
            f"{place} holds other data than those that the run to resume reads{hint}. Give those{also}, or begin "
            "another run, without ckpt_path.",
            key="buffer.path" if buffer.path else "buffer.url",
        ) from error


def check_resumed_dtype(config: TrainConfig | DictConfig, checkpoint: Path) -> None:
    """Refuse weights of a dtype other than the checkpoint's, to which its optimizer state belongs."""
    configured, saved = config.model.dtype, dtype_of(checkpoint)
    if configured not in (WeightDtype.auto, saved):
        raise ConfigError(
            f"model.dtype is {configured.value}, and the weights of the checkpoint '{checkpoint}' are {saved.value}: a "
            "resumed run keeps its own",
            key="model.dtype",
            fix=f"set model.dtype={saved.value}",
        )


def dtype_of(checkpoint: str | Path) -> WeightDtype:
    """The dtype of a checkpoint's weights: 16 bits if any weight has them, because some layers may stay in float32."""
    _, weights = saved_weights(checkpoint)
    dtypes = {tensor.dtype for tensor in weights.values()}
    rounded = (WeightDtype.bf16, WeightDtype.fp16)
    return next((dtype for dtype in rounded if TORCH_DTYPES[dtype] in dtypes), WeightDtype.fp32)


def log_changes(config: DictConfig, file: Path) -> None:
    """Warn of values that differ from the run's `config.yaml`, and of rules that are newer than this file."""
    recorded = OmegaConf.load(file)
    before, now = (_flat(OmegaConf.to_container(version, resolve=True)) for version in (recorded, config))
    if "model.thoughts" not in before and now.get("buffer.storage") == "memory":
        logger.warning(
            "the run was begun by an earlier version. From here on responses also end at the end tokens of the chat "
            "template, rewards judge all that was written but the thoughts (docs/config/reward.md), and lengths of "
            "several turns leave out what the environment wrote."
        )
    for key in sorted(before.keys() | now.keys()):
        if key.partition(".")[0] not in NOT_OF_THE_TRAINING and before.get(key) != now.get(key):
            logger.warning("resuming with %s = %s; it was %s", key, now.get(key), before.get(key))


def _flat(node: Any, prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one mapping with dotted keys; enumerations by their names, as in a file."""
    if not isinstance(node, dict):
        return {prefix: node.name if isinstance(node, Enum) else node}
    return {k: v for key, value in node.items() for k, v in _flat(value, f"{prefix}.{key}" if prefix else key).items()}
