"""Rewards that read the response as plain text."""

import ast
import functools
import json
import operator
import re
from collections import Counter
from collections.abc import Callable, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any, TypeVar

from trinity_lightning.explorer.tasks.task import Task

F = TypeVar("F")

# A minus that follows a digit, a letter or a closing bracket is a subtraction ("7-3"), any other is a sign.
_NUMBER = re.compile(
    r"(?:(?<![\w)\]])[-−])?(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
    r"(?:[eE][-+]?[0-9]{1,3}(?!\w))?"
)
_ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
# Thoughts and answer of DeepSeek-R1 (arXiv 2501.12948, table 1). Reasoning models' chat templates write the first tag.
_UNTAGGED = r"(?:(?!</?(?:think|answer)>).)*"
_THINK_ANSWER = re.compile(rf"\s*+(?:<think>)?({_UNTAGGED})</think>\s*+<answer>({_UNTAGGED})</answer>\s*+", re.DOTALL)


def reads_answer(function: F) -> F:
    """Mark a reward function that needs the entry's answer."""
    function.reads_answer = True  # type: ignore[attr-defined]
    return function


def answer_of(task: Task) -> Any:
    """The entry's answer; ValueError if it has none."""
    answer = task.raw_task.get("answer")
    if answer is None:
        raise ValueError("the task has no 'answer': set the taskset's answer_field")
    return answer


def answer_text(task: Task) -> str:
    """The entry's answer as text; a small or large float without an exponent, as people write it."""
    answer = answer_of(task)
    return format(Decimal(repr(answer)), "f") if isinstance(answer, float) else str(answer)


def find_numbers(text: str) -> list[Decimal]:
    """The numbers in a text: signed, decimal, with thousands separators."""
    return [Decimal(number.replace(",", "").replace("−", "-")) for number in _NUMBER.findall(text)]


def find_last_number(text: str) -> Decimal | None:
    """The last number in a text; None if there is none."""
    return next(reversed(find_numbers(text)), None)


def find_last_answer(text: str) -> str | None:
    """What stands in the last `<answer>...</answer>` of a text, without the space around; None if there is none."""
    answers: list[str] = _ANSWER.findall(text)
    return answers[-1].strip() if answers else None


@reads_answer
def last_number(response: str, task: Task) -> float:
    """1 when the last number in the response equals the task's answer (the last number in it), else 0.

    Raises:
        ValueError: the task's answer holds no number.
    """
    expected = find_last_number(answer_text(task))
    if expected is None:
        raise ValueError(f"the task's answer {answer_of(task)!r} holds no number")
    return float(find_last_number(response) == expected)


@reads_answer
def exact_match(response: str, task: Task) -> float:
    """1 when the response is the task's answer, space around either aside, else 0."""
    return float(response.strip() == str(answer_of(task)).strip())


def think_answer_format(response: str, task: Task) -> float:
    """1 when the response is `<think>thoughts</think> <answer>answer</answer>` and nothing else, else 0.

    Each tag once and neither part empty; the opening `<think>` may be missing, if the chat template writes it.
    """
    parts = _THINK_ANSWER.fullmatch(response)
    return float(parts is not None and all(part.strip() for part in parts.groups()))


def contains_digits(response: str, task: Task) -> float:
    """The share of the response's characters that are digits: a reward that varies even for an untrained model."""
    return sum(character.isdigit() for character in response) / len(response) if response else 0.0


# -- arithmetic that somebody else wrote, worked out exactly and without running it as code ---------------------------

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_ALLOWED = re.compile(r"[\d\s.+\-*/%()eE]*")  # all else is refused before Python's parser can warn of it
_HUGE = re.compile(r"[eE][-+]?\d{4}")
_LONGEST = 200  # characters: nesting and numbers stay small enough to be worked out at once


def evaluate(expression: str) -> tuple[Fraction, list[Fraction]]:
    """The value of numbers with + - * / // % and brackets, and the numbers that stand in it, in order.

    Raises:
        ValueError: it is longer than 200 characters, or holds anything else.
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
    except ZeroDivisionError:  # whose message would be a Fraction
        raise ZeroDivisionError("division by zero") from None


# -- countdown --------------------------------------------------------------------------------------------------------


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
        stated = evaluate(result)[0] if equals else value
    except (ValueError, SyntaxError, ZeroDivisionError):
        return _ATTEMPT
    right = value == stated == target and Counter(used) == Counter(numbers) and not _OTHER_OPERATORS.search(expression)
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


# -- reasoning-gym ----------------------------------------------------------------------------------------------------


def reasoning_gym(response: str, task: Task) -> float:
    """What the verifier of the entry's reasoning-gym dataset gives, from 0 to 1.

    Judged is what stands in the last `<answer>...</answer>` of the response, or else the whole of it.

    Raises:
        ValueError: the task does not come from a reasoning-gym taskset.
    """
    source = task.raw_task.get("reasoning_gym")
    if not source:
        raise ValueError("the task is no reasoning-gym entry: this reward needs a taskset with source 'reasoning_gym'")
    answer = find_last_answer(response) or response.strip()
    config = json.dumps(source.get("config", {}), sort_keys=True)
    return float(_verifier(source["name"], config)(answer, source["entry"]))


@functools.cache
def _verifier(name: str, config: str) -> Callable[[str, dict[str, Any]], float]:
    """The verifier of a dataset as it was configured: some judge by the configuration (a number of decimal places)."""
    import reasoning_gym  # takes a second: only when it is needed

    verifier: Callable[..., float] = reasoning_gym.create_dataset(name, **json.loads(config)).score_answer
    return verifier
