"""Reads conversations of datasets: one set of rules for tasks, evaluations, expert data, SFT and DPO.

A conversation is a list of {role, content} messages, or JSON text of one. Beside it an entry may have `tools`, a list
of functions as OpenAI's API describes them, and `chat_template_kwargs`, variables of the chat template; both may be
JSON text too, as CSV and parquet files have them.
"""

import functools
import json
import logging
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from jinja2 import Environment, TemplateError, meta

from trinity_lightning.common.pictures.parts import is_place, pictures_in, placed, read_parts, text_of
from trinity_lightning.common.pictures.picture import Picture, read_picture, read_pictures
from trinity_lightning.config.chat_template import check_template_variables
from trinity_lightning.config.values import nearest, unknown_name
from trinity_lightning.errors import ConfigError

logger = logging.getLogger(__name__)

TOOLS, TEMPLATE_VARIABLES = "tools", "chat_template_kwargs"  # names of columns
PICTURE_COLUMNS = ("images", "image")  # columns with pictures
FILM_AND_SOUND = ("video", "videos", "audio", "audios")  # columns with media that nothing is trained on
_HERE = Path()
# Roles that every chat template accepts; a template has to name any other role.
ROLES = ("system", "developer", "user", "assistant", "tool", "function")

_OPENAI_NAMES = {"from": "role", "value": "content"}
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}  # in messages that have `from`
_JSON_MESSAGES = re.compile(r'\s*\[\s*\{\s*"(?:role|content|from|value)"\s*:')
_GENERATION = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")  # transformers' own tag
_PYTHON_MESSAGES = re.compile(r"\s*\[\s*\{\s*'(?:role|content|from|value)'\s*:")


