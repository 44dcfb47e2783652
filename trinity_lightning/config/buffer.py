"""The buffer: where experiences wait for the trainer, expert data, datasets, and the operators on experiences."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trinity_lightning.config.losses import LOSSES
from trinity_lightning.config.registry import PARTS
from trinity_lightning.config.sections import PartConfig, Section, checked, part_config
from trinity_lightning.config.taskset import TasksetConfig, check_dataset_path
from trinity_lightning.config.values import number, one_of, text, whole_number
from trinity_lightning.errors import ConfigError

if TYPE_CHECKING:
    from trinity_lightning.config.run import TrainConfig

BUFFER_STORAGES = ("memory", "file", "sql", "dataset")
REPLAYS = ("priority", "random")  # orders in which an experience may be read again


@dataclass
class ExpertConfig(Section, key="buffer.expert"):
    """Expert data that join the rollouts of every explore step, for `algorithm.policy_loss=mix`.

    Attributes:
        per_step: expert experiences in an explore step; 0: none. After the last one, the first follows again.
        storage: `dataset`: prompts and answers; an answer is the expert's response. `file` or `sql`: experiences that
            another run kept or a program wrote.
        dataset: the prompts and answers, described like a taskset.
        path: the folder that `buffer.keep` wrote (`file`), or the SQLite database (`sql`).
        url: a database for `sql`, instead of a path: postgresql://USER@HOST/NAME.
    """

    per_step: int = checked(0, whole_number, least=0)
    storage: str = checked("dataset", one_of, names=("dataset", "file", "sql"))
    dataset: TasksetConfig = field(default_factory=lambda: TasksetConfig(name="expert", source="dataset"))
    path: str | None = None
    url: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.per_step == 0:
            return
        if self.storage != "dataset":
            check_stored("buffer.expert", self)
        elif self.dataset.source == "dataset" and self.dataset.path is None:
            raise ConfigError(
                "buffer.expert.dataset names no file or folder (path) for its source",
                key="buffer.expert.dataset",
                fix="give source=dataset and path=FILE, or another source, such as addition",
            )


@dataclass
class HeldOutConfig(Section, key="buffer.dataset.held_out"):
    """Examples that are not trained on. Their loss is the metric `eval/loss`; pairs also give `eval/accuracy`.

    Attributes:
        path: another file, folder or hub name with held-out examples.
        split: another split of the dataset, or of `path` if it is given.
        share: a share of the examples, drawn by the run's seed, in place of a path or split.
        interval: optimizer steps between two measurements; the last step's weights are measured too.
    """

    path: str | None = None
    split: str | None = None
    share: float | None = checked(None, number, above=0, most=0.9, optional=True)
    interval: int = checked(10, whole_number, least=1)

    @property
    def given(self) -> bool:
        """True if there are held-out examples."""
        return (self.path, self.split, self.share) != (None, None, None)


@dataclass
class DatasetConfig(Section, key="buffer.dataset"):
    """Examples to train on without rollouts (`buffer=dataset`).

    The formats are TRL's, as plain text or conversations. `algorithm=dpo` reads prompt, chosen and rejected. (Without a
    prompt, or with a text prompt beside messages that contain it, the prompt is the common beginning of chosen and
    rejected.) `algorithm=sft` reads prompt and completion; or messages, whose assistant turns are trained on; or text.
    A column `tools` is shown to the model. A column `chat_template_kwargs` holds variables of the chat template, such
    as enable_thinking. Pictures are part of the prompt, or of messages of the user.

    Attributes:
        subset: name of the dataset's configuration on the hub.
        split: split, or a slice of it (`train[:90%]`).
        images_field: name of the column with a picture or a list of them, as in `taskset.images_field`; by default
            `images`, and `image` in examples without.
        shuffle: read each pass in another order, which follows from the run's seed.
        max_length: most tokens of an example; null: the tokenizer's limit.
        overlong: `refuse` to run with a longer example, `drop` it, or `truncate` its end. The examples dropped or
            truncated are counted.
        held_out: examples to measure the loss on.
    """

    subset: str | None = None
    split: str = checked("train", text)
    images_field: str = checked("images", text)
    shuffle: bool = True
    max_length: int | None = checked(None, whole_number, least=2, optional=True)
    overlong: str = checked("refuse", one_of, names=("refuse", "drop", "truncate"))
    held_out: HeldOutConfig = field(default_factory=HeldOutConfig)


@dataclass
class BufferConfig(Section, key="buffer"):
    """The buffer, in which experiences wait for the trainer, and the experiences that are kept.

    Attributes:
        storage: `memory`: this run's rollouts fill the buffer. `file` (a folder of steps that `keep` wrote), `sql` (a
            database) or `dataset` (examples): the run reads stored data. It then has no rollouts, and a step is one
            optimizer step.
        path: the folder of `file`; the SQLite database of `sql`; a JSONL, parquet or CSV file, a folder or a hub name
            for `dataset`.
        url: a database for `sql`, instead of a path: postgresql://USER@HOST/NAME.
        keep: write the experiences of every explore step, as the trainer gets them, to `experiences/` in the run's
            folder; with `sql`, to the database at `url` or `path`, or else to `experiences.db` in the run's folder.
        order: the order of reading: `fifo` (as written); with `sql` also `priority` or `random`.
        reuse_limit: times that an experience may be read in the orders `priority` and `random`; null: no limit.
        batch_size: experiences that an optimizer step reads (`file`, `sql`), in whole groups; or examples (`dataset`).
        repeat: begin again at the end (`file`, `dataset`, and `sql` in `fifo` order).
        decay, use_decay: `priority` takes the highest score first: info["priority"] (1 if there is none)
            * decay ** age in explore steps * use_decay ** times read.
        expert: expert data among the rollouts (`memory`).
        dataset: settings for reading a `dataset`.
    """

    storage: str = checked("memory", one_of, names=BUFFER_STORAGES)
    path: str | None = None
    url: str | None = None
    keep: bool | str = False
    order: str = checked("fifo", one_of, names=("fifo", *REPLAYS))
    reuse_limit: int | None = checked(1, whole_number, least=1, optional=True, only_with="order", among=REPLAYS)
    decay: float = checked(1.0, number, above=0, most=1, only_with="order", among=("priority",))
    use_decay: float = checked(1.0, number, above=0, most=1, only_with="order", among=("priority",))
    batch_size: int = checked(64, whole_number, least=1, only_with="storage", among=BUFFER_STORAGES[1:])
    repeat: bool = checked(True, only_with="storage", among=BUFFER_STORAGES[1:])
    expert: ExpertConfig = field(default_factory=ExpertConfig)
    dataset: DatasetConfig = field(default_factory=DatasetConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_places()
        if self.storage != "dataset" and self.dataset != DatasetConfig():
            raise ConfigError(
                f"buffer.dataset has no effect with buffer.storage={self.storage}",
                key="buffer.dataset",
                fix="set buffer=dataset",
            )
        if self.order != "fifo" and self.storage != "sql":
            raise ConfigError(
                f"buffer.order={self.order} needs buffer.storage=sql, not {self.storage}.", key="buffer.order"
            )

    @property
    def has_rollouts(self) -> bool:
        """True if this run's rollouts fill the buffer; False if the run reads stored experiences or examples."""
        return self.storage == "memory"

    def _check_places(self) -> None:
        """Refuse an invalid `path`, `url` or `keep`, and one that this run neither reads nor writes."""
        if not isinstance(self.keep, bool) and self.keep != "sql":
            raise ConfigError(f"buffer.keep is {self.keep!r}", key="buffer.keep", fix="give true, false or sql")
        if self.has_rollouts and self.keep == "sql":
            _check_place("buffer", self.path, self.url)
        elif self.has_rollouts and (self.path or self.url):
            raise ConfigError(
                "buffer.path and buffer.url are places to read from (buffer.storage=file, sql) or to write to "
                "(buffer.keep=sql)",
                key="buffer.path",
                fix="leave them out",
            )
        elif not self.has_rollouts and self.keep:
            raise ConfigError(
                f"buffer.keep is about rollouts, and buffer.storage={self.storage} has none",
                key="buffer.keep",
                fix="leave it out",
            )
        elif self.storage in ("file", "sql"):
            check_stored("buffer", self)
        elif self.storage == "dataset":
            _check_examples(self)


