"""Tool calls in the text of responses, and in OpenAI's messages."""

from typing import Any

import pytest

from trinity_lightning.explorer.models.tool_calls import (
    ToolCall,
    call_of_message,
    format_tool_call,
    parse_tool_calls,
)


def test_calls_and_the_text_beside_them() -> None:
    text = 'Let me see.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n<tool_call>{"name": "now"}'
    assert parse_tool_calls(text) == ("Let me see.", [ToolCall("add", {"a": 1}), ToolCall("now", {})])


def test_text_without_a_call_stays_as_it_is() -> None:
    assert parse_tool_calls(" 42 \n") == (" 42 \n", [])


@pytest.mark.parametrize(
    "content",
    ["", "add(1)", "[1, 2]", '{"arguments": {}}', '{"name": 3}', '{"name": "add", "arguments": [1]}', '{"name": "add"'],
)
def test_a_malformed_call_stays_text(content: str) -> None:
    text = f"a <tool_call>{content}</tool_call> b"
    assert parse_tool_calls(text) == (text, [])


def test_a_malformed_call_does_not_spoil_the_others() -> None:
    bad = "<tool_call>?</tool_call>"
    assert parse_tool_calls(f'{bad}<tool_call>{{"name": "add"}}</tool_call>') == (bad, [ToolCall("add")])


def test_arguments_may_be_json_in_json() -> None:
    assert parse_tool_calls(r'<tool_call>{"name": "f", "arguments": "{\"a\": 1}"}</tool_call>')[1] == [
        ToolCall("f", {"a": 1})
    ]


def test_nesting_without_end_is_malformed() -> None:
    text = f'<tool_call>{{"name": "f", "arguments": {"[" * 100_000}</tool_call>'
    assert parse_tool_calls(text) == (text, [])


def test_what_is_formatted_is_parsed() -> None:
    call = ToolCall("größe", {"s": "é\n</b>", "n": [1, None]})
    assert parse_tool_calls(format_tool_call(call)) == ("", [call])


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ({"function": {"name": "f", "arguments": '{"a": 1}'}}, ToolCall("f", {"a": 1})),
        ({"function": {"name": "f", "arguments": ""}}, ToolCall("f")),
        ({"function": {"name": "f", "arguments": {"a": 1}}}, ToolCall("f", {"a": 1})),
        ({"function": {"name": "f", "arguments": "{"}}, None),
        ({"function": {}}, None),
        ({}, None),
    ],
)
def test_calls_of_openai_messages(entry: dict[str, Any], expected: ToolCall | None) -> None:
    assert call_of_message(entry) == expected
