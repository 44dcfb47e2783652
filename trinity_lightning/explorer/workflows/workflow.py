"""The interface of workflows, the base of the built-in ones, and the workflows of a single question and answer."""

import asyncio
import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from trinity_lightning.common.experience import EID, Experience
from trinity_lightning.common.inference import Completion, InferenceModel
from trinity_lightning.common.pictures.prompt import PicturePrompt
from trinity_lightning.common.pictures.thumbnails import notes_of
from trinity_lightning.common.runs import versions_entry
from trinity_lightning.config.registry import Registry
from trinity_lightning.config.signatures import check_arguments, is_of_the_library, made, parameters_beside
from trinity_lightning.config.values import nearest, unknown_name
from trinity_lightning.errors import ConfigError, RolloutError
from trinity_lightning.explorer.rewards import resolve_rewards, score
from trinity_lightning.explorer.tasks.task import Task, messages_of, prompt_text_of

ARGS = "workflow.args"  # the key of the workflow's arguments
GIVEN: tuple[str, ...] = ("task", "model", "auxiliary_models")  # every workflow is given these beside its arguments
SYSTEM_PROMPT = "system_prompt"  # an argument that `messages_of` reads


class Workflow(ABC):
    """Tries one task with a model and makes experiences of it.

    An instance lives for one run of a task, or for all of them if it is `repeatable`. Its constructor runs on the
    event loop: it must be quick, and the model is called in `run` only.

    Further arguments of a subclass's constructor, beside the three below, are settings of the workflow
    (`workflow.args`). The constructor need not take the three: they are set before it runs (`workflow_of`).

    Args:
        task: the task to try.
        model: the rollout model; each call gets the run's seed and the task's sampling settings.
        auxiliary_models: one model of each auxiliary kind (judges, teachers), in the order of the configuration.
    """

    # True if a run that the end of the process interrupted may be begun again, and be given the answers that its model
    # gave before. Its tools are called again: with tools that change something outside the run, set it to False. Such a
    # run is begun anew, without those answers.
    replayable: bool = True
    # True if one instance makes all runs of a task at once, as by one request with n samples.
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
        """Try the task, and return the experiences of the run in the order of its steps.

        A repeatable workflow returns the experiences of all runs, and sets `eid.run` to run_id_base, run_id_base + 1,
        ... It may leave runs out. The experiences of a run are its steps, numbered in their order unless each has
        another `eid.step`. If nothing is returned, the calls made through the model's OpenAI client are the
        experiences. Without any experience the run fails, or all runs of a repeatable workflow.

        `run` may also be a plain function: it runs in a thread, where the methods of the models block.

        Raises:
            PartialFailure: some runs of a repeatable workflow failed; it holds the experiences of the others.
            Exception: any other fails the run, and all runs of a repeatable workflow.
        """

    def reset(self, task: Task) -> None:
        """Take another task. A subclass that keeps something made from its task makes it again here."""
        self.task = task

    def set_repeat_times(self, repeat_times: int, run_id_base: int) -> None:
        """Make this many runs at once, numbered from `run_id_base`; called before `run` if repeatable."""
        self.repeat_times = repeat_times
        self.run_id_base = run_id_base


def token_ids_of(completion: Completion) -> list[int]:
    """Token ids of a prompt and its response; a `PicturePrompt` if the prompt has pictures."""
    prompt, response = completion.prompt_token_ids, list(completion.token_ids)
    return PicturePrompt.joined(prompt, response) if isinstance(prompt, PicturePrompt) else [*prompt, *response]


def experience_of(
    completion: Completion, asked: Sequence[Mapping[str, Any]], info: Mapping[str, Any] | None = None, **fields: Any
) -> Experience:
    """An Experience of a response, with its exact tokens and log-probabilities, and a mark if the limit cut it off.

    Args:
        completion: the response.
        asked: the messages that the response answers, for people to read.
        info: entries of `Experience.info` beside the finish reason and the versions of the weights.
        fields: further fields of the Experience, which win over the ones made here.
    """
    values: dict[str, Any] = {
        "tokens": [*completion.prompt_token_ids, *completion.token_ids],
        "prompt_length": len(prompt := completion.prompt_token_ids),
        "multi_modal_inputs": prompt.inputs if isinstance(prompt, PicturePrompt) else None,
        "logprobs": list(completion.logprobs),
        "truncate_status": "response_truncated" if completion.finish_reason == "length" else None,
        "info": {
            "finish_reason": completion.finish_reason,
            **versions_entry(completion.versions),
            **notes_of(prompt),
            **(info or {}),
        },
        "prompt_text": prompt_text_of(asked),
        "response_text": str(completion.text),
    }
    return Experience(**values | fields)


class PartialFailure(RolloutError):  # noqa: N818 - it holds the experiences of the others, too
    """Some runs of a repeatable workflow failed.

    Args:
        experiences: experiences of the runs that succeeded; they are kept.
        errors: the errors, by run id; only these runs are tried again.
    """

    def __init__(self, experiences: list[Experience], errors: Mapping[int, Exception]) -> None:
        super().__init__(f"{len(errors)} runs failed: {sorted(errors)}")
        self.experiences = experiences
        self.errors = dict(errors)


