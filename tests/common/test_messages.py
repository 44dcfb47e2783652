"""Tasks, expert data and examples of a dataset are read by the same rules, and refused by the same rules."""

import base64
import copy
import json
import pickle
import re
from collections.abc import Callable
from inspect import signature
from io import BytesIO
from pathlib import Path
from typing import Any

import datasets
import pytest
from PIL import Image
from transformers import PreTrainedTokenizerBase

from trinity_lightning.buffer.dataset import Example
from trinity_lightning.buffer.offline import AnswerReader
from trinity_lightning.common.messages import (
    FILM_AND_SOUND,
    Conversation,
    check_media,
    check_roles,
    read_messages,
    warn_of_unread,
)
from trinity_lightning.common.pictures.parts import without_pictures
from trinity_lightning.common.pictures.picture import Picture
from trinity_lightning.config.chat_template import RENDERING_ARGUMENTS
from trinity_lightning.config.models import load_tokenizer
from trinity_lightning.config.taskset import TasksetConfig
from trinity_lightning.errors import ConfigError
from trinity_lightning.explorer.models.chat import render_chat
from trinity_lightning.explorer.task_source import TaskSource
from trinity_lightning.explorer.tasks.task import Task, messages_of, prompt_text_of
from trinity_lightning.explorer.tasks.taskset import Taskset


def dot(color: str) -> str:
    """A small picture as a data URL."""
    file = BytesIO()
    Image.new("RGB", (2, 2), color).save(file, "png")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


RED, BLUE = (Picture(Image.new("RGB", (2, 2), color)) for color in ("red", "blue"))
DOT = dot("red")
ASK = {"role": "user", "content": "Name a bird."}
TELL = {"role": "assistant", "content": "Wren."}
TOOL = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}}
TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}{{ mood }}{% for m in messages %}"
    "<{{ m.role }}>{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{{ ending }}{% endif %}"
)


@pytest.fixture
def tokenizer() -> Any:
    tokenizer = load_tokenizer("tiny")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def task_prompt(tokenizer: Any, entry: dict[str, Any], folder: Path) -> str:
    """The prompt of a taskset's only row; its conversations end before the answer."""
    entry = entry | {"messages": entry["messages"][:-1]}
    (folder / "tasks.jsonl").write_text(json.dumps(entry))
    taskset = Taskset.from_config(TasksetConfig(name="t", source="dataset", path=str(folder / "tasks.jsonl")))
    return tokenizer.decode(render_chat(tokenizer, messages_of(Task("simple", taskset[0]))))


def expert_prompt(tokenizer: Any, entry: dict[str, Any], folder: Path) -> str:
    (experience,) = AnswerReader(Taskset([entry]), tokenizer).read(1)
    return tokenizer.decode(experience.tokens[: experience.prompt_length])


def sft_prompt(tokenizer: Any, entry: dict[str, Any], folder: Path) -> str:
    example = Example(tokenizer, entry).response()
    return tokenizer.decode(example.tokens[: example.prompt_length])


def dpo_prompt(tokenizer: Any, entry: dict[str, Any], folder: Path) -> str:
    *asked, answer = entry["messages"]
    pair = {"prompt": asked, "chosen": [answer], "rejected": [{"role": "assistant", "content": "Bat."}]}
    columns = {name: value for name, value in entry.items() if name != "messages"}
    example = Example(tokenizer, pair | columns).pair()
    return tokenizer.decode(example.tokens)


READERS = pytest.mark.parametrize("prompt_of", [task_prompt, expert_prompt, sft_prompt, dpo_prompt])
Reader = Callable[[Any, dict[str, Any], Path], str]


@READERS
@pytest.mark.parametrize("as_json", [False, True])
def test_tools_and_variables_reach_the_template_of_every_reader(
    prompt_of: Reader, as_json: bool, tokenizer: Any, tmp_path: Path
) -> None:
    columns: dict[str, Any] = {"tools": [TOOL], "chat_template_kwargs": {"mood": "calm", "other": None}}
    if as_json:
        columns = {name: json.dumps(value) for name, value in columns.items()}
    prompt = prompt_of(tokenizer, {"messages": [ASK, TELL], "answer": None, **columns}, tmp_path)
    assert prompt == "[look]calm<user>Name a bird.<|im_end|><assistant>"


@READERS
def test_columns_that_are_null_or_empty_count_as_absent(prompt_of: Reader, tokenizer: Any, tmp_path: Path) -> None:
    absent = {"tools": None, "chat_template_kwargs": None, "images": [], "image": None, "audio": ""}
    prompt = prompt_of(tokenizer, {"messages": [ASK, TELL], **absent}, tmp_path)
    assert prompt == "<user>Name a bird.<|im_end|><assistant>"


