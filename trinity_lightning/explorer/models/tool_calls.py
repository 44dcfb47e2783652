"""Tools in conversations: calls in responses, and messages with them for chat templates that know tools or do not."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trinity_lightning.errors import ConfigError

# -- tool calls, as Hermes and Qwen write them: `<tool_call>{"name": ..., "arguments": ...}</tool_call>` ---------------


OPENING = "<tool_call>"
# The closing tag may be missing: the end token or a stop string stands in its place.
_CALL = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)


@dataclass(frozen=True)
class ToolCall:
    """A function's name, and the arguments to call it with."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)


def parse_tool_calls(text: str) -> tuple[str, list[ToolCall]]:
    """The text around the tool calls of a response, and the calls in their order.

    A call that is no JSON object with a name and, if it has any, arguments that are an object, stays in the text.
    """
    calls: list[ToolCall] = []

    def take(match: re.Match[str]) -> str:
        call = _call(match[1])
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


def _call(text: str) -> ToolCall | None:
    return _checked(_object(text))


def _checked(value: Any) -> ToolCall | None:
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments")
    if isinstance(arguments, str):
        arguments = _object(arguments) if arguments.strip() else None
        if arguments is None and value["arguments"].strip():
            return None
    if arguments is None:
        arguments = {}
    return ToolCall(value["name"], dict(arguments)) if isinstance(arguments, Mapping) else None


def _object(text: str) -> Any:
    """What a JSON text holds; None if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


# -- for chat templates ------------------------------------------------------------------------------------------------


# Short: it is part of every prompt, and small models have little context.
_TOOLS_PROMPT = """You can call these functions:
{functions}
To call one, reply with <tool_call>{{"name": "...", "arguments": {{...}}}}</tool_call>"""

_PROBE = [{"role": "user", "content": "."}]
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
    """Messages and tools as a tokenizer's chat template takes them: if it knows no tools, as text in the messages.

    Raises:
        ConfigError: a message's tool call is malformed.
    """
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
