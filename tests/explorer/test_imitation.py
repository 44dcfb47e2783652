"""Conversations to imitate: a trained turn follows the prompt of rollouts, has the text of its entry, and ends."""

from typing import Any

import pytest
from support.chat_tokenizers import byte_tokenizer
from support.dataset import assistant, user
from support.errors import refuses
from transformers import GenerationConfig

from trinity_lightning.buffer.dataset import Example
from trinity_lightning.buffer.offline import AnswerReader
from trinity_lightning.explorer.models.chat import render_chat
from trinity_lightning.explorer.models.imitation import (
    CUT_BESIDE_CALLS,
    MARKED_OTHERWISE,
    OTHER_PROMPT,
    OTHER_TURNS,
    UNENDED,
    UNLISTED,
)
from trinity_lightning.explorer.tasks.taskset import Taskset

ASKED = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
OPENED = "{% if add_generation_prompt %}{{ '<|assistant|><think>\n' }}{% endif %}"
CHAT = "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>\n' }}{% endfor %}"
CUTTING = CHAT.replace("m.content", "m.content.split('</think>')[-1]")
MARKER = "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% endfor %}"
PLAIN = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
UNENDED_LAST = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}"
    "{% if m.role == 'user' or not loop.last %}<|end|>{% endif %}{% endfor %}"
)
MARKED = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' }}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}<|end|>{% endfor %}"
)
SPECIAL = ["<|user|>", "<|assistant|>", "<|system|>", "<|end|>"]
TWO = [user("Red?"), assistant("Rose."), user("Blue?"), assistant("Sky.")]
TOLD = "<think>\nThree pairs.\n</think>\nSix."


def tokenizer_of(template: str, eos: str = "<|end|>", **settings: Any) -> Any:
    return byte_tokenizer(template, SPECIAL, eos, plain=("<think>", "</think>", "<plan>"), **settings)


def trained(tokenizer: Any, generation_config: Any = None, **entry: Any) -> tuple[list[str], set[str]]:
    """The trained text, turn by turn or in one piece, and the warnings."""
    habits: set[str] = set()
    example = Example(tokenizer, entry, generation_config=generation_config, report=habits.add)
    made: Any = example.response()
    turns, mask = [""], [False, *made.action_mask.tolist()]
    for place, token in enumerate(made.tokens.tolist()[made.prompt_length :]):
        if mask[place + 1]:
            turns = turns if mask[place] or turns == [""] else [*turns, ""]
            turns[-1] += tokenizer.decode([token])
    return turns, habits


@pytest.mark.parametrize(
    ("template", "eos", "turns", "habits"),
    [
        (CHAT + ASKED, "<|end|>", ["Rose.<|end|>", "Sky.<|end|>"], set()),
        (CHAT + ASKED, "<eos>", ["Rose.<|end|>", "Sky.<|end|>"], set()),
        (MARKER + ASKED, "<eos>", ["Rose.<|user|>", "Sky.<eos>"], set()),
        (PLAIN, "<eos>", ["Rose.<eos>", "Sky.<eos>"], {UNENDED}),
        (PLAIN.replace("'\n' }}", "'\n\n\n' }}"), "<eos>", ["Rose.<eos>", "Sky.<eos>"], {UNENDED}),
        (UNENDED_LAST + ASKED, "<eos>", ["Rose.<|end|>", "Sky.<|end|>"], set()),
        (MARKED + ASKED, "<|end|>", ["Rose.<|end|>", "Sky.<|end|>"], set()),
        (MARKED + ASKED, "<eos>", ["Rose.<|end|>", "Sky.<|end|>"], set()),
        (MARKED.replace("<|end|>{% endfor", "{% endfor") + ASKED, "<eos>", ["Rose.<|user|>", "Sky.<eos>"], set()),
        (
            MARKED.replace("'|>' }}", "'|>\n' }}").replace("<|end|>{% endfor", "{{ '\n' }}<|end|>{{ '\n' }}{% endfor")
            + ASKED.replace("t|>", "t|>\n"),
            "<|end|>",
            ["Rose.\n<|end|>", "Sky.\n<|end|>"],
            set(),
        ),
    ],
    ids=[
        "own",
        "beside another",
        "next marker",
        "text",
        "text, newlines",
        "the last turn is not ended",
        "marked",
        "marked beside another",
        "marked, marker",
        "marked, newlines",
    ],
)
def test_every_turn_ends_with_an_end_token(template, eos, turns, habits):
    tokenizer = tokenizer_of(template, eos)
    assert trained(tokenizer, messages=TWO) == (turns, habits)
    assert trained(tokenizer, prompt=TWO[:3], completion=TWO[3:])[0] == turns[1:]
    pair: Any = Example(tokenizer, {"prompt": TWO[:1], "chosen": TWO[1:2], "rejected": [assistant("Tin.")]}).pair()
    assert [tokenizer.decode(part)[-5:] for part in (pair.chosen, pair.rejected)] == [turns[1][-5:]] * 2
    assert pair.tokens.tolist() == render_chat(tokenizer, TWO[:1])


