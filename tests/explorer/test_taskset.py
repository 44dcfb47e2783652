import json
import os
import pickle
import random
import re
import subprocess
import sys
import zlib
from contextlib import nullcontext
from typing import Any

import datasets
import datasets.config
import numpy as np
import pytest
import reasoning_gym
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from support.errors import refuses

from trinity_lightning.common.pictures.picture import Picture
from trinity_lightning.config.taskset import TasksetConfig
from trinity_lightning.errors import ConfigError
from trinity_lightning.explorer.task_source import TaskSource
from trinity_lightning.explorer.tasks.dataset import dataset_entries, warn_of_trained_entries
from trinity_lightning.explorer.tasks.formatter import Formatter
from trinity_lightning.explorer.tasks.sources import BY_HASH_SEED, ReasoningGymEntries
from trinity_lightning.explorer.tasks.taskset import Taskset, TasksetMixture, check_tasksets
from trinity_lightning.explorer.workflows import SimpleWorkflow

ROWS = [{"question": f"q{index}", "solution": index, "level": "easy"} for index in range(5)]
NAMED = Formatter(prompt_field="question", answer_field="solution")


class Own(SimpleWorkflow):
    """May find the answer elsewhere."""


def dataset_taskset(path, split="train", **options):
    return Taskset(dataset_entries(str(path), split, None), **options)


def reasoning_gym_taskset(dataset, size, seed=0, *, name=None, order="shuffled", **arguments):
    entries = ReasoningGymEntries(dataset, size, seed, arguments)
    return Taskset(entries, name=name or dataset, order=order, seed=seed)


def numbered(size: int, **options) -> Taskset:
    return Taskset([{"prompt": f"p{index}"} for index in range(size)], **options)


def indices(batch: list[dict]) -> list[int]:
    return [task["task_index"]["index"] for task in batch]


@pytest.fixture(autouse=True)
def arrow_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "arrow")


# Order and cursor


def test_sequential_batches_follow_the_source_and_run_on_into_the_next_epoch():
    taskset = numbered(5, order="sequential")
    assert [indices(taskset.next_batch(3)) for _ in range(4)] == [[0, 1, 2], [3, 4, 0], [1, 2, 3], [4, 0, 1]]
    assert indices(taskset.next_batch(12)) == [2, 3, 4, 0, 1, 2, 3, 4, 0, 1, 2, 3]


