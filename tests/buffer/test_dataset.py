"""Entries in TRL's formats as experiences: what is the prompt, what is trained on, and what is refused."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.plugins.precision import Precision
from support.dataset import GENERATION, assistant, user

from trinity_lightning.buffer.dataset import Example, ExampleReader, read_examples
from trinity_lightning.buffer.held_out import loss_of
from trinity_lightning.common.experience import Experience
from trinity_lightning.common.optimizer_batch import OptimizerBatch
from trinity_lightning.config.models import load_tokenizer
from trinity_lightning.errors import ConfigError, ForeignPositionError
from trinity_lightning.explorer.models.chat import render_chat


@pytest.fixture
def tokenizer():
    return load_tokenizer("tiny")


def parts(tokenizer, example):
    """Prompt and what is trained on, as text."""
    trained = example.tokens[example.prompt_length :][example.action_mask]
    return tokenizer.decode(example.tokens[: example.prompt_length]), tokenizer.decode(trained)


def pair_parts(tokenizer, example):
    return tuple(tokenizer.decode(tokens) for tokens in (example.tokens, example.chosen, example.rejected))


HI = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ({"prompt": "2+2=", "chosen": "4", "rejected": "five"}, ("2+2=", "4<|im_end|>", "five<|im_end|>")),
        ({"prompt": "2+2=", "chosen": "4", "rejected": ""}, ("2+2=", "4<|im_end|>", "<|im_end|>")),
        ({"chosen": "Is it so? yes", "rejected": "Is it so? no"}, ("Is it so?", " yes<|im_end|>", " no<|im_end|>")),
        (
            {"prompt": [user("hi")], "chosen": [assistant("yo")], "rejected": [assistant("no")], "tools": None},
            (HI, "yo<|im_end|>", "no<|im_end|>"),
        ),
        (
            {"chosen": [user("hi"), assistant("yo")], "rejected": [user("hi"), assistant("no")]},
            (HI, "yo<|im_end|>", "no<|im_end|>"),
        ),
        (
            {"prompt": "hi", "chosen": [user("hi"), assistant("yo")], "rejected": [user("hi"), assistant("no")]},
            (HI, "yo<|im_end|>", "no<|im_end|>"),
        ),
    ],
    ids=[
        "text",
        "nothing rejected",
        "implicit prompt",
        "messages",
        "implicit prompt of messages",
        "prompt as text beside messages",
    ],
)
def test_pairs(entry, expected, tokenizer):
    example = Example(tokenizer, entry).pair()
    assert example.experience_type == "dpo"
    assert pair_parts(tokenizer, example) == expected


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ({"prompt": "2+2=", "completion": "4<|im_end|>", "messages": None}, ("2+2=", "4<|im_end|>")),
        ({"prompt": [user("hi")], "completion": [assistant("yo")]}, (HI, "yo<|im_end|>")),
        ({"messages": [user("hi"), assistant("yo")]}, (HI, "yo<|im_end|>")),
        (
            {"conversations": [{"from": "user", "value": "hi"}, {"from": "assistant", "value": "yo"}]},
            (HI, "yo<|im_end|>"),
        ),
        ({"messages": [user("hi"), assistant("a"), user("b"), assistant("c")]}, (HI, "a<|im_end|>c<|im_end|>")),
        ({"text": "once"}, ("o", "nce<|im_end|>")),
    ],
    ids=["completion", "completion of messages", "messages", "from and value", "several turns", "text"],
)
def test_responses(entry, expected, tokenizer):
    assert parts(tokenizer, Example(tokenizer, entry).response()) == expected


def test_marks_of_the_template_and_turns_that_are_found_are_the_same(tokenizer):
    entry = {"messages": [user("hi"), assistant("a"), user("b"), assistant("c d"), user("e")]}
    masked_example: Any = Example(tokenizer, entry).response()
    tokenizer.chat_template = GENERATION
    marked: Any = Example(tokenizer, entry).response()
    assert torch.equal(masked_example.tokens, marked.tokens)
    assert torch.equal(masked_example.action_mask, marked.action_mask)
    assert masked_example.prompt_length == marked.prompt_length


@pytest.mark.parametrize("as_json", [False, True])
def test_tools_and_calls_are_shown(as_json, tokenizer):
    tool = {"type": "function", "function": {"name": "add", "description": None, "parameters": {}}}
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": None}}}
    messages = [user("1+1"), {"role": "assistant", "content": None, "tool_calls": [call]}]
    messages += [{"role": "tool", "content": "2", "tool_calls": None}, assistant("2")]
    tools = '[{"type": "function", "function": {"name": "add", "parameters": {}}}]' if as_json else [tool]
    prompt, trained = parts(tokenizer, Example(tokenizer, {"messages": messages, "tools": tools}).response())
    assert '{"name":"add","parameters":{}}' in prompt
    assert trained == '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>2<|im_end|>'


@pytest.mark.parametrize(
    ("kind", "entry", "words"),
    [
        (
            Example.pair,
            {"prompt": "a", "completion": "b"},
            "learns from prompt, chosen and rejected, or from .* it has completion, ",
        ),
        (Example.pair, {"prompt": "a", "chosen": "b", "rejected": "b"}, "chosen and rejected are the same"),
        (Example.pair, {"prompt": "a", "chosen": [assistant("b")], "rejected": "c"}, "both text, or both lists"),
        (Example.pair, {"chosen": "b", "rejected": "c"}, "there is no prompt"),
        (Example.response, {"prompt": "a", "chosen": "b", "rejected": "c"}, "sft learns from prompt and completion"),
        (Example.response, {"messages": [user("a")]}, "no turn of the assistant .*roles: user"),
        (Example.response, {"messages": [user("a"), {"role": "tool", "content": "b"}]}, "roles: tool, user"),
        (Example.response, {"messages": [{"role": "usr", "content": "a"}, assistant("b")]}, "turn 0 .*mean 'user'"),
        (Example.response, {"messages": [user("a"), {"role": "user"}, assistant("b")]}, "turn 1 .*no content"),
        (Example.pair, {"chosen": [user("a")], "rejected": [{"role": "bot", "content": "b"}]}, "unknown role 'bot'"),
        (Example.response, {"messages": [{"content": "b"}]}, "a message is {role, content}; this one has no role"),
        (Example.response, {"prompt": "a", "completion": ""}, "completion is empty"),
        (Example.response, {"prompt": "a", "completion": None}, "it has prompt, no completion .missing or null"),
        (Example.response, {"messages": ["a"]}, "a message is {role, content}, not 'a'"),
        (Example.response, {"text": ""}, "text is empty"),
        (Example.response, {"messages": []}, "messages is empty"),
        (
            Example.response,
            {"messages": [user("a"), assistant("b"), user("c"), assistant("")]},
            "turn 3 of messages",
        ),
        (Example.response, {"prompt": [user("a")], "completion": [assistant("")]}, "turn 0 of completion is empty"),
        (Example.pair, {"prompt": "a", "chosen": "", "rejected": "b"}, "chosen is empty: there is nothing to learn"),
        (
            Example.pair,
            {"prompt": [user("a")], "chosen": [assistant("")], "rejected": [assistant("b")]},
            "turn 0 of chosen is empty",
        ),
        (Example.response, {"text": 5}, "column 'text' is 5: give text"),
        (Example.response, {"messages": "a"}, "column 'messages' is 'a': give a list of messages"),
        (Example.response, {"prompt": "a", "completion": 5}, "both text, or both lists .* not 'a' and 5"),
        (Example.pair, {"chosen": "a b", "rejected": 5}, "column 'rejected' is 5: give text or a list of messages"),
        (Example.response, {"prompt": [user("a")], "completion": []}, "completion is empty"),
        (Example.pair, {"chosen": [user("a"), assistant("b")], "rejected": [user("a")]}, "rejected is empty"),
        (Example.pair, {"chosen": [user("a")], "rejected": [user("a"), assistant("b")]}, "chosen is empty"),
        (
            Example.pair,
            {"prompt": "a", "chosen": [assistant("b")], "rejected": [assistant("c")]},
            "nothing before their answers that both chosen and rejected begin with: give the prompt",
        ),
        (
            Example.pair,
            {"chosen": [assistant("b")], "rejected": [assistant("b"), user("c"), assistant("d")]},
            "there is no prompt",
        ),
        (Example.pair, {"chosen": [user("a"), assistant("b")], "rejected": [user("a"), assistant("b")]}, "the same"),
        (Example.pair, {"chosen": "", "rejected": "b"}, "there is no prompt"),
        (
            Example.response,
            {"messages": [user("a"), assistant("b")], "chat_template_kwargs": {"tokenize": False}},
            "chat_template_kwargs has tokenize",
        ),
    ],
)
def test_what_is_no_example_is_refused_by_its_number(kind, entry, words, tokenizer):
    with pytest.raises(ConfigError, match=f"^data, entry 0: .*{words}"):
        read_examples([entry], lambda _: kind(Example(tokenizer, entry)), "data", 100, "refuse")


def test_a_role_that_the_chat_template_names_is_known(tokenizer):
    tokenizer.chat_template = tokenizer.chat_template.replace("{%", "{# 'robot' #}{%", 1)
    entry = {"messages": [user("a"), {"role": "robot", "content": "b"}, assistant("c")]}
    assert "robot\nb" in parts(tokenizer, Example(tokenizer, entry).response())[0]


def test_variables_of_the_chat_template_are_given_to_it(tokenizer):
    tokenizer.chat_template = "{{ mood }}" + tokenizer.chat_template
    entry = {"messages": [user("hi"), assistant("yo")], "chat_template_kwargs": {"mood": "calm", "other": None}}
    assert parts(tokenizer, Example(tokenizer, entry).response()) == ("calm" + HI, "yo<|im_end|>")


def test_a_tokenizer_without_an_end_token_adds_none(tokenizer):
    tokenizer.eos_token = None
    assert parts(tokenizer, Example(tokenizer, {"text": "once"}).response()) == ("o", "nce")


def test_entries_that_are_no_examples_are_counted_and_the_first_are_named(tokenizer):
    entries = [{"prompt": "2+2=", "completion": "4" if n < 2 else None} for n in range(9)]
    message = r"^data: 7 of 9 entries are refused\. entry 2, entry 3, .*, entry 6: .*no completion.* And 2 more\.$"
    with pytest.raises(ConfigError, match=message):
        read_examples(entries, lambda index: Example(tokenizer, entries[index]).response(), "data", 100, "refuse")


def test_a_template_that_changes_earlier_turns_is_warned_of_and_they_are_as_rollouts_have_them(tokenizer, caplog):
    before = parts(tokenizer, Example(tokenizer, {"messages": [user("a"), assistant("b"), user("c")]}).response())
    tokenizer.chat_template = "{{ messages | length }}" + tokenizer.chat_template
    example = Example(tokenizer, {"messages": [user("a"), assistant("b"), user("c"), assistant("d")]}).response()
    assert "earlier turns otherwise than the last one" in caplog.text
    first = render_chat(tokenizer, [user("a")])
    so_far = [*first, *tokenizer.encode("b<|im_end|>")]
    context = render_chat(tokenizer, [user("c")], so_far=so_far)
    assert example.tokens.tolist() == [*context, *tokenizer.encode("d<|im_end|>")]
    assert parts(tokenizer, example) == ("1" + before[0], "b<|im_end|>d<|im_end|>")


def test_a_checkpoint_of_an_earlier_version_goes_on_and_is_warned_of_where_tokens_differ(tokenizer, caplog):
    entries = [{"prompt": [user("hi")], "completion": [assistant(word)]} for word in ("a", "b", "c")]
    made = [Example(tokenizer, entry).response() for entry in entries]
    reader = ExampleReader(made, "data", seed=1)
    reader.read(2)
    state = reader.state_dict()
    earlier = {**state, "source": state["source"].split("-")[1]}
    ExampleReader(made, "data", seed=1).load_state_dict(earlier)
    assert not caplog.text
    other = ExampleReader(made[:2], "data", seed=1)
    with pytest.raises(ForeignPositionError, match=f"{state['source']}.*{other.state_dict()['source']}"):
        other.load_state_dict(state)
    other.load_state_dict(earlier)
    assert "of an earlier version, whose examples had other tokens" in caplog.text


# -- lengths -----------------------------------------------------------------------------------------------------------


def pairs(*lengths):
    """Pairs of 2 prompt tokens; the longer response has so many."""
    return [{"pair": Experience(tokens=[9, 9], chosen=[5], rejected=[6] * length)} for length in lengths]


def read(entries, overlong, most=5):
    return read_examples(entries, lambda index: next(iter(entries[index].values())), "data", most, overlong)


def test_what_is_too_long_is_refused_dropped_or_cut_off_and_counted(caplog):
    entries = [*pairs(3, 4, 1), {"full": Experience(tokens=[1] * 6, chosen=[5], rejected=[6])}]
    with pytest.raises(
        ConfigError, match=r"^data: 2 of 4 entries .* entry 1: 6 tokens, more than 5 .*overlong=drop or truncate"
    ):
        read(entries, "refuse")
    assert [e.eid.suffix for e in read(entries, "drop")] == ["0", "2"]
    assert "2 of 4 examples have more than 5 tokens; 0 of them are cut off" in caplog.text
    cut: Any = read(entries, "truncate")
    assert [(len(e.chosen), len(e.rejected)) for e in cut] == [(1, 3), (1, 3), (1, 1)]
    assert "2 of 4 examples have more than 5 tokens; 1 of them are cut off" in caplog.text
    with pytest.raises(ConfigError, match="data has no examples of at most 2 tokens"):
        read(pairs(1), "truncate", most=2)


def test_a_pair_whose_difference_is_cut_off_is_left_out(caplog):
    alike = [{"pair": Experience(tokens=[9, 9], chosen=[5, 6, 7, 8], rejected=[5, 6, 7])}, *pairs(1)]
    assert [e.eid.suffix for e in read(alike, "truncate")] == ["1"]
    assert "1 of 2 examples have more than 5 tokens; 0 of them are cut off" in caplog.text


def test_turns_beyond_the_end_are_cut_off():
    turns = Experience(tokens=[0, 1, 2, 3, 4, 5, 6, 7], prompt_length=2, action_mask=[1, 0, 0, 0, 1, 1])
    cut: Any = read([{"turns": turns}], "truncate")[0]
    assert (cut.tokens.tolist(), cut.action_mask.tolist()) == ([0, 1, 2, 3, 4], [True, False, False])


# -- their order -------------------------------------------------------------------------------------------------------


def examples(count=5):
    return [Experience(tokens=[9, 10 + index], prompt_length=1) for index in range(count)]


def seen(reader, count):
    return [int(e.tokens[1]) - 10 for e in reader.read(count)]


def test_each_pass_has_all_examples_in_an_order_of_its_own_that_a_resume_keeps():
    reader = ExampleReader(examples(), "data", seed=1)
    order = seen(reader, 3) + seen(reader, 4) + seen(reader, 3)  # a read goes on into the next pass
    assert sorted(order[:5]) == sorted(order[5:]) == list(range(5))
    assert order[:5] != order[5:]
    again = ExampleReader(examples(), "data", seed=1)
    first = seen(again, 4)
    resumed = ExampleReader(examples(), "data", seed=1)
    resumed.load_state_dict(again.state_dict())
    assert first + seen(resumed, 6) == order


def test_a_pass_draws_its_order_once(monkeypatch):
    drawn, generator = [], np.random.default_rng
    monkeypatch.setattr(np.random, "default_rng", lambda seed: drawn.append(seed) or generator(seed))
    seen(ExampleReader(examples(), "data", seed=31), 10)
    assert drawn == [[31, 0], [31, 1]]


def test_they_come_in_order_and_end_if_that_is_asked_for():
    reader = ExampleReader(examples(), "data", repeat=False)
    assert seen(reader, 3) + seen(reader, 3) + seen(reader, 3) == list(range(5))


def masked(*mask):
    return [Experience(tokens=[9, 10, 11], prompt_length=1, action_mask=mask)]


def test_the_position_in_equal_tokens_with_another_mask_is_refused():
    state = ExampleReader(masked(True, False), "data").state_dict()
    ExampleReader(masked(True, False), "data").load_state_dict(state)
    with pytest.raises(ForeignPositionError, match=r"^data: "):
        ExampleReader(masked(True, True), "data").load_state_dict(state)


@pytest.mark.parametrize("other", [ExampleReader(examples(4), "d", seed=1), ExampleReader(examples(), "d", seed=2)])
def test_the_position_in_other_examples_is_refused(other):
    with pytest.raises(ForeignPositionError, match=r"^data: "):
        ExampleReader(examples(), "data", seed=1).load_state_dict(other.state_dict())


def test_a_policy_whose_held_out_loss_fails_is_in_training_mode_again():
    model = torch.nn.Linear(1, 1)

    def passes():
        assert not model.training
        raise torch.OutOfMemoryError

    trainer = SimpleNamespace(precision_plugin=Precision())
    batch = OptimizerBatch.of([Experience(tokens=[1, 2], prompt_length=1)], explore_step=0)
    with pytest.raises(torch.OutOfMemoryError):
        loss_of(SimpleNamespace(policy=model, trainer=trainer, passes=passes, accumulate=None, shares=None), batch)
    assert model.training
