"""A task: an entry of a taskset, with the settings for trying it and for judging the responses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trinity_lightning.common.messages import (
    Conversation,
    check_asks,
    read_messages,
    read_pictures_of,
    read_template_variables,
    read_tools,
)
from trinity_lightning.common.pictures.parts import text_of
from trinity_lightning.errors import ConfigError

if TYPE_CHECKING:
    from trinity_lightning.explorer.workflows.workflow import Workflow


# Fields of a raw task.
PROMPT, ANSWER, MESSAGES, IMAGES = "prompt", "answer", "messages", "images"
# Sampling settings that follow from other settings, by the fix that a refusal names.
_RESERVED_SAMPLING = {"n": "set repeat_times instead", "seed": "the seed of a rollout follows from explorer.seed"}


@dataclass
class Task:
    """A task that is tried `repeat_times` times.

    Attributes:
        workflow: registered name, dotted path, or Workflow class.
        raw_task: the taskset's entry: "prompt" or "messages", "answer" and "images" if there are any, and other fields.
        repeat_times: number of runs, the size of the group.
        is_eval: True for an evaluation: its experiences are measured, never trained on.
        rollout_args: sampling settings of the rollout model, by vLLM's names (temperature, max_tokens, ...); None
            values leave the engine's default.
        workflow_args: settings of the workflow.
        reward_fn: None (the workflow's own reward), a registered name, a dotted path, a function, a list of these, or a
            mapping from them to weights.
        reward_solved: least values of the reward's components at which a rollout has solved the task; None: see
            `common.solved.criterion_of`.
        batch_id: the explore step ("<step>/<taskset>" in an evaluation); set by the scheduler.
        task_id: position in the batch; set by the scheduler.
        chat_template_kwargs: variables of the chat template; variables in the entry's field of the same name win.

    Raises:
        ConfigError: repeat_times below 1, arguments that are no mappings, or a sampling setting that a task cannot
            have.
    """

    workflow: str | type[Workflow]
    raw_task: dict[str, Any] = field(default_factory=dict)
    repeat_times: int = 1
    is_eval: bool = False
    rollout_args: Mapping[str, Any] = field(default_factory=dict)
    workflow_args: Mapping[str, Any] = field(default_factory=dict)
    reward_fn: str | Callable[..., Any] | Sequence[Any] | Mapping[Any, float] | None = None
    reward_solved: Mapping[str, float] | None = field(default=None, kw_only=True)
    batch_id: int | str = ""
    task_id: int | str = ""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.repeat_times, int) or self.repeat_times < 1:
            raise ConfigError(f"Task.repeat_times must be an integer of at least 1, not {self.repeat_times!r}.")
        for name in ("raw_task", "rollout_args", "workflow_args", "chat_template_kwargs"):
            value = getattr(self, name)
            if not isinstance(value, Mapping):
                raise ConfigError(f"Task.{name} must be a mapping, not {type(value).__name__}.")
        for name, fix in _RESERVED_SAMPLING.items():
            if name in self.rollout_args:
                raise ConfigError(f"Task.rollout_args must not hold '{name}': {fix}.")


# -- a task's conversation --------------------------------------------------------------------------------------------


def messages_of(task: Task) -> Conversation:
    """The conversation that a task's entry begins, with its pictures, tools and the variables of the chat template.

    Raises:
        ConfigError: the entry has neither "messages" nor "prompt", its conversation or a picture cannot be read, there
            are more or fewer places than pictures, or the conversation ends with the assistant.
    """
    conversation = conversation_of(task)
    check_asks(MESSAGES, conversation)
    return conversation


def conversation_of(task: Task) -> Conversation:
    """Same as `messages_of`, for an entry that may end with the assistant's answer."""
    columns = (read_messages(name, task.raw_task.get(name), pictures=True) for name in (MESSAGES, PROMPT))
    conversation = next(filter(None, columns), None)
    if isinstance(conversation, str):
        system = task.workflow_args.get("system_prompt")
        opening = [{"role": "system", "content": system}] if system else []
        conversation = [*opening, {"role": "user", "content": conversation}]
    if not isinstance(conversation, list):
        fields = ", ".join(task.raw_task) or "none"
        raise ConfigError(
            f"a task's entry needs 'messages' or a 'prompt' text; it has: {fields}. "
            "Set the taskset's prompt_field or messages_field.",
            key=".prompt_field",
        )
    placed = Conversation(conversation, read_tools(task.raw_task), template_variables_of(task))
    return placed.with_pictures(read_pictures_of(task.raw_task))


def template_variables_of(task: Task) -> dict[str, Any]:
    """The variables of the chat template for a task's conversations."""
    return {**task.chat_template_kwargs, **read_template_variables(task.raw_task)}


def prompt_text_of(messages: Sequence[Mapping[str, Any]]) -> str:
    """A conversation as text for people: the content of a single message, or else a line "role: content" a message."""
    contents = [message.get("content", "") for message in messages]
    texts = [text_of(content) if isinstance(content, list) else str(content) for content in contents]
    if len(messages) == 1:
        return texts[0]
    return "\n".join(f"{message.get('role')}: {text}" for message, text in zip(messages, texts, strict=True))