@given(size=st.integers(1, 30), n=st.integers(1, 12), seed=st.integers(0, 2**40))
def test_each_shuffled_epoch_has_every_task_once(size, n, seed):
    taskset = numbered(size, seed=seed)
    handed_out = [index for _ in range(3 * size) for index in indices(taskset.next_batch(n))]
    for epoch in range(len(handed_out) // size):
        assert sorted(handed_out[epoch * size : (epoch + 1) * size]) == list(range(size))


def test_the_order_depends_on_seed_and_epoch_alone():
    first, second = (indices(numbered(50, seed=3).next_batch(150)) for _ in range(2))
    random.seed(1)
    assert first == second == indices(numbered(50, seed=3).next_batch(150))
    assert first != indices(numbered(50, seed=4).next_batch(150))
    assert first[:50] != first[50:100] != first[100:]


def test_batch_size_does_not_change_the_order():
    one, many = numbered(7, seed=2), numbered(7, seed=2)
    assert indices(many.next_batch(20)) == [index for _ in range(20) for index in indices(one.next_batch(1))]


def test_epochs_end_with_a_short_batch_and_then_none():
    taskset = numbered(5, epochs=2, order="sequential")
    assert [indices(taskset.next_batch(4)) for _ in range(4)] == [[0, 1, 2, 3], [4, 0, 1, 2], [3, 4], []]


@given(size=st.integers(1, 20), before=st.lists(st.integers(1, 9), max_size=5), n=st.integers(1, 30))
def test_a_restored_cursor_goes_on_where_the_saved_one_stood(size, before, n):
    saved = numbered(size, seed=1)
    for count in before:
        saved.next_batch(count)
    state = json.loads(json.dumps(saved.state_dict()))
    restored = numbered(size, seed=1)
    restored.load_state_dict(state)
    assert restored.next_batch(n) == saved.next_batch(n)
    assert restored.state_dict() == saved.state_dict()


@pytest.mark.parametrize(
    "other",
    [
        numbered(6),
        numbered(5, seed=1),
        numbered(5, name="b"),
        numbered(5, order="sequential"),
        Taskset([{"prompt": f"q{index}"} for index in range(5)]),
    ],
)
def test_the_state_of_another_taskset_is_refused(other):
    taskset = numbered(5)
    taskset.next_batch(3)
    with refuses("taskset"):
        other.load_state_dict(taskset.state_dict())
    assert other.state_dict()["position"] == 0


def write_rows(file, suffix, changed=()):
    rows = [{"prompt": f"p{-1 if index in changed else index}", "answer": str(index)} for index in range(1000)]
    table = datasets.Dataset.from_list(rows)
    {"jsonl": table.to_json, "parquet": table.to_parquet, "csv": table.to_csv}[suffix](file)
    return Taskset.from_config(TasksetConfig(name="t", source="dataset", path=str(file), seed=3))


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet"])
def test_a_change_of_any_entry_that_was_tried_is_noticed_and_others_may_change(suffix, tmp_path):
    saved = write_rows(tmp_path / f"tasks.{suffix}", suffix)
    tried = indices([task for _ in range(5) for task in saved.next_batch(8)])
    state = saved.state_dict()
    untried = set(range(1000)) - set(tried)
    resumed = write_rows(tmp_path / f"tasks.{suffix}", suffix, changed=untried)
    resumed.load_state_dict(state)
    assert indices(resumed.next_batch(3)) == indices(saved.next_batch(3))
    with refuses("taskset"):
        write_rows(tmp_path / f"tasks.{suffix}", suffix, changed={tried[17]}).load_state_dict(state)


def test_an_entry_that_gave_nothing_may_be_repaired(tmp_path):
    saved = write_rows(tmp_path / "tasks.jsonl", "jsonl")
    bad, good, *_ = indices(saved.next_batch(8))
    saved.forget(bad)
    write_rows(tmp_path / "tasks.jsonl", "jsonl", changed={bad}).load_state_dict(saved.state_dict())
    with refuses("taskset"):
        write_rows(tmp_path / "tasks.jsonl", "jsonl", changed={bad, good}).load_state_dict(saved.state_dict())


def test_a_checkpoint_that_does_not_say_what_was_tried_is_gone_on_with_and_warned_of(tmp_path, caplog):
    state = write_rows(tmp_path / "tasks.jsonl", "jsonl").state_dict()
    del state["seen"]
    resumed = write_rows(tmp_path / "tasks.jsonl", "jsonl", changed={777})
    resumed.load_state_dict(state | {"position": 3, "content": 12345})
    assert ["is of an earlier version" in message for message in caplog.messages] == [True]
    assert resumed.state_dict()["position"] == 3


def test_what_is_no_state_is_refused():
    with pytest.raises(ConfigError):
        numbered(5).load_state_dict({"cursor": 3})


def test_bad_entries_are_refused_together_and_the_first_five_are_named(tmp_path):
    file = tmp_path / "tasks.jsonl"
    bad = {120: "", 150: None, 151: 3, 160: "", 170: "", 199: ""}
    file.write_text("".join(json.dumps({"prompt": bad.get(index, f"p{index}")}) + "\n" for index in range(200)))
    with refuses("taskset.prompt_field") as refused:
        Taskset.from_config(TasksetConfig(name="sums", source="dataset", path=str(file)))
    text = str(refused.value)
    assert text.startswith("taskset 'sums': 6 of 200 entries are refused. line 121 of ")
    assert sorted(int(line) for line in re.findall(r"line (\d+) of", text)) == [121, 151, 152, 161, 171]
    assert "field 'prompt' holds int" in text
    assert text.endswith("And 1 more.")


def test_one_bad_entry_is_named():
    with refuses("tasksets.sums.prompt_field") as refused:
        Taskset([{"prompt": "a"}, {"prompt": ""}], name="sums", key="tasksets.sums")
    assert "taskset 'sums', entry 1" in str(refused.value)


def test_only_the_first_of_generated_entries_is_looked_at():
    class Generated(list):
        generated = True

    Taskset(Generated([{"prompt": "a"}, {"prompt": ""}]))
    with refuses("taskset.prompt_field") as refused:
        Taskset(Generated([{"prompt": ""}, {"prompt": "a"}]))
    assert "entry 0" in str(refused.value)


def test_of_generated_entries_a_resumed_run_compares_64_at_most():
    class Generated(list[Any]):
        generated = True
        asked = 0

        def __getitem__(self, index: Any) -> Any:
            self.asked += 1
            return {"prompt": f"{index}"}

    entries = Generated([None] * 127)
    taskset = Taskset(entries, order="sequential")
    taskset.next_batch(127)
    again = Taskset(resumed := Generated([None] * 127), order="sequential")
    before = resumed.asked
    again.load_state_dict(taskset.state_dict())
    assert 32 <= (resumed.asked - before) / 2 <= 64  # each is made for its task, and for its checksum


@pytest.mark.parametrize(
    ("entries", "options", "key"),
    [
        ([], {}, "taskset"),
        ([], {"data_key": "taskset.path"}, "taskset.path"),
        ([{"prompt": "a"}], {"order": "shufled"}, "taskset.order"),
        ([{"prompt": "a"}], {"epochs": 0}, None),  # no key: an evaluation goes through its tasks once
        ([{"prompt": "a"}], {"seed": -1}, "taskset.seed"),
        ([{"prompt": "a"}], {"seed": -1, "key": "eval_tasksets.sums"}, "eval_tasksets.sums.seed"),
    ],
)
def test_a_wrong_taskset_says_so_at_once(entries, options, key):
    with refuses(key):
        Taskset(entries, **options)


@pytest.mark.parametrize(
    ("workflow", "reward", "refused"),
    [
        ("math", None, "'math'"),
        ("simple", "accuracy", "'accuracy'"),
        ("simple", ["format", "exact_match"], "'exact_match'"),
        ("simple", "last_number", "'last_number'"),
        ("simple", "format", None),
        ("simple", None, None),
        (Own, "math", None),
    ],
)
def test_entries_without_the_answer_that_the_reward_needs_are_refused(workflow, reward, refused):
    """At the start, and not by every rollout."""
    entries = [{"prompt": "1 + 1 =", "solution": 2}]
    with refuses("taskset.answer_field") if refused else nullcontext() as error:
        TaskSource(Taskset(entries), workflow, reward)
    assert error is None or f"reward function {refused}" in str(error.value)
    TaskSource(Taskset(entries, formatter=Formatter(answer_field="solution")), workflow, reward)


def test_every_entry_needs_the_answer_and_what_a_reward_checks_itself():
    def positive(response, task):
        return 1.0

    def check_task(raw_task):
        if raw_task["answer"] < 0:
            raise ConfigError("the answer is below 0.")

    vars(positive)["check_task"] = check_task
    taskset = Taskset([{"prompt": "a", "answer": answer} for answer in (1, None, 2, -3)], name="sums")
    with refuses("taskset.answer_field") as refused:
        TaskSource(taskset, "simple", "exact_match")
    assert "taskset 'sums', entry 1" in str(refused.value)
    taskset = Taskset([{"prompt": "a", "answer": answer} for answer in (1, 4, 2, -3)], name="sums", data_key="it.path")
    with refuses("it.path") as refused:
        TaskSource(taskset, Own, positive)
    assert "taskset 'sums', entry 3: the answer is below 0" in str(refused.value)


def test_answers_that_a_reward_cannot_read_are_refused_by_their_rows(tmp_path):
    file = tmp_path / "maths.jsonl"
    rows = [{"prompt": "a", "reward_model": {"style": "rule", "ground_truth": answer}} for answer in ("1", ["2", 3])]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def taskset(**fields):
        return Taskset.from_config(TasksetConfig(name="maths", source="dataset", path=str(file), **fields))

    for fields in ({}, {"answer_field": "reward_model"}):
        with refuses("taskset.answer_field") as refused:
            TaskSource(taskset(**fields), "math")
        named = r"'maths'.*line 1 of .*line 2 of .*answer_field=reward_model\.ground_truth"
        assert re.search(named, str(refused.value))
    for wrong in ("ground_truth", "reward_model.ground_truht"):
        with refuses("taskset.answer_field") as refused:
            taskset(answer_field=wrong)
        assert "Did you mean 'reward_model.ground_truth'" in str(refused.value)
    tasks = TaskSource(taskset(answer_field="reward_model.ground_truth"), "math")
    assert [raw["answer"] for raw in tasks.taskset] == ["1", ["2", 3]]
    with refuses("taskset.path") as refused:
        TaskSource(taskset(), "simple", "countdown")
    assert "line 1 of" in str(refused.value)


def test_prompts_and_conversations_are_found_within_a_field(tmp_path):
    entry = {"extra": {"question": "1 + 1 =", "chat": [{"role": "user", "content": "Hi"}]}, "prompt": "other"}
    assert Formatter(prompt_field="extra.question")(entry)["prompt"] == "1 + 1 ="
    assert Formatter(messages_field="extra.chat")(entry)["messages"] == [{"role": "user", "content": "Hi"}]
    assert Formatter(answer_field="a.b")({"prompt": "q", "a.b": 1, "a": {"b": 2}})["answer"] == 1


def test_every_taskset_of_a_mixture_needs_answers():
    tasksets = [Taskset.addition(), numbered(2, name="without")]
    with refuses("taskset.answer_field") as refused:
        TaskSource(TasksetMixture(tasksets, [1, 1]), "math")
    assert "taskset 'without': 2 of 2 entries" in str(refused.value)


@pytest.mark.parametrize(
    ("trained", "evaluated", "both"),
    [
        ("train[:4]", "train[60%:]", "1 of 2 tasks"),
        ("train[:1] + train[4:]", "train", "2 of 5 tasks"),
        ("train[:4]", "train[4:]", None),
    ],
)
def test_tasks_that_are_trained_and_evaluated_on_are_counted(trained, evaluated, both, tmp_path, caplog):
    file = tmp_path / "maths.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    held_out, other = (
        TasksetConfig(name=name, source="dataset", path=str(file), split=split)
        for name, split in (("held_out", evaluated), ("mine", trained))
    )
    warn_of_trained_entries([TasksetConfig(name="sums"), other], [TasksetConfig(name="sums"), held_out])
    warning = f"{both} of eval_tasksets 'held_out' (split {evaluated}) are trained on, too (split {trained})."
    assert caplog.messages == ([] if both is None else [warning])


