"""The typed section `buffer` of a run's configuration."""

from dataclasses import dataclass, field

from trinity_lightning.common.config_sections import TasksetConfig


@dataclass
class ExpertConfig:
    """Expert data that join the rollouts of every explore step, for `algorithm.policy_loss=mix`.

    Attributes:
        per_step: expert experiences an explore step; 0: none. They begin again at their end.
        storage: `dataset`, prompts and answers, the answer being the expert's response; or `file` or `sql`, experiences
            that another run kept or a program wrote.
        dataset: the prompts and answers, as of a taskset.
        path: the file of `file`, or the folder of steps that `buffer.keep` wrote; of `sql` with SQLite the database.
        url: database of `sql`, instead of a path: postgresql://USER@HOST/NAME.
    """

    per_step: int = 0
    storage: str = "dataset"
    dataset: TasksetConfig = field(default_factory=lambda: TasksetConfig(name="expert", source="dataset"))
    path: str | None = None
    url: str | None = None


@dataclass
class BufferConfig:
    """Where experiences wait for the trainer, and what is kept of them.

    Attributes:
        storage: `memory`, filled by this run's rollouts; or `file` or `sql`, from which is read what another run kept
            or a program wrote: then there are no rollouts, and a step is one optimizer step.
        path: the file of `file`, or the folder of steps that `keep` wrote; of `sql` with SQLite the database.
        url: database of `sql`, instead of a path: postgresql://USER@HOST/NAME.
        keep: also write the experiences of every explore step, as they go to the trainer, to `experiences/` in the run
            folder.
        order: in which a storage is read: `fifo` (as written); with `sql` also `priority` or `random`.
        reuse_limit: how often an experience may be read in those two; null: without end.
        batch_size: experiences an optimizer step reads (`file`, `sql`), by whole groups.
        repeat: begin again at the end (`file`, and `sql` in `fifo` order).
        decay, use_decay: `priority` takes the highest score first, which is info["priority"] (1 where there is none)
            * decay ** age in explore steps * use_decay ** times read.
        expert: expert data among the rollouts (`memory`).
    """

    storage: str = "memory"
    path: str | None = None
    url: str | None = None
    keep: bool = False
    order: str = "fifo"
    reuse_limit: int | None = 1
    decay: float = 1.0
    use_decay: float = 1.0
    batch_size: int = 64
    repeat: bool = True
    expert: ExpertConfig = field(default_factory=ExpertConfig)
