"""Where experiences wait, what is stored of them, and what is trained on without rollouts."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.conf import HydraConf
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from trinity_lightning.config.losses import LOSSES
from trinity_lightning.config.registry import PARTS
from trinity_lightning.config.sections import PartConfig, Section, checked, part_config
from trinity_lightning.config.taskset import TasksetConfig, check_dataset_path
from trinity_lightning.config.values import text
from trinity_lightning.errors import ConfigError

if TYPE_CHECKING:
    from trinity_lightning.config.run import TrainConfig

from trinity_lightning.config.values import number, one_of, whole_number

BUFFER_STORAGES = ("memory", "file", "sql", "dataset")

REPLAYS = ("priority", "random")


@dataclass
class ExpertConfig(Section, key="buffer.expert"):
    """Expert data that join the rollouts of every explore step, for `algorithm.policy_loss=mix`.

    Attributes:
        per_step: expert experiences an explore step; 0: none. They begin again at their end.
        storage: `dataset`, prompts and answers, the answer being the expert's response; or `file` or `sql`, experiences
            that another run kept or a program wrote.
        dataset: the prompts and answers, as of a taskset.
        path: the folder of `file`, which `buffer.keep` wrote; of `sql` the SQLite database.
        url: database of `sql`, instead of a path: postgresql://USER@HOST/NAME.
    """

    per_step: int = checked(0, whole_number, least=0)
    storage: str = checked("dataset", one_of, names=("dataset", "file", "sql"))
    dataset: TasksetConfig = field(default_factory=lambda: TasksetConfig(name="expert", source="dataset"))
    path: str | None = None
    url: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.per_step > 0:
            check_expert_data(self)


@dataclass
class HeldOutConfig(Section, key="buffer.dataset.held_out"):
    """Examples that are not trained on: the loss on them is `eval/loss`, and of pairs there is `eval/accuracy`.

    Attributes:
        path: a second file, folder or hub name with such examples,
        split: or another split of the dataset (of `path`, if that is given),
        share: or a share of the examples, drawn by the run's seed.
        interval: optimizer steps from one measurement to the next; the last step's weights are measured too.
    """

    path: str | None = None
    split: str | None = None
    share: float | None = checked(None, number, above=0, most=0.9, optional=True)
    interval: int = checked(10, whole_number, least=1)

    @property
    def given(self) -> bool:
        """Whether there are such examples."""
        return (self.path, self.split, self.share) != (None, None, None)


@dataclass
class DatasetConfig(Section, key="buffer.dataset"):
    """Examples to train on without rollouts (`buffer=dataset`).

    The formats are TRL's, plain text or conversations: prompt, chosen and rejected for `algorithm=dpo` (without a
    prompt, or with a text next to messages that contain it, it is what the other two begin with); for `algorithm=sft`
    prompt and completion, messages, of which the assistant's turns are trained on, or text. A column `tools` is shown
    to the model; one `chat_template_kwargs` has further variables of the chat template, such as enable_thinking.

    Attributes:
        subset: name of the dataset's configuration on the hub.
        split: split, or a slice of it (`train[:90%]`).
        shuffle: read in another order in each pass, which follows from the run's seed.
        max_length: longest example in tokens; null: what the tokenizer allows.
        overlong: what becomes of a longer one: `refuse` the run, `drop` it, or `truncate` its end; both are counted.
        held_out: examples to measure the loss on.
    """

    subset: str | None = None
    split: str = checked("train", text)
    shuffle: bool = True
    max_length: int | None = checked(None, whole_number, least=2, optional=True)
    overlong: str = checked("refuse", one_of, names=("refuse", "drop", "truncate"))
    held_out: HeldOutConfig = field(default_factory=HeldOutConfig)


@dataclass
class BufferConfig(Section, key="buffer"):
    """Where experiences wait for the trainer, and what is kept of them.

    Attributes:
        storage: `memory`, filled by this run's rollouts; or `file` (the folder of steps that `keep` wrote) or `sql` (a
            database) or `dataset` (examples), which are read: then there are no rollouts, and a step is one optimizer
            step.
        path: the folder of `file`; of `sql` the SQLite database; of `dataset` a JSONL, parquet or CSV file, a folder or
            a hub name.
        url: database of `sql`, instead of a path: postgresql://USER@HOST/NAME.
        keep: write the experiences of every explore step, as they go to the trainer, to `experiences/` in the run's
            folder; or, by `sql`, to the database at `url` or `path`, else to `experiences.db` in the run's folder.
        order: in which a storage is read: `fifo` (as written); with `sql` also `priority` or `random`.
        reuse_limit: how often an experience may be read in those two; null: without end.
        batch_size: experiences an optimizer step reads (`file`, `sql`), by whole groups; or examples (`dataset`).
        repeat: begin again at the end (`file`, `dataset`, and `sql` in `fifo` order).
        decay, use_decay: `priority` takes the highest score first, which is info["priority"] (1 if there is none)
            * decay ** age in explore steps * use_decay ** times read.
        expert: expert data among the rollouts (`memory`).
        dataset: how a `dataset` is read.
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
        plain = self.has_rollouts and self.keep is False and self.order == "fifo" and self.dataset == DatasetConfig()
        if not plain or self.path or self.url:
            check_buffer(self)

    @property
    def has_rollouts(self) -> bool:
        """True if this run's rollouts fill the buffer; otherwise it is read as another run left it."""
        return self.storage == "memory"


