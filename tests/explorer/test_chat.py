"""Conversations as token ids, by chat templates."""

import copy
from typing import Any

import pytest
from support.errors import refuses

from trinity_lightning.config.models import load_tokenizer
from trinity_lightning.errors import ConfigError
from trinity_lightning.explorer.models.chat import render_chat, renders_tools

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
    ("message", "named"),
    [
        ({"role": "user", "content": [{"type": "image_url"}]}, "text"),
        ({"role": "user", "content": 3}, "text"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}, "without a name"),
    ],
)
def test_messages_that_are_refused(tokenizer: Any, message: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        render_chat(tokenizer, [message])


def test_a_template_that_refuses_says_why(tokenizer: Any) -> None:
    other = copy.deepcopy(tokenizer)
    other.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ConfigError, match="roles must alternate"):
        render_chat(other, [user("hi")])
    other.chat_template = "{{ messages[-1].content }}"
    with refuses("model.name") as refused:
        render_chat(other, [user("hi")], so_far=[5])
    assert "earlier responses" in str(refused.value)
    other.chat_template = None
    with pytest.raises(ConfigError, match="chat template"):
        render_chat(other, [user("hi")])
