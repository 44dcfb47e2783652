"""What only some conversations have: turns before, whose tokens are known, and messages whose content is in parts."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from trinity_lightning.errors import ConfigError, PromptTooLongError
from trinity_lightning.explorer.models.chat import Messages, apply_template

# Stands for a response whose tokens are known, so that what the template writes after it can be found.
_PLACEHOLDER = "THE-RESPONSE-STANDS-HERE"

_PROBE: list[dict[str, Any]] = [{"role": "user", "content": "."}]

logger = logging.getLogger(__name__)


def continued(
    tokenizer: Any, messages: Messages, tools: Sequence[Mapping[str, Any]] | None, so_far: Sequence[int]
) -> list[int]:
    """`render_chat` of what follows `so_far`, which ends with a response."""
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


def text_of(content: object) -> str:
    """The text of a message's content that is none (a tool call says it all), or in parts, as OpenAI's API has them.

    Raises:
        ConfigError: a part is no text.
    """
    if content is None:
        return ""
    if isinstance(content, Sequence) and all(
        isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)
        for part in content
    ):
        return "".join(part["text"] for part in content)
    raise ConfigError(f"a message's content must be text, or parts of type 'text'; this is {type(content).__name__}.")


def too_long(prompt: int, context: int) -> PromptTooLongError:
    """That a prompt of so many tokens leaves nothing."""
    return PromptTooLongError(
        f"the prompt has {prompt} tokens, and the model's context of {context} leaves no room for a response. Raise "
        "engine.max_model_len, or drop such tasks."
    )


def warn_of_room(prompt: int, max_tokens: int, context: int) -> None:
    """That it leaves less than was asked for."""
    logger.warning(
        "a prompt of %d tokens leaves room for %d of the %d response tokens asked for (said once): raise "
        "engine.max_model_len (%d), or lower max_tokens.",
        prompt,
        context - prompt,
        max_tokens,
        context,
    )
