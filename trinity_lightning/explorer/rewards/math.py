r"""Rewards for mathematics: the answer in the last \boxed{...}, or else the last number, compared by value."""

import re
from fractions import Fraction

from trinity_lightning.explorer.rewards.scoring import REWARDS
from trinity_lightning.explorer.rewards.text import answer_of, find_last_answer, find_last_number
from trinity_lightning.explorer.rewards.verifier import MathVerifier
from trinity_lightning.explorer.tasks.task import Task

_DECIMAL = r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)"
_RATIO = re.compile(rf"({_DECIMAL})(?:/({_DECIMAL}))?")
_BRACE = re.compile(r"(?<!\\)(?:\\boxed\{|\{|\})")
# Characters: longer than any answer, and where Python starts to refuse to read digits as an integer.
_LONGEST_ANSWER = 1000
# Not after a digit: 1\frac{1}{2} is a mixed number.
_LATEX_RATIO = re.compile(r"(?<![0-9])\\[dt]?frac\{([^{}]+)\}\{([^{}]+)\}")
# What changes the look of an answer and not its value.
_DECORATION = re.compile(r"\\(?:left|right)(?![a-zA-Z])|\\[,;!: ]|\\?[$%]|\^\\circ|\^\{\\circ\}|\s")
_TEXT = re.compile(r"\\(?:text|mathrm|mathbf)\{([^{}]*)\}")
_THOUSANDS = re.compile(r"(?<=\d)(?:,|\{,\})(?=\d{3}(?!\d))")
# Algebra would take it for a product of letters, and "lube" for the same as "blue".
_WORD = re.compile(r"[^\W\d_]{3,}")

_VERIFIER = MathVerifier()


def find_last_boxed(text: str) -> str | None:
    r"""What stands in the last complete `\boxed{...}` of a text, braces in it balanced; None where there is none."""
    last, last_start = None, -1
    open_braces: list[tuple[int, bool]] = []
    for token in _BRACE.finditer(text):
        if token.group() != "}":
            open_braces.append((token.end(), token.group() != "{"))
        elif open_braces:
            start, boxed = open_braces.pop()
            if boxed and start > last_start:
                last, last_start = text[start : token.start()], start
    return last


def same_answer(given: str, expected: str) -> bool:
    """Whether two answers are equal.

    As exact numbers where both are numbers or ratios; else as undecorated text, or as expressions, sets, intervals and
    the like by math-verify.
    """
    plain = _undecorated(given), _undecorated(expected)
    numbers = _as_number(plain[0]), _as_number(plain[1])
    if None not in numbers:
        return numbers[0] == numbers[1]
    if plain[0] == plain[1]:
        return True
    if not all(plain) or _WORD.fullmatch(plain[1]) or max(len(given), len(expected)) > _LONGEST_ANSWER:
        return False
    return _VERIFIER.same(rf"\boxed{{{expected}}}", rf"\boxed{{{given}}}")


@REWARDS.register("math")
def math_boxed_or_last(response: str, task: Task) -> float:
    r"""1 when the response's last `\boxed{...}`, or where it has none its last number, is the task's answer, else 0.

    The task's answer may be the bare answer, a solution that ends in a box, or one that ends in "#### answer".
    """
    given = find_last_boxed(response)
    if given is None:
        number = find_last_number(response)
        given = "" if number is None else format(number, "f")
    return float(same_answer(given, _expected(task)))


@REWARDS.register("accuracy")
def accuracy(response: str, task: Task) -> float:
    """1 when the response's answer is the task's, else 0; for responses whose answer need be in no box.

    The answer is what stands in the last `<answer>...</answer>`, or else in the whole response: its last box, or else
    what math-verify finds there. The task's answer as for `math`.
    """
    tagged = find_last_answer(response)
    text = response if tagged is None else tagged
    expected = _expected(task)
    boxed = find_last_boxed(text)
    if tagged is not None or boxed is not None:
        return float(same_answer(text if boxed is None else boxed, expected))
    return float(_VERIFIER.same(rf"\boxed{{{expected}}}", text[-_LONGEST_ANSWER:]))


def _expected(task: Task) -> str:
    """The task's answer, out of the solution around it."""
    reference = str(answer_of(task))
    return find_last_boxed(reference) or reference.rpartition("####")[2]


def _undecorated(answer: str) -> str:
    plain = _DECORATION.sub("", _TEXT.sub(r"\1", answer.replace("−", "-")))
    return _LATEX_RATIO.sub(r"\1/\2", _THOUSANDS.sub("", plain)).rstrip(".")


def _as_number(answer: str) -> Fraction | None:
    match = _RATIO.fullmatch(answer) if len(answer) <= _LONGEST_ANSWER else None
    if match is None:
        return None
    numerator, denominator = Fraction(match[1]), Fraction(match[2] or 1)
    return numerator / denominator if denominator else None