@pytest.mark.parametrize("entry", [{"messages": TWO[1:]}, {"prompt": [], "completion": TWO[1:2]}])
def test_a_turn_that_follows_nothing_is_refused(entry):
    with refuses(None):
        Example(tokenizer_of(CHAT + ASKED), entry).response()


def test_turns_are_rendered_as_rollouts_of_several_turns_have_them():
    tokenizer = tokenizer_of(PLAIN, "<eos>")
    so_far = [*render_chat(tokenizer, TWO[:1]), *tokenizer.encode("Rose.<eos>")]
    context = render_chat(tokenizer, TWO[2:3], so_far=so_far)
    made: Any = Example(tokenizer, {"messages": TWO}).response()
    assert made.tokens.tolist() == [*context, *tokenizer.encode("Sky.<eos>")]


def test_a_marker_that_only_the_template_has_as_an_end_is_warned_of():
    tokenizer = tokenizer_of(MARKER + ASKED, "<eos>")
    user_marker = tokenizer.convert_tokens_to_ids("<|user|>")
    assert trained(tokenizer, GenerationConfig(eos_token_id=7), messages=TWO)[1] == {UNLISTED}
    listed = GenerationConfig(eos_token_id=[user_marker])
    assert trained(tokenizer, listed, messages=TWO) == (["Rose.<|user|>", "Sky.<|user|>"], set())


@pytest.mark.parametrize("template", [CUTTING + OPENED, CUTTING.replace("<|end|>\n", "") + OPENED, CUTTING + ASKED])
@pytest.mark.parametrize(
    "told",
    [TOLD, "<think>Three pairs.</think>Six.", "\n<think>\n\nThree pairs.\n</think>\n\nSix."],
)
def test_a_reasoning_that_the_template_cuts_is_trained_behind_the_prompt_of_rollouts(template, told):
    tokenizer = tokenizer_of(template)
    asked = [user("Legs?")]
    for entry in ({"messages": [*asked, assistant(told)]}, {"prompt": asked, "completion": [assistant(told)]}):
        made: Any = Example(tokenizer, entry).response()
        assert made.tokens.tolist()[: made.prompt_length] == render_chat(tokenizer, asked)
        whole = tokenizer.decode(made.tokens)
        assert whole.endswith("Six.<|end|>")
        assert whole.count("<think>") == 1
        assert "Three pairs." in whole
    other = assistant(told.replace("Three pairs", "A guess"))
    pair: Any = Example(tokenizer, {"prompt": asked, "chosen": [assistant(told)], "rejected": [other]}).pair()
    assert pair.tokens.tolist() == render_chat(tokenizer, asked)
    assert "A guess" in tokenizer.decode(pair.rejected)


def test_thoughts_of_the_models_own_marker_that_the_prompt_has_are_not_opened_twice():
    tokenizer = tokenizer_of(CUTTING.replace("</think>", "</plan>") + OPENED.replace("think", "plan"))
    made: Any = Example(tokenizer, {"messages": [user("a"), assistant("<plan>\nb\n</plan>c")]}).response()
    assert tokenizer.decode(made.tokens).endswith("<|assistant|><plan>\nb\n</plan>c<|end|>")


def test_reasoning_of_every_turn_is_trained_although_the_template_cuts_it_from_all():
    tokenizer = tokenizer_of(CUTTING + OPENED)
    turns, habits = trained(tokenizer, messages=[user("a"), assistant(TOLD), user("b"), assistant(TOLD)])
    assert turns == ["Three pairs.\n</think>\nSix.<|end|>"] * 2
    assert habits == {OTHER_TURNS}


def test_a_turn_without_thoughts_behind_a_prompt_that_opens_them_is_warned_of():
    tokenizer = tokenizer_of(CUTTING + OPENED)
    assert trained(tokenizer, messages=TWO) == (["Rose.<|end|>", "Sky.<|end|>"], {OTHER_PROMPT})


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking"])
def test_a_reasoning_of_its_own_field_is_trained_or_refused(field):
    message = assistant("Six.") | {field: "Three pairs."}
    with refuses("model.name") as refused:
        Example(tokenizer_of(CHAT + ASKED), {"messages": [user("Legs?"), message]}).response()
    assert f"'{field}'" in str(refused.value)
    assert trained(tokenizer_of(CUTTING + OPENED), messages=[user("Legs?"), message]) == (
        ["Three pairs.\n</think>\n\nSix.<|end|>"],
        set(),
    )
    reads = CHAT.replace("m.content", "('[' + m.thinking + ']' if m.thinking else '') + m.content")
    assert trained(tokenizer_of(reads + ASKED), messages=[user("Legs?"), message]) == (
        ["[Three pairs.]Six.<|end|>"],
        set(),
    )


