"""What only some conversations have: turns whose tokens are known, content in parts, and tools."""

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

from trinity_lightning.common.thoughts import Response, split_thoughts
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
    """The text of a message whose content is null (it only calls tools) or a list of parts, as in OpenAI's API.

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


def lack_of_room(prompt: int, max_tokens: int | None, context: int, said: bool) -> None:
    """Log, unless it was said, that a prompt leaves room for less than was asked for.

    Raises:
        PromptTooLongError: it leaves none.
    """
    if prompt >= context:
        raise PromptTooLongError(
            f"the prompt has {prompt} tokens, and the model's context of {context} leaves no room for a response. "
            "Raise engine.max_model_len, or drop such tasks."
        )
    if not said:
        logger.warning(
            "a prompt of %d tokens leaves room for %d of the %d response tokens asked for (said once): raise "
            "engine.max_model_len (%d), or lower max_tokens.",
            prompt,
            context - prompt,
            max_tokens,
            context,
        )


# -- tool calls, as Hermes and Qwen write them: `<tool_call>{"name": ..., "arguments": ...}</tool_call>` ---------------


OPENING = "<tool_call>"
# The closing tag may be missing: the end token or a stop string stands in its place.
_CALL = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)


@dataclass(frozen=True)
class ToolCall:
    """A function's name, and the arguments to call it with."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)


# Reads a response: the text around the calls, and the calls in their order.
Parser = Callable[[str], tuple[str, list[ToolCall]]]


def behind_thoughts(parse: Parser) -> Parser:
    """Have a parser read what stands behind a response's thoughts: a call that they consider is none.

    The text around the calls begins with the thoughts, for rewards that look at them.
    """

    @wraps(parse)
    def parse_answer(response: str) -> tuple[str, list[ToolCall]]:
        thoughts, answer = split_thoughts(response)
        if answer is None:
            return response, []
        rest, calls = parse(answer)
        whole = thoughts + rest
        return response.with_text(whole) if isinstance(response, Response) else whole, calls

    return parse_answer


@behind_thoughts
def parse_tool_calls(text: str) -> tuple[str, list[ToolCall]]:
    """The text around the tool calls of a response, and the calls in their order; those in its thoughts are none.

    A call that is no JSON object with a name and, if it has any, arguments that are an object, stays in the text.
    """
    calls: list[ToolCall] = []

    def take(match: re.Match[str]) -> str:
        call = _checked(_object(match[1]))
        if call is None:
            return match[0]
        calls.append(call)
        return ""

    rest = _CALL.sub(take, text)
    return (rest.strip() if calls else text), calls


def format_tool_call(call: ToolCall) -> str:
    """The text that `parse_tool_calls` reads."""
    content = json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False)
    return f"{OPENING}\n{content}\n</tool_call>"


def call_of_message(entry: Mapping[str, Any]) -> ToolCall | None:
    """An entry of an OpenAI message's `tool_calls`, whose arguments are JSON text; None if it is malformed."""
    function = entry.get("function")
    return _checked(function) if isinstance(function, Mapping) else None


def _checked(value: Any) -> ToolCall | None:
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments")
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        arguments = {}
    elif isinstance(arguments, str):
        arguments = _object(arguments)
    return ToolCall(value["name"], dict(arguments)) if isinstance(arguments, Mapping) else None


def _object(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


# -- tools for chat templates ------------------------------------------------------------------------------------------


# Short: it is part of every prompt, and small models have little context.
_TOOLS_PROMPT = """You can call these functions:
{functions}
To call one, reply with <tool_call>{{"name": "...", "arguments": {{...}}}}</tool_call>"""

_PROBE_TOOL = {"type": "function", "function": {"name": "probe", "description": "", "parameters": {}}}


def renders_tools(tokenizer: Any) -> bool:
    """Whether the chat template shows tools to the model."""
    texts = [
        tokenizer.apply_chat_template(_PROBE, tools=tools, tokenize=False, add_generation_prompt=True)
        for tools in (None, [_PROBE_TOOL])
    ]
    return texts[0] != texts[1]


def for_template(
    tokenizer: Any, messages: Sequence[dict[str, Any]], tools: Sequence[Mapping[str, Any]] | None
) -> tuple[list[dict[str, Any]], list[Any] | None]:
    """Messages and tools as a tokenizer's chat template takes them: if it knows no tools, as text in the messages."""
    native = renders_tools(tokenizer)
    plain = [_with_calls(message, native) for message in messages]
    if tools and not native:
        plain = _with_tools_as_text(plain, tools)
    return plain, list(tools) if tools and native else None


def _with_calls(message: Mapping[str, Any], native: bool) -> dict[str, Any]:
    """The message with its tool calls as templates expect them, or as text."""
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
    return plain | {"content": "\n".join([plain["content"], *texts] if plain["content"] else texts)}


def _with_tools_as_text(messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    functions = [json.dumps(tool.get("function", tool), ensure_ascii=False, separators=(",", ":")) for tool in tools]
    prompt = _TOOLS_PROMPT.format(functions="\n".join(functions))
    if messages and messages[0].get("role") == "system":
        return [messages[0] | {"content": f"{messages[0]['content']}\n\n{prompt}"}, *messages[1:]]
    return [{"role": "system", "content": prompt}, *messages]
