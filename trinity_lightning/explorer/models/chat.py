"""Messages as token ids, by the model's chat template: with tools, and behind turns whose tokens are known."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from jinja2 import TemplateError

from trinity_lightning.common.messages import Conversation, check_roles
from trinity_lightning.common.pictures.parts import empty_places, has_places, pictures_in, read_parts, text_of
from trinity_lightning.errors import ConfigError
from trinity_lightning.explorer.models.tool_calls import call_of_message, format_tool_call
from trinity_lightning.explorer.models.turns import (
    PLACEHOLDER,
    QUESTION,
    in_parts,
    shows,
    shows_pictures,
    takes_parts,
    turn_end,
)

# Names of the field that holds a message's reasoning; templates read one of them.
REASONING = ("reasoning_content", "reasoning", "thinking")
TEMPLATE = "model.name"  # the key to change if the tokenizer's chat template does not fit
_CALL_ID = "call00000"  # nine letters and digits, because Mistral's templates insist on that

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Rendered:
    """A conversation up to where the model answers next.

    Attributes:
        so_far: token ids that are known: the conversation before the text, and what closes its last turn.
        text: the text behind them, as the chat template writes it, with a placeholder for each picture.
        written: number of tokens at the beginning of the text that `so_far` ends with already.
    """

    so_far: Sequence[int]
    text: str
    written: int = 0

    def token_ids(self, tokenizer: Any) -> list[int]:
        """Token ids of a conversation without pictures."""
        return [*self.so_far, *tokenizer.encode(self.text, add_special_tokens=False)[self.written :]]

    def unwritten(self, tokenizer: Any) -> str:
        """The text without its tokens that `so_far` ends with.

        Raises:
            ConfigError: the tokenizer reads the rest otherwise than behind these tokens.
        """
        added = tokenizer.encode(self.text, add_special_tokens=False)
        rest = self.text.removeprefix(tokenizer.decode(added[: self.written], skip_special_tokens=False))
        if tokenizer.encode(rest, add_special_tokens=False) == added[self.written :]:
            return rest
        raise ConfigError("the tokenizer reads a later turn otherwise without the end of the one before", key=TEMPLATE)


def render_chat(
    tokenizer: Any,
    messages: Messages,
    tools: Sequence[Mapping[str, Any]] | None = None,
    so_far: Sequence[int] = (),
    generation_config: Any = None,
) -> list[int]:
    """Token ids of a conversation up to where the model answers next; see `InferenceModel.render`.

    If the template knows no tools, a system message describes them, and tool calls become text.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template.
        messages: messages in the form of OpenAI's API, with text as content; a `Conversation` also has tools and
            variables of the template.
        tools: functions on offer, in the form of OpenAI's API, in place of the conversation's.
        so_far: token ids of the conversation before `messages`, which end with a response; the result begins with them.
        generation_config: the model's, for its end tokens.

    Raises:
        ConfigError: the template refuses the messages, or leaves out every message of some role; a role is unknown; or
            a content is neither text nor, for a template that has places for them, pictures.
    """
    if so_far:
        return render_text(tokenizer, messages, tools, so_far, generation_config).token_ids(tokenizer)
    conversation = _checked(tokenizer, messages, tools)
    # The tokenizer's own ids, since some (Mistral's) do not read their template's text as the same ones.
    return apply_template(
        tokenizer, messages, conversation.tools, add_generation_prompt=True, **conversation.template_variables
    )


def render_text(
    tokenizer: Any,
    messages: Messages,
    tools: Sequence[Mapping[str, Any]] | None = None,
    so_far: Sequence[int] = (),
    generation_config: Any = None,
) -> Rendered:
    """Same as `render_chat`, before the text is tokenized, and the placeholders of its pictures are expanded.

    Raises:
        ConfigError: as in `render_chat`; or a place for a picture has none.
    """
    conversation = _checked(tokenizer, messages, tools)
    if so_far:
        return continued(
            tokenizer, messages, conversation.tools, so_far, generation_config, **conversation.template_variables
        )
    settings = {"add_generation_prompt": True, "tokenize": False, **conversation.template_variables}
    return Rendered((), apply_template(tokenizer, messages, conversation.tools, **settings))


def check_shown(text: str, placeholder: str, conversation: Conversation) -> None:
    """Refuse a rendered text that lacks pictures, as of templates without a place for them in results of tools.

    Args:
        text: the conversation as the chat template writes it.
        placeholder: what stands for a picture in it.
        conversation: the messages, with their pictures.

    Raises:
        ConfigError: the text has fewer placeholders than there are pictures in messages of other roles than the user's.
    """
    roles = sorted({str(message.get("role")) for message in conversation if has_places(message)} - {"user"})
    if roles and text.count(placeholder) < len(conversation.pictures):
        raise ConfigError(
            f"the model's chat template has no place for pictures in messages of role {' or '.join(map(repr, roles))}",
            key=TEMPLATE,
            fix="show them in a message of the user, or give the tokenizer a template that has (chat_template)",
        )


def _checked(tokenizer: Any, messages: Messages, tools: Sequence[Mapping[str, Any]] | None) -> Conversation:
    """The conversation, whose roles are known, and whose places for pictures have some; a ConfigError."""
    conversation = Conversation.of(messages, tools)
    pictures_in(conversation)
    check_roles("", conversation, getattr(tokenizer, "chat_template", None))
    return conversation


def apply_template(
    tokenizer: Any, messages: Messages, tools: Sequence[Mapping[str, Any]] | None = None, **settings: Any
) -> Any:
    """Token ids of a conversation, or the form that `settings` of `apply_chat_template` ask for.

    Errors as in `render_chat`.
    """
    try:
        template = tokenizer.get_chat_template() if getattr(tokenizer, "chat_template", None) else ""
        plain = [_plain(message, template) for message in messages]
        if template:
            _check_shown(tokenizer, template, plain)
        if any(map(has_places, plain)) and not (template and shows_pictures(tokenizer, template)):
            raise ConfigError(
                "the model's chat template has no place for pictures",
                key=TEMPLATE,
                fix="choose a model that takes pictures, or give its tokenizer a template that does (chat_template)",
            )
        template_tools = None
        if tools or any("tool_calls" in message for message in plain):
            plain, template_tools = _for_template(tokenizer, plain, tools)
        if template and takes_parts(tokenizer, template):
            plain = [in_parts(message) for message in plain]
        rendered = tokenizer.apply_chat_template(plain, tools=template_tools, **{"return_dict": False, **settings})
        return _with_one_bos(tokenizer, rendered)
    except (TemplateError, ValueError, TypeError, LookupError) as error:  # a template is a program
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"the model's chat template refuses the conversation: {error}") from error


def _with_one_bos(tokenizer: Any, rendered: Any) -> Any:
    """The rendered conversation with a single BOS, where both the template and the first message began with one."""
    if isinstance(rendered, str):
        bos = getattr(tokenizer, "bos_token", None)
        while bos and rendered.startswith(bos * 2):
            rendered = rendered.removeprefix(bos)
        return rendered
    bos = getattr(tokenizer, "bos_token_id", None)
    columns = [rendered] if isinstance(rendered, list) else [rendered[name] for name in rendered]
    while bos is not None and columns[0][:2] == [bos, bos]:
        for column in columns:
            del column[0]
    return rendered


def _plain(message: Mapping[str, Any], template: str) -> dict[str, Any]:
    """The message with its content as text, its reasoning under the name that the template reads, and no empty calls.

    A content with pictures is a list of parts, in which their places are empty.

    Raises:
        ConfigError: it has no role, or its content is neither text nor pictures.
    """
    if not message.get("role"):
        raise ConfigError(f"a message is {{role, content}}; this one has no role: {message!r}.")
    plain = {name: value for name, value in message.items() if name != "tool_calls" or value}
    if reasoning := next((name for name in REASONING if plain.get(name)), None):
        read = _name_of_reasoning(template)
        if read and not plain.get(read):
            plain[read] = plain.pop(reasoning)
    content: Any = message.get("content")
    return plain | {"content": empty_places(content) if has_places(message) else text_of(content)}


@lru_cache(maxsize=16)
def _name_of_reasoning(template: str) -> str | None:
    """The name under which a chat template reads a message's reasoning; None if it reads none."""
    return next((name for name in REASONING if re.search(rf"[.'\"]{name}\b", template)), None)