@READERS
@pytest.mark.parametrize(
    "messages",
    [
        [{"from": "human", "value": "Name a bird."}, {"from": "gpt", "value": "Wren."}],
        [{"from": "user", "value": "Name a bird."}, {"from": "assistant", "value": "Wren."}],
        [{**ASK, "content": [{"type": "text", "text": "Name "}, {"type": "text", "text": "a bird.", "x": None}]}, TELL],
        [{**ASK, "name": None, "tool_calls": None}, TELL],
    ],
    ids=["sharegpt", "from and value", "parts", "nulls"],
)
def test_a_conversation_in_any_form_is_the_same(
    messages: Any, prompt_of: Reader, tokenizer: Any, tmp_path: Path
) -> None:
    assert prompt_of(tokenizer, {"messages": messages}, tmp_path) == "<user>Name a bird.<|im_end|><assistant>"


# An entry, and the turn or the column that its refusal names.
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no mapping": ({"messages": ["hello", TELL]}, "turn 0 of .*'hello'"),
    "no role": ({"messages": [{"content": "a"}, TELL]}, "turn 0 of .*role"),
    "a number as role": ({"messages": [{"role": 3, "content": "a"}, TELL]}, "turn 0 of .*role"),
    "no content": ({"messages": [ASK, {"role": "user"}, TELL]}, "turn 1 of .*content"),
    "content is null": ({"messages": [ASK, {"role": "user", "content": None}, TELL]}, "turn 1 of .*content"),
    "a number as content": ({"messages": [{"role": "user", "content": 5}, TELL]}, "turn 0 of .*5"),
    "a misspelt role": ({"messages": [{"role": "usr", "content": "a"}, TELL]}, "turn 0.*'usr'.*'user'"),
    "a film": ({"messages": [{"role": "user", "content": [{"type": "video"}]}, TELL]}, "turn 0 of .*'video'"),
    "videos": ({"messages": [ASK, TELL], "videos": [{"path": "a.mp4"}]}, "'videos'"),
    "audio": ({"messages": [ASK, TELL], "audio": {"array": [0.0]}}, "'audio'"),
    "tools that are names": ({"messages": [ASK, TELL], "tools": ["look"]}, "'tools'.*look"),
    "tools that are no JSON": ({"messages": [ASK, TELL], "tools": "[{'a': 1}]"}, "'tools'.*JSON"),
    "rendering itself": (
        {"messages": [ASK, TELL], "chat_template_kwargs": {"add_generation_prompt": False}},
        "chat_template_kwargs.*add_generation_prompt",
    ),
    "variables in a list": ({"messages": [ASK, TELL], "chat_template_kwargs": ["mood"]}, "chat_template_kwargs"),
}  # fmt: skip


# Entries with pictures, which tasks may have, and the column or turn that the other readers name.
OF_PICTURES: dict[str, tuple[dict[str, Any], str]] = {
    "a picture": (
        {"messages": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}, TELL]},
        "turn 0 of .*'image'|places for 1 pictures, and there are 0",
    ),
    "a picture by url": (
        {"messages": [ASK, {"role": "user", "content": [{"type": "image_url", "image_url": {"url": DOT}}]}, TELL]},
        "turn 1 of .*'image_url'|'images'",
    ),
    "images": ({"messages": [ASK, TELL], "images": [DOT]}, "'images'"),
    "image": ({"messages": [ASK, TELL], "image": DOT}, "'image'|'images'"),
}


@pytest.mark.parametrize("prompt_of", [expert_prompt, sft_prompt, dpo_prompt])
@pytest.mark.parametrize(("entry", "named"), OF_PICTURES.values(), ids=OF_PICTURES)
def test_only_tasks_have_pictures(
    entry: dict[str, Any], named: str, prompt_of: Reader, tokenizer: Any, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=named):
        prompt_of(tokenizer, entry, tmp_path)


def test_a_film_is_refused_by_what_else_is_trained_on() -> None:
    for columns, trained in ((FILM_AND_SOUND, "text and pictures are"), (("images", *FILM_AND_SOUND), "text is")):
        with pytest.raises(ConfigError, match=f"'video' is not empty, and only {trained} trained on"):
            check_media({"video": ["a.mp4"]}, columns)


@READERS
@pytest.mark.parametrize(("entry", "named"), BAD.values(), ids=BAD)
def test_what_is_no_conversation_of_text_is_refused_alike(
    entry: dict[str, Any], named: str, prompt_of: Reader, tokenizer: Any, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=named):
        prompt_of(tokenizer, entry, tmp_path)


