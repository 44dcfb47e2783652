"""From messages to token ids, by the model's chat template."""

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from trinity_lightning.errors import ConfigError

Messages = Sequence[Mapping[str, Any]]

# Stands for a response whose tokens are known, so that what the template writes after it can be found.
_PLACEHOLDER = "THE-RESPONSE-STANDS-HERE"

_PROBE: list[dict[str, Any]] = [{"role": "user", "content": "."}]


def render_chat(
    tokenizer: Any, messages: Messages, tools: Sequence[Mapping[str, Any]] | None = None, so_far: Sequence[int] = ()
) -> list[int]:
    """Token ids of a conversation up to where the model answers next; see `InferenceModel.render`.

    A template without tools gets them as a system message, and tool calls as text.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template.
        messages: as OpenAI's API has them, content as text.
        tools: functions on offer, as OpenAI's API describes them.
        so_far: token ids of the conversation before `messages`, which end with a response; the result begins with them.

    Raises:
        ConfigError: the template refuses the messages, or a content is no text.
    """
    if not so_far:
        return apply_template(tokenizer, messages, tools, add_generation_prompt=True)
    opening = [*_PROBE, {"role": "assistant", "content": _PLACEHOLDER}]
    text = apply_template(tokenizer, [*opening, *messages], tools, add_generation_prompt=True, tokenize=False)
    _, found, tail = text.rpartition(_PLACEHOLDER)
    if not found:
        raise ConfigError("the chat template drops earlier responses: it cannot carry a conversation of several turns.")
    added = tokenizer.encode(tail, add_special_tokens=False)
    # The model ends its turn itself, with the token that the template would write; cut off, it has not.
    if added and added[0] == so_far[-1]:
        added = added[1:]
    return [*so_far, *added]


def apply_template(
    tokenizer: Any, messages: Messages, tools: Sequence[Mapping[str, Any]] | None = None, **settings: Any
) -> Any:
    """What the tokenizer's `apply_chat_template` returns with these settings: token ids, unless they say otherwise.

    Raises:
        ConfigError: as `render_chat`.
    """
    try:
        plain = [_plain(message) for message in messages]
        shown = None
        if tools or any("tool_calls" in message for message in plain):
            from trinity_lightning.explorer.models.tool_calls import for_template

            plain, shown = for_template(tokenizer, plain, tools)
        return tokenizer.apply_chat_template(plain, tools=shown, **{"return_dict": False, **settings})
    except (TemplateError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"the model's chat template refuses the conversation: {error}") from error


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with text as its content, and tool calls only if it has any. ConfigError: it has no role."""
    if not message.get("role"):
        raise ConfigError(f"a message is {{role, content}}; this one has no role: {message!r}.")
    kept = {name: value for name, value in message.items() if name != "tool_calls" or value}
    return kept | {"content": _text(message.get("content"))}


def _text(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence) and all(
        isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)
        for part in content
    ):
        return "".join(part["text"] for part in content)
    raise ConfigError(f"a message's content must be text, or parts of type 'text'; this is {type(content).__name__}.")
