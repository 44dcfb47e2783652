"""Task sources of one's own: entries by their index or in a stream, kept exact by a resumed run."""

import itertools
import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from support.errors import refuses

from trinity_lightning.config.taskset import TasksetConfig
from trinity_lightning.errors import ConfigError
from trinity_lightning.explorer.tasks.sources import check_source, entries_of
from trinity_lightning.explorer.tasks.taskset import Taskset, TasksetMixture

HERE = __name__


def entry_of(number: int) -> dict[str, Any]:
    return {"prompt": f"{number}?", "answer": str(number)}


class Sums:
    """Entries by index; those of the split `heldout` are others."""

    generated = True

    def __init__(self, split: str, seed: int, size: int = 9, terms: int = 2) -> None:
        self.split, self.seed, self.size, self.terms = split, seed, size, terms

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        numbers = random.Random(f"{self.split}/{self.seed}/{index}").choices(range(100), k=self.terms)
        return {"prompt": " + ".join(map(str, numbers)), "answer": str(sum(numbers))}


@dataclass
class Table:
    """Entries by index, of a dataclass."""

    size: int = 3

    def __post_init__(self) -> None:
        self.rows = [entry_of(number) for number in range(self.size)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.rows[index]


def listed(count: int = 3) -> list[dict[str, Any]]:
    return [entry_of(number) for number in range(count)]


class Sized:
    """Entries one after the other, with a length."""

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return map(entry_of, range(3))


def endless(seed: int, start: int = 0) -> Iterator[dict[str, Any]]:
    drawn = random.Random(seed)
    for number in itertools.count(start):
        yield entry_of(number) | {"drawn": drawn.random()}


def ending() -> Iterator[dict[str, Any]]:
    yield from map(entry_of, range(5))


class Stateful:
    """A stream that goes on from its state; `made` counts the entries, `constructed` the streams."""

    made = constructed = 0

    def __init__(self, step: int = 1, late: bool = False) -> None:
        Stateful.constructed += 1
        self.step, self.late, self.number = step, late, 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while True:
            Stateful.made += 1
            entry = entry_of(self.number * self.step)
            self.number += not self.late
            yield entry
            self.number += self.late

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number = state["number"]


NO_SOURCE = 7


def by_split() -> dict[str, Any]:
    return {"train": listed(), "test": listed()}


def number() -> int:
    return 7


def text() -> str:
    return "1 + 1 = ?"


def breaks(seed: int) -> list[Any]:
    raise KeyError(seed)


def settings(source: str, **values: Any) -> TasksetConfig:
    usual = {"name": "mine", "order": "sequential", "seed": 5}
    return TasksetConfig(source=f"{HERE}.{source}", **usual | values)


def made(source: str, **values: Any) -> Taskset:
    return Taskset.from_config(settings(source, **values))


def answers(batch: list[dict[str, Any]]) -> list[str]:
    return [task["answer"] for task in batch]


def saved(taskset: Taskset) -> dict[str, Any]:
    """The state as a checkpoint gives it back."""
    return json.loads(json.dumps(taskset.state_dict()))


# -- the entries -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "values", "count"),
    [
        ("Sums", {}, 9),
        ("Sums", {"size": 4, "args": {"terms": 3}}, 4),
        ("Table", {"size": 2}, 2),
        ("listed", {"args": {"count": 4}}, 4),
        ("Sized", {}, 3),
    ],
)
def test_entries_by_index_are_handed_out_in_any_order_and_resumed(source, values, count):
    for order in ("sequential", "shuffled", "by_difficulty"):
        taskset, resumed = (made(source, order=order, **values) for _ in range(2))
        assert len(taskset) == len(list(taskset)) == count
        before = taskset.next_batch(count)
        assert sorted(answers(before)) == sorted(answers(list(taskset)))
        assert before[0]["task_index"]["taskset_id"] == "mine"
        resumed.load_state_dict(saved(taskset))
        assert resumed.next_batch(5) == taskset.next_batch(5)


def test_a_source_is_given_the_settings_that_it_has_parameters_for():
    entries: Any = entries_of(settings("Sums", split="heldout", size=3, args={"terms": 4}))
    assert (entries.split, entries.seed, len(entries), entries.terms) == ("heldout", 5, 3, 4)
    default: Any = entries_of(settings("Sums"))
    assert len(default) == 9


