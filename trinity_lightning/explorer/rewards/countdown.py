"""The numbers game Countdown: reach a target with given numbers."""

import re
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from trinity_lightning.common.arithmetic import evaluate
from trinity_lightning.explorer.rewards.text import find_last_answer
from trinity_lightning.explorer.tasks.task import Task

# What TinyZero (github.com/Jiayi-Pan/TinyZero) gives for an answer that is there and is not right.
_ATTEMPT = 0.1
_WRITTEN = {"×": "*", "·": "*", r"\times": "*", r"\cdot": "*", "÷": "/", r"\div": "/", "−": "-", "–": "-"}
_OTHER_OPERATORS = re.compile(r"//|%")  # the game has four


def countdown(response: str, task: Task) -> float:
    """1 for an expression that reaches the target with every number once, 0.1 for any other answer, 0 for none.

    The expression is of numbers, + - * / and brackets, and stands in the last `<answer>...</answer>`, with or without
    "= target" behind it. The task's entry has the numbers in `nums` (or `numbers`) and the `target`.

    Raises:
        ValueError: the entry has no such fields.
    """
    numbers, target = _game(task.raw_task)
    answer = find_last_answer(response)
    if not answer:
        return 0.0
    expression, equals, result = _plain(answer).partition("=")
    try:
        value, used = evaluate(expression)
        told = evaluate(result)[0] if equals else value
    except (ValueError, SyntaxError, ZeroDivisionError):
        return _ATTEMPT
    right = value == told == target and Counter(used) == Counter(numbers) and not _OTHER_OPERATORS.search(expression)
    return 1.0 if right else _ATTEMPT


def _plain(answer: str) -> str:
    """On one line, out of bold type and dollar signs, with the operators of a keyboard."""
    for written, meant in _WRITTEN.items():
        answer = answer.replace(written, meant)
    return " ".join(answer.split()).strip("*`$ ")


def _game(entry: Any) -> tuple[list[Fraction], Fraction]:
    numbers = entry.get("numbers") if entry.get("nums") is None else entry["nums"]
    try:
        if not isinstance(numbers, Sequence) or isinstance(numbers, str):
            raise ValueError
        return [Fraction(str(number)) for number in numbers], Fraction(str(entry.get("target")))
    except ValueError:
        raise ValueError(
            "the task is no game of Countdown: its entry needs a list of numbers 'nums' and a 'target', and has "
            f"{numbers!r} and {entry.get('target')!r}"
        ) from None
