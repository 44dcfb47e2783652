"""Exact values of numbers as people and models write them: decimals, ratios, other bases, words."""

import re
from fractions import Fraction

LONGEST_ANSWER = 1000  # characters

# An exponent has at most three digits: larger numbers are no answers, and take long to compute.
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d{1,3}(?: \d{3})+(?![\d/ ])|\d+)"
_DECIMAL = rf"(?:{_DIGITS}(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d{{1,3}})?"
_NUMBER = re.compile(rf"([-+]?)\s*(?:(\d+)\s+(?=.*/))?([-+]?{_DECIMAL})(?:\s*/\s*([-+]?{_DECIMAL}))?")
_FRACTION = re.compile(r"([-+]?\s*(?:\d+\s*)?)\\frac\s*(?:\{([^{}]+)\}|(\d))\s*(?:\{([^{}]+)\}|(\d))")
_POWER_OF_TEN = re.compile(
    r"(?:\s*(?:\\times|\\cdot|[x×·*])\s*|^([-+]?)\s*)10\s*\^\s*(?:\{\s*([-+]?\d{1,3})\s*\}|([-+]?\d{1,3}))$"
)
_REPEATING = re.compile(r"(-?)(\d*)\.(\d*)\\overline\{(\d+)\}")
_BASED = re.compile(
    r"(-?)\(?\s*(?:0x(?P<hex>[0-9a-fA-F]+)|0b(?P<binary>[01]+)|(?P<digits>[0-9A-Fa-f]*[0-9][0-9A-Fa-f]*|[A-F]+)\s*\)?\s*"
    r"(?:_\s*\{?\s*\(?|\(?\s*(?:in\s+)?base[\s_-]*)(?P<base>\d{1,2}|[a-z]+)\s*\)?\s*\}?)"
)
_ONES = [
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"),
    *("eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
]
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_WORDS = {word: value for value, word in enumerate(_ONES)} | {
    tens + (f"{joint}{_ONES[one]}" if one else ""): 10 * ten + one
    for ten, tens in enumerate(_TENS, 2)
    for one in range(10)
    for joint in "- "
}
_FIRST_WORD = re.compile(
    rf"(?:(minus|negative)\s+)?({'|'.join(sorted(_WORDS, key=len, reverse=True))})(?![\w-])", re.IGNORECASE
)


def as_number(answer: str) -> Fraction | None:
    r"""The value of 5, 1,000, -2.5e3, 1/2, \frac{1}{2}, 1 1/2 and 2.5 \times 10^{3}; None for anything else."""
    if len(answer) > LONGEST_ANSWER:
        return None
    if power := _POWER_OF_TEN.search(answer):
        factor = as_number(answer[: power.start()] or f"{power[1]}1")
        return None if factor is None else factor * Fraction(10) ** int(power[2] or power[3])
    if fraction := _FRACTION.fullmatch(answer):
        answer = f"{fraction[1]} {fraction[2] or fraction[3]}/{fraction[4] or fraction[5]}".strip()
    match = _NUMBER.fullmatch(answer)
    if match is None:
        return _repeating(answer)
    parts = (part and part.replace(",", "").replace(" ", "") for part in match.groups()[1:])
    whole, numerator, denominator = (Fraction(part) if part else None for part in parts)
    if numerator is None or denominator == 0:
        return None
    value = (whole or 0) + numerator / (denominator or 1)
    return -value if match[1] == "-" else value


def _repeating(answer: str) -> Fraction | None:
    r"""The value of 0.1\overline{6}."""
    if not (match := _REPEATING.fullmatch(answer)):
        return None
    sign, whole, once, again = match.groups()
    value = Fraction(f"{whole or 0}.{once or 0}") + Fraction(int(again), (10 ** len(again) - 1) * 10 ** len(once))
    return -value if sign else value


def as_based(answer: str) -> tuple[str, int] | None:
    """The digits and the value of a number that names its base, such as 101_2, 1F_{16} or 0x1F; else None."""
    match = _BASED.fullmatch(answer)
    if match is None:
        return None
    digits = match["hex"] or match["binary"] or match["digits"]
    name = "16" if match["hex"] else "2" if match["binary"] else match["base"]
    base = int(name) if name.isdigit() else _WORDS.get(name, 0)
    if not 2 <= base <= 36 or any(int(digit, 36) >= base for digit in digits):  # as in the variable a_{10}
        return None
    return match[1] + digits, int(match[1] + digits, base)


def with_digits(answer: str) -> str:
    """The answer with digits in place of its first word, if that is a number below a hundred."""
    word = _FIRST_WORD.match(answer)
    if word is None:
        return answer
    return f"{'-' if word[1] else ''}{_WORDS[word[2].lower()]}{answer[word.end() :]}"
