"""Conversations as token ids, by chat templates."""

import copy
from typing import Any

import pytest
from PIL import Image
from support.errors import refuses

from trinity_lightning.common.messages import Conversation
from trinity_lightning.common.pictures.picture import FIELD, Picture
from trinity_lightning.config.models import load_tokenizer
from trinity_lightning.errors import ConfigError
from trinity_lightning.explorer.models.chat import Rendered, check_shown, render_chat, render_text, renders_tools

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


def user(text: Any) -> dict[str, Any]:
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
        ({"role": "user", "content": [{"type": "image_url"}]}, "1 of them without a picture"),
        ({"role": "user", "content": [{"type": "video"}]}, "text"),
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


# Pictures

RED = Picture(Image.new("RGB", (2, 2), "red"))
PLACE = {"type": "image"}
# A template that takes a content of strings only, one of parts only, and one of both.
STRINGS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
ADDED = "{% for m in messages %}{{ '<' + m.role + '>' + m.content }}{% endfor %}"
_PARTS = "{% for p in m.content %}{{ '<image>' if p.type == 'image' else p.text }}{% endfor %}"
PARTS = "{% for m in messages %}<{{ m.role }}>" + _PARTS + "{% endfor %}"
BOTH = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
    + _PARTS
    + "{% endif %}{% endfor %}"
)
TEXTS = BOTH.replace("'<image>' if p.type == 'image' else p.text", "p.text")


def shown(*pictures: Picture, **options: Any) -> Conversation:
    messages = [{"role": "system", "content": "s"}, user("a<image>b"), {"role": "assistant", "content": "c"}]
    return Conversation(messages, **options).with_pictures(pictures or [RED])


@pytest.fixture(scope="module")
def vision_tokenizer() -> Any:
    return load_tokenizer("tiny_vision")


def with_template(tokenizer: Any, template: str) -> Any:
    other = copy.deepcopy(tokenizer)
    other.chat_template = template
    return other


@pytest.mark.parametrize("template", [PARTS, BOTH])
def test_pictures_have_places_in_the_text(template: str, vision_tokenizer: Any) -> None:
    tokenizer = with_template(vision_tokenizer, template)
    assert render_text(tokenizer, shown()) == Rendered((), "<system>s<user>a<image>b<assistant>c")
    assert render_text(tokenizer, [user("a")]).text == "<user>a"


@pytest.mark.parametrize("template", [STRINGS, ADDED, TEXTS])
def test_a_template_without_places_for_pictures_is_refused(template: str, vision_tokenizer: Any) -> None:
    tokenizer = with_template(vision_tokenizer, template)
    with refuses("model.name"):
        render_text(tokenizer, shown())
    assert render_text(tokenizer, [user("<image>")]).text == "<user><image>"


def test_a_text_model_is_refused_by_name_of_the_key(tokenizer: Any) -> None:
    with refuses("model.name"):
        render_chat(tokenizer, shown())


def test_as_many_pictures_as_places(vision_tokenizer: Any) -> None:
    empty = {"role": "user", "content": [PLACE]}
    for messages in ([empty], [*shown(), empty], Conversation([empty, *shown()])):
        with refuses(FIELD):
            render_text(vision_tokenizer, messages)


def test_pictures_that_a_template_leaves_out_of_a_role_are_refused_by_its_name() -> None:
    result = {"role": "tool", "content": [PLACE, {"type": "text", "text": "a"}]}
    check_shown("<image>a<image>", "<image>", Conversation([user([PLACE]), result]).with_pictures([RED, RED]))
    with refuses("model.name") as refused:
        check_shown("<image>a", "<image>", Conversation([user([PLACE]), result]).with_pictures([RED, RED]))
    assert "'tool'" in str(refused.value)
    check_shown("a", "<image>", Conversation([user([PLACE])]).with_pictures([RED]))  # the processor tells


def test_a_later_turn_with_a_picture(vision_tokenizer: Any) -> None:
    tokenizer, begun = vision_tokenizer, render_chat(vision_tokenizer, [user("hi")])
    later = Conversation([user("<image>and")]).with_pictures([RED])
    asked = "<|im_start|>user\n<image>and<|im_end|>\n<|im_start|>assistant\n"
    for answer, end in ((f"yo{END}", "\n"), ("yo", f"{END}\n")):
        so_far = [*begun, *tokenizer.encode(answer)]
        rendered = render_text(tokenizer, later, so_far=so_far)
        assert list(rendered.so_far) == so_far
        assert rendered.unwritten(tokenizer) == end + asked
        text = tokenizer.decode(rendered.token_ids(tokenizer))
        assert text == f"<|im_start|>user\nhi{END}\n<|im_start|>assistant\nyo{END}\n{asked}"


def test_a_tokenizer_that_reads_a_cut_text_otherwise_is_refused() -> None:
    class Merging:
        """Reads the letters at the beginning of a text as one token."""

        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            return [ord(text[0]), *(1000 + ord(letter) for letter in text[1:])]

        def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
            return "".join(chr(token % 1000) for token in tokens)

    assert Rendered((), "abc").unwritten(Merging()) == "abc"
    with refuses("model.name"):
        Rendered((), "abc", written=1).unwritten(Merging())


def test_calls_and_tools_as_text_stand_behind_pictures(vision_tokenizer: Any) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    messages = [
        {"role": "system", "content": [PLACE, {"type": "text", "text": "s"}]},
        user("hi"),
        {"role": "assistant", "content": [{"type": "text", "text": "so "}, PLACE], "tool_calls": [call]},
        user("and"),
    ]
    text = render_text(vision_tokenizer, Conversation(messages, [TOOL]).with_pictures([RED, RED])).text
    assert "system\n<image>s\n\nYou can call" in text
    assert "assistant\nso <image>\n<tool_call>" in text
