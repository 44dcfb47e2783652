"""Pictures that the package draws."""

from typing import Any

import pytest
from support.errors import refuses

from trinity_lightning.config.taskset import TasksetConfig
from trinity_lightning.explorer.tasks.drawings import COLOURS, QUESTIONS, drawings
from trinity_lightning.explorer.tasks.taskset import Taskset


def colours_in(entry: Any) -> set[tuple[int, int, int]]:
    return {colour for _, colour in entry["images"][0].getcolors()} - {(255, 255, 255)}


def test_the_answer_is_the_number_of_the_colour() -> None:
    entries = [drawings()[index] for index in range(40)]
    for entry in entries:
        name = next(name for name, colour in COLOURS.items() if {colour} == colours_in(entry))
        assert f"{entry['answer']} {name}" in entry["prompt"]
    assert {entry["answer"] for entry in entries} == {"1", "2", "3", "4"}


def test_the_answer_is_the_number_of_squares() -> None:
    entries = [drawings(questions=["count"], most=2)[index] for index in range(60)]
    covered = [sum(n for n, c in entry["images"][0].getcolors() if c != (255, 255, 255)) for entry in entries]
    assert drawings(questions="count", most=2)[3]["prompt"] == entries[3]["prompt"]
    area = min(covered)
    assert [int(entry["answer"]) * area for entry in entries] == covered
    assert {entry["prompt"] for entry in entries} == {QUESTIONS["count"]}


def test_entries_are_the_same_each_time_and_held_out_pictures_are_others() -> None:
    train, again, heldout = drawings(), drawings(), drawings("heldout")
    assert train[5]["images"][0].tobytes() == again[5]["images"][0].tobytes()
    pictures = {train[index]["images"][0].tobytes() for index in range(len(train))}
    assert not pictures & {heldout[index]["images"][0].tobytes() for index in range(len(heldout))}


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"split": "test"}, "taskset.split"),
        ({"args": {"questions": ["shape"]}}, "taskset.args.questions"),
        ({"args": {"questions": "shape"}}, "taskset.args.questions"),
        ({"args": {"questions": []}}, "taskset.args.questions"),
        ({"args": {"most": 0}}, "taskset.args.most"),
        ({"args": {"most": 10}}, "taskset.args.most"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], key: str) -> None:
    with refuses(key):
        Taskset.from_config(TasksetConfig(name="drawings", source="drawings", **settings))
