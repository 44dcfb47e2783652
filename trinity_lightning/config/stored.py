"""Rules of runs that read what they train on, or a part of it: stored experiences, and examples of a dataset."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hydra.conf import HydraConf
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from trinity_lightning.config.registry import PARTS
from trinity_lightning.config.schema import BUFFER_STORAGES, BufferConfig, ExpertConfig, TasksetConfig, TrainConfig
from trinity_lightning.config.training import DatasetConfig, HeldOutConfig
from trinity_lightning.config.values import nearest
from trinity_lightning.errors import ConfigError

DATASET_LOSSES = ("dpo", "sft")  # of examples out of a dataset, which have no advantages
# Sections that runs without rollouts do not read, but for these keys: the longest row, for the memory plan, and, of
# stored experiences, the longest response and weights by the log-probabilities that they have.
OF_ROLLOUTS = (
    *("add_strategy", "auxiliary_models", "engine", "eval_repeat_times", "eval_sampling", "eval_tasksets"),
    *(
        "eval_workflow",
        "explorer",
        "operators",
        "reward",
        "reward_solved",
        "sampling",
        "synchronizer",
        "taskset",
        "tasksets",
    ),
    "workflow",
)
READ_BY_ALL = ("engine.max_model_len",)
OF_STORED = ("algorithm.rollout_correction", "sampling.max_tokens", "workflow")

FILE_FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}


def check_without_rollouts(run: TrainConfig) -> None:
    """Refuse an objective that does not fit what is read; a ConfigError."""
    algorithm, loss = run.algorithm, run.algorithm.policy_loss.name
    if algorithm.optimizer_steps > 1 or algorithm.inner_epochs > 1:
        raise ConfigError(
            "without rollouts (buffer.storage) there is one optimizer step a read: set algorithm.optimizer_steps=1 and "
            "algorithm.inner_epochs=1."
        )
    if run.buffer.storage == "dataset" and loss in PARTS["policy loss"] and loss not in DATASET_LOSSES:
        raise ConfigError(
            f"algorithm.policy_loss={loss} needs advantages, which the examples of buffer=dataset do not have: choose "
            f"{' or '.join(DATASET_LOSSES)}."
        )
    constant = algorithm.loss_agg_mode == "seq-mean-token-sum-norm"
    if run.buffer.storage == "dataset" and constant and run.buffer.dataset.max_length is None:
        raise ConfigError(
            "algorithm.loss_agg_mode=seq-mean-token-sum-norm divides by buffer.dataset.max_length, which is not given: "
            "give it."
        )


def check_composed(storage: str, hydra: HydraConf) -> None:
    """Refuse keys of the command line, or of a recipe of one's own, that are not read; a ConfigError."""
    overrides = OverridesParser.create().parse_overrides(hydra.overrides.task)
    given = [key for each in overrides if not each.is_delete() for key in keys_of(each.value(), each.key_or_group)]
    check_given(storage, given)
    if not {"buffer", "buffer.storage"} & {*given}:  # else a recipe with rollouts is used without
        name = hydra.runtime.choices.get("recipe")
        for folder in (Path(each.path) for each in hydra.runtime.config_sources if each.schema == "file"):
            if (recipe := folder / "recipe" / f"{name}.yaml").is_file():
                check_given(storage, keys_of_recipe(recipe), f"recipe/{name}.yaml: ")


def check_given(storage: str, keys: Iterable[str], where: str = "") -> None:
    """Refuse keys, given at one place, that training which reads from this storage does not read; a ConfigError.

    The choice of an engine is not refused: on a machine without vLLM it belongs to every command.
    """
    if storage not in BUFFER_STORAGES:
        return  # which is refused by name
    examples = storage == "dataset"
    read = READ_BY_ALL if examples else (*READ_BY_ALL, *OF_STORED)
    others = (*OF_ROLLOUTS, *OF_STORED) if examples else OF_ROLLOUTS
    unread = [key for key in keys if key != "engine" and _is_within(key, others) and not _is_within(key, read)]
    if unread:
        raise ConfigError(
            f"{where}{', '.join(unread)}: without rollouts (buffer.storage={storage}) this has no effect, leave it out."
        )


def keys_of(value: Any, key: str = "") -> Iterator[str]:
    """The keys, dotted, of the values in a mapping, however deep; `key` itself if there is none."""
    if not isinstance(value, Mapping) or not value:
        yield key
        return
    for name, inner in value.items():
        yield from keys_of(inner, f"{key}.{name}" if key else str(name))


def keys_of_recipe(path: Path) -> Iterator[str]:
    """The keys and groups that a recipe sets itself: not what it builds on sets, which may have rollouts."""
    recipe: Any = OmegaConf.to_container(OmegaConf.load(path))
    for entry in recipe.pop("defaults", []):
        for group in entry if isinstance(entry, dict) else ():
            yield str(group).removeprefix("override").strip().removeprefix("/").partition("@")[0]
    yield from keys_of(recipe)


def _is_within(key: str, sections: Iterable[str]) -> bool:
    return any(key == section or key.startswith(f"{section}.") for section in sections)


def check_steps(folder: Path) -> None:
    """Refuse a folder in which no run kept anything."""
    if folder.is_dir() and not any(folder.glob("step_*.trxp")):
        inside = folder / "experiences"
        hint = f"give '{inside}'" if inside.is_dir() else "give the folder `experiences` of a run with buffer.keep=true"
        raise ConfigError(f"buffer.path: there is no step_<n>.trxp in '{folder}': {hint}.")


def is_local(path: str) -> bool:
    """Whether a dataset's path is one of this machine; other names are the hub's, `name` or `org/name`, or a folder."""
    return path.startswith((".", "/", "~")) or path.count("/") > 1 or Path(path).suffix in FILE_FORMATS


