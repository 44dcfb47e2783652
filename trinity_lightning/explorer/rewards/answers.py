"""The task's answer, the answer in a response, and the reward `math`, which compares both by value.

Rewards that read a response as text are in `text`.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache, wraps
from typing import Any, NamedTuple, TypeVar

import numpy as np

from trinity_lightning.common.thoughts import answer_part
from trinity_lightning.errors import ConfigError
from trinity_lightning.explorer.rewards.equality import same_answer
from trinity_lightning.explorer.rewards.numerals import as_number
from trinity_lightning.explorer.rewards.spelling import bare, written
from trinity_lightning.explorer.tasks.task import Task

# -- marks of reward functions, the task's answer, and numbers in a text -----------------------------------------------

F = TypeVar("F")
Entry = Mapping[str, Any]

# A minus after a digit, a letter or a closing bracket is a subtraction ("7-3"); any other is a sign.
_NUMBER_IN_TEXT = re.compile(
    r"(?:(?<![\w)\]])[-−])?(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
    r"(?:[eE][-+]?[0-9]{1,3}(?!\w))?"
)
# Fields of a mapping that hold the answer itself, as in verl's reward_model.
_NESTED = ("ground_truth", "answer", "value", "solution", "target")


def checked_by(check: Callable[[Entry], object]) -> Callable[[F], F]:
    """Mark a reward function with a check, which is called for entries before a run: ConfigError for a bad entry."""

    def mark(function: F) -> F:
        function.check_task = check  # type: ignore[attr-defined]
        return function

    return mark


def judges_answer(function: Callable[[str, Task], float]) -> Callable[[str, Task], float]:
    """Have a reward function judge the answer behind a response's thoughts, which `answer_part` finds.

    A response that was cut off in its thoughts is worth 0. For plain functions, not for coroutine functions.
    """

    @wraps(function)
    def judge(response: str, task: Task) -> float:
        answer = answer_part(response)
        return 0.0 if answer is None else function(answer, task)

    return judge


def reads_answer(check: Callable[[Entry], object]) -> Callable[[F], F]:
    """Mark a reward function that needs the entry's answer, and a check of it; see `checked_by`."""

    def mark(function: F) -> F:
        function.reads_answer = True  # type: ignore[attr-defined]
        return checked_by(check)(function)

    return mark


def accepted_answers(entry: Entry) -> list[str]:
    """The entry's answers as text; any of them is right.

    Raises:
        ConfigError: there is no answer, or it is neither text nor number: a mapping, NaN, an empty list, blank text.
    """
    return [str(text) for text, *_ in map(_spellings, _answers(entry))]


def exact_answers(entry: Entry) -> set[str]:
    """All spellings of the accepted answers; a float has several, such as 5.0 and 5, or 1e-05 and 0.00001."""
    return {spelling.strip() for answer in _answers(entry) for spelling in _spellings(answer)}


def nested_answer(entry: Entry) -> str | None:
    """The dotted name of a field within a field that usually has the answer, such as `reward_model.ground_truth`."""
    mappings = ((field, value) for field, value in entry.items() if isinstance(value, Mapping) and field != "answer")
    return next((f"{field}.{name}" for field, value in mappings for name in _NESTED if name in value), None)


def _answers(entry: Entry) -> list[Any]:
    answer = entry.get("answer")
    if answer is None:
        hint = f", as in answer_field={nested}" if (nested := nested_answer(entry)) else ""
        raise ConfigError(f"the task has no 'answer': set the taskset's answer_field{hint}", key=".answer_field")
    if isinstance(answer, Mapping):
        field = next((name for name, value in entry.items() if value is answer and name != "answer"), "answer")
        name = next((name for name in (*_NESTED, *answer) if name in answer), "NAME")
        raise ConfigError(
            f"the task's answer is a mapping with the fields {', '.join(map(str, answer)) or 'none'}: name that of the "
            f"answer in the taskset, as in answer_field={field}.{name}",
            key=".answer_field",
        )
    if isinstance(answer, np.ndarray):
        answer = answer.tolist()
    answers = list(answer) if isinstance(answer, list | tuple | set | frozenset) else [answer]
    if not answers:
        raise ConfigError("the task's answer is an empty list: give at least one accepted answer")
    return answers


