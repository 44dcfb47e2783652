import asyncio

import pytest
import torch
from support.errors import refuses

from trinity_lightning.algorithm.add_strategy import (
    AddStrategy,
    ComposedAddStrategy,
    GRPOAddStrategy,
    StepWiseGRPOStrategy,
    create_add_strategy,
)
from trinity_lightning.algorithm.add_strategy.add_strategy import ListWriter
from trinity_lightning.common.experience import EID, Experience, ExperienceError
from trinity_lightning.errors import ArgumentError, ConfigError, PartError, UnfinishedClassError


def experiences(*groups):
    return [
        Experience(eid=EID(1, task, run), tokens=[1, 2, 3], reward=reward)
        for task, rewards in enumerate(groups)
        for run, reward in enumerate(rewards)
    ]


def advantages(exp):
    assert exp.advantages is not None
    return exp.advantages.tolist()


class Failing(AddStrategy):
    async def add(self, experiences, step):
        await self.writer.write_async(experiences)
        if step == 1:
            raise RuntimeError("first step")
        return len(experiences), {}

    @classmethod
    def default_args(cls):
        return {}


class Unfinished(AddStrategy):
    @classmethod
    def default_args(cls):
        return {}


class Writing(Failing):
    """Sets the advantages of the second experience to a value."""

    def __init__(self, writer, value):
        super().__init__(writer)
        self.value = value

    async def add(self, experiences, step):
        experiences[1].advantages = self.value
        await self.writer.write_async(experiences)
        return len(experiences), {}


def run(specs, exps, step=1):
    writer = ListWriter()
    return *asyncio.run(create_add_strategy(specs, writer).add(exps, step)), writer.calls


def test_one_entry_is_the_plain_strategy():
    strategy = create_add_strategy([("grpo", {"epsilon": 0.5})], ListWriter())
    assert type(strategy) is GRPOAddStrategy
    assert vars(strategy)["epsilon"] == 0.5


def test_each_strategy_gets_what_the_one_before_let_through():
    exps = experiences([0, 1], [1, 1], [0, 4])
    count, metrics, calls = run([("reward_variance", {}), ("grpo", {"std_level": "batch"})], exps)
    assert count == 4
    assert [[exp.eid.task for exp in call] for call in calls] == [[0, 0], [2, 2]]
    alone = experiences([0, 1], [0, 4])
    run([("grpo", {"std_level": "batch"})], alone)
    written = [exp for call in calls for exp in call]
    assert [advantages(exp) for exp in written] == [advantages(exp) for exp in alone]
    assert metrics["filtered_count"] == 2
    assert metrics["group_advantages/reward_mean/mean"] == 1.25


def test_clashing_metrics_get_the_later_strategy_s_name():
    specs = [
        ("reward_variance", {}),
        ("reward_variance", {"variance_threshold": 1.0}),
        ("grpo", {"std_threshold": 0.0}),
    ]
    _, metrics, _ = run(specs, experiences([0, 1], [1, 1], [0, 4], [None, 1]))
    assert metrics["filtered_count"] == 4
    assert metrics["reward_variance_2/filtered_count"] == 2
    assert metrics["grpo/filtered_count"] == 0
    assert metrics["group_advantages/invalid_group_count"] == 1
    assert metrics["grpo/group_advantages/invalid_group_count"] == 0


def test_nothing_left_writes_nothing():
    count, metrics, calls = run([("reward_variance", {}), ("grpo", {})], experiences([1, 1]))
    assert (count, calls) == (0, [])
    assert metrics["filtered_count"] == 2


def test_empty_input():
    assert run([("reward_variance", {}), ("grpo", {})], []) == (0, {}, [])


def test_a_step_that_failed_leaves_nothing_to_the_next():
    writer = ListWriter()
    strategy = create_add_strategy([(f"{Failing.__module__}.Failing", {}), ("grpo", {})], writer)
    with pytest.raises(PartError, match=r"first step \(.*test_compose\.py:\d+ in add\)"):
        asyncio.run(strategy.add(experiences([0, 1]), 1))
    count, _ = asyncio.run(strategy.add(experiences([0, 1]), 2))
    assert (count, len(writer.calls)) == (2, 1)


