"""Rewards that read the response as plain text."""

import re
from decimal import Decimal
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
    """1 when the response is the task's answer, but for space around either, else 0."""
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
