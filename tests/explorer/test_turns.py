"""Where turns begin and end: BOS once, and the end tokens of templates, tokenizers and generation_config.json."""

from typing import Any

import pytest
from support.chat_tokenizers import byte_tokenizer
from transformers import GenerationConfig

from trinity_lightning.explorer.models.chat import render_chat
from trinity_lightning.explorer.models.turns import QUESTION, encode_text, end_tokens, turn_end

OPEN = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
CHAT = "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}" + OPEN
MARKED = "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% endfor %}" + OPEN
PHI = CHAT.replace("{% endif %}", "{% else %}{{ eos_token }}{% endif %}")
PARTS = CHAT.replace("m.content", "m.content[0].text")
ROLES = ["<|user|>", "<|assistant|>", "<|tool|>"]


def names(tokenizer, token_ids):
    return set(tokenizer.convert_ids_to_tokens(sorted(token_ids)))


@pytest.mark.parametrize(
    ("template", "eos", "ends", "closing"),
    [
        (CHAT, "<|end|>", {"<|end|>"}, "<|end|>"),
        (CHAT, "<eos>", {"<|end|>", "<eos>"}, "<|end|>"),
        (CHAT.replace("'<|end|>'", "'\n<|stop|><|end|>\n'"), "<|end|>", {"<|end|>"}, "\n<|stop|><|end|>"),
        (PHI, "<eos>", {"<|end|>", "<eos>"}, "<|end|>"),
        (PARTS, "<eos>", {"<|end|>", "<eos>"}, "<|end|>"),
        (MARKED, "<eos>", {"<|user|>", "<|tool|>", "<eos>"}, "<eos>"),
        (MARKED.replace("'<|' + m.role + '|>'", "m.role + ': '"), "<eos>", {"<eos>"}, "<eos>"),
        ("{{ raise_exception('none') }}", "<eos>", {"<eos>"}, "<eos>"),
        (None, "<eos>", {"<eos>"}, "<eos>"),
    ],
    ids=[
        "own",
        "beside the tokenizer's",
        "several tokens",
        "a conversation's",
        "parts",
        "marker",
        "text",
        "error",
        "no",
    ],
)
def test_what_ends_a_turn(template, eos, ends, closing):
    tokenizer = byte_tokenizer(template, [*ROLES, "<|end|>", "<|stop|>"], eos)
    end = turn_end(tokenizer)
    assert names(tokenizer, end.tokens) == ends
    assert tokenizer.decode(list(end.closing)) == closing


def test_end_tokens_of_the_generation_config_count_and_may_close_a_turn():
    tokenizer: Any = byte_tokenizer(MARKED, ROLES, "<eos>")
    user, tool = tokenizer.convert_tokens_to_ids(["<|user|>", "<|tool|>"])
    end = turn_end(tokenizer, GenerationConfig(eos_token_id=[user, tool, 7]))
    assert end.tokens == {user, tool, 7, tokenizer.eos_token_id}
    assert (end.closing, end.closing_calls, end.markers) == ((user,), (tool,), {user, tool})
    assert end_tokens(tokenizer, GenerationConfig(eos_token_id=7)) == {user, tool, 7, tokenizer.eos_token_id}
    assert end_tokens(tokenizer, GenerationConfig()) == {user, tool, tokenizer.eos_token_id}


@pytest.mark.parametrize("after", ["", "</s>"])
def test_plain_text_begins_once_and_does_not_end(after):
    tokenizer = byte_tokenizer(None, [], "</s>", bos="<s>", adds=("<s>", after))
    plain = tokenizer.encode("Up?", add_special_tokens=False)
    assert encode_text(tokenizer, "Up?") == encode_text(tokenizer, "<s>Up?") == [tokenizer.bos_token_id, *plain]
    assert encode_text(tokenizer, "<s>Up?</s>") == [tokenizer.bos_token_id, *plain, tokenizer.eos_token_id]


def test_plain_text_of_a_tokenizer_that_adds_nothing_has_nothing_added():
    tokenizer = byte_tokenizer(None, [], "</s>", bos="<s>")
    assert encode_text(tokenizer, "Up?") == tokenizer.encode("Up?")


HARMONY = (
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}"
    "{% if m.role == 'assistant' and loop.last %}<|return|>{% else %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
LAST = MARKED.replace("m.content", "m.content + ('<|end|>' if loop.last and m.role == 'assistant' else '')")
LLAMA = (
    "{% for m in messages %}{% if m.role == 'user' %}<s>[{{ m.content }}]{% else %} {{ m.content }} </s>{% endif %}"
    "{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "written", "behind"),
    [
        (CHAT, "yo<|end|>", "<|user|>more<|end|><|assistant|>"),
        (CHAT, "yo<eos>", "<|user|>more<|end|><|assistant|>"),
        (CHAT, "yo<|stop|>", "<|user|>more<|end|><|assistant|>"),
        (CHAT, "yo", "<|end|><|user|>more<|end|><|assistant|>"),
        (
            CHAT.replace("'<|end|>'", "'<|return|><|end|>\n'"),
            "yo<|return|><|end|>",
            "\n<|user|>more<|return|><|end|>\n<|assistant|>",
        ),
        (PHI, "yo<|end|>", "<|user|>more<|end|><|assistant|>"),
        (MARKED, "yo<|user|>", "more<|assistant|>"),
        (MARKED, "yo<eos>", "<|user|>more<|assistant|>"),
        (MARKED, "yo", "<|user|>more<|assistant|>"),
        (HARMONY, "yo<|return|>", "<|start|>user<|message|>more<|end|><|start|>assistant"),
        (LLAMA, "yo </s>", "<s>[more]"),
        (LAST, "yo<|end|>", "<|user|>more<|assistant|>"),
    ],
)
def test_a_turn_ends_once_whichever_token_ended_it(template, written, behind):
    special = [*ROLES, "<|end|>", "<|stop|>", "<|return|>", "<|start|>", "<|message|>", "<s>", "</s>"]
    eos = {HARMONY: "<|return|>", LLAMA: "</s>"}.get(template, "<eos>")
    tokenizer = byte_tokenizer(template, special, eos)
    other = GenerationConfig(eos_token_id=tokenizer.convert_tokens_to_ids("<|stop|>"))
    so_far = [*render_chat(tokenizer, [QUESTION]), *tokenizer.encode(written, add_special_tokens=False)]
    whole = render_chat(tokenizer, [{"role": "user", "content": "more"}], so_far=so_far, generation_config=other)
    assert whole[: len(so_far)] == so_far
    assert tokenizer.decode(whole[len(so_far) :]) == behind


@pytest.mark.parametrize("end", ["<|user|>", "<|tool|>", "<eos>", ""])
def test_the_next_turn_has_its_marker_whichever_token_ended_the_last(end):
    tokenizer = byte_tokenizer(MARKED, ROLES, "<eos>")
    listed = GenerationConfig(eos_token_id=tokenizer.convert_tokens_to_ids(["<eos>", "<|user|>", "<|tool|>"]))
    so_far = [*render_chat(tokenizer, [QUESTION]), *tokenizer.encode(f"yo{end}", add_special_tokens=False)]
    whole = render_chat(tokenizer, [{"role": "user", "content": "more"}], so_far=so_far, generation_config=listed)
    assert whole[: len(so_far)] == so_far
    assert tokenizer.decode(whole[len(so_far) :]) == "<|user|>more<|assistant|>".removeprefix(end)
