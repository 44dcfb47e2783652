"""A step that dapo leaves short is filled up with new tasks, weighed once, and never beyond its size."""

import asyncio
import copy

import pytest
from support.buffer import make_group

from trinity_lightning.buffer.datamodule import ExperienceDataModule
from trinity_lightning.buffer.operators import ExperienceOperatorV1
from trinity_lightning.common.experience import Experience
from trinity_lightning.config.buffer import OperatorConfig
from trinity_lightning.errors import OperatorError

MIXED, EQUAL = [0.0, 1.0, 1.0, 0.0], [1.0] * 4


class FailsLater(ExperienceOperatorV1):
    """Adds to rewards in place, and fails when it is called once too often."""

    def __init__(self, calls):
        self.calls = calls

    async def process(self, exps):
        self.calls -= 1
        for experience in exps:
            experience.reward = 5 + (experience.reward or 0.0)
        if self.calls == 0:
            raise RuntimeError("no more today")
        return exps, {}


class More:
    """Gives what it is told, group by group, and keeps what it was asked for."""

    def __init__(self, tasks, groups):
        self.tasks, self.groups, self.asked = tasks, list(groups), []

    async def __call__(self, tasks):
        self.asked.append(tasks)
        handed_out, self.groups = self.groups[:tasks], self.groups[tasks:]
        return [experience for group in handed_out for experience in group]


def groups(*rewards, first=0):
    return [make_group(first + task, 4, rewards=group_rewards) for task, group_rewards in enumerate(rewards)]


def filled(step, more, operators=(), strategy=(("dapo", {}), ("grpo", {}))):
    data = ExperienceDataModule(strategy, operators=operators)
    step = [experience for group in step for experience in group]
    metrics = asyncio.run(data.fill(step, 1, more))
    data.storage.advance(1)
    return data, metrics


def tasks_of(data):
    return list(dict.fromkeys(experience.eid.task for experience in data.storage.experiences))


def test_tasks_that_were_left_out_are_replaced():
    more = More(4, groups(EQUAL, MIXED, MIXED, first=10))
    data, metrics = filled(groups(MIXED, EQUAL, MIXED, EQUAL), more)
    assert tasks_of(data) == [0, 2, 11, 12]
    assert more.asked[0] == 4  # two of four survived: four are asked for, for two to survive
    assert all(experience.advantages is not None for experience in data.storage.experiences)
    assert metrics["experience_pipeline/missing_groups"] == 0
    assert metrics["experience_pipeline/surplus_groups"] == 0
    assert metrics["filtered_count"] == 12


def test_groups_beyond_the_steps_size_are_dropped_and_counted():
    data, metrics = filled(groups(MIXED, EQUAL), More(2, groups(MIXED, MIXED, first=10)))
    assert tasks_of(data) == [0, 10]
    assert metrics["experience_pipeline/surplus_groups"] == 1
    assert metrics["experience_pipeline/written"] == 8


def test_where_no_more_are_to_be_had_the_step_stays_short_and_says_so(caplog):
    more = More(4, groups(EQUAL, MIXED, first=10))
    data, metrics = filled(groups(EQUAL, EQUAL, EQUAL, MIXED), more)
    assert tasks_of(data) == [3, 11]
    assert metrics["experience_pipeline/missing_groups"] == 2
    assert "2 of its 4 tasks are missing" in caplog.text
    assert "explorer.max_refills" in caplog.text


def test_operators_tidy_the_new_groups_too_and_their_counts_add_up():
    drops_failures = OperatorConfig("reward_filter", {"threshold": -0.5})
    shifts = OperatorConfig(
        "reward_shaping_mapper", {"reward_shaping_configs": [{"stats_key": "none", "op_type": "ADD"}]}
    )
    bad = make_group(10, 4, rewards=[-1.0, 0.0, 1.0, 0.0])
    data, metrics = filled(groups(MIXED, EQUAL), More(2, [bad]), operators=[drops_failures, shifts])
    assert tasks_of(data) == [0, 10]
    assert len(data.storage.experiences) == 7
    assert metrics["experience_pipeline/reward_filter/filtered_count"] == 1
    assert metrics["experience_pipeline/reward_shaping_mapper/skipped_count"] == 12 - 1


@pytest.mark.parametrize("strategy", ["grpo", (("reward_variance", {}), ("grpo", {}))])
def test_other_strategies_ask_for_nothing(strategy):
    more = More(2, groups(MIXED, first=10))
    _, metrics = filled(groups(MIXED, EQUAL), more, strategy=strategy)
    assert more.asked == []
    assert "experience_pipeline/missing_groups" not in metrics


def test_a_full_step_asks_for_nothing():
    more = More(2, groups(MIXED, first=10))
    filled(groups(MIXED, MIXED), more)
    assert more.asked == []


def test_where_an_operator_fails_on_a_refill_the_whole_step_is_saved_as_it_came(tmp_path):
    step, refilled = groups(MIXED, EQUAL), groups(EQUAL, MIXED, first=10)
    came = copy.deepcopy([experience for group in step + refilled for experience in group])
    data = ExperienceDataModule(
        (("dapo", {}), ("grpo", {})),
        operators=[OperatorConfig(f"{__name__}.FailsLater", {"calls": 2})],
        folder=tmp_path,
    )
    first = [experience for group in step for experience in group]
    with pytest.raises(OperatorError, match=r"step_1\.trxp"):
        asyncio.run(data.fill(first, 1, More(2, [refilled[0], refilled[1]])))
    assert Experience.deserialize_many((tmp_path / "rejected" / "step_1.trxp").read_bytes()) == came