@pytest.mark.parametrize("suffix", ["csv", "parquet", "jsonl"])
@pytest.mark.parametrize("column", ["prompt", "messages", "conversations"])
def test_a_conversation_may_be_json_text_in_a_column(suffix: str, column: str, tokenizer: Any, tmp_path: Path) -> None:
    rows = {column: [json.dumps([ASK])], "tools": [json.dumps([TOOL])], "answer": ["Wren"]}
    table, file = datasets.Dataset.from_dict(rows), tmp_path / f"tasks.{suffix}"
    {"csv": table.to_csv, "parquet": table.to_parquet, "jsonl": table.to_json}[suffix](file)
    taskset = Taskset.from_config(TasksetConfig(name="t", source="dataset", path=str(file)))
    prompt = tokenizer.decode(render_chat(tokenizer, messages_of(Task("simple", taskset[0]))))
    assert prompt == "[look]<user>Name a bird.<|im_end|><assistant>"


def test_text_that_only_looks_like_a_conversation_stays_text() -> None:
    for text in ("[1, 2]", "[INST] hi", '[{"a": 1}]', "[]", '{"role": "user"}', " plain"):
        assert read_messages("prompt", text) == text


@pytest.mark.parametrize("text", [str([ASK]), json.dumps([ASK])[:-1]])
def test_broken_text_of_a_conversation_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="prompt"):
        read_messages("prompt", text)


@pytest.mark.parametrize("made", [Example.response, Example.pair])
def test_a_prompt_of_examples_that_ends_with_the_assistant_is_refused(tokenizer: Any, made: Any) -> None:
    prompt, answer = [ASK, TELL], [TELL]
    entry = {"prompt": prompt, "completion": answer, "chosen": answer, "rejected": [TELL | {"content": "Owl."}]}
    with pytest.raises(ConfigError, match=r"prompt.*assistant.*answer_field"):
        made(Example(tokenizer, entry))
    assert made(Example(tokenizer, entry | {"prompt": [ASK]}))


