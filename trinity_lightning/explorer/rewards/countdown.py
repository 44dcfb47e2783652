"""The numbers game Countdown: reach a target with given numbers."""

import re
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from trinity_lightning.common.arithmetic import evaluate
from trinity_lightning.explorer.rewards.scoring import REWARDS
from trinity_lightning.explorer.rewards.text import find_last_answer
from trinity_lightning.explorer.tasks.task import Task

# What TinyZero (github.com/Jiayi-Pan/TinyZero) gives for an answer that is there and is not right.
_ATTEMPT = 0.1
_OTHER_OPERATORS = re.compile(r"//|%")  # the game has four


@REWARDS.register("countdown")
def countdown(response: str, task: Task) -> float:
    """1 for an expression that reaches the target with every number once, 0.1 for any other answer, 0 for none.

    The expression is of numbers, + - * / and brackets, and stands in the last `<answer>...</answer>`, with or without
    "= target" behind it. The task's entry has the numbers in `nums` (or `numbers`) and the `target`.

    Raises:
        ValueError: the entry has no such fields.
    """
    numbers, target = _game(task.raw_task)
    answer = find_last_answer(response)
    if answer is None:
        return 0.0
    expression, equals, result = answer.replace("×", "*").replace("÷", "/").partition("=")
    try:
        value, used = evaluate(expression)
        told = evaluate(result)[0] if equals else value
    except (ValueError, SyntaxError, ZeroDivisionError):
        return _ATTEMPT
    right = value == told == target and Counter(used) == Counter(numbers) and not _OTHER_OPERATORS.search(expression)
    return 1.0 if right else _ATTEMPT


def _game(entry: Any) -> tuple[list[Fraction], Fraction]:
    numbers, target = entry.get("nums") or entry.get("numbers"), entry.get("target")
    if not isinstance(numbers, Sequence) or isinstance(numbers, str) or target is None:
        raise ValueError("the task is no game of Countdown: its entry needs a list of numbers 'nums' and a 'target'")
    return [Fraction(str(number)) for number in numbers], Fraction(str(target))