class Conversation(list[dict[str, Any]]):
    """Messages of a dataset's entry, and the tools and variables that its chat template is given.

    A picture is a part of a message: {"type": "image", "image": Picture}. It stays there until the conversation is
    rendered, so that lists made of these messages have it too.

    Args:
        messages: messages with OpenAI's keys.
        tools: functions on offer, which the chat template is shown.
        template_variables: variables for the chat template.
    """

    def __init__(
        self,
        messages: Iterable[Any],
        tools: Sequence[Any] | None = None,
        template_variables: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(messages)
        self.tools: list[dict[str, Any]] = list(tools or [])
        self.template_variables = dict(template_variables or {})

    @property
    def pictures(self) -> list[Picture]:
        """The pictures, in the order of their places.

        Raises:
            ConfigError: a place has none, or one that cannot be read.
        """
        return pictures_in(self)

    @classmethod
    def of(cls, messages: Iterable[Any], tools: Sequence[Any] | None = None) -> Self:
        """A conversation of messages; if they are one already, a copy, with `tools` (if any) in place of its own."""
        if not isinstance(messages, cls):
            return cls(messages, tools)
        return cls(messages, tools or messages.tools, messages.template_variables)

    def without_last(self) -> Self:
        """All messages but the last, with the same tools and variables."""
        return type(self)(self[:-1], self.tools, self.template_variables)

    def with_pictures(self, values: Iterable[Any], folder: Path = _HERE) -> Self:
        """A copy that has further pictures, each in an empty place of the messages; see `parts.placed`.

        Args:
            values: pictures, as `read_picture` takes them.
            folder: the folder in which relative paths begin.

        Raises:
            ConfigError: a picture cannot be read, or there are fewer or more places than pictures.
        """
        messages = placed(list(self), [read_picture(value, folder) for value in values], folder)
        return type(self)(messages, self.tools, self.template_variables)


# -- an entry ----------------------------------------------------------------------------------------------------------


def check_media(entry: Mapping[str, Any], columns: Collection[str] = (*PICTURE_COLUMNS, *FILM_AND_SOUND)) -> None:
    """Refuse an entry with pictures, sound or film in these columns; those that are null or empty count as absent."""
    trained = "text is" if {*columns} & {*PICTURE_COLUMNS} else "text and pictures are"
    for name in columns:
        if not is_empty(entry.get(name)):
            raise ConfigError(
                f"column '{name}' is not empty, and only {trained} trained on here",
                fix="leave such entries or the column out (rename it if it has no pictures, sound or film)",
            )


def is_empty(value: object) -> bool:
    """True if a column's value is null or has no elements."""
    return value is None or (isinstance(value, Sequence | Mapping) and len(value) == 0)


def picture_columns(field: str) -> tuple[str, ...]:
    """Names of the columns that may have pictures, if this is configured as the name of their column."""
    return PICTURE_COLUMNS if field == PICTURE_COLUMNS[0] else (field,)


def read_pictures_of(entry: Mapping[str, Any], field: str = PICTURE_COLUMNS[0], folder: Path = _HERE) -> list[Picture]:
    """The pictures of an entry: those of a field, or by default of the first of `PICTURE_COLUMNS` that is not empty.

    Raises:
        ConfigError: as in `read_picture`.
    """
    values = (entry[name] for name in picture_columns(field) if not is_empty(entry.get(name)))
    return next((read_pictures(value, folder) for value in values), [])


def read_tools(entry: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The tools of an entry; an empty list without such a column.

    Raises:
        ConfigError: the column is no list of functions, nor JSON text of one.
    """
    tools = _json_value(TOOLS, entry.get(TOOLS))
    if tools is None:
        return []
    if not isinstance(tools, Sequence) or not all(isinstance(tool, Mapping) for tool in tools):
        raise ConfigError(
            f"column '{TOOLS}' is {tools!r:.80}: give a list of functions as OpenAI's API describes them, or JSON text "
            "of one; rename the column if it is none."
        )
    return without_none(list(tools))


def read_template_variables(entry: Mapping[str, Any]) -> dict[str, Any]:
    """The `chat_template_kwargs` of an entry; an empty dict without such a column.

    Raises:
        ConfigError: the column is no mapping, nor JSON text of one, or names an argument of the rendering function.
    """
    variables = _json_value(TEMPLATE_VARIABLES, entry.get(TEMPLATE_VARIABLES))
    return {} if variables is None else check_template_variables(None, without_none(variables), TEMPLATE_VARIABLES)


def _json_value(column: str, value: Any) -> Any:
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None
    try:
        return json.loads(value)
    except ValueError as error:
        raise ConfigError(f"column '{column}' is text that is no JSON: {error}.") from error


# -- messages ----------------------------------------------------------------------------------------------------------


def read_messages(column: str, value: Any, pictures: bool = False) -> Any:
    """The messages of a column that holds a conversation, or JSON text of one; any other value as it is.

    Each message has `role` and `content` (made from `from` and `value` if need be; text in parts is joined), and no key
    whose value is null.

    Args:
        column: the column's name, for messages.
        value: its value.
        pictures: True if contents may have pictures: they stay lists of parts then.

    Raises:
        ConfigError: an element is no message, has no role, lacks its content, or has parts that are no text (nor
            pictures, if these are allowed); or text that looks like a conversation is no JSON.
    """
    if isinstance(value, str):
        value = _conversation_in(column, value)
    if not isinstance(value, list):
        return value
    return [_read_message(f"turn {turn} of {column}", message, pictures) for turn, message in enumerate(value)]


def _conversation_in(column: str, text: str) -> Any:
    """The conversation in a JSON text, or the text itself if it is none."""
    if not text.lstrip().startswith("["):
        return text
    if _PYTHON_MESSAGES.match(text):
        raise ConfigError(f"{column} is a conversation as Python's str() writes it", fix="write it by json.dumps")
    try:
        value = json.loads(text)
    except ValueError as error:
        if _JSON_MESSAGES.match(text):
            raise ConfigError(f"{column} is a conversation that is no JSON: {error}.") from error
        return text
    is_conversation = value and all(isinstance(turn, Mapping) and turn.keys() & {"role", "from"} for turn in value)
    return value if is_conversation else text


def _read_message(where: str, message: Any, pictures: bool) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ConfigError(f"{where}: a message is {{role, content}}, not {message!r:.80}.")
    read = {str(_OPENAI_NAMES.get(name, name)): value for name, value in without_none(message).items()}
    role = read.get("role")
    if not role or not isinstance(role, str):
        raise ConfigError(f"{where}: a message is {{role, content}}; this one has no role: {message!r:.80}.")
    if "from" in message:
        role = read["role"] = _SHAREGPT_ROLES.get(role, role)
    if role in ("system", "developer", "user") and "content" not in read:
        raise ConfigError(f"{where}, of role '{role}', has no content", fix="give it")
    if "content" in read:
        read["content"] = _read_content(where, read["content"], pictures)
    return read


def _read_content(where: str, content: Any, pictures: bool) -> str | list[Any]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise ConfigError(f"{where}: its content is {content!r:.80}", fix="give text, or parts of type 'text'")
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if pictures and is_place(part):
            continue
        if kind != "text" or not isinstance(part.get("text"), str):
            named = f"a part of type '{kind}'" if kind else f"the part {part!r:.80}"
            trained = "text and pictures are" if pictures else "text is"
            raise ConfigError(f"{where} has {named}, and only {trained} trained on here", fix="leave such entries out")
    return read_parts(content) if any(map(is_place, content)) else text_of(content)


def check_asks(column: str, messages: Sequence[Mapping[str, Any]]) -> None:
    """Refuse a conversation that ends with the assistant where the policy has to answer."""
    if messages and messages[-1].get("role") == "assistant":
        raise ConfigError(
            f"{column} ends with a turn of the assistant, which the policy would be shown before it answers: end the "
            "conversation before it, and give the turn as the answer (answer_field) if it is one."
        )


def check_roles(where: str, messages: Iterable[Mapping[str, Any]], chat_template: object) -> None:
    """Refuse a role that is neither common nor one that the chat template names.

    Args:
        where: the conversation's name in error messages, with a space before it; or nothing.
        messages: messages from `read_messages`; one without a role is refused when it is rendered.
        chat_template: the tokenizer's chat template.

    Raises:
        ConfigError: a role is unknown.
    """
    for turn, message in enumerate(messages):
        role = message.get("role")
        if role is None or role in ROLES or f"'{role}'" in str(chat_template) or f'"{role}"' in str(chat_template):
            continue
        raise ConfigError(
            f"turn {turn}{where}: {unknown_name('role', str(role), ROLES)} Others are those that the chat template "
            "names."
        )


def warn_of_unread(names: Iterable[str], chat_template: object) -> None:
    """Warn, once, of variables that the chat template does not read; never if there are several templates."""
    if isinstance(chat_template, str):
        _warn_of_unread(frozenset(names), chat_template)


@functools.lru_cache(maxsize=64)
def _warn_of_unread(names: frozenset[str], chat_template: str) -> None:
    known = _variables_of(chat_template) if names else None
    if known is not None and (unread := sorted(names - known)):
        match = nearest(unread[0], known)
        logger.warning(
            "chat_template_kwargs: the model's chat template does not read %s, so that it has no effect.%s",
            ", ".join(unread),
            f" Did you mean '{match}'?" if match else "",
        )


def _variables_of(chat_template: str) -> set[str] | None:
    """The variables that a chat template reads; None if it cannot be parsed."""
    try:
        syntax = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_GENERATION.sub("", chat_template))
    except TemplateError:
        return None
    return meta.find_undeclared_variables(syntax)


def without_none(value: Any) -> Any:
    """The value without null entries of mappings, at any depth: datasets add them for keys of other entries."""
    if isinstance(value, Mapping):
        return {name: without_none(inner) for name, inner in value.items() if inner is not None}
    return [without_none(inner) for inner in value] if isinstance(value, list) else value
