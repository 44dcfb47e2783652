"""Tasksets: the source of their entries, and the meaning of an entry's fields."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import MISSING

from trinity_lightning.config.registry import PARTS
from trinity_lightning.config.sections import Section, checked
from trinity_lightning.config.values import nearest, one_of
from trinity_lightning.errors import ConfigError

if TYPE_CHECKING:
    from trinity_lightning.config.run import TrainConfig

TASK_ORDERS = ("sequential", "shuffled", "easy_to_hard", "by_difficulty")


@dataclass
class TasksetConfig(Section, key="taskset"):
    """A taskset: a source of entries, and the meaning of an entry's fields.

    Attributes:
        name: the taskset's name in metrics (`eval/<name>/...`) and in the log. In `tasksets` and `eval_tasksets` the
            default is its key there.
        source: `addition` (the built-in sums), `drawings` (pictures with questions), `reasoning_gym`, `dataset` (a
            file, a folder, or a hub name), or the dotted path of your own source. A source gets `path`, `split`, `size`
            and `seed` if it has such parameters.
        path: (`reasoning_gym`) name of its dataset; (`dataset`) a JSONL, parquet or CSV file, a folder or a hub name.
        split: split of a dataset; for sums and drawings `train` or `heldout`.
        size: number of reasoning-gym entries, or of drawings.
        seed: seed of generated entries and of the order. Some reasoning-gym datasets (such as `ransom_note` and
            `word_ladder`; a warning names them) also depend on Python's hash seed, which each process draws. With them,
            a resumed run has the same tasks only if PYTHONHASHSEED is set in its environment, to 0 for example.
        order: `sequential`, `shuffled` (a permutation from seed and epoch), `easy_to_hard` (entries by their
            difficulty_field), or `by_difficulty` (first the tasks that are solved half of the time).
        difficulty_field: an entry's field with a number, for `easy_to_hard`.
        weight: (`tasksets`) this taskset's share of the tasks, relative to the weights of the others.
        held_out_of: (`eval_tasksets`) the source, such as addition, from which these tasks are held out. A run that
            trains on no taskset of that source skips this evaluation. Null: it is never skipped.
        prompt_field, answer_field, messages_field: names of an entry's fields; a dot leads into a field
            (`reward_model.ground_truth`).
        images_field: name of an entry's field with a picture or a list of them: paths, relative to the folder of the
            data; or bytes, {bytes, path} or pictures of PIL, as parquet files and your own source may have them. By
            default it is `images`, and `image` in entries without. A part {"type": "image"} of a message's content is
            a picture's place, and so is `<image>` in a user's text; without places, pictures come before the first
            user's text.
        system_prompt: first message of every conversation; null: the chat template's default.
        args: further arguments of the source; for `reasoning_gym`, of its dataset.
    """

    name: str = MISSING
    source: str = checked("addition", one_of, names=PARTS["task source"], with_paths=True)
    path: str | None = None
    split: str = "train"
    size: int | None = None
    seed: int = 0
    order: str = checked("shuffled", one_of, names=TASK_ORDERS)
    difficulty_field: str | None = None
    weight: float = 1.0
    held_out_of: str | None = checked(None, one_of, names=PARTS["task source"], with_paths=True, optional=True)
    prompt_field: str = "prompt"
    answer_field: str = "answer"
    messages_field: str = "messages"
    images_field: str = "images"
    system_prompt: str | None = None
    args: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.source in PARTS["task source"]:  # a user's source checks its arguments itself
            check_taskset(self)


FILE_FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}


def is_local(path: str) -> bool:
    """True if a dataset's path can only be local. A path like `name` or `org/name` may be a hub name, or a folder."""
    return path.startswith((".", "/", "~")) or path.count("/") > 1 or Path(path).suffix in FILE_FORMATS


def check_dataset_path(key: str | None, path: str | None, label: str = "") -> None:
    """Refuse a missing local file or folder, and a file of an unknown format; a ConfigError.

    A `label` stands for the key in messages.
    """
    title = label or key
    if path == "":
        raise ConfigError(
            f"{title} is empty", key=key, fix="give a file, a folder, or the name of a dataset on the hub"
        )
    if path and is_local(path) and not (place := Path(path).expanduser()).exists():
        match = nearest(place.name, [path.name for path in place.parent.iterdir()] if place.parent.is_dir() else [])
        hint = f": did you mean '{place.parent / match}'?" if match else "."
        raise ConfigError(f"{title}: there is no file or folder '{path}'{hint}", key=key)
    if path and (file := Path(path).expanduser()).is_file() and file.suffix not in FILE_FORMATS:
        raise ConfigError(
            f"{title}: '{path}' is of no known format", key=key, fix=f"give a file of {', '.join(FILE_FORMATS)}"
        )


def check_taskset(taskset: TasksetConfig) -> None:
    """Refuse settings that the taskset's built-in source does not have; a ConfigError."""
    path = taskset.path if taskset.source == "dataset" else None
    check_dataset_path("taskset.path", path)
    if taskset.path is not None and taskset.source == "addition":
        raise ConfigError(
            f"taskset.path is {taskset.path}, and source=addition reads none",
            key="taskset.path",
            fix="give source=dataset and path=FILE",
        )
    if taskset.size is not None and taskset.source not in ("drawings", "reasoning_gym"):
        hint = ": take a part of a dataset by taskset.split='train[:100]'" if path else ""
        raise ConfigError(
            f"taskset.size belongs to taskset.source=reasoning_gym, not to {taskset.source}{hint}.", key="taskset.size"
        )
    if taskset.split != "train" and taskset.source == "reasoning_gym":
        raise ConfigError(
            f"taskset.split is {taskset.split}, and reasoning_gym has no splits",
            key="taskset.split",
            fix="leave it out",
        )


def data_key(config: TasksetConfig, key: str) -> str:
    """The dotted key that names the data of the taskset under `key`: its path, or without one its source."""
    return f"{key}.source" if config.path is None else f"{key}.path"


def tasksets_of(run: "TrainConfig") -> dict[str, TasksetConfig]:
    """The tasksets of a run, for training and evaluation, by their dotted keys."""
    trained = {f"tasksets.{name}": taskset for name, taskset in run.tasksets.items()} or {"taskset": run.taskset}
    return trained | {f"eval_tasksets.{name}": taskset for name, taskset in run.eval_tasksets.items()}
