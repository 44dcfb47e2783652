"""The numbers game Countdown: reach a target with given numbers."""

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


@REWARDS.register("countdown")
def countdown(response: str, task: Task) -> float:
    """1 for an equation that reaches the target with every number once, 0.1 for any other answer, 0 for none.

    The answer is what stands in the last `<answer>...</answer>`, with or without "= target" behind it. The task's entry
    has the numbers in `nums` (or `numbers`) and the `target`.

    Raises:
        ValueError: the entry has no such fields.
    """
    numbers, target = _game(task.raw_task)
    answer = find_last_answer(response)
    if answer is None:
        return 0.0
    try:
        value, used = evaluate(answer.partition("=")[0].replace("×", "*").replace("÷", "/"))
    except (ValueError, SyntaxError, ZeroDivisionError):
        return _ATTEMPT
    return 1.0 if value == target and Counter(used) == Counter(numbers) else _ATTEMPT


def _game(entry: Any) -> tuple[list[Fraction], Fraction]:
    numbers, target = entry.get("nums", entry.get("numbers")), entry.get("target")
    if not isinstance(numbers, Sequence) or isinstance(numbers, str) or target is None:
        raise ValueError("the task is no game of Countdown: its entry needs a list of numbers 'nums' and a 'target'")
    return [Fraction(str(number)) for number in numbers], Fraction(str(target))
