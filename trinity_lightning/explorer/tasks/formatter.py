"""What of an entry is the prompt, the answer and the conversation; the built-in sums need none of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trinity_lightning.config.values import unknown_name
from trinity_lightning.errors import ConfigError
from trinity_lightning.explorer.tasks.task import ANSWER, MESSAGES, PROMPT


@dataclass(frozen=True)
class Formatter:
    """Turns an entry into a raw task: its other fields as they are, and these three.

    - `prompt`: the text, if the entry has one.
    - `messages`: the conversation, a list of {"role", "content"}, if the entry has one or a system prompt is set.
    - `answer`: the reference answer, if there is one.

    A field named here (other than by the default) has to be there. Where neither the prompt's nor the messages' field
    is named, `prompt` is taken before `messages`. A prompt that is a list is a conversation.

    Attributes:
        prompt_field, answer_field, messages_field: names of an entry's fields.
        system_prompt: first message of every conversation, in place of the entry's own; None changes nothing.
    """

    prompt_field: str = PROMPT
    answer_field: str = ANSWER
    messages_field: str = MESSAGES
    system_prompt: str | None = None

    def __call__(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        """The raw task of one entry; the entry is left as it is.

        Raises:
            ConfigError: a field is missing, empty, or neither text nor a conversation.
        """
        self._check_named_fields(entry)
        task = {key: value for key, value in entry.items() if key not in (PROMPT, ANSWER, MESSAGES)}
        task |= self._conversation(entry)
        if entry.get(self.answer_field) is not None:
            task[ANSWER] = entry[self.answer_field]
        return task

    def _check_named_fields(self, entry: Mapping[str, Any]) -> None:
        for default in (PROMPT, ANSWER, MESSAGES):
            field = getattr(self, f"{default}_field")
            if field != default and field not in entry:
                raise ConfigError(unknown_name("field", field, entry) + f" Correct {default}_field.")

    def _conversation(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        """`prompt` if it is text, `messages` if it is not or a system prompt comes before it."""
        field = self._conversation_field(entry)
        if isinstance(entry[field], str):
            task: dict[str, Any] = {PROMPT: entry[field]}
            if self.system_prompt is None:
                return task
            messages = [{"role": "user", "content": entry[field]}]
        else:
            task = {}
            messages = _checked_messages(field, entry[field])
        if self.system_prompt is not None:
            rest = messages[1:] if messages[0]["role"] == "system" else messages
            messages = [{"role": "system", "content": self.system_prompt}, *rest]
        return task | {MESSAGES: messages}

    def _conversation_field(self, entry: Mapping[str, Any]) -> str:
        defaults = ((self.prompt_field, PROMPT), (self.messages_field, MESSAGES))
        candidates = [field for field, default in defaults if field != default] or [PROMPT, MESSAGES]
        present = [field for field in candidates if field in entry]
        if not present:
            raise ConfigError(unknown_name("field", candidates[0], entry) + " Set prompt_field or messages_field.")
        for name in present:
            if entry[name]:
                return name
        raise ConfigError(f"field '{present[0]}' is empty: every entry needs a prompt or messages.")


def _checked_messages(field: str, source: object) -> list[dict[str, Any]]:
    if not isinstance(source, list) or not all(
        isinstance(message, Mapping) and "role" in message for message in source
    ):
        raise ConfigError(
            f"field '{field}' holds {type(source).__name__}: a prompt is text, or a list of "
            '{"role": ..., "content": ...} messages.'
        )
    return [dict(message) for message in source]
