"""Orders that follow difficulty, and several tasksets at once."""

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.errors import refuses

from trinity_lightning.config.taskset import TasksetConfig
from trinity_lightning.errors import ConfigError
from trinity_lightning.explorer.tasks import Taskset
from trinity_lightning.explorer.tasks.taskset import TasksetMixture, mixture_of


def numbered(size: int, name: str = "numbers", **settings: Any) -> Taskset:
    return Taskset([{"prompt": str(i), "level": -i} for i in range(size)], name=name, **settings)


def prompts(batch: list[dict[str, Any]]) -> list[int]:
    return [int(task["prompt"]) for task in batch]


def solved(taskset: Taskset, batch: list[dict[str, Any]], rate: float = 0.0) -> None:
    taskset.update({taskset.name: {task["task_index"]["index"]: (rate, 8) for task in batch}})


# -- easy to hard -----------------------------------------------------------------------------------------------------


def test_easy_to_hard_follows_the_field_in_every_epoch() -> None:
    taskset = numbered(4, order="easy_to_hard", difficulty_field="level")
    assert prompts(taskset.next_batch(6)) == [3, 2, 1, 0, 3, 2]


@pytest.mark.parametrize("field", [None, "missing", "prompt"])
def test_a_difficulty_that_is_no_number_is_refused(field: str | None) -> None:
    with refuses("taskset.difficulty_field"):
        numbered(4, order="easy_to_hard", difficulty_field=field)


# -- by difficulty ----------------------------------------------------------------------------------------------------


def test_tasks_solved_half_of_the_time_are_preferred() -> None:
    taskset = numbered(60, order="by_difficulty", seed=1)
    rates = {i: 0.5 if i < 10 else float(i % 2) for i in range(60)}
    for _ in range(5):
        taskset.update({"numbers": {i: (rate, 8) for i, rate in rates.items()}})
    taken = Counter(prompts(taskset.next_batch(10)))
    assert sum(count for index, count in taken.items() if index < 10) >= 8
    assert max(taken.values()) == 1


def test_every_task_gets_its_turn() -> None:
    taskset = numbered(20, order="by_difficulty", seed=1)
    seen: set[int] = set()
    for _ in range(40):
        batch = taskset.next_batch(4)
        seen |= set(prompts(batch))
        solved(taskset, batch)
    assert seen == set(range(20))


def test_it_goes_on_where_it_was_saved() -> None:
    one = numbered(30, order="by_difficulty", seed=3)
    for _ in range(5):
        solved(one, one.next_batch(4), 0.25)
    other = numbered(30, order="by_difficulty", seed=3)
    other.load_state_dict(json.loads(json.dumps(one.state_dict())))
    for _ in range(5):
        first, second = one.next_batch(4), other.next_batch(4)
        assert first == second
        solved(one, first, 0.75)
        solved(other, second, 0.75)


def test_rewards_of_other_tasksets_and_beyond_one_do_no_harm() -> None:
    taskset = numbered(3, order="by_difficulty")
    taskset.update({"others": {0: (0.5, 8)}, "numbers": {1: (7.0, 4), 2: (-3.0, 4)}})
    state = taskset.state_dict()["difficulty"]
    assert state == {"tried": [1, 2], "passes": [4.0, 0.0], "fails": [0.0, 4.0]}


# -- several tasksets -------------------------------------------------------------------------------------------------


def mixture(**settings: Any) -> TasksetMixture:
    tasksets = [numbered(7, "a", order="sequential", **settings), numbered(5, "b", order="sequential", **settings)]
    return TasksetMixture(tasksets, [3.0, 1.0])


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12))
def test_shares_are_kept_whatever_the_batch_size(sizes: list[int]) -> None:
    mixed = mixture()
    taken: Counter[str] = Counter()
    for size in sizes:
        batch = mixed.next_batch(size)
        assert len(batch) == size
        taken.update(task["task_index"]["taskset_id"] for task in batch)
    assert abs(taken["a"] - 0.75 * sum(sizes)) <= 1


def test_an_exhausted_taskset_leaves_its_share() -> None:
    mixed = mixture(epochs=1)
    batches = [mixed.next_batch(4) for _ in range(4)]
    assert [len(batch) for batch in batches] == [4, 4, 4, 0]
    assert len(mixed) == 12
    assert len(list(mixed)) == 12


def test_a_mixture_goes_on_where_it_was_saved() -> None:
    one, other = mixture(), mixture()
    one.next_batch(5)
    other.load_state_dict(json.loads(json.dumps(one.state_dict())))
    assert one.next_batch(9) == other.next_batch(9)
    with refuses("tasksets"):
        TasksetMixture(list(mixture().tasksets.values()), [1.0, 1.0]).load_state_dict(one.state_dict())


def test_what_cannot_be_mixed() -> None:
    with pytest.raises(ConfigError, match="different names"):
        TasksetMixture([numbered(3), numbered(3)], [1, 1])
    for weights in ([1.0], [1.0, 0.0], [1.0, float("nan")]):
        with pytest.raises(ConfigError, match="weights of tasksets"):
            TasksetMixture([numbered(3, "a"), numbered(3, "b")], weights)
    with refuses(None):
        mixture().next_batch(0)
    with refuses("tasksets"):
        mixture_of({"a": TasksetConfig(name="sums"), "b": TasksetConfig(name="sums")})
    with refuses("tasksets"):
        mixture_of({"a": TasksetConfig(name="a", weight=0.0), "b": TasksetConfig(name="b")})
