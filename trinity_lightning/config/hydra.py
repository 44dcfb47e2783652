"""Hydra's part of the configuration: the registered schema and choices, folders of runs, and commands."""

import atexit
import errno
import fcntl
import logging
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Optional

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, Node, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trinity_lightning.config.algorithm import AlgorithmConfig
from trinity_lightning.config.checkpoints import NOT_OF_THE_TRAINING, RECORD, folder_of_same_run, folder_to_resume
from trinity_lightning.config.choices import CHOICES, register_own_parts
from trinity_lightning.config.explain import (
    LOCK,
    begun,
    end_by_own_code,
    end_command,
    end_run,
    exit_code,
    log_end,
)
from trinity_lightning.config.flags import check_flags
from trinity_lightning.config.model import OptimizerConfig
from trinity_lightning.config.output import end_quickly, end_unread, only_shows, outlive_readers
from trinity_lightning.config.registry import PARTS, config_dir, groups, options
from trinity_lightning.config.run import NAMED_PARTS, TrainConfig
from trinity_lightning.config.sections import schema_of
from trinity_lightning.config.taskset import TasksetConfig
from trinity_lightning.config.trainer import check_start, trains_together
from trinity_lightning.config.values import AUTO
from trinity_lightning.errors import ConfigError, TakenFolderError, TrinityError

logger = logging.getLogger(__name__)


# -- schema, recipes and resolvers -------------------------------------------------------------------------------------


def compose_run(overrides: Sequence[str], output_dir: str) -> DictConfig:
    """Compose the configuration of a training command outside of a run; the default recipe's without overrides.

    Raises:
        HydraException, OmegaConfBaseException, YAMLError, ConfigError: nothing can be composed; see `explain.explain`.
    """
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)  # parts of the user's own
    register()
    with initialize_config_dir(str(config_dir("conf")), version_base="1.3"):
        return hydra_compose("train", [f"output_dir={output_dir}", *(overrides or ["+recipe=grpo"])])


def register(within: str | None = "") -> None:
    """Register the schema, the recipes, the parts and this package's resolvers with Hydra. Calling it twice is allowed.

    `within`: see `run_dir`; None: the command writes nothing and has no folder.
    """
    store = ConfigStore.instance()
    # Hydra copies the store for each composition, and for each group that --help lists. It never changes the copies.
    ConfigStore.__deepcopy__ = lambda store, memo: store  # type: ignore[attr-defined]
    schema = schema_of(TrainConfig)
    # Plain mappings: a PartConfig would not merge with the bare name that a recipe may give.
    schema.algorithm.policy_loss = OmegaConf.create(vars(AlgorithmConfig().policy_loss))
    schema.optimizer.lr_scheduler = OmegaConf.create(vars(OptimizerConfig().lr_scheduler))
    for part in (schema.algorithm.policy_loss, schema.optimizer.lr_scheduler, schema.optimizer):
        OmegaConf.set_struct(part.args, False)  # an argument needs no plus sign: the part refuses unknown ones
    OmegaConf.set_struct(schema.taskset.args, False)
    for name in set(NAMED_PARTS) & {*schema}:
        parts: Any = schema._get_node(name)
        parts._metadata.optional = True  # null removes all of them, see `run.settle_parts`
    for tasksets in (schema.tasksets, schema.eval_tasksets):
        tasksets._metadata.element_type = Optional[TasksetConfig]  # noqa: UP045  # OmegaConf reads only this form
    store.store(name="schema", node=schema)
    for path in config_dir("recipes").glob("*.yaml"):
        store.store(group="recipe", name=path.stem, node=OmegaConf.load(path), package="_global_")
    for group, (kind, chosen) in CHOICES.items():
        for name in set(PARTS[kind]).difference(options(group)):
            store.store(group=group, name=name, node=chosen(name))
    register_own_parts()
    OmegaConf.register_new_resolver("trinity.run_dir", partial(_folder, within), replace=True)
    OmegaConf.register_new_resolver("trinity.group", _group, replace=True)
    OmegaConf.register_new_resolver("trinity.run_name", _run_name, replace=True)
    OmegaConf.register_new_resolver("trinity.tags", _tags, replace=True)


def _folder(within: str | None, root: str, name: str, ckpt_path: str | None, *, _root_: DictConfig) -> str:
    """The folder for Hydra's files: `output_dir` if it is given, the folder of a run to resume, or a new folder."""
    if within is None:
        return "."
    if resolved := OmegaConf.select(_root_, "hydra.runtime.output_dir"):
        return resolved
    node = _root_._get_node("output_dir")
    if isinstance(node, Node) and node._value() != "${hydra:runtime.output_dir}":
        if node._value() == "":  # Hydra would take the current folder
            raise ConfigError(
                "output_dir is empty (of a variable that is not set?)",
                key="output_dir",
                fix="give a folder, or leave it out",
            )
        with suppress(OSError):  # Hydra meets the same error when it makes the folder
            _begin(Path(_root_.output_dir))
        return _root_.output_dir
    if ckpt_path == AUTO and not within:
        same = folder_of_same_run(Path(root, name), _root_)
        return run_dir(root, name, None) if same is None else str(same)
    return run_dir(root, name, None if within else ckpt_path, within)


