"""From messages to token ids, by the model's chat template; conversations of several turns are in `conversation`."""

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from trinity_lightning.errors import ConfigError

Messages = Sequence[Mapping[str, Any]]


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
    if so_far:
        from trinity_lightning.explorer.models.conversation import continued

        return continued(tokenizer, messages, tools, so_far)
    return apply_template(tokenizer, messages, tools, add_generation_prompt=True)


def apply_template(
    tokenizer: Any, messages: Messages, tools: Sequence[Mapping[str, Any]] | None = None, **settings: Any
) -> Any:
    """Token ids of a conversation, or what `settings` of `apply_chat_template` ask for; errors as `render_chat`."""
    try:
        plain = [_plain(message) for message in messages]
        shown = None
        if tools or any("tool_calls" in message for message in plain):
            from trinity_lightning.explorer.models.conversation import for_template

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
    content = message.get("content")
    if not isinstance(content, str):
        from trinity_lightning.explorer.models.conversation import text_of

        content = text_of(content)
    return kept | {"content": content}
