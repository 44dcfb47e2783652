"""The fields of an entry that are a task's prompt, answer, conversation and pictures."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trinity_lightning.common.messages import (
    FILM_AND_SOUND,
    PICTURE_COLUMNS,
    Conversation,
    check_asks,
    check_media,
    picture_columns,
    read_messages,
    read_pictures_of,
    read_template_variables,
    read_tools,
)
from trinity_lightning.common.pictures.parts import text_of, without_pictures
from trinity_lightning.config.values import nearest, unknown_name
from trinity_lightning.errors import ConfigError
from trinity_lightning.explorer.tasks.task import ANSWER, IMAGES, MESSAGES, PROMPT

CONVERSATIONS = "conversations"  # another usual name for messages


@dataclass(frozen=True)
class Formatter:
    """Turns an entry into a raw task. It sets four fields, and leaves the others as they are.

    - `prompt`: the text, if the entry has one.
    - `messages`: the conversation, a list of {"role", "content"}, if the entry has one or a system prompt is set.
    - `answer`: the reference answer, if there is one.
    - `images`: the entry's pictures in the order of their places, a list of `Picture`, if it has any. They are not in
      the field of the entry that has them, if it has another name.

    A field with another name than the default has to be in every entry; `reward_model.ground_truth` names a field
    within a field. If prompt_field and messages_field have their defaults, the first field of `prompt`, `messages` and
    `conversations` that is not empty is taken. A prompt that is a list, or JSON text of a list, is a conversation.

    Attributes:
        prompt_field, answer_field, messages_field, images_field: names of an entry's fields. By default the pictures
            are those of `images`, or else of `image`.
        system_prompt: first message of every conversation, in place of the entry's own; None changes nothing.
        answered: True if a conversation may end with the assistant, as an expert's does.
    """

    prompt_field: str = PROMPT
    answer_field: str = ANSWER
    messages_field: str = MESSAGES
    system_prompt: str | None = None
    answered: bool = True
    images_field: str = IMAGES

    @property
    def picture_fields(self) -> tuple[str, ...]:
        """Names of the fields that may have pictures."""
        return picture_columns(self.images_field)

    def __call__(self, entry: Mapping[str, Any], folder: Path = Path()) -> dict[str, Any]:
        """The raw task of one entry; the entry is left as it is.

        Args:
            entry: the entry.
            folder: the folder in which relative paths of pictures begin.

        Raises:
            ConfigError: a field is missing, empty, or neither text nor a conversation; the entry has film or sound, a
                picture that cannot be used, or more or fewer places than pictures; or its tools or chat_template_kwargs
                cannot be read.
        """
        if not isinstance(entry, Mapping):
            raise ConfigError(
                f"an entry is a mapping of fields, such as {{'prompt': ...}}, and no {type(entry).__name__}.",
                key=".source",
            )
        fields = dict(entry)
        for default in (PROMPT, ANSWER, MESSAGES, IMAGES):
            field = getattr(self, f"{default}_field")
            if field != default and field not in entry:
                fields[field] = _nested_field(entry, field, f"{default}_field")
        check_media(entry, FILM_AND_SOUND)
        read_tools(entry)
        read_template_variables(entry)
        conversation = self._conversation(fields, folder)
        replaced = (PROMPT, ANSWER, MESSAGES, *(self.picture_fields if IMAGES in conversation else ()))
        if self.images_field != IMAGES:
            replaced += PICTURE_COLUMNS  # whatever they have, it is not shown to the model
        task = {key: value for key, value in entry.items() if key not in replaced} | conversation
        if fields.get(self.answer_field) is not None:
            task[ANSWER] = fields[self.answer_field]
        return task

    def _conversation(self, entry: Mapping[str, Any], folder: Path) -> dict[str, Any]:
        """The fields `prompt`, if the prompt is text; `messages`, if it is a conversation or has a system prompt; and
        `images`, if there are any.
        """
        field = self._conversation_field(entry)
        pictures = read_pictures_of(entry, self.images_field, folder)
        conversation = read_messages(field, entry[field], pictures=True)
        task: dict[str, Any] = {}
        if isinstance(conversation, str):
            task[PROMPT] = conversation
            if self.system_prompt is None and not pictures:
                return task
            conversation = [{"role": "user", "content": conversation}]
        else:
            self._check(field, conversation)
        if self.system_prompt is not None:
            rest = conversation[1:] if conversation[0]["role"] == "system" else conversation
            conversation = [{"role": "system", "content": self.system_prompt}, *rest]
        placed = Conversation(conversation).with_pictures(pictures, folder)
        shown = placed.pictures
        if PROMPT not in task or self.system_prompt is not None:
            task[MESSAGES] = without_pictures(placed) if shown else list(placed)
        return task | ({IMAGES: shown} if shown else {})

    def _check(self, field: str, conversation: object) -> None:
        """Refuse a value that is no conversation, and a conversation that the policy cannot go on with."""
        if not isinstance(conversation, list):
            raise ConfigError(
                f"field '{field}' holds {type(conversation).__name__}: a prompt is text, or a list of "
                '{"role": ..., "content": ...} messages.',
                key=self._key_of(field),
            )
        if not any(text_of(message.get("content", "")).strip() for message in conversation):
            raise ConfigError(
                f"field '{field}' is empty: every entry needs a prompt or messages.", key=self._key_of(field)
            )
        if not self.answered:
            check_asks(field, conversation)

    def _conversation_field(self, entry: Mapping[str, Any]) -> str:
        defaults = ((self.prompt_field, PROMPT), (self.messages_field, MESSAGES))
        candidates = [field for field, default in defaults if field != default] or [PROMPT, MESSAGES, CONVERSATIONS]
        present = [field for field in candidates if field in entry]
        if not present:
            fields, match = ", ".join(sorted(map(str, entry))), nearest(candidates[0], map(str, entry))
            raise ConfigError(
                f"there is no field '{candidates[0]}' among {fields or 'none'}",
                key=self._key_of(candidates[0]),
                fix=(
                    f"name the field of the question in the taskset, prompt_field={match or 'NAME'}, or of a "
                    "conversation, messages_field=NAME"
                ),
            )
        for name in present:
            value = entry[name]
            if value.strip() if isinstance(value, str) else value:
                return name
        others = ", ".join(str(field) for field, value in entry.items() if value and field not in candidates)
        lacks = "missing" if entry[present[0]] is None else "empty"
        raise ConfigError(
            f"field '{present[0]}' is {lacks}: every entry needs a prompt or messages, in the same field "
            f"(prompt_field=NAME). Other fields of this one: {others or 'none'}.",
            key=self._key_of(present[0]),
        )

    def _key_of(self, field: str) -> str:
        """The key, relative to the taskset's section, that names a field with the question."""
        return ".messages_field" if field in (self.messages_field, CONVERSATIONS) else ".prompt_field"


def _nested_field(entry: Mapping[str, Any], name: str, key: str) -> Any:
    """The value of a field within a field, such as `reward_model.ground_truth`; ConfigError: `key` names none."""
    value: Any = entry
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            mappings = {outer: inner for outer, inner in entry.items() if isinstance(inner, Mapping)}
            within = [f"{outer}.{field}" for outer, inner in mappings.items() for field in inner]
            same = next((field for field in within if field.endswith(f".{name}")), None)
            hint = (
                f"there is no field '{name}'. Did you mean '{same}'?"
                if same
                else unknown_name("field", name, [*entry, *within])
            )
            raise ConfigError(f"{hint} Correct {key}.", key=f".{key}")
        value = value[part]
    return value
