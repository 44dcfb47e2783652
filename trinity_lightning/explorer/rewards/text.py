"""Rewards that read a response as text: its last number, its form, and the answer in words or in tags (accuracy)."""

import re
from decimal import Decimal

from trinity_lightning.errors import ConfigError
from trinity_lightning.explorer.rewards.answers import (
    Entry,
    accepted_answers,
    exact_answers,
    expected_answers,
    find_boxed,
    find_last_number,
    find_numbers,
    is_any,
    judges_answer,
    reads_answer,
)
from trinity_lightning.explorer.rewards.numerals import as_number
from trinity_lightning.explorer.rewards.spelling import IDLE_SPACE
from trinity_lightning.explorer.tasks.task import Task

_ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
# Thoughts and answer of DeepSeek-R1 (arXiv 2501.12948, table 1). Reasoning models' chat templates write the first tag.
_UNTAGGED = r"(?:(?!</?(?:think|answer)>).)*"
_THINK_ANSWER = re.compile(rf"\s*+(?:<think>)?({_UNTAGGED})</think>\s*+<answer>({_UNTAGGED})</answer>\s*+", re.DOTALL)


def find_last_answer(text: str) -> str | None:
    """What stands in the last `<answer>...</answer>` of a text, without the space around; None if there is none."""
    answers: list[str] = _ANSWER.findall(text)
    return answers[-1].strip() if answers else None


def _expected_numbers(entry: Entry) -> list[Decimal]:
    answers = accepted_answers(entry)
    numbers = [number for number in map(find_last_number, answers) if number is not None]
    if not numbers:
        raise ConfigError(f"the task's answer {entry['answer']!r} holds no number")
    return numbers


@reads_answer(_expected_numbers)
@judges_answer
def last_number(response: str, task: Task) -> float:
    """1 when the last number in the response equals the task's answer (the last number in it), else 0.

    Of a list of answers any is right.

    Raises:
        ConfigError: the task's answer holds no number.
    """
    return float(find_last_number(response) in _expected_numbers(task.raw_task))


@reads_answer(exact_answers)
@judges_answer
def exact_match(response: str, task: Task) -> float:
    """1 when the response is the task's answer, but for space around either, else 0; of a list any answer is right.

    Raises:
        ConfigError: the task has no answer, or one that is neither text nor number.
    """
    return float(response.strip() in exact_answers(task.raw_task))


def think_answer_format(response: str, task: Task) -> float:
    """1 when the response is `<think>thoughts</think> <answer>answer</answer>` and nothing else, else 0.

    Each tag once and neither part empty; the opening `<think>` may be missing, if the chat template writes it.
    """
    parts = _THINK_ANSWER.fullmatch(response)
    return float(parts is not None and all(part.strip() for part in parts.groups()))


def contains_digits(response: str, task: Task) -> float:
    """The share of the response's characters that are digits: a reward that varies even for an untrained model."""
    return sum(character.isdigit() for character in response) / len(response) if response else 0.0


# -- the answer in words: boxed, tagged, or the mathematics at the end of a response -----------------------------------


_WORD = re.compile(r"(?<![\\\w])[^\W\d_]{2}")  # and no command of LaTeX
# Within tags: what introduces the answer, what denies it, a formula, and the exponent of a unit (m^2).
_INTRODUCTION = re.compile(r"\b(?:answer|result|solution)\b[^.,;:\n]*?(?:\b(?:is|are|equals)\b|[=:])", re.IGNORECASE)
_DENIAL = re.compile(r"\b(?:not|nor|neither|never)\b|n['’]t\b", re.IGNORECASE)
_FORMULA = re.compile(r"\$([^$]+)\$")
# Of a longer term: a number behind an operand and an operator, or before an operator and an operand, or before x.
_OPERATOR = r"[ \t]*(?:[-+*/^×·÷]|\\(?:times|cdot|div|pm)(?![a-zA-Z]))[ \t]*"
_TERM_BEFORE = re.compile(rf"(?:(?<![a-zA-Z\\])[a-zA-Z]|[\d)\]}}]){_OPERATOR}$")
_TERM_AFTER = re.compile(rf"[ \t]?[xyz](?![a-zA-Z])|{_OPERATOR}(?:[a-zA-Z](?!\s*[a-zA-Z])|[\d(\[{{\\])")
_EXPONENT = re.compile(r"(?<=[a-zA-Z])\^\{?-?\d+\}?")
_END = 2000  # characters of a response in which an answer without tags and box is looked for


@reads_answer(expected_answers)
@judges_answer
def accuracy(response: str, task: Task) -> float:
    """1 when the response's answer is the task's, else 0; for responses whose answer need be in no box.

    Read is what stands in the last `<answer>...</answer>`, or else all of the response. The answer is what its last
    boxes hold, or else all that stands between the tags, or else, among words, the mathematics that math-verify finds
    in the last 2,000 characters. Between tags that must be the only number or formula behind "the answer is" (or
    "result", "solution"; without such words, the only one at all), and nothing denied: "12 or 13" and "not 12, but 13"
    are no answers; nor is a number within a longer term, as in "the answer is x + 3". Boxes, thoughts and the task's
    answer as for `math`.

    Raises:
        ConfigError: the task has no answer, or one that is neither text nor number.
    """
    expected = expected_answers(task.raw_task)
    tagged = find_last_answer(response)
    text = response if tagged is None else tagged
    boxed = find_boxed(text)
    if boxed is not None:
        return float(is_any(boxed, expected))
    if tagged is not None:
        if is_any(tagged, expected):
            return 1.0
        if not _WORD.search(tagged):  # mathematics throughout: a number in it is not the answer
            return 0.0
        text = _INTRODUCTION.split(tagged)[-1]
    from trinity_lightning.explorer.rewards.math_verifier import VERIFIER  # what stands in a box may do without it

    end = _end_of(text)
    found = VERIFIER.find(end)
    if found is None or _is_part_of_a_term(end, found) or (tagged is not None and _hedges(text, found)):
        return 0.0
    return float(is_any(found, expected))


def _hedges(text: str, found: str) -> bool:
    """Whether a text denies something, or has other numbers or formulas than what was found in it."""
    others = set(find_numbers(_EXPONENT.sub("", text))).difference(find_numbers(found))
    formulas = {IDLE_SPACE.sub("", formula) for formula in _FORMULA.findall(text)}
    return bool(_DENIAL.search(text) or others or len(formulas) > 1)


def _is_part_of_a_term(text: str, found: str) -> bool:
    """Whether the number that was found in a text is not all of the answer there; an expression is, or nothing."""
    if as_number(found) is None:
        return False
    before, *introduced = _INTRODUCTION.split(text)
    said = introduced[-1] if introduced else before
    places = list(re.finditer(rf"(?<![\d.]){re.escape(found.lstrip('+-'))}(?!\d)", said))
    if not places:
        return False
    place = places[0] if introduced else places[-1]
    return bool(_TERM_BEFORE.search(said[: place.start()]) or _TERM_AFTER.match(said, place.end()))


def _end_of(text: str) -> str:
    """Its last characters, from the beginning of a word, with the minus that math-verify knows."""
    text = text.replace("−", "-")
    return text if len(text) <= _END else re.split(r"\s", text[-_END:], maxsplit=1)[-1]
