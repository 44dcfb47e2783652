"""Strategies of one's own: the natural class works, and a class that cannot work is refused by its key."""

import asyncio
import re
from dataclasses import dataclass
from typing import Any

import pytest
from support.errors import refuses
from support.strategies import scores, step_of

from trinity_lightning.algorithm.add_strategy import (
    AddStrategy,
    GRPOAddStrategy,
    TaskAdvantageStrategy,
    create_add_strategy,
)
from trinity_lightning.algorithm.add_strategy.add_strategy import ListWriter
from trinity_lightning.errors import ArgumentError, PartError


class Scaled(TaskAdvantageStrategy):
    power: Any

    def score(self, rewards, groups, runs):
        return rewards * self.power, {}


class Plain(Scaled):
    def __init__(self, power=1.0):
        self.power = power


class Super(Scaled):
    def __init__(self, power):
        super().__init__()
        self.power = power


class Keyword(Scaled):
    def __init__(self, *, power: float = 1.0, **others: Any):
        super().__init__(**others)
        self.power = power


class Reference(Scaled):
    """The form of the specification: a writer, and keywords."""

    def __init__(self, writer, **kwargs):
        super().__init__(writer)
        self.power = kwargs.get("power", 1.0)

    @classmethod
    def default_args(cls):
        return {"power": 1.0}


class WithWriter(Scaled):
    def __init__(self, writer, power=1.0):
        super().__init__(writer)
        self.power = power


@dataclass
class Data(Scaled):
    power: float = 1.0


@dataclass(frozen=True)
class Frozen(Scaled):
    power: float


class OfGRPO(GRPOAddStrategy):
    def __init__(self, power=1.0):
        super().__init__(std_level="group")
        self.power = power

    def score(self, rewards, groups, runs):
        return rewards * self.power, {}


class OfAnEarlierVersion(Scaled):
    def __init__(self, output, power=1.0):
        super().__init__(output)
        self.power = power

    @classmethod
    def default_args(cls):
        return {"power": 1.0}


NATURAL = [Plain, Super, Keyword, Reference, WithWriter, Data, Frozen, OfGRPO, OfAnEarlierVersion]


@pytest.mark.parametrize("cls", NATURAL)
def test_the_natural_class_with_one_argument_works(cls):
    writer, exps = ListWriter(), step_of([1.0, 2.0])
    strategy: Any = create_add_strategy([(f"{__name__}.{cls.__name__}", {"power": 3.0})], writer)
    count, _ = asyncio.run(strategy.add(exps, 1))
    assert count == len(writer.experiences) == 2
    assert scores(writer.experiences) == [3.0, 6.0]
    assert strategy.writer is writer


@pytest.mark.parametrize("cls", [Plain, Keyword, WithWriter, Data, Reference])
def test_default_args_follow_from_the_constructor_or_are_those_that_are_given(cls):
    assert cls.default_args() == {"power": 1.0}
    assert Super.default_args() == Frozen.default_args() == {}  # it has no default


@pytest.mark.parametrize("cls", [strategy for strategy in NATURAL if strategy is not Reference])
def test_a_wrong_or_a_missing_argument_is_refused_by_its_key(cls: Any):
    with refuses(f"add_strategy.{cls.__name__}.args.powr", ArgumentError) as refused:
        create_add_strategy([(cls, {"powr": 1.0})], ListWriter())
    assert "Did you mean 'power'" in str(refused.value)
    without_power: Any = (cls, {})
    if cls in (Super, Frozen):
        with refuses(f"add_strategy.{cls.__name__}.args.power", ArgumentError):
            create_add_strategy([without_power], ListWriter())


class Swapped(TaskAdvantageStrategy):
    def score(self, groups, rewards, runs):  # type: ignore[override]
        return rewards, {}


class Fewer(TaskAdvantageStrategy):
    def score(self, rewards, groups):  # type: ignore[override]
        return rewards, {}


class OfVerl(TaskAdvantageStrategy):
    def score(self, index, token_level_rewards, runs):  # type: ignore[override]
        return token_level_rewards, {}


class StepFirst(AddStrategy):
    async def add(self, step, exps):  # type: ignore[override]
        return 0, {}


class Fails(Plain):
    def __init__(self, power=1.0):
        self.power = {}[power]


@pytest.mark.parametrize(
    ("cls", "named"),
    [
        (Swapped, r"score\(rewards, groups, runs\)"),
        (Fewer, r"score\(rewards, groups, runs\)"),
        (OfVerl, "'index'"),
        (StepFirst, "'step'"),
        (Fails, r"KeyError: 1\.0 \(.*test_own_strategies\.py:\d+ in __init__\)"),
    ],
)
def test_methods_that_are_called_otherwise_and_constructors_that_fail_are_refused(cls, named):
    with refuses(f"add_strategy.{cls.__name__}") as refused:
        create_add_strategy([(cls, {})], ListWriter())
    assert re.search(named, str(refused.value))


class Raises(Plain):
    def score(self, rewards, groups, runs):
        return {}["nothing"], {}


def test_an_error_while_it_weighs_names_its_line():
    strategy = create_add_strategy([("reward_variance", {}), (f"{__name__}.Raises", {})], ListWriter())
    with pytest.raises(PartError, match=r"Raises.*'nothing' \(.*test_own_strategies\.py:\d+ in score"):
        asyncio.run(strategy.add(step_of([0.0, 1.0]), 1))