# -- experience operators ----------------------------------------------------------------------------------------------


class OnError(Enum):
    """The consequence of an operator's failure: `stop` the run, or `skip` the operator for this explore step."""

    stop = "stop"
    skip = "skip"


@dataclass
class OperatorConfig(PartConfig):
    """One experience operator.

    Attributes:
        on_error: `stop` the run, with the step's experiences saved to `rejected/`; or `skip` the operator in this step.
    """

    on_error: OnError = OnError.stop


def operator_configs(group: Mapping[str, Any]) -> dict[str, OperatorConfig]:
    """The operators of {label: {name, args, on_error}}, in order; errors as `part_config`."""
    operators = {
        label: part_config(f"operators.{label}", entry, label, OperatorConfig) for label, entry in group.items()
    }
    for label, operator in operators.items():
        known = PARTS["experience operator"]
        one_of(f"operators.{label}", operator.name, known, with_paths=True, label="operator")
        operator.on_error = on_error_of(label, operator.on_error)
    return operators


def on_error_of(label: str, choice: OnError | str) -> OnError:
    """The consequence of a failure of the operator with this label; a ConfigError if it is unknown."""
    if isinstance(choice, OnError):
        return choice
    return OnError(one_of(f"operators.{label}.on_error", choice, [option.value for option in OnError]))


# -- runs without rollouts ---------------------------------------------------------------------------------------------


# Losses of dataset examples, which have no advantages: dpo and sft.
DATASET_LOSSES = [
    name for name, loss in LOSSES.items() if loss.needs.pairs or (loss.needs.supervised and not loss.needs.teacher)
]


