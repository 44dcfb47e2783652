"""How to try a task: the base class of workflows, and their names."""

import dataclasses
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from trinity_lightning.common.experience import Experience
from trinity_lightning.common.inference import InferenceModel
from trinity_lightning.config.registry import Registry
from trinity_lightning.config.values import unknown_name
from trinity_lightning.errors import ConfigError, RolloutError
from trinity_lightning.explorer.tasks.task import Task

# -- settings ---------------------------------------------------------------------------------------------------------


T = TypeVar("T")


def read_arguments(kind: type[T], given: Mapping[str, Any], workflow: str) -> T:
    """The settings of a workflow.

    Args:
        kind: a dataclass; its `__post_init__` may check values.
        given: `workflow_args`.
        workflow: its name, for messages.

    Raises:
        ConfigError: a name that the workflow does not know, or one that is missing.
    """
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    names = [field.name for field in fields]
    for name in given:
        if name not in names:
            raise ConfigError(unknown_name(f"argument of workflow '{workflow}'", name, names))
    missing_default = dataclasses.MISSING
    required = [f.name for f in fields if f.default is missing_default and f.default_factory is missing_default]
    if missing := [name for name in required if given.get(name) is None]:
        raise ConfigError(f"workflow '{workflow}' needs workflow.args.{missing[0]}.")
    return kind(**given)


def check_call(function: Callable[..., Any], arguments: Mapping[str, Any], what: str) -> None:
    """Refuse arguments that a class or function cannot be called with.

    Raises:
        ConfigError: names what is wrong with them.
    """
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        raise ConfigError(f"{what}: {error}.") from error


# -- workflows --------------------------------------------------------------------------------------------------------


class Workflow(ABC):
    """Tries one task with a model and says what came of it.

    An instance lives for one run of a task, or for all of them where it is `repeatable`. Its constructor runs on the
    event loop: it must be quick, and the model is called in `run` only.

    Args:
        task: what to try.
        model: the rollout model; each call gets the run's seed and the task's sampling settings.
        auxiliary_models: one model of each auxiliary kind (judges, teachers), in the order of the configuration.
    """

    # Whether one instance makes all the runs of a task at once: one request with n samples, say.
    repeatable: bool = False

    def __init__(
        self,
        task: Task,
        model: InferenceModel,
        auxiliary_models: Sequence[InferenceModel] | None = None,
    ) -> None:
        self.task = task
        self.model = model
        self.auxiliary_models = list(auxiliary_models or [])
        self.repeat_times = 1
        self.run_id_base = 0

    @classmethod  # noqa: B027 - nothing to refuse, unless a subclass knows better
    def check_args(cls, workflow_args: Mapping[str, Any]) -> None:
        """Refuse wrong arguments before anything is tried; a workflow that has some overrides this.

        Raises:
            ConfigError: names the argument.
        """

    @abstractmethod
    async def run(self) -> list[Experience]:
        """The experiences of the run (of all runs, where repeatable), in the order of its steps.

        Several of a run have each its own `eid.step`; where they have not, they are numbered in their order.

        A plain `def run` is accepted too: it runs in a thread of its own, where the methods of the models block.
        Where repeatable, `eid.run` is set here: run_id_base, run_id_base + 1, ...
        Where nothing is returned, the calls made through the model's OpenAI client are the experiences.

        Raises:
            PartialFailure: some runs of a repeatable workflow failed, the others' experiences are inside.
            Exception: whatever else is raised fails the run, and all runs of a repeatable workflow.
        """

    def reset(self, task: Task) -> None:
        """Take another task. A subclass that keeps anything made from its task makes it again here."""
        self.task = task

    def set_repeat_times(self, repeat_times: int, run_id_base: int) -> None:
        """Make this many runs at once, numbered from `run_id_base`; called before `run` where repeatable."""
        self.repeat_times = repeat_times
        self.run_id_base = run_id_base


class PartialFailure(RolloutError):  # noqa: N818 - an outcome to be kept, not only an error
    """Some runs of a repeatable workflow failed.

    Args:
        experiences: those of the runs that succeeded; they are kept.
        errors: what went wrong, by run id; only these runs are tried again.
    """

    def __init__(self, experiences: list[Experience], errors: Mapping[int, Exception]) -> None:
        super().__init__(f"{len(errors)} runs failed: {sorted(errors)}")
        self.experiences = experiences
        self.errors = dict(errors)


WORKFLOWS: Registry[type[Workflow]] = Registry("workflow")


def resolve_workflow(workflow: str | type[Workflow]) -> type[Workflow]:
    """The class that `Task.workflow` means: a registered name, a dotted path, or the class itself.

    Raises:
        ConfigError: an unknown name, or something that is no Workflow.
    """
    try:
        found = WORKFLOWS.resolve(workflow) if isinstance(workflow, str) else workflow
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if not (isinstance(found, type) and issubclass(found, Workflow)):
        raise ConfigError(f"workflow {workflow!r} is no subclass of {Workflow.__module__}.{Workflow.__name__}.")
    return found