class RewardedWorkflow(Workflow):
    """Base of the built-in workflows: reward functions judge the responses, and a dataclass holds the settings.

    Attributes:
        name: the workflow's name, for messages about arguments.
        arguments_class: dataclass that `workflow_args` are read into; its `__post_init__` refuses wrong values. None:
            the arguments are not looked at.
        default_reward: reward function of tasks that name none.
        rewards: the task's reward functions, or else the workflow's own.
        arguments: the settings, an `arguments_class`; None without one.
    """

    name: str
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
            ConfigError: an unknown or missing name, or a wrong value.
        """
        if cls.arguments_class is None:
            return None
        others = constructor_arguments(cls)
        settings = {name: value for name, value in workflow_args.items() if name not in others}
        parameters = inspect.signature(cls.arguments_class).parameters
        for name in settings:
            if name not in parameters:
                unknown = unknown_name(f"argument of workflow '{cls.name}'", name, parameters)
                raise ConfigError(unknown, key=f"{ARGS}.{name}")
        for name, parameter in parameters.items():
            if parameter.default is parameter.empty and settings.get(name) is None:
                raise ConfigError(f"workflow '{cls.name}' needs {ARGS}.{name}.", key=f"{ARGS}.{name}")
        return cls.arguments_class(**settings)


# -- workflows by name, and their arguments ----------------------------------------------------------------------------


WORKFLOWS: Registry[type[Workflow]] = Registry("workflow")


def resolve_workflow(workflow: str | type[Workflow]) -> type[Workflow]:
    """The class that `Task.workflow` stands for: a registered name, a dotted path, or the class itself.

    Raises:
        ConfigError: an unknown name, an object that is no Workflow, or a class that lacks its `run`.
    """
    resolved = WORKFLOWS.resolve(workflow)
    if not (isinstance(resolved, type) and issubclass(resolved, Workflow)):
        raise ConfigError(f"workflow {workflow!r} is no subclass of {Workflow.__module__}.{Workflow.__name__}.")
    return resolved


def check_workflow(workflow: str | type[Workflow], args: Mapping[str, Any]) -> type[Workflow]:
    """The class that `Task.workflow` stands for, which takes these arguments.

    Raises:
        ConfigError: as in `resolve_workflow`; or an argument that is unknown, missing, or has a wrong value.
    """
    kind = resolve_workflow(workflow)
    kind.check_args(args)
    if constructor_arguments(kind):
        check_arguments(f"workflow '{kind.__name__}'", kind, _for_constructor(kind, args), ARGS, GIVEN)
    return kind


def workflow_of(task: Task, model: InferenceModel, auxiliary_models: Sequence[InferenceModel]) -> Workflow:
    """An instance of the task's workflow; errors as in `check_workflow`, and those of the constructor."""
    kind = resolve_workflow(task.workflow)
    values = dict(zip(GIVEN, (task, model, list(auxiliary_models)), strict=True))
    workflow = made(f"workflow '{kind.__name__}'", kind, _for_constructor(kind, task.workflow_args), ARGS, values)
    if not {*GIVEN} <= inspect.signature(kind).parameters.keys():  # then the base's constructor may not have run
        workflow.reset(task)
    return workflow


def constructor_arguments(workflow: type[Workflow]) -> list[str]:
    """Names of the arguments that a workflow's constructor takes; all others are read from the task."""
    return parameters_beside(workflow, GIVEN)


def _for_constructor(workflow: type[Workflow], args: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments to call a workflow's constructor with: its own, and mistakes, which the call refuses.

    Another argument is a mistake if nothing else can read it. A constructor that takes the task may read any argument
    there, so that only a name close to one of its own is a mistake. Without arguments of its own, it gets none.
    """
    names = constructor_arguments(workflow)
    read_elsewhere = issubclass(workflow, RewardedWorkflow) and workflow.arguments_class is not None
    takes_task = GIVEN[0] in inspect.signature(workflow).parameters
    others = set() if not names or read_elsewhere else args.keys() - {*names, SYSTEM_PROMPT}
    mistakes = {name for name in others if not takes_task or nearest(name, names) is not None}
    return {name: value for name, value in args.items() if name in names or name in mistakes}


# -- one question, one answer ------------------------------------------------------------------------------------------


class SimpleWorkflow(RewardedWorkflow):
    """Single turn: asks for all n responses to the task's prompt at once, and judges each by the reward functions.

    The entry holds "messages" (a conversation) or "prompt" (one user message, after `workflow_args["system_prompt"]`
    if that is set).
    """

    repeatable = True

    @classmethod
    def check_args(cls, workflow_args: Mapping[str, Any]) -> Any:
        """See `RewardedWorkflow`. A built-in workflow without settings takes `system_prompt` only."""
        for name in workflow_args if is_of_the_library(cls) and cls.arguments_class is None else ():
            if name != SYSTEM_PROMPT:
                unknown = unknown_name(f"{ARGS} of {cls.__name__}:", name, [SYSTEM_PROMPT])
                raise ConfigError(unknown, key=f"{ARGS}.{name}")
        return super().check_args(workflow_args)

    def reset(self, task: Task) -> None:
        super().reset(task)
        self.messages = messages_of(task)

    async def run(self) -> list[Experience]:
        """One Experience a response; PartialFailure: the reward functions of some responses failed."""
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
