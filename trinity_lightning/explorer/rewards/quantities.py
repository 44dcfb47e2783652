"""The parts of an answer: its number, and its unit, currency, or the name of the counted things."""

import re
from fractions import Fraction
from typing import NamedTuple

from trinity_lightning.explorer.rewards.numerals import as_number
from trinity_lightning.explorer.rewards.units import Unit, ratio, read_unit

_CURRENCY = re.compile(
    r"([-+]?)\s*(?:US\s*)?(?:\\?(\$)|([€£¥₹])|\\(pounds)(?![a-zA-Z])|(USD|EUR|GBP|INR|Rs)(?![a-zA-Z])\.?)\s*(?=[\d.\\(])"
)
_LETTERS = r"[^\W\d_]++(?:['-][^\W\d_]++)*+\.?"
_UNIT = rf"(?:\\?%|\\?\$|[€£¥₹¢]|{_LETTERS}(?:\s*+\^\s*+\{{?\s*+-?\d\s*+\}}?)?+)"
_GAP = r"\s*+(?:(?:/|\\cdot(?![a-zA-Z])|\*)\s*+)?+"
_TAIL = re.compile(rf"(?<![\\a-zA-Z])(?:/\s*+)?{_UNIT}(?:{_GAP}{_UNIT})*+$")
_AMOUNT_END = re.compile(r"(?:[\d)}\]!.]|\\pi|(?<![\\a-zA-Z])[a-zA-Z])\s*$")
_HAS_NUMBER = re.compile(r"\d|\\pi")
_FACTORS = {"dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_FACTOR = re.compile(rf"({'|'.join(_FACTORS)})s?(?![a-z])\s*", re.IGNORECASE)
_PART = re.compile(r"(\d[\d,]*(?:\.\d+)?(?:/\d+)?)\s*([a-zA-Z]+|[¢])\.?(?:\s*,\s*|\s+|$)(?:and\s+)?")
# Words that no name of a thing contains: they join, deny, or are mathematics.
_NO_NAMES = re.compile(
    r"\b(?:or|and|to|than|is|are|not|no|never|wrong|incorrect|sin|cos|tan|log|ln|exp|sqrt|mod|choose|[b-zB-Z])\b"
)
_DETAILS = re.compile(r"\s+(?:long|tall|wide|high|deep|thick|old|away|apart|each|(?:in\s+)?total|altogether)$")
_MOST_NAMES = 5  # words: more are a sentence


class Quantity(NamedTuple):
    """The parts of an answer; a plain one has an amount alone."""

    amount: str
    factor: Fraction = Fraction(1)  # of a word such as "million"
    units: tuple[Unit, ...] = ()
    names: frozenset[str] = frozenset()  # words for the counted things, if they are no unit

    @property
    def is_plain(self) -> bool:
        return self.factor == 1 and not self.units and not self.names


def quantity_of(answer: str, is_expected: bool = True) -> Quantity:
    """The number of an answer, and the unit or name behind it, or the currency before it.

    In the task's answer (`is_expected`), a letter right behind a number is a variable, as in 5m: a unit of the task's
    answer is separated from the number.
    """
    if quantity := _sum_of_parts(answer):
        return quantity
    currency = ""
    if match := _CURRENCY.match(answer):
        currency = next(filter(None, match.groups()[1:])).replace("pounds", "£")
        answer = match[1] + answer[match.end() :]
    tail = _TAIL.search(answer)
    amount = answer[: tail.start()] if tail else ""
    if tail is None or not _AMOUNT_END.search(amount) or not _HAS_NUMBER.search(amount):
        return Quantity(answer, units=read_unit(currency))
    text, factor = tail.group().replace("\\", ""), Fraction(1)
    if many := _FACTOR.match(text):
        text, factor = text[many.end() :], Fraction(_FACTORS[many[1].lower()])
    units = read_unit(f"{currency} {_DETAILS.sub('', text)}".strip())
    is_apart = amount[-1].isspace() or not text.isascii() or factor != 1
    is_variable = is_expected and not is_apart and len(text) == 1 and text.isalpha()
    if (units and not is_variable) or not text:
        return Quantity(amount, factor, units)
    if is_apart and (names := _names(text)):
        return Quantity(amount, factor, read_unit(currency), frozenset() if currency else names)
    return Quantity(answer, units=read_unit(currency))


def singular(word: str) -> str:
    """A word without a plural s."""
    return word.removesuffix("s") if len(word) > 3 and not word.endswith("ss") else word


def _names(text: str) -> frozenset[str]:
    """The words that name a thing; none if it is a sentence, or mathematics."""
    words = text.replace(".", "").lower().split()
    if "/" in text or len(words) > _MOST_NAMES or _NO_NAMES.search(text):
        return frozenset()
    return frozenset(map(singular, words))


def _sum_of_parts(answer: str) -> Quantity | None:
    """The sum of an answer such as 3 hours 30 minutes, in its first unit; None for anything else."""
    parts, end = [], 0
    while match := _PART.match(answer, end):
        parts.append((as_number(match[1]), read_unit(match[2])))
        end = match.end()
    if len(parts) < 2 or end < len(answer):
        return None
    total, units = Fraction(0), parts[0][1]
    smallest = Fraction(1)
    for index, (number, part_units) in enumerate(parts):
        size = ratio(part_units, units)
        if number is None or size is None or (index and size >= smallest):
            return None
        total, smallest = total + number * size, size
    return Quantity(str(total), units=units)
