"""Reward functions for the tests of workers, in a module that is quickly imported."""

import asyncio
import os
import sys
from typing import Any

from trinity_lightning.explorer.tasks.task import Task


def length(response: str, task: Task) -> float:
    return len(response) + task.raw_task.get("more", 0)


def scaled(response: str, task: Task, *, factor: float) -> float:
    return factor * len(response)


async def parts(response: str, task: Task) -> dict[str, float]:
    await asyncio.sleep(0)
    return {"short": 0.5, "digits": float(response.isdigit())}


waiting = most_waiting = 0


async def wait_here(response: str, task: Task) -> float:
    """Note how many wait at the same time."""
    global waiting, most_waiting
    waiting += 1
    most_waiting = max(most_waiting, waiting)
    await asyncio.sleep(0.2)
    waiting -= 1
    return os.getpid()


class WaitHere:
    async def __call__(self, response: str, task: Task) -> float:
        return await wait_here(response, task)


def process_id(response: str, task: Task) -> float:
    return os.getpid()


def hangs(response: str, task: Task) -> float:
    while True:
        pass


def dies(response: str, task: Task) -> float:
    os._exit(3)


def leaves(response: str, task: Task) -> float:
    sys.exit("enough")


def raises(response: str, task: Task) -> float:
    raise ZeroDivisionError(f"with {response}")


def returns_text(response: str, task: Task) -> Any:
    return "one"


class Scale:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, response: str, task: Task) -> float:
        return self.factor * len(response)


twice = Scale(2.0)