@pytest.mark.parametrize("column", ["prompt", "messages"])
def test_a_task_that_ends_with_the_assistant_is_refused_by_its_row(column: str, tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text("".join(json.dumps({column: row}) + "\n" for row in ([ASK], [ASK, TELL], [ASK, TELL, ASK])))
    with pytest.raises(ConfigError, match=f"line 2 of .*{column}.*answer_field"):
        Taskset.from_config(TasksetConfig(name="t", source="dataset", path=str(file)))
    with pytest.raises(ConfigError, match=r"assistant.*answer_field"):
        messages_of(Task("simple", {column: [ASK, TELL]}))


def test_an_experts_last_turn_is_the_response_beside_an_answer_for_rewards(tokenizer: Any) -> None:
    (experience,) = AnswerReader(Taskset([{"messages": [ASK, TELL], "answer": "wren"}]), tokenizer).read(1)
    assert tokenizer.decode(experience.tokens[: experience.prompt_length]) == "<user>Name a bird.<|im_end|><assistant>"
    assert experience.response_text == "Wren."


def test_variables_of_the_run_hold_unless_an_entry_has_its_own(tokenizer: Any) -> None:
    variables = {"mood": "calm", "other": 1}
    plain, loud = {"messages": [ASK, TELL]}, {"messages": [ASK, TELL], "chat_template_kwargs": {"mood": "loud"}}
    for entry, mood in ((plain, "calm"), (loud, "loud")):
        (expert,) = AnswerReader(Taskset([entry]), tokenizer, template_variables=variables).read(1)
        example = Example(tokenizer, entry, template_variables=variables).response()
        task = Task("simple", {**entry, "messages": [ASK]}, chat_template_kwargs=variables)
        prompts: list[Any] = [read.tokens[: read.prompt_length] for read in (expert, example)]
        prompts.append(render_chat(tokenizer, messages_of(task)))
        expected = f"{mood}<user>Name a bird.<|im_end|><assistant>"
        assert [tokenizer.decode(prompt) for prompt in prompts] == [expected] * 3


def test_later_turns_are_rendered_with_the_same_variables(tokenizer: Any) -> None:
    so_far = [*render_chat(tokenizer, [ASK]), *tokenizer.encode("Wren.<|im_end|>")]
    ids = render_chat(tokenizer, Conversation([ASK], template_variables={"ending": "calm"}), so_far=so_far)
    assert tokenizer.decode(ids[len(so_far) :]) == "<user>Name a bird.<|im_end|><assistant>calm"


def test_a_role_that_the_chat_template_names_is_known(tokenizer: Any) -> None:
    robot = [{"role": "robot", "content": "x"}]
    check_roles("", robot, "{% if m.role == 'robot' %}")
    with pytest.raises(ConfigError, match="'robot'"):
        render_chat(tokenizer, robot)
    tokenizer.chat_template += "{# 'robot' #}"
    assert tokenizer.decode(render_chat(tokenizer, robot)) == "<robot>x<|im_end|><assistant>"


def test_a_conversation_is_copied_whole() -> None:
    conversation = Conversation([ASK], [TOOL], {"mood": "calm"}).with_pictures([RED])
    for copied in (
        copy.deepcopy(conversation),
        pickle.loads(pickle.dumps(conversation)),  # noqa: S301 - as Ray does
        Conversation.of(conversation),
    ):
        assert without_pictures(copied) == [
            ASK | {"content": [{"type": "image"}, {"type": "text", "text": ASK["content"]}]}
        ]
        assert (copied.tools, copied.template_variables) == ([TOOL], {"mood": "calm"})
        assert copied.pictures == [RED]


def test_every_argument_of_rendering_is_known() -> None:
    parameters = signature(PreTrainedTokenizerBase.apply_chat_template).parameters
    assert set(RENDERING_ARGUMENTS) >= parameters.keys()


@pytest.mark.parametrize(
    ("names", "template", "named"),
    [
        (
            {"enable_thinkin"},
            "{% if enable_thinking is defined %}a{% endif %}",
            "enable_thinkin,.*'enable_thinking'",
        ),
        ({"mood"}, "{% generation %}{{ x }}{% endgeneration %}", "mood"),
        ({"mood"}, "{% for m in messages %}{% continue %}{% endfor %}{{ mood }}", None),
        ({"mood"}, "{% if not mood is defined %}{% set mood = 1 %}{% endif %}{{ mood }}", None),
        ({"mood"}, "{% broken", None),
        ({"mood"}, None, None),
        ({"mood"}, {"default": "{{ x }}", "tool_use": "{{ y }}"}, None),
        (set(), "{{ x }}", None),
    ],
)
def test_a_variable_that_the_template_does_not_read_is_warned_of_once(
    names: set[str], template: Any, named: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        warn_of_unread(names, template)
    assert len(caplog.messages) == (named is not None)
    assert named is None or re.search(named, caplog.text)


def test_roles_of_tasks_are_checked_before_a_run_by_the_policys_template() -> None:
    taskset = Taskset([{"messages": [{"role": "robot", "content": "x"}]}], name="t")
    with pytest.raises(ConfigError, match=r"'t', entry 0: turn 0 of messages: .*'robot'"):
        TaskSource(taskset, "simple", chat_template=TEMPLATE)
    TaskSource(taskset, "simple", chat_template=TEMPLATE + "{# 'robot' #}")


def test_the_messages_before_the_last_have_their_own_pictures() -> None:
    shown = {"role": "user", "content": [{"type": "image"}]}
    conversation = Conversation([shown, TELL, shown]).with_pictures([RED, BLUE])
    before = conversation.without_last()
    assert (without_pictures(before), before.pictures) == ([shown, TELL], [RED])


def test_parts_with_pictures_stay_parts_where_they_are_allowed() -> None:
    parts = [{"type": "text", "text": "a", "image": None}, {"type": "text", "text": "b"}, {"type": "image", "x": None}]
    read = read_messages("messages", [{"role": "user", "content": parts}, TELL], pictures=True)
    assert read == [{"role": "user", "content": [{"type": "text", "text": "ab"}, {"type": "image"}]}, TELL]
    assert read == read_messages("messages", [{"role": "user", "content": tuple(parts)}, TELL], pictures=True)
    assert read_messages("m", json.dumps([{"role": "user", "content": parts[:2]}]), pictures=True)[0]["content"] == "ab"
    with pytest.raises(ConfigError, match="'image'"):
        read_messages("messages", [{"role": "user", "content": parts}])


@pytest.mark.parametrize(
    ("raw", "content", "pictures"),
    [
        (
            {"prompt": "a", "images": [RED, BLUE]},
            [{"type": "image"}] * 2 + [{"type": "text", "text": "a"}],
            [RED, BLUE],
        ),
        ({"prompt": "a", "image": DOT}, [{"type": "image"}, {"type": "text", "text": "a"}], [RED]),
        ({"messages": [{"role": "user", "content": [{"type": "image", "url": DOT}]}]}, [{"type": "image"}], [RED]),
        ({"prompt": "a <image>", "images": [], "image": None}, "a <image>", []),
    ],
)
def test_a_tasks_conversation_has_its_pictures(raw: dict[str, Any], content: Any, pictures: list[Picture]) -> None:
    conversation = messages_of(Task("simple", raw, workflow_args={"system_prompt": "be brief"}))
    assert without_pictures(conversation)[-1] == {"role": "user", "content": content}
    assert conversation.pictures == pictures
    assert [message["role"] for message in conversation] == (["system", "user"] if "prompt" in raw else ["user"])


def test_people_read_where_pictures_are() -> None:
    conversation = messages_of(Task("simple", {"prompt": "<image> or <image>?", "images": [RED, BLUE]}))
    assert prompt_text_of(conversation) == "[picture] or [picture]?"
    assert prompt_text_of([TELL, *conversation]) == "assistant: Wren.\nuser: [picture] or [picture]?"