def test_calls_that_the_template_leaves_out_are_refused_and_text_beside_them_is_warned_of():
    call = {"type": "function", "function": {"name": "look_up", "arguments": {"word": "ant"}}}
    message = assistant("Let me see.") | {"tool_calls": [call]}
    tool = {"type": "function", "function": {"name": "look_up", "parameters": {}}}
    shown = "{{ tools | tojson if tools else '' }}" + CHAT + ASKED
    with refuses("model.name") as refused:
        Example(tokenizer_of(shown), {"messages": [user("a"), message], "tools": [tool]}).response()
    assert "'tool_calls'" in str(refused.value)
    calling = shown.replace("m.content", "(m.tool_calls[0].function | tojson if m.tool_calls else m.content)")
    turns, habits = trained(tokenizer_of(calling), messages=[user("a"), message], tools=[tool])
    assert habits == {CUT_BESIDE_CALLS}
    assert turns == ['{"name": "look_up", "arguments": {"word": "ant"}}<|end|>']


def test_marks_of_some_turns_alone_are_kept_and_what_they_lack_is_warned_of():
    last = MARKED.replace("m.role == 'assistant'", "m.role == 'assistant' and loop.last") + ASKED
    assert trained(tokenizer_of(last), messages=TWO) == (["Sky.<|end|>"], set())
    cut = last.replace("{% generation %}{{ m.content }}", "{% generation %}{{ m.content.split('</think>')[-1] }}")
    entry = [user("a"), assistant("b"), user("c"), assistant(TOLD)]
    assert trained(tokenizer_of(cut), messages=entry) == (["\nSix.<|end|>"], {MARKED_OTHERWISE})
    whole = cut.replace(" and loop.last", "")
    assert trained(tokenizer_of(whole), messages=entry) == (["b<|end|>", f"{TOLD}<|end|>"], set())


@pytest.mark.parametrize("template", [CHAT + ASKED, "{{ bos_token }}" + CHAT + ASKED])
def test_a_conversation_begins_once(template):
    tokenizer = tokenizer_of(template.replace("'<|' + m.role + '|>' + ", ""), bos="<s>", adds=("<s>", ""))
    ids = render_chat(tokenizer, [user("<s>a")])
    assert ids.count(tokenizer.bos_token_id) == 1


def test_a_prompt_that_goes_on_in_the_responses_first_token_is_warned_of(tiny_pieces):
    habits: set[str] = set()
    Example(tiny_pieces, {"prompt": "a1", "completion": "2"}, report=habits.add).response()
    assert len(habits) == 1


@pytest.fixture
def tiny_pieces() -> Any:
    """A tokenizer that has a token for two characters."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE(vocab={"1": 0, "2": 1, "12": 2, "</s>": 3, "a": 4}, merges=[("1", "2")]))
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")


@pytest.mark.parametrize(
    "entry",
    [
        {"text": "<s>A kite flies.</s>"},
        {"text": "<s>A kite flies.</s>\n"},
        {"text": "A kite flies."},
        {"prompt": "<s>A kite", "completion": " flies.</s>"},
        {"prompt": "A kite", "completion": " flies."},
    ],
)
def test_plain_text_begins_once_and_ends_once(entry):
    tokenizer = byte_tokenizer(None, [], "</s>", bos="<s>", adds=("<s>", "</s>"))
    tokens = Example(tokenizer, entry).response().tokens.tolist()
    assert tokenizer.decode(tokens) == "<s>A kite flies.</s>"


def test_text_pairs_begin_and_end_once():
    tokenizer = byte_tokenizer(None, [], "</s>", bos="<s>", adds=("<s>", "</s>"))
    pair: Any = Example(tokenizer, {"prompt": "<s>Up?", "chosen": " Yes.", "rejected": " No.</s>"}).pair()
    parts = [tokenizer.decode(part) for part in (pair.tokens, pair.chosen, pair.rejected)]
    assert parts == ["<s>Up?", " Yes.</s>", " No.</s>"]


def test_expert_data_of_an_earlier_version_end_with_another_token_and_that_is_said(caplog):
    reader = AnswerReader(Taskset([{"prompt": "a", "answer": "b"}]), tokenizer_of(CHAT + ASKED, "<eos>"))
    (experience,) = reader.read(1)
    state = reader.state_dict()
    reader.load_state_dict(state)
    assert not caplog.text
    assert tokenizer_of(CHAT + ASKED, "<eos>").decode(experience.tokens).endswith("b<|end|>")
    reader.load_state_dict(state | {"source": "of an earlier version"})
    assert "ended with <eos>; they end with <|end|> now" in caplog.text
