"""Tool calls in responses, and conversations as token ids."""

import copy
from typing import Any

import pytest

from trinity_lightning.config.model_files import load_tokenizer
from trinity_lightning.errors import ConfigError
from trinity_lightning.explorer.models.chat import render_chat, renders_tools
from trinity_lightning.explorer.models.tool_calls import (
    ToolCall,
    call_of_message,
    format_tool_call,
    parse_tool_calls,
)

# -- tool calls --------------------------------------------------------------------------------------------------------


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


# -- chat templates ----------------------------------------------------------------------------------------------------


END = "<|im_end|>"
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}

# As Qwen's: tools in the system message, calls as text, results as user messages.
WITH_TOOLS = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}"
    "[{{ call.function.name }} {{ call.function.arguments | tojson }}]{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer("tiny")


@pytest.fixture(scope="module")
def with_tools(tokenizer: Any) -> Any:
    other = copy.deepcopy(tokenizer)
    other.chat_template = WITH_TOOLS
    return other


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def test_a_conversation(tokenizer: Any) -> None:
    ids = render_chat(tokenizer, [user("hi")])
    assert tokenizer.decode(ids) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_it_goes_on_from_the_exact_tokens_which_the_end_token_closed(tokenizer: Any) -> None:
    so_far = [*render_chat(tokenizer, [user("hi")]), *tokenizer.encode(f"yo{END}")]
    ids = render_chat(tokenizer, [user("more")], so_far=so_far)
    assert ids[: len(so_far)] == so_far
    whole = [user("hi"), {"role": "assistant", "content": "yo"}, user("more")]
    assert ids == render_chat(tokenizer, whole)


def test_a_response_that_was_cut_off_is_closed(tokenizer: Any) -> None:
    so_far = [*render_chat(tokenizer, [user("hi")]), *tokenizer.encode("yo")]
    ids = render_chat(tokenizer, [user("more")], so_far=so_far)
    assert ids[: len(so_far)] == so_far
    assert tokenizer.decode(ids[len(so_far) :]) == f"{END}\n<|im_start|>user\nmore{END}\n<|im_start|>assistant\n"


def test_tokens_that_no_text_gives_stay_as_they_are(tokenizer: Any) -> None:
    so_far = [*render_chat(tokenizer, [user("hi")]), 0, 1, 2, 1, *tokenizer.encode(END)]
    assert render_chat(tokenizer, [user("more")], so_far=so_far)[: len(so_far)] == so_far


def test_a_system_message_of_the_template_comes_once() -> None:
    tokenizer: Any = load_tokenizer("smollm2")
    so_far = [*render_chat(tokenizer, [user("hi")]), *tokenizer.encode(f"yo{END}")]
    text = tokenizer.decode(render_chat(tokenizer, [user("more")], so_far=so_far))
    assert text.count("You are a helpful AI assistant") == 1
    assert text.endswith(
        "<|im_start|>assistant\nyo<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_template_with_tools_gets_them(with_tools: Any) -> None:
    assert renders_tools(with_tools)
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [user("hi"), {"role": "assistant", "content": None, "tool_calls": [call]}]
    text = with_tools.decode(render_chat(with_tools, [*messages, {"role": "tool", "content": "2"}], [TOOL]))
    assert '"name": "add"' in text
    assert '<|im_start|>assistant\n[add {"a": 1}]<|im_end|>\n<|im_start|>user\n2<|im_end|>' in text
    assert "<tool_call>" not in text


def test_tool_results_go_on_from_the_exact_tokens(with_tools: Any) -> None:
    so_far = [*render_chat(with_tools, [user("hi")], [TOOL]), *with_tools.encode(f"<tool_call>{END}")]
    ids = render_chat(with_tools, [{"role": "tool", "content": "2"}], [TOOL], so_far)
    assert ids[: len(so_far)] == so_far
    assert with_tools.decode(ids[len(so_far) :]) == f"\n<|im_start|>user\n2{END}\n<|im_start|>assistant\n"


def test_a_template_without_tools_is_told_of_them_in_a_system_message(tokenizer: Any) -> None:
    assert not renders_tools(tokenizer)
    text = tokenizer.decode(render_chat(tokenizer, [user("hi")], [TOOL]))
    assert text.startswith("<|im_start|>system\nYou can call these functions:\n{")
    assert '"name":"add"' in text
    assert '<tool_call>{"name": "...", "arguments": {...}}</tool_call><|im_end|>\n<|im_start|>user\nhi' in text
    brief = tokenizer.decode(render_chat(tokenizer, [{"role": "system", "content": "Be brief."}, user("hi")], [TOOL]))
    assert brief.startswith("<|im_start|>system\nBe brief.\n\nYou can call")
    assert brief.count("<|im_start|>system") == 1


def test_a_template_without_tools_has_the_calls_as_text(tokenizer: Any) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [user("hi"), {"role": "assistant", "content": "so", "tool_calls": [call]}, user("and")]
    text = tokenizer.decode(render_chat(tokenizer, messages))
    assert 'so\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>' in text


def test_content_in_parts(tokenizer: Any) -> None:
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    assert render_chat(tokenizer, [{"role": "user", "content": parts}]) == render_chat(tokenizer, [user("hi")])


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ({"role": "user", "content": [{"type": "image_url"}]}, "must be text"),
        ({"role": "user", "content": 3}, "must be text"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}, "without a name"),
    ],
)
def test_messages_that_are_refused(tokenizer: Any, message: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        render_chat(tokenizer, [message])


def test_a_template_that_refuses_says_why(tokenizer: Any) -> None:
    other = copy.deepcopy(tokenizer)
    other.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ConfigError, match=r"chat template refuses the conversation.*roles must alternate"):
        render_chat(other, [user("hi")])
    other.chat_template = "{{ messages[-1].content }}"
    with pytest.raises(ConfigError, match="drops earlier responses"):
        render_chat(other, [user("hi")], so_far=[5])
    other.chat_template = None
    with pytest.raises(ConfigError, match="chat template"):
        render_chat(other, [user("hi")])
