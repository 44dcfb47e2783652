"""The conversation that a task begins, and conversations as people read them."""

from collections.abc import Mapping, Sequence
from typing import Any

from trinity_lightning.errors import ConfigError
from trinity_lightning.explorer.tasks.task import Task


def messages_of(task: Task) -> list[dict[str, Any]]:
    """The conversation that a task's entry begins.

    Raises:
        ConfigError: the entry has neither "messages" nor "prompt".
    """
    messages, prompt = task.raw_task.get("messages"), task.raw_task.get("prompt")
    if messages:
        return [dict(message) for message in messages]
    if not isinstance(prompt, str):
        fields = ", ".join(task.raw_task) or "none"
        raise ConfigError(
            f"a task's entry needs 'messages' or a 'prompt' text; it has: {fields}. "
            "Set the taskset's prompt_field or messages_field."
        )
    system = task.workflow_args.get("system_prompt")
    opening = [{"role": "system", "content": system}] if system else []
    return [*opening, {"role": "user", "content": prompt}]


def prompt_text_of(messages: Sequence[Mapping[str, Any]]) -> str:
    """A conversation as people read it: a lone message's content, else one "role: content" a line."""
    if len(messages) == 1:
        return str(messages[0].get("content", ""))
    return "\n".join(f"{message.get('role')}: {message.get('content', '')}" for message in messages)