def test_a_batch_of_nothing_is_refused():
    with refuses(None):
        numbered(2).next_batch(0)


# Formatter


def test_a_raw_task_has_the_three_fields_and_keeps_the_others():
    taskset = Taskset(ROWS, name="maths", formatter=NAMED)
    expected = {"prompt": "q2", "answer": 2, "question": "q2", "solution": 2, "level": "easy"}
    assert taskset[2] == expected | {"task_index": {"taskset_id": "maths", "index": 2}}
    assert taskset[-1]["prompt"] == "q4"
    assert indices(list(taskset)) == [0, 1, 2, 3, 4]
    with pytest.raises(IndexError):
        taskset[5]


def test_raw_tasks_are_new_dicts():
    rows = [{"prompt": "a", "messages": [{"role": "user", "content": "b"}]}]
    Taskset(rows)[0]["prompt"] = "changed"
    assert rows == [{"prompt": "a", "messages": [{"role": "user", "content": "b"}]}]


CHAT = [{"role": "user", "content": "hello"}]
PLACE = {"type": "image"}
SYSTEM = {"role": "system", "content": "be brief"}


@pytest.mark.parametrize(
    ("formatter", "entry", "expected"),
    [
        (Formatter(), {"messages": CHAT}, {"messages": CHAT}),
        (Formatter(), {"prompt": CHAT}, {"messages": CHAT}),
        (Formatter(), {"prompt": "a", "messages": CHAT}, {"prompt": "a"}),
        (Formatter(), {"prompt": None, "messages": CHAT}, {"messages": CHAT}),
        (Formatter(messages_field="chat"), {"prompt": "a", "chat": CHAT}, {"messages": CHAT, "chat": CHAT}),
        (Formatter(), {"prompt": "a", "answer": None}, {"prompt": "a"}),
        (Formatter(), {"prompt": "a", "answer": 0}, {"prompt": "a", "answer": 0}),
        (
            Formatter(images_field="x"),
            {"prompt": "a", "x": None, "images": [3], "image": "b"},
            {"prompt": "a", "x": None},
        ),
        (
            Formatter(system_prompt="be brief"),
            {"prompt": "a"},
            {"prompt": "a", "messages": [SYSTEM, {"role": "user", "content": "a"}]},
        ),
        (Formatter(system_prompt="be brief"), {"messages": CHAT}, {"messages": [SYSTEM, *CHAT]}),
        (
            Formatter(system_prompt="be brief"),
            {"messages": [{"role": "system", "content": "old"}, *CHAT]},
            {"messages": [SYSTEM, *CHAT]},
        ),
    ],
)
def test_formatter(formatter, entry, expected):
    assert formatter(entry) == expected