# -- folders of runs ---------------------------------------------------------------------------------------------------


def _begin(folder: Path) -> None:
    """Remember the folders that are about to be made: this one and its missing parents."""
    begun.update(path.resolve() for path in (folder, *folder.parents) if not path.exists())


def run_dir(root: str, name: str, ckpt_path: str | None, within: str = "") -> str:
    """A new folder for this run; with `ckpt_path=last`, the folder of that name with the newest checkpoint.

    Args:
        root: `output_root`.
        name: the run's name.
        ckpt_path: as configured.
        within: name of the folder for evaluations, inside the folder `name`; empty for runs.

    Raises:
        ConfigError: there is no run to resume, the name cannot be a folder's name, or the folder cannot be made.
    """
    if not re.fullmatch(r"[\w.+=@-]*\w[\w.+=@-]*", name):
        raise ConfigError(
            f"name: '{name}' cannot be a folder's name", key="name", fix="use letters, digits, '_', '-', '.', '+', '='"
        )
    if ckpt_path != "last":
        return str(_new_folder(Path(root, name, within, datetime.now().strftime("%Y-%m-%d_%H-%M-%S"))))
    return str(folder_to_resume(Path(root, name)))


def _new_folder(folder: Path) -> Path:
    """Make the folder. If another run began in the same second, a number follows the folder's name."""
    number = 1
    while True:
        try:
            _begin(folder)
            folder.mkdir(parents=True)
            return folder
        except OSError as error:
            if not folder.is_dir():
                raise ConfigError(
                    f"output_root: cannot make the folder '{folder}': {error.strerror}.", key="output_root"
                ) from error
            number += 1
            folder = folder.with_name(f"{folder.name.partition('~')[0]}~{number}")


@contextmanager
def sole_writer(folder: Path) -> Iterator[None]:
    """Lock a run's folder against other processes. Processes of other machines count if the file system has locks.

    When this process dies, the system releases the lock, even if child processes live on. If the file system has no
    locks, as Lustre may be mounted, a warning is logged.

    Raises:
        TakenFolderError: another process holds the lock.
    """
    with ExitStack() as stack:
        try:
            fcntl.lockf(stack.enter_context((folder / LOCK).open("a")), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES) and error.filename is None:  # an error of opening has a name
                raise TakenFolderError(
                    f"another process is at work in '{folder}': wait for its end, or give this one another output_dir."
                ) from error
            logger.warning(
                "'%s' could not be locked (%s): see to it that no other process writes to it.", folder, error
            )
        yield


# -- records of a run, and its names in W&B ----------------------------------------------------------------------------


def composition(config: DictConfig) -> dict[str, str]:
    """The texts of Hydra's records of a composed command (`config.yaml`, `hydra.yaml`, `overrides.yaml`) by name."""
    hydra = HydraConfig.instance().cfg
    parts = {"config": config, "hydra": hydra, "overrides": HydraConfig.get().overrides.task}
    return {f"{name}.yaml": OmegaConf.to_yaml(part) for name, part in parts.items()}


def record_composition(files: Mapping[str, str], folder: Path) -> None:
    """Write the records of `composition` to a run's folder.

    Hydra itself would write them before it is known that the folder belongs to this run. A refused command would then
    replace the record of the run in that folder, by which `ckpt_path=auto` finds the run.
    """
    record = (folder / RECORD).parent
    record.mkdir(exist_ok=True)
    for name, text in files.items():
        (record / name).write_text(text, encoding="utf-8")


def _group(name: str, mode: Any, sweep_dir: str) -> str:
    """W&B group of a run; the jobs of a sweep share a group."""
    return f"{name}/{Path(sweep_dir).name}" if str(mode).endswith("MULTIRUN") else name


UNNAMED = ("recipe", "name", *NOT_OF_THE_TRAINING)  # keys of overrides that a run's name leaves out
LONGEST_NAME, LONGEST_TAG = 128, 64  # W&B's limits, in characters


def _run_name(name: str, overrides: Sequence[str], job: str) -> str:
    """W&B name of a run: its recipe, the parts that the command chose, and the values that it set.

    Example: grpo sort lr=1e-4 seed=1
    """
    settings = [override.lstrip("+").partition("=") for override in overrides if not override.startswith("~")]
    words = [value for key, _, value in settings if key in ("recipe", "name")][-1:] or [name]
    words += ["evaluation"] if job == "evaluate" else []
    config_groups, parts, values = groups(), [], []
    for key, _, value in settings:
        if key.partition(".")[0] not in UNNAMED:
            last, short = key.rpartition(".")[2], value.rpartition("/")[2]
            if key in config_groups or last == "name":
                parts.append(short)
            else:
                values.append(f"{last}={short}")
    words += parts + values
    return textwrap.shorten(" ".join(words), LONGEST_NAME, placeholder=" ...")