@pytest.mark.parametrize(
    ("specs", "key", "error"),
    [
        ([], "add_strategy", ConfigError),
        ({"grpo": {}}, "add_strategy", ConfigError),
        (["reward_variance", "grpo"], "add_strategy", ConfigError),
        (Failing, "add_strategy", ConfigError),
        ([("grpo", {"epsilon": -1})], "add_strategy.grpo.args.epsilon", ConfigError),
        ([("reward_variance", {}), ("gpro", {})], "add_strategy.gpro", ConfigError),
        ([("grpo", {}), ("grpo", {"epsilom": 1})], "add_strategy.grpo.args.epsilom", ArgumentError),
        ([("grpo", None)], "add_strategy.grpo.args", ConfigError),
        ([(f"{__name__}.Unfinished", {})], f"add_strategy.{__name__}.Unfinished", UnfinishedClassError),
    ],
)
def test_wrong_specs_are_refused(specs, key, error):
    with refuses(key, error):
        create_add_strategy(specs, ListWriter())


def test_a_class_that_is_no_strategy_is_refused():
    with pytest.raises(TypeError, match=r"collections\.OrderedDict"):
        create_add_strategy([("collections.OrderedDict", {})], ListWriter())


def test_composition_is_an_add_strategy():
    strategy = create_add_strategy([("reward_variance", {}), ("grpo", {})], ListWriter())
    assert isinstance(strategy, ComposedAddStrategy)
    assert [type(s).__name__ for s in strategy.strategies] == ["RewardVarianceAddStrategy", "GRPOAddStrategy"]


class Own(AddStrategy):
    """Returns a value, whatever it should return."""

    def __init__(self, writer, returned):
        super().__init__(writer)
        self.returned = returned

    async def add(self, experiences, step):
        return self.returned

    @classmethod
    def default_args(cls):
        return {}


class OwnScore(GRPOAddStrategy):
    def __init__(self, writer, returned):
        super().__init__(writer)
        self.returned = returned

    def score(self, rewards, groups, runs):
        return self.returned


class OwnGroup(GRPOAddStrategy):
    def calculate_group_advantage(self, group_id, exps):  # pyright: ignore[reportIncompatibleMethodOverride]
        return exps


class OwnSteps(StepWiseGRPOStrategy):
    def calculate_group_advantage(self, exps):  # pyright: ignore[reportIncompatibleMethodOverride]
        return dict.fromkeys(exps, 0.0)


SCORES = torch.zeros(3)


@pytest.mark.parametrize(
    ("name", "args", "method"),
    [
        ("Own", {"returned": None}, "add"),
        ("Own", {"returned": ({}, 3)}, "add"),
        ("OwnGroup", {}, "calculate_group_advantage"),
        ("OwnSteps", {}, "calculate_group_advantage"),
        ("OwnScore", {"returned": SCORES}, "score"),
        ("OwnScore", {"returned": (SCORES[:2], {})}, "score"),
        ("OwnScore", {"returned": (SCORES, {"best": 1.0})}, "score"),
    ],
)
def test_a_strategy_of_ones_own_that_returns_something_else_is_named_with_its_method(name, args, method):
    with refuses("add_strategy") as refused:
        run([(f"{__name__}.{name}", args), ("reinforce", {})], experiences([0.0, 1.0], [1.0]))
    assert f"{name}.{method}" in str(refused.value)


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor([0.0, float("nan")]),
        torch.tensor([float("inf"), 0.0]),
        torch.zeros(3),
        torch.tensor(2.0),
        [1.0, 1.0],
    ],
)
def test_advantages_that_cannot_be_trained_on_are_refused_by_the_name_of_the_strategy(value):
    strategy = ComposedAddStrategy([(f"{__name__}.Writing", {"value": value})], ListWriter())
    with pytest.raises(ExperienceError, match=r"1/0/1/.*Writing"):
        asyncio.run(strategy.add(experiences([0, 1]), 1))


def test_a_masked_token_may_have_any_advantage():
    step = experiences([0, 1])
    step[1].action_mask = torch.tensor([True, False])
    strategy = ComposedAddStrategy(
        [(f"{__name__}.Writing", {"value": torch.tensor([0.5, float("nan")])})], ListWriter()
    )
    assert asyncio.run(strategy.add(step, 1))[0] == 2


def test_an_experience_that_comes_with_nan_may_be_weighed_anew():
    step = experiences([0, 1])
    step[0].advantages = torch.full((2,), float("nan"))
    count, _, _ = run([(f"{__name__}.Writing", {"value": torch.zeros(2)}), ("grpo", {})], step)
    assert count == 2


def test_a_reward_beyond_float32_is_as_an_infinite_one(caplog):
    count, metrics, calls = run([("reinforce", {})], experiences([1e39, 0], [3e38, 1]))
    assert (count, metrics["group_advantages/invalid_group_count"]) == (2, 1)
    assert [exp.eid.task for [exp, _] in calls] == [1]
    assert "1/0" in caplog.text