def test_held_out_entries_are_those_of_another_split():
    train, heldout = made("Sums"), made("Sums", split="heldout")
    assert {task["prompt"] for task in train}.isdisjoint(task["prompt"] for task in heldout)


def test_only_the_first_of_generated_entries_is_made_at_the_start(monkeypatch):
    asked: list[int] = []
    make = Sums.__getitem__
    monkeypatch.setattr(Sums, "__getitem__", lambda self, index: asked.append(index) or make(self, index))
    made("Sums", size=10**9)
    assert set(asked) == {0}


def test_entries_that_changed_since_are_refused():
    taskset = made("Sums")
    taskset.next_batch(4)
    with refuses("taskset"):
        made("Sums", args={"terms": 3}).load_state_dict(saved(taskset))


# -- streams -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["endless", "Stateful"])
def test_a_stream_is_handed_out_in_its_order_and_resumed(source):
    taskset, resumed = made(source), made(source)
    assert answers(taskset.next_batch(3) + taskset.next_batch(2)) == ["0", "1", "2", "3", "4"]
    state = saved(taskset)
    resumed.load_state_dict(state)
    after = taskset.next_batch(3)
    assert [task["task_index"]["index"] for task in after] == [5, 6, 7]
    assert resumed.next_batch(3) == after
    taskset.load_state_dict(state)  # back, as after an explore step that was cut short
    assert taskset.next_batch(3) == after
    assert saved(taskset) == saved(resumed)


def test_a_stream_with_a_state_makes_no_entry_again(monkeypatch):
    taskset, resumed = made("Stateful"), made("Stateful")
    taskset.next_batch(1000)
    state = saved(taskset)
    monkeypatch.setattr(Stateful, "made", 0)
    resumed.load_state_dict(state)
    assert saved(resumed) == state
    assert answers(resumed.next_batch(2)) == ["1000", "1001"]
    assert Stateful.made < 10


def test_the_cursor_of_a_stream_with_a_state_does_not_grow():
    taskset = made("Stateful")
    taskset.next_batch(1)
    size = len(json.dumps(saved(taskset)))
    taskset.next_batch(1000)
    assert len(json.dumps(saved(taskset))) < size + 30  # longer numbers alone


def test_a_source_is_not_made_again_where_it_stands(monkeypatch):
    taskset = made("Stateful")
    state = taskset.state_dict()
    monkeypatch.setattr(Stateful, "constructed", 0)
    for step in range(3):  # as the explorer does in each step
        taskset.load_state_dict(state)
        assert answers(taskset.next_batch(2)) == [str(2 * step), str(2 * step + 1)]
        state = taskset.state_dict()
    assert Stateful.constructed == 0


def test_a_stream_that_has_a_state_since_it_was_saved_is_refused(monkeypatch):
    with monkeypatch.context() as before:
        before.delattr(Stateful, "state_dict")
        state = saved(made("Stateful"))
    with refuses("taskset.source"):
        made("Stateful").load_state_dict(state)


