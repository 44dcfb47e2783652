"""Helpers of the operators' tests, and users' operators, found by dotted path."""

import asyncio

from trinity_lightning.buffer.operators import (
    ExperienceOperator,
    ExperienceOperatorV1,
    OperatorConfig,
    create_operators,
)
from trinity_lightning.buffer.operators.experience_operator import OperatorChain
from trinity_lightning.buffer.pipeline import ExperiencePipeline
from trinity_lightning.common.experience import EID, Experience

HERE = "support.operators"


def make(task=0, run=0, reward: float | None = 1.0, response=2, **fields):
    """An experience with a prompt of 2 tokens and a response of that many."""
    return Experience(
        eid=EID(batch=1, task=task, run=run),
        tokens=list(range(1, 3 + response)),
        prompt_length=2,
        reward=reward,
        **fields,
    )


def step_of(*groups):
    """An experience a reward, group after group."""
    return [make(task, run, reward) for task, rewards in enumerate(groups) for run, reward in enumerate(rewards)]


def run(name, exps, auxiliary_models=None, **args):
    """The result of the operator of that name."""
    (operator,) = create_operators([OperatorConfig(name, args)], auxiliary_models)
    return asyncio.run(operator.process(exps))


def rewards(exps):
    return [exp.reward for exp in exps]


def chain_of(pipeline: ExperiencePipeline) -> OperatorChain:
    """The operators of a pipeline that has some."""
    assert pipeline.chain is not None
    return pipeline.chain


def operators_of(pipeline: ExperiencePipeline) -> list[ExperienceOperatorV1]:
    """The same, one by one."""
    return chain_of(pipeline).operators


class AddOne(ExperienceOperatorV1):
    """Adds to the rewards, in place; keeps a diary of its life."""

    def __init__(self, amount: float = 1.0, fail_at: int = 0):
        self.amount, self.fail_at = amount, fail_at
        self.diary: list[str] = []

    async def prepare(self):
        self.diary.append("prepare")

    async def process(self, exps):
        self.diary.append("process")
        for i, exp in enumerate(exps):
            if self.fail_at and i == self.fail_at:
                raise RuntimeError("half-way")
            assert exp.reward is not None
            assert exp.action_mask is not None
            exp.reward += self.amount
            exp.info["touched"] = True
            exp.info["trace"].append(self.amount)
            exp.action_mask.zero_()
        return exps, {"sum": sum(exp.reward or 0 for exp in exps)}

    async def close(self):
        self.diary.append("close")


class Old(ExperienceOperator):
    """An operator of the older kind: keeps every second experience."""

    closed = False

    def process(self, exps):
        return exps[::2], {"kept": len(exps[::2])}

    def close(self):
        self.closed = True


class OldWithModels(Old):
    models = None

    def set_auxiliary_model(self, auxiliary_models):
        self.models = auxiliary_models


class Plain(ExperienceOperatorV1):
    """Its process is no coroutine function, as a mistake."""

    def process(self, exps):  # type: ignore[override]  # pyright: ignore[reportIncompatibleMethodOverride]
        return exps, {}


class Returns(ExperienceOperatorV1):
    """Returns what it is told to."""

    def __init__(self, result):
        self.result = result

    async def process(self, exps):
        return self.result


class Numbers(ExperienceOperatorV1):
    """Reports what it is told to."""

    def __init__(self, metrics):
        self.metrics = metrics

    async def process(self, exps):
        return exps, self.metrics


class Fails(ExperienceOperatorV1):
    """Fails where it is told to, once its list of experiences has been emptied."""

    def __init__(self, where="process"):
        self.where = where

    async def prepare(self):
        self._at("prepare")

    async def process(self, exps):
        exps.clear()
        self._at("process")
        return exps, {}

    async def close(self):
        self._at("close")

    def _at(self, place):
        if place == self.where:
            raise RuntimeError(f"no {place} today")