@pytest.mark.parametrize(
    ("formatter", "entry", "key", "message"),
    [
        (Formatter(prompt_field="qestion"), {"question": "a"}, "prompt_field", "Did you mean 'question'"),
        (Formatter(prompt_field="qestion"), {"question": "a", "prompt": "b"}, "prompt_field", "mean 'question'"),
        (Formatter(answer_field="answr"), {"prompt": "a", "answer": "b"}, "answer_field", "Did you mean 'answer'"),
        (Formatter(messages_field="chats"), {"prompt": "a", "chat": CHAT}, "messages_field", "Did you mean 'chat'"),
        (Formatter(), {"promt": "a"}, "prompt_field", "prompt_field=promt, .* messages_field=NAME"),
        (Formatter(), {"prompt": 3}, "prompt_field", "field 'prompt' holds int"),
        (Formatter(), {"messages": []}, "messages_field", ""),
        (Formatter(), {"messages": ["hello"]}, "path", "turn 0 of messages: a message is {role, content}"),
        (Formatter(), {"prompt": "a", "images": ["b.png"]}, "path", "b.png.*no such file"),
        (
            Formatter(images_field="photo"),
            {"prompt": "a", "photos": ["b.png"]},
            "images_field",
            "Did you mean 'photos'",
        ),
        (Formatter(), {"prompt": "a", "images": [3]}, "images_field", "int"),
        (
            Formatter(),
            {"messages": [{"role": "user", "content": [PLACE]}]},
            "images_field",
            "1 pictures, .* 0 pictures",
        ),
        (Formatter(), {"messages": CHAT, "video": "a.mp4"}, "path", "column 'video'"),
        (Formatter(), {"prompt": "a", "chat_template_kwargs": 3}, "path", "chat_template_kwargs is 3"),
        (Formatter(), ["prompt"], "source", ""),
    ],
)
def test_a_wrong_field_is_named_with_the_nearest(formatter, entry, key, message):
    with refuses(f"tasksets.sums.{key}") as refused:
        Taskset([entry], formatter=formatter, key="tasksets.sums", data_key="tasksets.sums.path")
    assert re.search(message, str(refused.value))


# Pictures


def paint(file, color="red", size=(4, 4)):
    file.parent.mkdir(exist_ok=True)
    Image.new("RGB", size, color).save(file)
    return file


def rows_in(folder, *rows, name="tasks.jsonl", **options):
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = str(folder / name)
    return Taskset.from_config(TasksetConfig(name="t", source="dataset", path=path, order="sequential", **options))


def colors(task):
    names = {(255, 0, 0): "red", (0, 0, 255): "blue"}
    return [names[picture.image.getpixel((0, 0))] for picture in task["images"]]


@pytest.mark.parametrize(
    ("entry", "options", "expected"),
    [
        ({"prompt": "a", "images": ["p/red.png", "blue.png"]}, {}, {"prompt": "a"}),
        ({"prompt": "a", "images": [], "image": "p/red.png"}, {}, {"prompt": "a"}),
        ({"prompt": "a", "photo": "p/red.png"}, {"images_field": "photo"}, {"prompt": "a"}),
        ({"prompt": "a", "x": {"y": ["blue.png"]}}, {"images_field": "x.y"}, {"prompt": "a", "x": {"y": ["blue.png"]}}),
        (
            {"prompt": "<image>a", "images": "p/red.png"},
            {"system_prompt": "be brief"},
            {
                "prompt": "<image>a",
                "messages": [SYSTEM, {"role": "user", "content": [PLACE, {"type": "text", "text": "a"}]}],
            },
        ),
        (
            {"messages": [{"role": "user", "content": [PLACE | {"image": "blue.png"}, PLACE]}], "image": "p/red.png"},
            {},
            {"messages": [{"role": "user", "content": [PLACE, PLACE]}]},
        ),
    ],
)
def test_pictures_lie_beside_the_data(entry, options, expected, tmp_path):
    for name in ("p/red", "blue"):
        paint(tmp_path / f"{name}.png", name.split("/")[-1])
    taskset = rows_in(tmp_path, entry, **options)
    task = taskset[0]
    assert {name: value for name, value in task.items() if name not in ("images", "task_index")} == expected
    assert colors(task) == re.findall("red|blue", json.dumps(entry))
    assert taskset.most_pictures == len(task["images"])


def test_pictures_lie_beside_the_file_of_their_row(tmp_path):
    paint(tmp_path / "data" / "a.png", "blue")
    rows_in(tmp_path / "data", {"prompt": "a", "image": "a.png"}, name="train.jsonl")
    taskset = Taskset.from_config(TasksetConfig(name="t", source="dataset", path=str(tmp_path)))
    assert colors(taskset[0]) == ["blue"]


def test_entries_of_text_are_as_before(tmp_path):
    taskset = rows_in(tmp_path, {"prompt": "a <image>", "images": None}, {"prompt": "b", "images": []})
    assert taskset[0] == {"prompt": "a <image>", "images": None, "task_index": {"taskset_id": "t", "index": 0}}
    assert taskset[1] == {"prompt": "b", "images": [], "task_index": {"taskset_id": "t", "index": 1}}
    assert taskset.most_pictures == 0


