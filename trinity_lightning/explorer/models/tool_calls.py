"""Tool calls in a response, as Hermes and Qwen write them: `<tool_call>{"name": ..., "arguments": ...}</tool_call>`."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

from trinity_lightning.common.thoughts import Response, split_thoughts

OPENING = "<tool_call>"
# The closing tag may be missing, because an end token or a stop string may have ended the response.
_CALL = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)


@dataclass(frozen=True)
class ToolCall:
    """A function's name, and the arguments to call it with."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)


# Reads a response: the text around the calls, and the calls in their order.
Parser = Callable[[str], tuple[str, list[ToolCall]]]


def behind_thoughts(parse: Parser) -> Parser:
    """Have a parser read only the answer behind a response's thoughts: calls within thoughts do not count.

    The returned text begins with the thoughts, for rewards that look at them.
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
    """The text around a response's tool calls, and the calls in order; calls within its thoughts do not count.

    A call must be a JSON object with a name; its arguments, if it has any, must be an object. Any other stays text.
    """
    calls: list[ToolCall] = []

    def take(match: re.Match[str]) -> str:
        call = _tool_call(_json_or_none(match[1]))
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
    return _tool_call(function) if isinstance(function, Mapping) else None


def _tool_call(value: Any) -> ToolCall | None:
    """The call that a parsed JSON value describes; None if it is malformed."""
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments")
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        arguments = {}
    elif isinstance(arguments, str):
        arguments = _json_or_none(arguments)
    return ToolCall(value["name"], dict(arguments)) if isinstance(arguments, Mapping) else None


def _json_or_none(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
