"""How a task is tried: workflows, what the built-in ones share, and the plain ones: one question, one answer."""

import asyncio
import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from trinity_lightning.common.experience import EID, Experience
from trinity_lightning.common.inference import Completion, InferenceModel
from trinity_lightning.config.registry import Registry
from trinity_lightning.config.signatures import check_arguments, made, parameters_beside
from trinity_lightning.config.values import nearest, unknown_name
from trinity_lightning.errors import ConfigError, RolloutError
from trinity_lightning.explorer.rewards import resolve_rewards, score
from trinity_lightning.explorer.tasks.task import Task, messages_of, prompt_text_of


class Workflow(ABC):
    """Tries one task with a model and makes experiences of it.

    An instance lives for one run of a task, or for all of them if it is `repeatable`. Its constructor runs on the
    event loop: it must be quick, and the model is called in `run` only.

    What the constructor of a subclass takes beside the three arguments below are the workflow's own (`workflow.args`).
    It need not take these three: they are set before it runs (`workflow_of`).

    Args:
        task: what to try.
        model: the rollout model; each call gets the run's seed and the task's sampling settings.
        auxiliary_models: one model of each auxiliary kind (judges, teachers), in the order of the configuration.
    """

    # Whether one instance makes all the runs of a task at once: one request with n samples, say.
    repeatable: bool = False
    repeat_times: int = 1
    run_id_base: int = 0

    def __init__(
        self, task: Task, model: InferenceModel, auxiliary_models: Sequence[InferenceModel] | None = None
    ) -> None:
        self.task = task
        self.model = model
        self.auxiliary_models = list(auxiliary_models or [])

    @classmethod  # noqa: B027 - nothing to refuse, unless a subclass knows better
    def check_args(cls, workflow_args: Mapping[str, Any]) -> None:
        """Refuse wrong arguments before anything is tried; a workflow that has some overrides this.

        Raises:
            ConfigError: names the argument.
        """

    @abstractmethod
    async def run(self) -> list[Experience]:
        """The experiences of the run (of all runs, if repeatable), in the order of its steps.

        Several of a run have each its own `eid.step`; if they have not, they are numbered in their order. Without any
        experience the run has failed, or all runs of a repeatable workflow; of these it may leave some out.

        A plain `def run` is accepted too: it runs in a thread of its own, where the methods of the models block.
        If repeatable, `eid.run` is set here: run_id_base, run_id_base + 1, ...
        If nothing is returned, the calls made through the model's OpenAI client are the experiences.

        Raises:
            PartialFailure: some runs of a repeatable workflow failed, the others' experiences are inside.
            Exception: any other fails the run, and all runs of a repeatable workflow.
        """

    def reset(self, task: Task) -> None:
        """Take another task. A subclass that keeps anything made from its task makes it again here."""
        self.task = task

    def set_repeat_times(self, repeat_times: int, run_id_base: int) -> None:
        """Make this many runs at once, numbered from `run_id_base`; called before `run` if repeatable."""
        self.repeat_times = repeat_times
        self.run_id_base = run_id_base


def experience_of(
    completion: Completion, asked: Sequence[Mapping[str, Any]], info: Mapping[str, Any] | None = None, **fields: Any
) -> Experience:
    """A response as an Experience: its exact tokens and log-probabilities, and whether the token limit cut it off.

    Args:
        completion: the response.
        asked: the messages that it answers, for people to read.
        info: entries of `Experience.info` in addition to the finish reason.
        fields: further fields of the Experience.
    """
    values: dict[str, Any] = {
        "tokens": [*completion.prompt_token_ids, *completion.token_ids],
        "prompt_length": len(completion.prompt_token_ids),
        "logprobs": list(completion.logprobs),
        "truncate_status": "response_truncated" if completion.finish_reason == "length" else None,
        "info": {"finish_reason": completion.finish_reason, **(info or {})},
        "prompt_text": prompt_text_of(asked),
        "response_text": str(completion.text),
    }
    return Experience(**values | fields)


class PartialFailure(RolloutError):  # noqa: N818 - it holds what is kept, too
    """Some runs of a repeatable workflow failed.

    Args:
        experiences: those of the runs that succeeded; they are kept.
        errors: what went wrong, by run id; only these runs are tried again.
    """

    def __init__(self, experiences: list[Experience], errors: Mapping[int, Exception]) -> None:
        super().__init__(f"{len(errors)} runs failed: {sorted(errors)}")
        self.experiences = experiences
        self.errors = dict(errors)


class RewardedWorkflow(Workflow):
    """Base of the built-in workflows: reward functions judge what is tried, and a dataclass holds the settings.

    Attributes:
        rewards: the task's reward functions, or else the workflow's own.
        arguments: the settings, an `arguments_class`; None without one.
    """

    name: str  # for messages about arguments
    # What `workflow_args` are read into; its `__post_init__` refuses wrong values. None: they are not looked at.
    arguments_class: type[Any] | None = None
    default_reward: str | None = None

    def __init__(
        self, task: Task, model: InferenceModel, auxiliary_models: Sequence[InferenceModel] | None = None
    ) -> None:
        super().__init__(task, model, auxiliary_models)
        self.reset(task)

    def reset(self, task: Task) -> None:
        super().reset(task)
        self.arguments = self.check_args(task.workflow_args)
        self.rewards = resolve_rewards(self.default_reward if task.reward_fn is None else task.reward_fn)

    @classmethod
    def check_args(cls, workflow_args: Mapping[str, Any]) -> Any:
        """The settings as an `arguments_class`.

        Raises:
            ConfigError: a name that the workflow does not know, one that is missing, or a wrong value.
        """
        if cls.arguments_class is None:
            return None
        from trinity_lightning.config.explorer import arguments_of

        own = own_arguments(cls)
        others = {name: value for name, value in workflow_args.items() if name not in own}
        return arguments_of(cls.name, cls.arguments_class, others)