class Arrays(Stateful):
    """A stream whose entries and state have arrays, equal ones in each process."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return ({**entry, "pixels": np.arange(3), "gaps": float("nan")} for entry in super().__iter__())

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number, "left": np.ones(2)}


def test_a_stream_with_a_state_may_give_arrays():
    taskset, resumed = made("Arrays"), made("Arrays")
    taskset.next_batch(3)
    resumed.load_state_dict(taskset.state_dict())
    assert answers(resumed.next_batch(2)) == answers(taskset.next_batch(2)) == ["3", "4"]
    with refuses("taskset.source"):
        made("Arrays", args={"late": True})


def test_a_resumed_stream_is_the_same_one():
    taskset = made("endless")
    taskset.next_batch(3)
    with refuses("taskset"):
        made("endless", args={"start": 1}).load_state_dict(saved(taskset))
    taskset = made("Stateful", args={"step": 2})
    taskset.next_batch(3)
    with refuses("taskset.source"):
        made("Stateful").load_state_dict(saved(taskset))


def test_a_state_that_does_not_say_what_comes_next_is_refused():
    with refuses("taskset.source"):
        made("Stateful", args={"late": True})


def test_a_stream_may_end():
    taskset = made("ending")
    assert [answers(taskset.next_batch(3)) for _ in range(3)] == [["0", "1", "2"], ["3", "4"], []]


def test_a_stream_has_one_order_and_cannot_be_evaluated_on():
    for order in ("shuffled", "by_difficulty", "easy_to_hard"):
        with refuses("taskset.order"):
            made("endless", order=order)
    with refuses("eval_tasksets.mine.source"):
        Taskset.from_config(settings("endless"), epochs=1, key="eval_tasksets.mine")
    for unending in (len, list):
        with refuses("taskset"):
            unending(made("endless"))


def test_sources_of_all_kinds_are_mixed():
    def mixture() -> TasksetMixture:
        return TasksetMixture([made(source, name=source) for source in ("endless", "Sums")], [1.0, 1.0])

    mixed, resumed = mixture(), mixture()
    mixed.next_batch(5)
    resumed.load_state_dict(mixed.state_dict())
    assert resumed.next_batch(6) == mixed.next_batch(6)


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "values", "key"),
    [
        ("Sum", {}, "taskset.source"),
        ("NO_SOURCE", {}, "taskset.source"),
        ("Sums", {"args": {"term": 3}}, "taskset.args.term"),
        ("endless", {"args": {"begin": 3}}, "taskset.args.begin"),
        ("listed", {"size": 3}, "taskset.size"),
        ("listed", {"path": "here"}, "taskset.path"),
        ("listed", {"split": "test"}, "taskset.split"),
    ],
)
def test_a_wrong_source_or_argument_is_refused_by_its_key_before_anything_is_made(source, values, key):
    with refuses(key):
        check_source(settings(source, **values))
    with refuses(key.replace("taskset", "eval_tasksets.mine")):
        check_source(settings(source, **values), "eval_tasksets.mine")


def test_a_setting_that_the_source_needs_is_asked_for_by_its_key(monkeypatch):
    monkeypatch.setattr(f"{HERE}.needing", lambda path, size: [], raising=False)
    with refuses("taskset.path"):
        check_source(settings("needing", size=3))
    with refuses("taskset.size"):
        check_source(settings("needing", path="here"))


@pytest.mark.parametrize("source", ["by_split", "number", "text"])
def test_a_source_that_gives_no_entries_is_refused(source):
    with refuses("taskset.source"):
        entries_of(settings(source))


def test_an_error_of_the_source_is_told_with_its_line():
    with refuses("taskset.source") as refused:
        entries_of(settings("breaks"))
    assert re.search(r"raised KeyError: 5 .*test_task_sources", str(refused.value))


def breaks_later() -> Iterator[dict[str, Any]]:
    yield entry_of(0)
    raise KeyError("second")


class BreaksLater(Sums):
    """Entries by index, of which some cannot be made."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"prompt": {0: "first", 4: "fifth"}[index], "answer": "0", "level": index}


@pytest.mark.parametrize("source", ["breaks_later", "BreaksLater"])
def test_an_error_of_the_source_while_it_makes_entries_is_told_with_its_line(source):
    taskset = made(source)
    taskset.next_batch(1)
    with refuses("taskset.source") as refused:
        taskset.next_batch(1)
    assert "test_task_sources" in str(refused.value)
    assert isinstance(refused.value.__cause__, KeyError | ConfigError)


def test_an_error_of_the_source_while_its_entries_are_ranked_is_told():
    with refuses("taskset.source"):
        made("BreaksLater", order="easy_to_hard", difficulty_field="level")


@pytest.mark.parametrize("source", ["range", "dict"])
def test_a_source_that_does_not_tell_its_parameters_is_refused(source):
    with refuses("taskset.source"):
        check_source(TasksetConfig(name="mine", source=f"builtins.{source}"))


def test_a_state_of_something_else_is_refused_by_the_tasksets_key():
    with refuses("taskset"):
        made("Sums").load_state_dict({"step": 3})


def test_an_entry_is_a_mapping(monkeypatch):
    monkeypatch.setattr(f"{HERE}.texts", lambda: ["1 + 1 = ?"], raising=False)
    with refuses("taskset.source"):
        made("texts")