def test_bad_pictures_are_refused_by_their_rows(tmp_path):
    paint(tmp_path / "a.png")
    (tmp_path / "broken.png").write_bytes(b"\x89PNG")
    rows = [{"prompt": "a", "image": name} for name in ("a.png", "b.png", "a.png", "broken.png", "http://x.org/a.png")]
    with refuses("taskset.path") as refused:
        rows_in(tmp_path, *rows)
    for named in ("3 of 5", "line 2 of", "b.png", "line 4 of", "broken.png", "line 5 of", "http://x.org/a.png"):
        assert named in str(refused.value)
    places = {"messages": [{"role": "user", "content": [PLACE, PLACE]}], "image": "a.png"}
    with refuses("taskset.images_field") as refused:
        rows_in(tmp_path, {"prompt": "a"}, places)
    assert "line 2 of" in str(refused.value)


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("stored", [False, True])
def test_pictures_of_datasets_stay_files_until_they_are_looked_at(many, stored, tmp_path):
    """Decoding each of them whenever entries are checked would take hours for a large dataset."""
    content = paint(tmp_path / "a.png").read_bytes()
    begin = content.index(b"IDAT") + 4
    end = begin + int.from_bytes(content[begin - 8 : begin - 4])
    chunk = b"IDAT" + bytes(8) + content[begin + 8 : end]
    # Its checksum is right, so that the damage is found by decoding alone.
    damaged = content[: begin - 4] + chunk + zlib.crc32(chunk).to_bytes(4) + content[end + 4 :]
    values = [{"bytes": content, "path": None}, {"bytes": damaged, "path": None}]
    feature = datasets.Sequence(datasets.Image()) if many else datasets.Image()
    features = datasets.Features({"prompt": datasets.Value("string"), "images": feature})
    columns = {"prompt": ["a", "b"], "images": [[value] for value in values] if many else values}
    entries = datasets.Dataset.from_dict(columns, features=features)
    if stored:
        entries.to_parquet(tmp_path / "tasks.parquet")
        config = TasksetConfig(name="t", source="dataset", path=str(tmp_path / "tasks.parquet"), order="sequential")
        taskset = Taskset.from_config(config)
    else:
        taskset = Taskset(entries, order="sequential")
    whole, broken = taskset.next_batch(2)
    assert (whole["images"][0].source, broken["images"][0].source) == (content, damaged)
    assert colors(whole) == ["red"]
    with pytest.raises(ConfigError, match="cannot be read"):
        colors(broken)


def test_decoded_pictures_of_a_dataset_with_a_transform_are_taken():
    entries = datasets.Dataset.from_dict({"x": [1]}).with_transform(
        lambda rows: {"prompt": ["a"] * len(rows["x"]), "image": [Image.new("RGB", (3, 3), "blue")] * len(rows["x"])}
    )
    assert colors(Taskset(entries)[0]) == ["blue"]


def test_pictures_are_not_decoded_before_they_are_looked_at(tmp_path):
    paint(tmp_path / "a.png")
    (picture,) = rows_in(tmp_path, {"prompt": "a", "image": "a.png"}).next_batch(1)[0]["images"]
    assert isinstance(picture, Picture)
    assert vars(picture) == {"source": tmp_path / "a.png"}