ARGS = "workflow.args"
WORKFLOWS: Registry[type[Workflow]] = Registry("workflow")


def resolve_workflow(workflow: str | type[Workflow]) -> type[Workflow]:
    """The class that `Task.workflow` means: a registered name, a dotted path, or the class itself.

    Raises:
        ConfigError: an unknown name, or something that is no Workflow or lacks its `run`.
    """
    found = WORKFLOWS.resolve(workflow)
    if not (isinstance(found, type) and issubclass(found, Workflow)):
        raise ConfigError(
            f"workflow {workflow!r} is no subclass of {Workflow.__module__}.{Workflow.__name__}.", key="workflow"
        )
    return found


GIVEN: tuple[str, ...] = ("task", "model", "auxiliary_models")  # what every workflow is given beside its arguments
SYSTEM_PROMPT = "system_prompt"  # an argument that `messages_of` reads


def own_arguments(workflow: type[Workflow]) -> list[str]:
    """Names of the arguments that a workflow's constructor takes; those of others are read from the task."""
    return parameters_beside(workflow, GIVEN)


def check_workflow(workflow: str | type[Workflow], args: Mapping[str, Any]) -> type[Workflow]:
    """The class that `Task.workflow` means, which takes these arguments.

    Raises:
        ConfigError: as `resolve_workflow`; or an argument that it does not have, or lacks, or of a wrong value.
    """
    found = resolve_workflow(workflow)
    found.check_args(args)
    if own_arguments(found):
        check_arguments(f"workflow '{found.__name__}'", found, _of_constructor(found, args), ARGS, GIVEN)
    return found


def workflow_of(task: Task, model: InferenceModel, auxiliary_models: Sequence[InferenceModel]) -> Workflow:
    """An instance of the task's workflow; raises what `check_workflow` or its constructor does."""
    kind = resolve_workflow(task.workflow)
    given = dict(zip(GIVEN, (task, model, list(auxiliary_models)), strict=True))
    made_of = made(f"workflow '{kind.__name__}'", kind, _of_constructor(kind, task.workflow_args), ARGS, given)
    if not {*GIVEN} <= inspect.signature(kind).parameters.keys():  # nor has it called a base's constructor, perhaps
        made_of.reset(task)
    return made_of


def _of_constructor(workflow: type[Workflow], args: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that are the constructor's: none if it has none, else all that nothing else reads.

    A constructor that takes the task may read others there; a name close to one of its own is taken for a slip.
    """
    own = own_arguments(workflow)
    read_elsewhere = issubclass(workflow, RewardedWorkflow) and workflow.arguments_class is not None
    takes_task = GIVEN[0] in inspect.signature(workflow).parameters
    others = set() if not own or read_elsewhere else args.keys() - {*own, SYSTEM_PROMPT}
    refused = {name for name in others if not takes_task or nearest(name, own) is not None}
    return {name: value for name, value in args.items() if name in own or name in refused}


# -- one question, one answer ------------------------------------------------------------------------------------------


class SimpleWorkflow(RewardedWorkflow):
    """Single turn: all n responses to the task's prompt in one request, each judged by the task's reward functions.

    The entry holds "messages" (a conversation) or "prompt" (one user message, after `workflow_args["system_prompt"]`
    if that is set).
    """

    repeatable = True

    @classmethod
    def check_args(cls, workflow_args: Mapping[str, Any]) -> Any:
        """See `RewardedWorkflow`; built-in ones without settings have one argument, one's own may read others."""
        built_in = cls.__module__.startswith(f"{__package__}.")
        for name in workflow_args if built_in and cls.arguments_class is None else ():
            if name != "system_prompt":
                raise ConfigError(unknown_name(f"workflow.args of {cls.__name__}:", name, ["system_prompt"]))
        return super().check_args(workflow_args)

    def reset(self, task: Task) -> None:
        super().reset(task)
        self.messages = messages_of(task)

    async def run(self) -> list[Experience]:
        """One Experience a response; those whose reward function failed are reported by PartialFailure."""
        completions = await self.model.chat(self.messages, n=self.repeat_times)
        results = await asyncio.gather(
            *(self._experience(completion, self.run_id_base + i) for i, completion in enumerate(completions)),
            return_exceptions=True,
        )
        errors: dict[int, Exception] = {}
        experiences: list[Experience] = []
        for run, result in enumerate(results, start=self.run_id_base):
            if isinstance(result, Experience):
                experiences.append(result)
            elif isinstance(result, Exception):
                errors[run] = result
            else:
                raise result
        if errors:
            raise PartialFailure(experiences, errors)
        return experiences

    async def _experience(self, completion: Completion, run: int) -> Experience:
        if completion.finish_reason == "abort":
            raise RolloutError("the engine aborted the request before its end")
        reward, metrics = await score(self.rewards, completion.text, self.task)
        return experience_of(completion, self.messages, eid=EID(run=run), reward=reward, metrics=metrics)


class MathWorkflow(SimpleWorkflow):
    """Single turn, judged by the boxed answer or the last number if the task names no reward function."""

    default_reward = "math"
