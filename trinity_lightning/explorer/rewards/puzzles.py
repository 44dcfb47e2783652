"""Rewards for puzzles: Countdown and those of reasoning-gym; and the arithmetic that Countdown needs."""

import ast
import functools
import json
import operator
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from trinity_lightning.errors import ConfigError
from trinity_lightning.explorer.rewards.answers import checked_by, judges_answer
from trinity_lightning.explorer.rewards.text import find_last_answer
from trinity_lightning.explorer.tasks.task import Task

# -- arithmetic of a model, computed exactly and without running it as code --------------------------------------------

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_ALLOWED = re.compile(r"[\d\s.+\-*/%()eE]*")  # other characters are refused, before Python's parser may warn of them
_HUGE = re.compile(r"[eE][-+]?\d{4}")
_LONGEST = 200  # characters, so that the computation takes no time


def evaluate(expression: str) -> tuple[Fraction, list[Fraction]]:
    """The value of an expression of numbers, + - * / // % and brackets; and its numbers, in order.

    Raises:
        ValueError: the expression is longer than 200 characters, or has other parts.
        SyntaxError: it is no expression.
        ZeroDivisionError: it divides by zero.
    """
    if len(expression) > _LONGEST:
        raise ValueError(f"the expression is longer than {_LONGEST} characters")
    expression = expression.strip()
    if not _ALLOWED.fullmatch(expression) or _HUGE.search(expression):
        raise ValueError(f"cannot work out '{expression}'")
    numbers: list[Fraction] = []

    def value(node: ast.expr) -> Fraction:
        if isinstance(node, ast.Constant) and type(node.value) in (int, float):
            numbers.append(Fraction(ast.get_source_segment(expression, node) or ""))  # as written: floats are not exact
            return numbers[-1]
        if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
            return Fraction(_BINARY[type(node.op)](value(node.left), value(node.right)))
        if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
            return _UNARY[type(node.op)](value(node.operand))
        raise ValueError(f"cannot work out '{ast.unparse(node)}'")

    try:
        return value(ast.parse(expression, mode="eval").body), numbers
    except ZeroDivisionError:  # its message would be a Fraction
        raise ZeroDivisionError("division by zero") from None


# -- countdown --------------------------------------------------------------------------------------------------------


# The reward of TinyZero (github.com/Jiayi-Pan/TinyZero) for a wrong answer in the right form.
_ATTEMPT = 0.1
_WRITTEN = {"×": "*", "·": "*", r"\times": "*", r"\cdot": "*", "÷": "/", r"\div": "/", "−": "-", "–": "-"}
_OTHER_OPERATORS = re.compile(r"//|%")  # the game has four


def _game(entry: Mapping[str, Any]) -> tuple[list[Fraction], Fraction]:
    """The numbers and the target of an entry."""
    numbers = entry.get("numbers") if entry.get("nums") is None else entry["nums"]
    try:
        if isinstance(numbers, np.ndarray):
            numbers = numbers.tolist()
        if not isinstance(numbers, Sequence) or isinstance(numbers, str) or not numbers:
            raise ValueError
        return [Fraction(str(number)) for number in numbers], Fraction(str(entry.get("target")))
    except (ValueError, ZeroDivisionError):
        raise ConfigError(
            "the task is no game of Countdown: its entry needs a list of numbers 'nums' and a 'target', and has "
            f"{numbers!r} and {entry.get('target')!r}"
        ) from None


@checked_by(_game)
@judges_answer
def countdown(response: str, task: Task) -> float:
    """1 for an expression that reaches the target with every number once, 0.1 for any other answer, 0 for none.

    The expression is of numbers, + - * / and brackets, and stands in the last `<answer>...</answer>`, with or without
    "= target" behind it. The task's entry has the numbers in `nums` (or `numbers`) and the `target`.

    Raises:
        ConfigError: the entry has no such fields.
    """
    numbers, target = _game(task.raw_task)
    answer = find_last_answer(response)
    if not answer:
        return 0.0
    expression, equals, result = _plain(answer).partition("=")
    try:
        value, used = evaluate(expression)
        stated = evaluate(result)[0] if equals else value
    except (ValueError, SyntaxError, ZeroDivisionError):
        return _ATTEMPT
    right = value == stated == target and Counter(used) == Counter(numbers) and not _OTHER_OPERATORS.search(expression)
    return 1.0 if right else _ATTEMPT


def _plain(answer: str) -> str:
    """The answer on one line, without bold type and dollar signs, with the operators of a keyboard."""
    for written, meant in _WRITTEN.items():
        answer = answer.replace(written, meant)
    return " ".join(answer.split()).strip("*`$ ")


# -- reasoning-gym ----------------------------------------------------------------------------------------------------


def _source(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    """The name, configuration and entry of the reasoning-gym dataset of a task's entry."""
    source = entry.get("reasoning_gym")
    if not source:
        raise ConfigError(
            "the task is no reasoning-gym entry: this reward needs a taskset with source 'reasoning_gym'", key=".source"
        )
    return source


@checked_by(_source)
@judges_answer
def reasoning_gym(response: str, task: Task) -> float:
    """The score from 0 to 1 that the verifier of the entry's reasoning-gym dataset gives.

    It judges the content of the last `<answer>...</answer>` of the response, or else the whole response.

    Raises:
        ConfigError: the task does not come from a reasoning-gym taskset.
    """
    source = _source(task.raw_task)
    answer = find_last_answer(response) or response.strip()
    config = json.dumps(source.get("config", {}), sort_keys=True)
    return float(_verifier(source["name"], config)(answer, source["entry"]))


@functools.cache
def _verifier(name: str, config: str) -> Callable[[str, dict[str, Any]], float]:
    """The verifier of a dataset with its configuration, which some judge by (a number of decimal places)."""
    import reasoning_gym  # takes a second

    verifier: Callable[..., float] = reasoning_gym.create_dataset(name, **json.loads(config)).score_answer
    return verifier