def test_files_of_pictures_are_opened_once_before_a_run_and_not_to_hand_tasks_out(tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr(Image, "open", lambda file, open=Image.open: opened.append(file) or open(file))
    rows = [{"prompt": "a", "image": f"{index}.png", "answer": "1"} for index in range(3)]
    for index in range(3):
        Image.new("RGB", (4, 4)).save(tmp_path / f"{index}.png")
    rows_in(tmp_path, *rows)
    config = TasksetConfig(name="t", source="dataset", path=str(tmp_path / "tasks.jsonl"), order="sequential")
    check_tasksets({"taskset": config})
    source = TaskSource(Taskset.from_config(config))
    source.next_tasks(2)
    assert len(opened) == 3


def test_a_file_that_is_lost_after_the_start_fails_its_task_alone(tmp_path):
    for name in ("a", "b"):
        paint(tmp_path / f"{name}.png")
    taskset = rows_in(tmp_path, {"prompt": "a", "image": "a.png"}, {"prompt": "b", "image": "b.png"})
    (tmp_path / "a.png").unlink()
    lost, there = taskset.next_batch(2)
    assert colors(there) == ["red"]
    with pytest.raises(ConfigError, match=r"a\.png.*no such file"):
        colors(lost)
    assert taskset.state_dict()["seen"][0] == [1]  # the other entry may be mended before the run is resumed
    paint(tmp_path / "a.png", "blue")
    mended = rows_in(tmp_path, {"prompt": "a", "image": "a.png"}, {"prompt": "b", "image": "b.png"})
    mended.load_state_dict(taskset.state_dict())


def test_a_task_with_pictures_travels_without_its_folder(tmp_path):
    paint(tmp_path / "a.png")
    sent = pickle.dumps(rows_in(tmp_path, {"prompt": "a", "image": "a.png"})[0])
    (tmp_path / "a.png").unlink()
    assert colors(pickle.loads(sent)) == ["red"]  # noqa: S301 - as Ray does


def test_a_source_names_the_folders_of_its_entries(tmp_path):
    class Source(list):
        def folder(self, index):
            return tmp_path / str(index)

    for index, color in enumerate(("red", "blue")):
        paint(tmp_path / str(index) / "a.png", color)
    taskset = Taskset(Source([{"prompt": "a", "image": "a.png"}] * 2), order="sequential")
    assert list(map(colors, taskset)) == [["red"], ["blue"]]


def test_a_resumed_run_compares_pictures_by_content(tmp_path):
    def made(color="red", folder="data", **entry: Any):
        paint(tmp_path / folder / "a.png", color)
        paint(tmp_path / folder / "b.png", "blue")
        return rows_in(tmp_path / folder, {"prompt": "a", "image": "a.png"} | entry, {"prompt": "b", "image": "b.png"})

    taskset = made()
    taskset.next_batch(1)
    state = taskset.state_dict()
    made().load_state_dict(state)
    made(folder="elsewhere").load_state_dict(state)
    for color, image in (("green", "a.png"), ("red", "b.png"), ("red", ["a.png", "b.png"]), ("red", None)):
        with refuses("taskset") as refused:
            made(color, image=image).load_state_dict(state)
        assert "line 1 of" in str(refused.value)


def test_of_many_pictures_a_resumed_run_reads_some_and_compares_the_sizes_of_all(tmp_path, monkeypatch):
    monkeypatch.setattr("trinity_lightning.explorer.tasks.taskset.MOST_COMPARED", 2)
    rows = [{"prompt": f"{i}", "image": f"{i}.bmp"} for i in range(6)]
    for i in range(6):
        Image.new("RGB", (4, 4), "red").save(tmp_path / f"{i}.bmp")
    taskset = rows_in(tmp_path, *rows)
    taskset.next_batch(5)
    state = taskset.state_dict()
    Image.new("RGB", (4, 4), "blue").save(tmp_path / "1.bmp")  # of equal size, and not read: 0 and 3 are
    rows_in(tmp_path, *rows).load_state_dict(state)
    for i, size in ((3, (4, 4)), (1, (5, 5))):
        before = (tmp_path / f"{i}.bmp").read_bytes()
        Image.new("RGB", size, "blue").save(tmp_path / f"{i}.bmp")
        with refuses("taskset") as refused:
            rows_in(tmp_path, *rows).load_state_dict(state)
        assert f"line {i + 1} of" in str(refused.value)
        (tmp_path / f"{i}.bmp").write_bytes(before)


@pytest.mark.parametrize("form", ["pillow", "bytes", "in messages"])
def test_a_resumed_run_compares_pictures_in_memory(form, tmp_path):
    def entries(color):
        content = paint(tmp_path / "a.png", color).read_bytes()
        if form == "in messages":
            return [{"messages": [{"role": "user", "content": [PLACE | {"image": content}]}]}]
        return [{"prompt": "a", "image": Image.new("RGB", (3, 3), color) if form == "pillow" else content}]

    taskset = Taskset(entries("red"))
    taskset.next_batch(1)
    Taskset(entries("red")).load_state_dict(taskset.state_dict())
    with refuses("taskset"):
        Taskset(entries("blue")).load_state_dict(taskset.state_dict())


def test_checksums_of_text_stay_those_of_earlier_checkpoints():
    """Runs that were saved before there were pictures have these numbers in their state."""
    entries = [
        {"prompt": "a", "images": None, "n": 1},
        {"messages": CHAT, "images": [], "x": {"y": 1.5}},
        {"prompt": "b", "photo": Image.new("RGB", (2, 2)), "image": ""},
    ]
    taskset = Taskset(entries, order="sequential")
    taskset.next_batch(3)
    assert taskset.state_dict()["seen"] == [[0, 1, 2], [119776955, 436755716, 2428045871]]


# The built-in sums


def test_addition_keeps_its_heldout_sums_apart():
    train, heldout = Taskset.addition(), Taskset.addition("heldout")
    assert (len(train), len(heldout)) == (441 - 128, 128)
    prompts = {task["prompt"] for taskset in (train, heldout) for task in taskset}
    assert prompts == {f"What is {a} + {b}? Reply with only the number." for a in range(21) for b in range(21)}
    for task in train:
        a, b = (int(word.strip("?")) for word in task["prompt"].split() if word.strip("?").isdigit())
        assert task["answer"] == str(a + b)


def test_no_seed_moves_a_sum_into_the_train_split():
    heldout = {task["prompt"] for task in Taskset.addition("heldout", seed=1)}
    for seed in range(5):
        train = Taskset.addition("train", seed=seed)
        assert heldout.isdisjoint(task["prompt"] for task in train.next_batch(len(train)))
    assert Taskset.addition(seed=0).next_batch(20) != Taskset.addition(seed=1).next_batch(20)


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        ({"split": "held_out"}, "split"),
        ({"low": 3, "high": 2}, "args.low"),
        ({"high": 2, "heldout": 9}, "args.heldout"),
        ({"heldout": -1}, "args.heldout"),
        ({"split": "heldout", "heldout": 0}, "source"),
    ],
)
def test_wrong_sums(arguments, key):
    with refuses("taskset" if key == "source" else f"taskset.{key}"):
        Taskset.addition(**arguments)
    split = {name: value for name, value in arguments.items() if name == "split"}
    args = {name: value for name, value in arguments.items() if name != "split"}
    with refuses(f"eval_tasksets.sums.{key}"):
        Taskset.from_config(TasksetConfig(name="sums", **split, args=args), key="eval_tasksets.sums")


# reasoning-gym


def test_reasoning_gym_entries_are_those_of_the_library_with_what_the_verifier_needs():
    taskset = reasoning_gym_taskset("chain_sum", size=10, seed=42, max_terms=3, name="sums")
    library = reasoning_gym.create_dataset("chain_sum", size=10, seed=42, max_terms=3)
    assert len(taskset) == 10
    for task in taskset.next_batch(10):
        entry = library[task["task_index"]["index"]]
        assert (task["prompt"], task["answer"], task["metadata"]) == tuple(entry.values())
        assert task["reasoning_gym"] == {"name": "chain_sum", "config": {"max_terms": 3}, "entry": entry}
        verifier = reasoning_gym.create_dataset(task["reasoning_gym"]["name"], **task["reasoning_gym"]["config"])
        assert verifier.score_answer(task["answer"], task["reasoning_gym"]["entry"]) == 1.0
    assert taskset.name == "sums"