class OnError(Enum):
    """What follows when an operator fails: `stop` the run, or `skip` the operator for this explore step."""

    stop = "stop"
    skip = "skip"


@dataclass
class OperatorConfig(PartConfig):
    """One experience operator.

    Attributes:
        on_error: `stop`, with the step's experiences saved to `rejected/`; or `skip`: the step goes on as if the
            operator were not there.
    """

    on_error: OnError = OnError.stop


def operator_configs(group: Mapping[str, Any]) -> dict[str, OperatorConfig]:
    """The operators of {label: {name, args, on_error}}, in order; a ConfigError as `part_config`."""
    operators = {label: part_config(f"operators.{label}", it, label, OperatorConfig) for label, it in group.items()}
    for label, operator in operators.items():
        one_of("operator", operator.name, PARTS["experience operator"], with_paths=True)
        operator.on_error = on_error_of(label, operator.on_error)
    return operators


def on_error_of(label: str, given: OnError | str) -> OnError:
    """What follows when the operator of that label fails, also by its name; a ConfigError if there is no such."""
    if isinstance(given, OnError):
        return given
    return OnError(one_of(f"operators.{label}.on_error", given, [each.value for each in OnError]))


# Losses that learn from the examples of a dataset, which have no advantages: dpo and sft.
DATASET_LOSSES = [
    name for name, loss in LOSSES.items() if loss.needs.pairs or (loss.needs.supervised and not loss.needs.teacher)
]

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