def _tags(*, _root_: DictConfig) -> list[str]:
    """W&B tags of a run: its recipe, model, rewards and tasksets."""
    tags = [_root_.name, _root_.model.name.rpartition("/")[2]]
    if OmegaConf.select(_root_, "buffer.storage") == "memory":
        reward, several = _root_.reward, list(_root_.tasksets or {})
        if isinstance(reward, DictConfig) and "name" in reward:  # a reward function with arguments
            reward = reward.name
        tags += [reward] if isinstance(reward, str) else list(reward or {})
        tags += several or [_root_.taskset.name]
    return list(dict.fromkeys(str(tag)[:LONGEST_TAG] for tag in tags))


# -- checks of a command -----------------------------------------------------------------------------------------------


def check_overrides(config: DictConfig) -> None:
    """Refuse `GROUP=[]` for a section, and `NAME={}` for a mapping that is not empty. Hydra ignores both.

    Raises:
        ConfigError: names the override and the fix.
    """
    for override in HydraConfig.get().overrides.task:
        name, _, value = override.partition("=")
        group = name.lstrip("+")
        if re.fullmatch(r"\[\s*\]", value) and group not in NAMED_PARTS and (choices := options(group)):
            raise ConfigError(f"{override} chooses nothing: give {name}=NAME. Known: {', '.join(choices)}.", key=group)
        if re.fullmatch(r"\{\s*\}", value) and (entries := OmegaConf.select(config, name)):
            raise ConfigError(
                f"{override} changes nothing, since Hydra merges mappings",
                key=group,
                fix=f"leave out an entry by '~{name}.{next(iter(entries))}', or all of them by '~{name}'",
            )


def check_folder(config: DictConfig) -> None:
    """Refuse an `output_dir` that is not the folder of Hydra's files and of the log; a ConfigError."""
    if (folder := Path(HydraConfig.get().runtime.output_dir).resolve()) != Path(config.output_dir).resolve():
        raise ConfigError(
            f"output_dir is '{config.output_dir}', and this run's other files go to '{folder}'",
            key="output_dir",
            fix=(
                "give output_dir without "
                "hydra.run.dir, or, for the jobs of a sweep, output_root or hydra.sweep.dir instead"
            ),
        )


def check_processes(config: DictConfig) -> None:
    """Refuse a sweep on several devices, and processes of torchrun without a common folder; a ConfigError."""
    if isinstance(config.trainer, DictConfig) and trains_together(config.trainer):
        check_start(config, HydraConfig.get())


# -- commands ----------------------------------------------------------------------------------------------------------


@contextmanager
def errors_as_sentences(folder: str | Path, keeps_log: bool = True) -> Iterator[None]:
    """End a run by one message and an exit code: 2 for a wrong configuration, 130 for Ctrl-C, 143 for SIGTERM, else 1.

    For an error in the user's code, the message has its file and line. The run's log has the traceback of every error.
    In a sweep the error is raised again, so that the other jobs run.

    Args:
        folder: the run's folder. It is removed if a wrong configuration or Ctrl-C left nothing but logs in it.
        keeps_log: False: remove such a folder after any error that its message explains.
    """
    in_sweep = HydraConfig.get().mode == RunMode.MULTIRUN
    try:
        yield
    except (TrinityError, OmegaConfBaseException, KeyboardInterrupt, SystemExit) as error:
        if not in_sweep:
            end_run(error, folder if Path(folder).resolve() in begun else None, keeps_log)
        if isinstance(error, Exception):
            log_end(error)
        raise
    except Exception as error:
        if in_sweep:
            log_end(error)
        else:
            end_by_own_code(error)
        raise


def run_command(command: Callable[[], None], within: str | None = "") -> None:
    """Run Hydra's main function. A wrong configuration ends it by one message and exit code 2.

    `within`: see `register`.
    """
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # Hydra raises errors instead of printing them
    sys.path.insert(0, str(Path.cwd()))  # users' own parts lie in the folder from which they start a command
    if within is None or only_shows(sys.argv[1:]):
        end_unread()
    else:
        outlive_readers()
    atexit.register(end_quickly)
    try:
        register(within)
        check_flags(sys.argv[1:])
        command()
    except (KeyboardInterrupt, SystemExit) as stop:
        sys.exit(exit_code(stop))
    except Exception as error:
        end_command(error)  # unless it is no error of a configuration
        raise