def check_dataset_path(key: str, path: str | None) -> None:
    """Refuse a file or folder that is not there; a ConfigError."""
    if path == "":
        raise ConfigError(f"{key} is empty: give a file, a folder, or the name of a dataset on the hub.")
    if path and is_local(path) and not (place := Path(path).expanduser()).exists():
        match = nearest(place.name, [each.name for each in place.parent.iterdir()] if place.parent.is_dir() else [])
        hint = f": did you mean '{place.parent / match}'?" if match else "."
        raise ConfigError(f"{key}: there is no file or folder '{path}'{hint}")


def check_taskset(taskset: TasksetConfig) -> None:
    """Refuse what the source of a taskset does not have; a ConfigError."""
    path = taskset.path if taskset.source == "dataset" else None
    check_dataset_path("taskset.path", path)
    if taskset.path is not None and taskset.source == "addition":
        raise ConfigError(
            f"taskset.path is {taskset.path}, and source=addition reads none: give source=dataset and path=FILE."
        )
    if taskset.size is not None and taskset.source != "reasoning_gym":
        part = ": take a part of a dataset by taskset.split='train[:100]'" if path else ""
        raise ConfigError(f"taskset.size belongs to taskset.source=reasoning_gym, not to {taskset.source}{part}.")
    if taskset.split != "train" and taskset.source == "reasoning_gym":
        raise ConfigError(f"taskset.split is {taskset.split}, and reasoning_gym has no splits: leave it out.")


def check_buffer(buffer: BufferConfig) -> None:
    """Refuse invalid places to read from or to write to, and settings that the storage does not have; a ConfigError."""
    if not isinstance(buffer.keep, bool) and buffer.keep != "sql":
        raise ConfigError(f"buffer.keep is {buffer.keep!r}; give true, false or sql.")
    if buffer.has_rollouts and buffer.keep == "sql":
        check_place("buffer", buffer.path, buffer.url)
    elif buffer.has_rollouts and (buffer.path or buffer.url):
        raise ConfigError(
            "buffer.path and buffer.url are places to read from (buffer.storage=file, sql) or to write to "
            "(buffer.keep=sql): leave them out."
        )
    elif not buffer.has_rollouts and buffer.keep:
        raise ConfigError(f"buffer.keep is about rollouts, and buffer.storage={buffer.storage} has none: leave it out.")
    elif buffer.storage in ("file", "sql"):
        check_stored("buffer", buffer)
    elif buffer.storage == "dataset":
        _check_examples(buffer)
    if buffer.storage != "dataset" and buffer.dataset != DatasetConfig():
        raise ConfigError(f"buffer.dataset has no effect with buffer.storage={buffer.storage}: set buffer=dataset.")
    if buffer.order != "fifo" and buffer.storage != "sql":
        raise ConfigError(f"buffer.order={buffer.order} needs buffer.storage=sql, not {buffer.storage}.")


def _check_examples(buffer: BufferConfig) -> None:
    """Refuse examples that are not there, and held-out ones that are none or are trained on; a ConfigError."""
    if buffer.path is None or buffer.url is not None:
        raise ConfigError("buffer=dataset reads buffer.path=FILE, a folder or a hub name, and no buffer.url.")
    check_dataset_path("buffer.path", buffer.path)
    dataset, held_out, key = buffer.dataset, buffer.dataset.held_out, "buffer.dataset.held_out"
    if held_out.share is not None and (held_out.path or held_out.split):
        raise ConfigError(f"{key}: give a share of the examples, or a path or split of others, not both.")
    check_dataset_path(f"{key}.path", held_out.path)
    if held_out.path is None and dataset.split in (held_out.split, (held_out.split or "").partition("[")[0]):
        raise ConfigError(f"{key}.split is {held_out.split}, which is trained on: give another.")
    if held_out.interval != HeldOutConfig.interval and not held_out.given:
        raise ConfigError(f"{key}.interval has no effect: give {key}.path, split or share, too.")


def check_stored(key: str, section: ExpertConfig | BufferConfig) -> None:
    """Refuse a section that names no experiences to read, or two places of them."""
    storage, path, url = section.storage, section.path, section.url
    if storage == "file" and url is not None:
        raise ConfigError(f"{key}.storage=file has no {key}.url: give {key}.path, or {key}.storage=sql.")
    check_place(key, path, url)
    if path is None and url is None:
        raise ConfigError(
            f"{key}.storage={storage} reads what another run wrote: give {key}.path=PLACE, such as the folder "
            "outputs/grpo/TIME/experiences of a run with buffer.keep=true."
        )
    if path is not None and not Path(path).exists():
        raise ConfigError(f"{key}.path: there is no file or folder '{path}'.")


def check_expert_data(expert: ExpertConfig) -> None:
    """Refuse expert data that are not there; a ConfigError."""
    if expert.storage != "dataset":
        check_stored("buffer.expert", expert)
    elif (expert.dataset.source == "addition") != (expert.dataset.path is None):
        raise ConfigError(
            "buffer.expert.dataset: give source=dataset and path=FILE, or source=addition, which has no path."
        )


def check_place(key: str, path: str | None, url: str | None) -> None:
    """Refuse two places of stored experiences, or a URL that is none; a ConfigError."""
    if path is not None and url is not None:
        raise ConfigError(f"{key}: give {key}.path or {key}.url, not both.")
    if url is not None and "://" not in url:
        raise ConfigError(
            f"{key}.url: '{url}' is no database URL; give one such as postgresql://USER@HOST/NAME, or a file as "
            f"{key}.path."
        )