def check_without_rollouts(run: "TrainConfig") -> None:
    """Refuse an objective that does not fit what is read; a ConfigError."""
    algorithm, loss = run.algorithm, run.algorithm.policy_loss.name
    if algorithm.optimizer_steps > 1 or algorithm.inner_epochs > 1:
        raise ConfigError(
            "without rollouts (buffer.storage) there is one optimizer step a read",
            fix="set algorithm.optimizer_steps=1 and algorithm.inner_epochs=1",
        )
    if run.buffer.storage == "dataset" and loss in PARTS["policy loss"] and loss not in DATASET_LOSSES:
        raise ConfigError(
            f"algorithm.policy_loss={loss} needs advantages, which the examples of buffer=dataset do not have",
            key="algorithm.policy_loss",
            fix=f"choose {' or '.join(DATASET_LOSSES)}",
        )
    constant = algorithm.loss_agg_mode == "seq-mean-token-sum-norm"
    if run.buffer.storage == "dataset" and constant and run.buffer.dataset.max_length is None:
        raise ConfigError(
            "algorithm.loss_agg_mode=seq-mean-token-sum-norm divides by buffer.dataset.max_length, which is not given",
            key="algorithm.loss_agg_mode",
            fix="give it",
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
        raise ConfigError(f"buffer.path: there is no step_<n>.trxp in '{folder}': {hint}.", key="buffer.path")


def check_buffer(buffer: BufferConfig) -> None:
    """Refuse invalid places to read from or to write to, and settings that the storage does not have; a ConfigError."""
    if not isinstance(buffer.keep, bool) and buffer.keep != "sql":
        raise ConfigError(f"buffer.keep is {buffer.keep!r}", key="buffer.keep", fix="give true, false or sql")
    if buffer.has_rollouts and buffer.keep == "sql":
        check_place("buffer", buffer.path, buffer.url)
    elif buffer.has_rollouts and (buffer.path or buffer.url):
        raise ConfigError(
            "buffer.path and buffer.url are places to read from (buffer.storage=file, sql) or to write to "
            "(buffer.keep=sql)",
            key="buffer.path",
            fix="leave them out",
        )
    elif not buffer.has_rollouts and buffer.keep:
        raise ConfigError(
            f"buffer.keep is about rollouts, and buffer.storage={buffer.storage} has none",
            key="buffer.keep",
            fix="leave it out",
        )
    elif buffer.storage in ("file", "sql"):
        check_stored("buffer", buffer)
    elif buffer.storage == "dataset":
        _check_examples(buffer)
    if buffer.storage != "dataset" and buffer.dataset != DatasetConfig():
        raise ConfigError(
            f"buffer.dataset has no effect with buffer.storage={buffer.storage}",
            key="buffer.dataset",
            fix="set buffer=dataset",
        )
    if buffer.order != "fifo" and buffer.storage != "sql":
        raise ConfigError(
            f"buffer.order={buffer.order} needs buffer.storage=sql, not {buffer.storage}.", key="buffer.order"
        )


def _check_examples(buffer: BufferConfig) -> None:
    """Refuse examples that are not there, and held-out ones that are none or are trained on; a ConfigError."""
    if buffer.path is None or buffer.url is not None:
        raise ConfigError(
            "buffer=dataset reads buffer.path=FILE, a folder or a hub name, and no buffer.url.", key="buffer"
        )
    check_dataset_path("buffer.path", buffer.path)
    dataset, held_out, key = buffer.dataset, buffer.dataset.held_out, "buffer.dataset.held_out"
    if held_out.share is not None and (held_out.path or held_out.split):
        raise ConfigError(f"{key}", key=key, fix="give a share of the examples, or a path or split of others, not both")
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
    """Refuse a section that names no experiences to read, or two places of them."""
    storage, path, url = section.storage, section.path, section.url
    if storage == "file" and url is not None:
        raise ConfigError(
            f"{key}.storage=file has no {key}.url", key=f"{key}.storage", fix=f"give {key}.path, or {key}.storage=sql"
        )
    check_place(key, path, url)
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


def check_expert_data(expert: ExpertConfig) -> None:
    """Refuse expert data that are not there; a ConfigError."""
    if expert.storage != "dataset":
        check_stored("buffer.expert", expert)
    elif expert.dataset.source == "dataset" and expert.dataset.path is None:
        raise ConfigError(
            "buffer.expert.dataset",
            key="buffer.expert.dataset",
            fix="give source=dataset and path=FILE, or another source, such as addition",
        )


def check_place(key: str, path: str | None, url: str | None) -> None:
    """Refuse two places of stored experiences, or a URL that is none; a ConfigError."""
    if path is not None and url is not None:
        raise ConfigError(f"{key}", key=key, fix=f"give {key}.path or {key}.url, not both")
    if url is not None and "://" not in url:
        raise ConfigError(
            f"{key}.url: '{url}' is no database URL",
            key=f"{key}.url",
            fix=f"give one such as postgresql://USER@HOST/NAME, or a file as {key}.path",
        )
