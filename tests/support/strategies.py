"""Helpers of the add strategies' tests."""

import asyncio

import torch

from trinity_lightning.algorithm.add_strategy import ADD_STRATEGY
from trinity_lightning.algorithm.add_strategy.add_strategy import ListWriter
from trinity_lightning.common.experience import EID, Experience

INVALID = "group_advantages/invalid_group_count"
# Write whole tasks, one write each, without changing their order or number.
ONE_WRITE_A_TASK = [n for n in ADD_STRATEGY if n not in ("duplicate_informative", "step_wise_grpo", "gigpo")]


def make(task, run, reward, step=0, **fields):
    """An experience of 3 response tokens, the second not trained, with all that any strategy asks for."""
    defaults = {"logprobs": [-1.0] * 3, "teacher_logprobs": [-0.5] * 3, "info": {"state": f"s{step}"}}
    return Experience(
        eid=EID(batch=1, task=task, run=run, step=step),
        tokens=[1, 2, 3, 4, 5],
        prompt_length=2,
        action_mask=[True, False, True],
        reward=reward,
        **(defaults | fields),
    )


def runs_of(task, *runs):
    """A task's runs, each a list of its steps: a reward, or a reward and the state before it."""
    steps = [
        (run, step, entry if isinstance(entry, tuple) else (entry, f"s{step}"))
        for run, of_run in enumerate(runs)
        for step, entry in enumerate(of_run)
    ]
    return [make(task, run, reward, step, info={"state": state}) for run, step, (reward, state) in steps]


def step_of(*groups):
    """An experience a reward; groups interleaved by run."""
    runs = max(map(len, groups), default=0)
    return [
        make(task, run, rewards[run])
        for run in range(runs)
        for task, rewards in enumerate(groups)
        if run < len(rewards)
    ]


def add(name, exps, step=1, **args):
    """The experiences that the strategy of that name writes, one list a call, and its metrics."""
    writer = ListWriter()
    count, metrics = asyncio.run(ADD_STRATEGY.get(name)(writer, **args).add(exps, step))
    assert count == sum(map(len, writer.calls))
    return writer.calls, metrics


def advantages(exp) -> torch.Tensor:
    assert exp.advantages is not None
    return exp.advantages


def scores(exps):
    """The advantage of each experience's first trained token."""
    return [advantages(exp)[0].item() for exp in exps]