def _spellings(answer: Any) -> list[str]:
    """Spellings of a text or a number, the usual one first."""
    if isinstance(answer, str):
        if not answer.strip():
            raise ConfigError(f"the task's answer {answer!r} is empty")
        return [answer]
    if isinstance(answer, int | Fraction | np.integer | np.bool_):
        return [str(answer)]
    if isinstance(answer, float | np.floating | Decimal) and math.isfinite(answer):
        plain = format(Decimal(str(answer)), "f")
        return [plain, str(answer), *([str(int(answer))] if answer == int(answer) else [])]
    raise ConfigError(
        f"the task's answer has {answer!r}, of type {type(answer).__name__}: give a text, a finite number, or a list "
        "of these, any of which is right"
    )


def find_numbers(text: str) -> list[Decimal]:
    """The numbers in a text: signed, decimal, with thousands separators."""
    return [Decimal(number.replace(",", "").replace("−", "-")) for number in _NUMBER_IN_TEXT.findall(text)]


def find_last_number(text: str) -> Decimal | None:
    """The last number in a text; None if there is none."""
    return next(reversed(find_numbers(text)), None)


# -- the reward `math`: the answer in the last \boxed{...}s, or else the last number -----------------------------------


# A backslash may be doubled, as in JSON.
_BRACE = re.compile(r"\\+(?:boxed|fbox)(?![a-zA-Z])\s*+\{?|\\\\|\\[{}]|[{}]")
# Content of a box without braces: the formula up to its end, if it has no words, else one number, letter or command.
_ARGUMENT = r"\s*\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\}"
_UNBRACED = re.compile(
    r"(?=[-+−.\d(\[\\a-zA-Z])"
    r"(?:(?:(?!(?<![\\a-zA-Z])[a-zA-Z]{2}|\\[)\]])[^$\n]){1,200}?(?=\s*(?:\$|\\[)\]]))"
    r"|[-+−]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:/\d+)?(?:\\?%)?"
    rf"|[-+−]?\\[a-zA-Z]+(?:{_ARGUMENT}|\s*\d)*"
    r"|[a-zA-Z](?!\w|\s+[a-zA-Z]))"
)
# Text that joins two boxes to one answer, as in "$x = \boxed{2}$ and $y = \boxed{3}$", with spaces, dollar signs and
# bold type around it.
_SPACE = r"(?:[\s$*~]|\\[()\[\],;:! ]|\\q?quad(?![a-zA-Z]))*+"
_AND_WORDS = r"(?:and(?:\s++also)?+|or|as\s++well\s++as)"
_AND = rf"(?:{_AND_WORDS}\b|&|\\(?:text|mathrm)\{{\s*+{_AND_WORDS}\s*+\}}|\\(?:land|lor)(?![a-zA-Z]))"
_NAME = r"(?:[a-zA-Z](?:_\{?\w+\}?)?\s*+=)?+"
_BETWEEN = re.compile(rf"{_SPACE}(?:[,;]{_SPACE}{_AND}?+|{_AND}){_SPACE}{_NAME}{_SPACE}")


# Marks before the answer of a solution in GSM8K and MetaMath.
_BEFORE_ANSWER = re.compile(r"####|\b(?:the|final)\s+answer\s*(?:is\b\s*:?|:)", re.IGNORECASE)


class _Box(NamedTuple):
    start: int
    end: int
    answer: str