def test_reasoning_gym_entries_are_generated_when_asked_for():
    taskset = reasoning_gym_taskset("basic_arithmetic", size=10**9, seed=1, order="sequential")
    assert len(taskset) == 10**9
    assert indices(taskset.next_batch(2)) == [0, 1]
    assert taskset[10**9 - 1] == taskset[10**9 - 1]


def test_reasoning_gym_entries_depend_on_no_global_generator_and_leave_them_alone():
    taskset = reasoning_gym_taskset("list_functions", size=20, seed=1)  # some draw from Python's own generator
    states = random.getstate(), repr(np.random.get_state())
    first = list(taskset)
    reasoning_gym_taskset("pool_matrix", size=1, seed=1)  # which seeds NumPy's own
    assert (random.getstate(), repr(np.random.get_state())) == states
    random.seed(5)
    assert list(taskset) == first


@pytest.fixture
def other_entries(monkeypatch):
    """Called, it lets reasoning-gym make other entries of the same arguments, as its next version may."""
    create = reasoning_gym.create_dataset

    def change():
        changed = lambda name, seed, **args: create(name, seed=seed + 1, **args)  # noqa: E731
        monkeypatch.setattr(reasoning_gym, "create_dataset", changed)

    return change


def test_a_dataset_whose_entries_follow_the_hash_seed_is_known_by_its_arguments(other_entries):
    saved = reasoning_gym_taskset("ransom_note", size=3, max_note_length=9)
    saved.next_batch(2)
    state = saved.state_dict()
    other_entries()
    others = reasoning_gym_taskset("ransom_note", size=3, max_note_length=9)
    others.load_state_dict(state)
    assert others.state_dict()["position"] == 2
    of_other_arguments = reasoning_gym_taskset("ransom_note", size=3, max_note_length=8)
    another = reasoning_gym_taskset("word_ladder", size=3, name="ransom_note")
    for taskset in (of_other_arguments, another):
        with refuses("taskset"):
            taskset.load_state_dict(state)


def test_any_other_dataset_is_known_by_its_entries(other_entries):
    saved = reasoning_gym_taskset("chain_sum", size=3)
    saved.next_batch(2)
    state = saved.state_dict()
    reasoning_gym_taskset("chain_sum", size=3).load_state_dict(state)
    other_entries()
    with refuses("taskset"):
        reasoning_gym_taskset("chain_sum", size=3).load_state_dict(state)


@pytest.mark.parametrize(("seed", "warned"), [(None, True), ("random", True), ("0", False), ("7", False)])
def test_entries_that_no_other_process_makes_are_warned_of(monkeypatch, caplog, seed, warned):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if seed is not None:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    reasoning_gym_taskset("chain_sum", size=1)
    assert caplog.messages == []
    reasoning_gym_taskset("ransom_note", size=1)
    assert ["'ransom_note' makes other entries in every process" in message for message in caplog.messages] == [
        True
    ] * warned


@pytest.mark.slow
def test_entries_by_hash_seed_are_the_same_in_processes_that_have_one():
    code = (
        "from trinity_lightning.explorer.tasks.sources import BY_HASH_SEED, ReasoningGymEntries\n"
        "for name in BY_HASH_SEED: print([ReasoningGymEntries(name, 30, 1, {})[index] for index in (1, 24)])"
    )

    def start(seed: str) -> subprocess.Popen[str]:
        environment = os.environ | {"PYTHONHASHSEED": seed}
        return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)

    processes = [start(seed) for seed in ("0", "0", "1")]
    first, second, other = (process.communicate()[0].splitlines() for process in processes)
    assert {process.returncode for process in processes} == {0}
    assert first == second
    assert len(first) == len(BY_HASH_SEED)
    assert all(one != another for one, another in zip(first, other, strict=True))


@pytest.mark.parametrize(
    ("name", "arguments", "key", "message"),
    [
        ("chain_sums", {}, "path", "Did you mean 'chain_sum'"),
        ("chain_sum", {"max_term": 3}, "args.max_term", "Did you mean 'max_terms'"),
        ("chain_sum", {"max_terms": 1}, "args", ""),
        ("chain_sum", {"max_terms": "many"}, "args", ""),
        ("decimal_arithmetic", {"max_num_decimal_places": 2}, "args", "entry 0: "),
    ],
)
def test_wrong_reasoning_gym_arguments(name, arguments, key, message):
    config = TasksetConfig(name="gym", source="reasoning_gym", path=name, size=3, args=arguments)
    with refuses(f"tasksets.gym.{key}") as refused:
        Taskset.from_config(config, key="tasksets.gym")
    assert message in str(refused.value)


# Files and folders


@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet", "csv"])
def test_files_of_every_format(tmp_path, suffix):
    file = tmp_path / f"maths.{suffix}"
    table = datasets.Dataset.from_list(ROWS)
    if suffix == "parquet":
        table.to_parquet(file)
    elif suffix == "csv":
        table.to_csv(file)
    else:
        file.write_text(json.dumps(ROWS) if suffix == "json" else "\n".join(map(json.dumps, ROWS)))
    taskset = dataset_taskset(file, formatter=NAMED, order="sequential")
    assert [(task["prompt"], task["answer"], task["level"]) for task in taskset] == [
        (row["question"], row["solution"], row["level"]) for row in ROWS
    ]
    assert len(dataset_taskset(file, "train[:2]", formatter=NAMED)) == 2