def _check_shown(tokenizer: Any, template: str, messages: Messages) -> None:
    """Refuse messages of a role that the chat template accepts but never shows, such as results of tools."""
    for role in sorted({str(message["role"]) for message in messages} - {"user", "assistant"}):
        shown = _shown_places(tokenizer, template, role)
        if False in shown and True not in shown:
            raise ConfigError(
                f"the chat template leaves out messages of role '{role}'",
                key=TEMPLATE,
                fix="give them another role, or the tokenizer another template (chat_template)",
            )


@lru_cache(maxsize=64)
def _shown_places(tokenizer: Any, template: str, role: str) -> tuple[bool | None, ...]:
    """True for each place at which the chat template shows a message of a role, else False; None if it refuses it.

    The places are: behind an answer, behind a call, behind the user, and first.
    """
    message = {"role": role, "name": "tool", "tool_call_id": _CALL_ID, "content": PLACEHOLDER}
    answer = {"role": "assistant", "content": "."}
    calling = {"role": "assistant", "content": "", "tool_calls": [_call_for(message)]}
    places = ([QUESTION, answer, message], [QUESTION, calling, message], [QUESTION, message], [message, QUESTION])
    return tuple(shows(tokenizer, *place) for place in places)


def continued(
    tokenizer: Any,
    messages: Messages,
    tools: Sequence[Mapping[str, Any]] | None,
    so_far: Sequence[int],
    generation_config: Any,
    **variables: Any,
) -> Rendered:
    """A conversation that goes on with `messages` behind `so_far`, which ends with a response."""

    def shown(answer: Mapping[str, Any], following: Messages, asks: bool) -> str:
        turns = [QUESTION, answer, *following]
        return apply_template(tokenizer, turns, tools, add_generation_prompt=asks, tokenize=False, **variables)

    end = turn_end(tokenizer, generation_config)
    results = [message for message in messages if message.get("role") == "tool"]
    if results and not _shown_places(tokenizer, tokenizer.get_chat_template(), "tool")[0]:
        # This template shows results only behind their calls: take the text that follows a turn with calls.
        calling = {"role": "assistant", "content": "", "tool_calls": [_call_for(message) for message in results]}
        opening, whole = shown(calling, [], False), shown(calling, messages, True)
        if not whole.startswith(opening):
            raise ConfigError(
                "the chat template shows a call of a tool otherwise once there is its result.", key=TEMPLATE
            )
        closing = () if so_far[-1] in end.tokens else end.closing_calls
        return Rendered([*so_far, *closing], whole.removeprefix(opening))
    answer = {"role": "assistant", "content": PLACEHOLDER}
    _, placeholder, tail = shown(answer, messages, True).rpartition(PLACEHOLDER)
    if not placeholder:
        message = "the chat template drops earlier responses: it cannot carry a conversation of several turns."
        raise ConfigError(message, key=TEMPLATE)
    added = tokenizer.encode(tail, add_special_tokens=False)
    return Rendered(so_far, tail, end.already_written(so_far[-1], added))


