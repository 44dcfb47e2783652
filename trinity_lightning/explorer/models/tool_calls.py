"""Tool calls in responses, as Hermes and Qwen write them: `<tool_call>{"name": ..., "arguments": ...}</tool_call>`."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

OPENING = "<tool_call>"
# The closing tag may be missing: the end token or a stop string came in its place.
_CALL = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)


@dataclass(frozen=True)
class ToolCall:
    """A function's name, and the arguments to call it with."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)


def parse_tool_calls(text: str) -> tuple[str, list[ToolCall]]:
    """What stands beside the tool calls of a response, and the calls in their order.

    A call that is no JSON object with a name and, where it has any, arguments that are an object, stays in the text.
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
    """An entry of an OpenAI message's `tool_calls`, whose arguments are JSON text; None where it is malformed."""
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
    """What a JSON text holds; None where it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