def find_boxed(text: str) -> str | None:
    r"""The content of the last complete `\boxed{...}` of a text, braces in it balanced; None if there is none.

    `\fbox{...}` is a box, too, and so is `\boxed 5`, without braces. Boxes before the last one belong to the answer if
    only a comma, "and (also)", "as well as" or "or" joins them (and a name, as in y = \boxed{3}). Their contents are
    then listed with commas, equal ones once. Other boxes are steps on the way, or answers that were given up.
    """
    boxes = _boxes(text)
    joined = boxes[-1:]
    for box in reversed(boxes[:-1]):
        if not _BETWEEN.fullmatch(text, box.end, joined[0].start):
            break
        joined.insert(0, box)
    if len(joined) == 1:
        return joined[0].answer
    distinct: dict[Fraction | str, str] = {}
    for answer in (box.answer for box in joined):
        number = as_number(written(bare(answer)))
        distinct.setdefault(answer if number is None else number, answer)
    return ", ".join(distinct.values()) if distinct else None


def expected_answers(entry: Entry) -> list[str]:
    """The entry's accepted answers, each without the solution around it.

    Raises:
        ConfigError: see `accepted_answers`.
    """
    return [_expected(text) for answer in accepted_answers(entry) for text in _listed(answer)]


@reads_answer(expected_answers)
@judges_answer
def math_boxed_or_last(response: str, task: Task) -> float:
    r"""1 if the response's last `\boxed{...}`, or its last number if it has no box, is the task's answer, else 0.

    `\fbox{...}` is a box, too, and so is `\boxed 5`. Boxes that a comma, "and (also)", "as well as" or "or" joins to
    the last one are one answer together: `x = \boxed{2}, y = \boxed{3}` is "2, 3". Otherwise the last box counts, as a
    correction of those before. Only text behind the thoughts counts, and a response that was cut off in them is worth
    0. The task's answer may be the bare answer, a solution that ends in such boxes, in "#### answer" or in "The answer
    is: answer", or a list of these, any of which is right.

    Raises:
        ConfigError: the task has no answer, or one that is neither text nor number.
    """
    expected = expected_answers(task.raw_task)
    given = find_boxed(response)
    if given is None:
        number = find_last_number(response)
        given = "" if number is None else format(number, "f")
    return float(is_any(given, expected))


def is_any(given: str, expected: Iterable[str]) -> bool:
    """True if an answer is equal to any of the accepted ones."""
    return any(same_answer(given, answer) for answer in expected)


def _boxes(text: str) -> list[_Box]:
    """The complete boxes of a text, in order; if one lies within another, only the inner one."""
    boxes: list[_Box] = []
    opened: list[re.Match[str]] = []
    first = min((place for box in (r"\boxed", r"\fbox") if (place := text.find(box)) >= 0), default=len(text))
    for token in _BRACE.finditer(text, first):
        kind = token.group()
        if kind == "}" and opened:
            brace = opened.pop()
            if brace.group() != "{" and not (boxes and boxes[-1].start > brace.start()):
                boxes.append(_Box(brace.start(), token.end(), text[brace.end() : token.start()]))
        elif kind[-1] == "{" and kind != r"\{":
            opened.append(token)
        elif len(kind) > 2 and (content := _UNBRACED.match(text, token.end())):  # and no line break
            boxes.append(_Box(token.start(), content.end(), content.group().rstrip(" ,;:")))
    return boxes


def _listed(answer: str) -> list[str]:
    """The answer; if it is a JSON list of texts, as in Skywork-OR1, the list and each of its texts."""
    if not answer.startswith('["'):
        return [answer]
    try:
        return [answer, *map(str, json.loads(answer))]  # also the list itself, which may be the output of code
    except ValueError:
        return [answer]


@lru_cache(maxsize=4096)
def _expected(reference: str) -> str:
    """The answer in a reference, without the solution around it."""
    expected = find_boxed(reference)
    if expected is None:
        expected = _BEFORE_ANSWER.split(reference)[-1]
    plain = bare(expected)
    if not plain.isalnum() and not written(plain):
        raise ConfigError(f"the task's answer {reference!r} is empty")
    return expected