def _call_for(message: Mapping[str, Any]) -> dict[str, Any]:
    """A tool call whose result the message could be."""
    function = {"name": message.get("name") or "tool", "arguments": {}}
    return {"id": message.get("tool_call_id") or _CALL_ID, "type": "function", "function": function}


# -- tools for chat templates ------------------------------------------------------------------------------------------


# Short, because it is part of every prompt, and small models have little context.
_TOOLS_PROMPT = """You can call these functions:
{functions}
To call one, reply with <tool_call>{{"name": "...", "arguments": {{...}}}}</tool_call>"""

_PROBE_TOOL = {"type": "function", "function": {"name": "probe", "description": "", "parameters": {}}}


def renders_tools(tokenizer: Any) -> bool:
    """True if the chat template shows tools to the model."""
    return _renders_tools(tokenizer, tokenizer.get_chat_template())


@lru_cache(maxsize=16)
def _renders_tools(tokenizer: Any, template: str) -> bool:
    texts = [
        tokenizer.apply_chat_template(
            [QUESTION], tools=tools, tokenize=False, add_generation_prompt=True, chat_template=template
        )
        for tools in (None, [_PROBE_TOOL])
    ]
    return texts[0] != texts[1]


def _for_template(
    tokenizer: Any, messages: Sequence[dict[str, Any]], tools: Sequence[Mapping[str, Any]] | None
) -> tuple[list[dict[str, Any]], list[Any] | None]:
    """Messages and tools in the form that the chat template takes: as text in the messages if it knows no tools."""
    native = renders_tools(tokenizer)
    plain = [_with_calls(message, native) for message in messages]
    if tools and not native:
        plain = _with_tools_as_text(plain, tools)
    return plain, list(tools) if tools and native else None


def _with_calls(message: Mapping[str, Any], native: bool) -> dict[str, Any]:
    """The message with its tool calls in the form that templates expect (`native`), or as text."""
    plain = dict(message)
    entries: Any = plain.pop("tool_calls", None)
    if not entries:
        return plain
    calls = [call_of_message(entry) for entry in entries]
    if None in calls:
        raise ConfigError(f"a message holds a tool call without a name, or whose arguments are no object: {entries}.")
    if native:
        functions = [{"name": call.name, "arguments": call.arguments} for call in calls if call]
        return plain | {
            "tool_calls": [
                {**entry, "type": "function", "function": function}
                for entry, function in zip(entries, functions, strict=True)
            ]
        }
    texts = [format_tool_call(call) for call in calls if call]
    return plain | {"content": _with_text(plain["content"], "\n".join(["", *texts] if plain["content"] else texts))}


def _with_tools_as_text(messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    functions = [json.dumps(tool.get("function", tool), ensure_ascii=False, separators=(",", ":")) for tool in tools]
    prompt = _TOOLS_PROMPT.format(functions="\n".join(functions))
    if messages and messages[0].get("role") == "system":
        return [messages[0] | {"content": _with_text(messages[0]["content"], f"\n\n{prompt}")}, *messages[1:]]
    return [{"role": "system", "content": prompt}, *messages]


def _with_text(content: str | list[Any], text: str) -> str | list[Any]:
    """A content, as `_plain` makes it, with further text behind it."""
    return content + text if isinstance(content, str) else read_parts([*content, {"type": "text", "text": text}])