def test_folders_of_files_and_saved_datasets(tmp_path):
    (tmp_path / "files").mkdir()
    for split, rows in (("train", ROWS), ("test", ROWS[3:])):
        (tmp_path / "files" / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    table = datasets.Dataset.from_list(ROWS[3:])
    table.save_to_disk(tmp_path / "table")
    datasets.DatasetDict({"test": table}).save_to_disk(tmp_path / "splits")
    for folder, split in (("files", "test"), ("table", "train"), ("splits", "test")):
        taskset = dataset_taskset(tmp_path / folder, split, formatter=NAMED)
        assert [task["prompt"] for task in taskset] == ["q3", "q4"]
    for folder, known in (("files", "test"), ("table", "train"), ("splits", "test")):
        with refuses(".split") as refused:
            dataset_taskset(tmp_path / folder, "dev", formatter=NAMED)
        assert known in str(refused.value)
    sliced = TasksetConfig(name="t", source="dataset", path=str(tmp_path / "table"), split="train[:2]")
    with refuses("tasksets.t.split"):
        Taskset.from_config(sliced, key="tasksets.t")


def test_conversations_of_a_file(tmp_path):
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": [SYSTEM, *CHAT]}))
    assert dataset_taskset(tmp_path / "chats.jsonl")[0]["messages"] == [SYSTEM, *CHAT]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("trian.jsonl", "did you mean '.*train.jsonl'"),
        ("notes.txt", "no known format"),
        ("zero.jsonl", "is empty"),
        ("broken.jsonl", "line 1 of .*broken.jsonl is no JSON object"),
        ("folder", "cannot load split 'train'.*data files"),
        ("foldr", "did you mean '.*folder'"),
    ],
)
def test_a_wrong_file_says_what_to_do(tmp_path, path, message):
    (tmp_path / "train.jsonl").write_text('{"prompt": "a"}')
    (tmp_path / "notes.txt").write_text("a")
    (tmp_path / "zero.jsonl").write_text("")
    (tmp_path / "broken.jsonl").write_text('{"prompt": \n nonsense')
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match=message):
        dataset_taskset(tmp_path / path)
    by_the_section = path == "notes.txt" or not (tmp_path / path).exists()
    with refuses("taskset.path" if by_the_section else "tasksets.t.path"):
        taskset = TasksetConfig(name="t", source="dataset", path=str(tmp_path / path))
        Taskset.from_config(taskset, key="tasksets.t")


@pytest.mark.parametrize("split", ["trian", "test", "test[:2]", "train+test", "all[:2]"])
def test_a_file_has_one_split(split, tmp_path):
    file = tmp_path / "test.jsonl"
    file.write_text("\n".join(map(json.dumps, ROWS)))
    with refuses(".split"):
        dataset_entries(str(file), split, None)


def test_a_slice_of_a_file_is_that_slice(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, ROWS)))
    assert [row["question"] for row in dataset_entries(str(file), "train[-2:]", None)] == ["q3", "q4"]
    assert len(dataset_entries(str(file), "train[:50%]", None)) == len(ROWS) // 2


def test_an_unreachable_hub_is_a_readable_error(monkeypatch):
    def load_dataset_builder(*args, **kwargs):
        raise ConnectionError("Couldn't reach 'org/data' on the Hub")

    monkeypatch.setattr(datasets, "load_dataset_builder", load_dataset_builder)
    with pytest.raises(ConfigError, match="cannot load split 'train' of dataset 'org/data': Couldn't reach"):
        dataset_taskset("org/data")


# From a configuration


def test_every_source_from_a_configuration(tmp_path):
    (tmp_path / "maths.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    sums = Taskset.from_config(TasksetConfig(name="sums", split="heldout", args={"high": 3, "heldout": 4}, seed=5))
    assert (sums.name, len(sums), sums.seed) == ("sums", 4, 5)
    once = Taskset.from_config(TasksetConfig(name="sums", split="heldout", args={"high": 3, "heldout": 4}), epochs=1)
    assert len(once.next_batch(9)) == 4
    gym = TasksetConfig(name="gym", source="reasoning_gym", path="chain_sum", size=3, system_prompt="be brief")
    assert Taskset.from_config(gym)[0]["messages"][0] == SYSTEM
    file = TasksetConfig(name="m", source="dataset", path=str(tmp_path / "maths.jsonl"), prompt_field="question")
    file.answer_field, file.order = "solution", "sequential"
    assert [task["answer"] for task in Taskset.from_config(file)] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("wrong", [{"answer": "2"}, {"prompt": "", "answer": "2"}])
def test_a_line_without_a_prompt_is_refused_when_the_file_is_opened(tmp_path, wrong):
    file = tmp_path / "tasks.jsonl"
    file.write_text("\n\n".join(map(json.dumps, [{"prompt": "one", "answer": "1"}, wrong])))
    with refuses("taskset.prompt_field") as refused:
        Taskset.from_config(TasksetConfig(name="t", source="dataset", path=str(file)))
    assert re.search(r"taskset 't', line 3 of .*tasks.jsonl", str(refused.value))


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"source": "adition"}, "taskset.source"),
        ({"source": "adition", "args": {"high": 3}}, "taskset.source"),
        ({"args": {"hihg": 3}}, "taskset.args.hihg"),
        ({"source": "dataset"}, "taskset.path"),
        ({"source": "reasoning_gym", "path": "chain_sum"}, "taskset.size"),
    ],
)
def test_a_wrong_configuration_names_the_key(config, key):
    with refuses(key):
        Taskset.from_config(TasksetConfig(name="t", **config))