def check_without_rollouts(run: "TrainConfig") -> None:
    """Refuse an objective that does not fit stored experiences or examples; a ConfigError."""
    algorithm, loss = run.algorithm, run.algorithm.policy_loss.name
    if algorithm.optimizer_steps > 1 or algorithm.inner_epochs > 1:
        raise ConfigError(
            "without rollouts (buffer.storage) there is one optimizer step a read",
            key="algorithm.optimizer_steps" if algorithm.optimizer_steps > 1 else "algorithm.inner_epochs",
            fix="set algorithm.optimizer_steps=1 and algorithm.inner_epochs=1",
        )
    if run.buffer.storage == "dataset" and loss in PARTS["policy loss"] and loss not in DATASET_LOSSES:
        raise ConfigError(
            f"algorithm.policy_loss={loss} needs advantages, which the examples of buffer=dataset do not have",
            key="algorithm.policy_loss",
            fix=f"choose {' or '.join(DATASET_LOSSES)}",
        )
    by_length = algorithm.loss_agg_mode == "seq-mean-token-sum-norm"
    if run.buffer.storage == "dataset" and by_length and run.buffer.dataset.max_length is None:
        raise ConfigError(
            "algorithm.loss_agg_mode=seq-mean-token-sum-norm divides by buffer.dataset.max_length, which is not given",
            key="algorithm.loss_agg_mode",
            fix="give it",
        )


# -- places of experiences and examples --------------------------------------------------------------------------------


def check_steps(buffer: BufferConfig) -> None:
    """Refuse a folder of `file` storage without experiences of a run; a ConfigError."""
    folder = Path(buffer.path or "")
    if buffer.storage == "file" and folder.is_dir() and not any(folder.glob("step_*.trxp")):
        inside = folder / "experiences"
        hint = f"give '{inside}'" if inside.is_dir() else "give the folder `experiences` of a run with buffer.keep=true"
        raise ConfigError(f"buffer.path: there is no step_<n>.trxp in '{folder}': {hint}.", key="buffer.path")


def _check_examples(buffer: BufferConfig) -> None:
    """Refuse missing examples, and held-out examples that are missing or are trained on; a ConfigError."""
    if buffer.url is not None:
        raise ConfigError(
            "buffer=dataset reads buffer.path, and no buffer.url", key="buffer.url", fix="leave buffer.url out"
        )
    if buffer.path is None:
        raise ConfigError(
            "buffer=dataset needs examples",
            key="buffer.path",
            fix="give buffer.path=FILE, a folder, or the name of a dataset on the hub",
        )
    check_dataset_path("buffer.path", buffer.path)
    dataset, held_out, key = buffer.dataset, buffer.dataset.held_out, "buffer.dataset.held_out"
    if held_out.share is not None and (held_out.path or held_out.split):
        raise ConfigError(
            f"{key} has a share of the examples, and a path or split of others",
            key=key,
            fix="give one of them",
        )
    check_dataset_path(f"{key}.path", held_out.path)
    if held_out.path is None and dataset.split in (held_out.split, (held_out.split or "").partition("[")[0]):
        raise ConfigError(
            f"{key}.split is {held_out.split}, which is trained on", key=f"{key}.split", fix="give another"
        )
    if held_out.interval != HeldOutConfig.interval and not held_out.given:
        raise ConfigError(
            f"{key}.interval has no effect", key=f"{key}.interval", fix=f"give {key}.path, split or share, too"
        )


def check_stored(key: str, section: ExpertConfig | BufferConfig) -> None:
    """Refuse a section with no place of stored experiences, with two places, or with a missing one; a ConfigError."""
    storage, path, url = section.storage, section.path, section.url
    if storage == "file" and url is not None:
        raise ConfigError(
            f"{key}.storage=file has no {key}.url", key=f"{key}.storage", fix=f"give {key}.path, or {key}.storage=sql"
        )
    _check_place(key, path, url)
    if path is None and url is None:
        raise ConfigError(
            f"{key}.storage={storage} reads what another run wrote",
            key=f"{key}.storage",
            fix=(
                f"give {key}.path=PLACE, such as the folder "
                "outputs/grpo/TIME/experiences of a run with buffer.keep=true"
            ),
        )
    if path is not None and not Path(path).exists():
        raise ConfigError(f"{key}.path: there is no file or folder '{path}'.", key=f"{key}.path")


def _check_place(key: str, path: str | None, url: str | None) -> None:
    """Refuse a path together with a URL, and text that is no URL; a ConfigError."""
    if path is not None and url is not None:
        raise ConfigError(
            f"{key} has two places, {key}.path and {key}.url", key=f"{key}.url", fix="leave one of them out"
        )
    if url is not None and "://" not in url:
        raise ConfigError(
            f"{key}.url: '{url}' is no database URL",
            key=f"{key}.url",
            fix=f"give one such as postgresql://USER@HOST/NAME, or a file as {key}.path",
        )
