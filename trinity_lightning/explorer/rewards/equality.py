r"""Equality of two answers: numbers by value, words as words, all else by math-verify.

Rules of `math` and `accuracy` where graders differ, or where math-verify takes different answers for the same:

- A number is its value: 1/2 is 0.5, 101_2 is 5, and 0.333 is not 1/3. Commas or spaces may separate groups of three
  digits; a comma is no decimal point. A decimal equals an expression without an exact value, such as `\sqrt{2}`, if six
  digits agree.
- An answer may leave out what the question says: the unit, the currency, the name of the counted things, "x =", and the
  base (the digits must then be the same). If both answers have one, it counts: 5 cm is 0.05 m and not 5 m. 50% is 50 as
  well as 0.5.
- "About" and "exactly" do not change the value; "at least", "not" and "or more" make another answer.
- Brackets count: (1,2), [1,2] and {1,2} differ, and so do (1,2) and (2,1). A list without brackets has no order.
- One letter alone is a variable, large or small, unless something marks it as a choice: (A), A), "Option A". If the
  text of a choice follows its letter, either is the answer.
- Words are the same in small and large letters, in quotes and bold type, with and without a plural s.
- Dates, versions and ranges (2023-01-05, 1.2.3, 3-5) are compared part by part, and names with a digit right behind a
  letter (H2O, B12) letter by letter. Algebra would compute them, and take factors in any order.
- (1, 2) is x = 1, y = 2.
- An answer of more than 1,000 characters is compared as text.
"""

import re
from fractions import Fraction

from trinity_lightning.explorer.rewards.math_verifier import VERIFIER
from trinity_lightning.explorer.rewards.numerals import LONGEST_ANSWER, as_based, as_number, with_digits
from trinity_lightning.explorer.rewards.quantities import quantity_of, singular
from trinity_lightning.explorer.rewards.spelling import IDLE_SPACE, bare, written
from trinity_lightning.explorer.rewards.units import PERCENT, ratio


def same_answer(given: str, expected: str) -> bool:
    """True if two answers are equal; the rules are at the top of this file."""
    given, expected = bare(given), bare(expected)
    if (same := _same_number(given, expected)) is not None:
        return same
    if max(len(given), len(expected)) > LONGEST_ANSWER:
        return IDLE_SPACE.sub("", given) == IDLE_SPACE.sub("", expected)
    given, expected = written(given), written(expected)
    if IDLE_SPACE.sub("", given) == IDLE_SPACE.sub("", expected):
        return True
    if not given or not expected:
        return False
    for decide in (_same_number, _same_choice, _same_relation, _same_based, _same_code, _same_list, _same_quantity):
        if (same := decide(given, expected)) is not None:
            return same
    return _same_words(given, expected) or _same_mathematics(given, expected)


# Each of the following functions compares one kind of answers, and returns None for other kinds.


def _same_number(given: str, expected: str) -> bool | None:
    number, expected_number = as_number(given), as_number(expected)
    return None if number is None or expected_number is None else number == expected_number


def _same_based(given: str, expected: str) -> bool | None:
    """Compare numbers, one of which names its base: by value, or by its digits if the other has no base."""
    based, expected_based = as_based(given), as_based(expected)
    if based and expected_based:
        return based[1] == expected_based[1]
    if with_base := based or expected_based:
        plain = expected if based else given
        return plain.upper() == with_base[0].upper() or as_number(plain) == with_base[1]
    return None


_PARTED = re.compile(r"\d+(?:([-/.])\d+)(?:\1\d+)+")
_RANGE = re.compile(r"\d+-\d+")
_NAMED = re.compile(r"(?=.*[a-zA-Z]\d)(?!.*(?:sqrt|pi|sin|cos|tan|log|ln|exp))[a-zA-Z0-9]+")
_SUBSCRIPT = re.compile(r"_\{?(\w+)\}?")


def _same_code(given: str, expected: str) -> bool | None:
    """Compare dates, versions and ranges by their parts, and names with digits by their letters, without subscripts."""
    given, expected = given.replace("–", "-"), expected.replace("–", "-")
    if _RANGE.fullmatch(expected) or any(map(_PARTED.fullmatch, (given, expected))):
        split = (re.split(r"[-/.]", answer) for answer in (given, expected))
        parts, expected_parts = ([part.lstrip("0") or part[-1:] for part in answer] for answer in split)
        return parts == expected_parts
    if "_" in given and "_" in expected:  # variables
        return None
    names = [_SUBSCRIPT.sub(r"\1", answer) for answer in (given, expected)]
    if any(_NAMED.fullmatch(name) and as_number(name) is None for name in names):
        return names[0].casefold() == names[1].casefold()
    return None


# -- choices -----------------------------------------------------------------------------------------------------------


_CHOICE = re.compile(
    r"(?:(?i:option|choice)\s*)?"
    r"(?:\((?P<marked>[A-Ja-j])\)|(?P<letter>[A-J](?=[).:])|[a-j](?=\)))[).:]|(?P<alone>[A-J])(?=$))\s*"
    r"(?P<text>(?!\(?[A-Ja-j][).:]).*)",
    re.DOTALL,
)


def _same_choice(given: str, expected: str) -> bool | None:
    """Compare choices by their letter, or by the text behind it."""
    choice, expected_choice = _CHOICE.fullmatch(given), _CHOICE.fullmatch(expected)
    if choice and expected_choice:
        texts = choice["text"], expected_choice["text"]
        return _letter(choice) == _letter(expected_choice) and (not all(texts) or same_answer(*texts))
    if choice and choice["text"]:
        return same_answer(choice["text"], expected)
    if expected_choice and expected_choice["text"]:
        return same_answer(given, expected_choice["text"])
    return False if len(given) == len(expected) == 1 else None


def _letter(choice: re.Match[str]) -> str:
    return (choice["marked"] or choice["letter"] or choice["alone"]).upper()


# -- bounds and denials ------------------------------------------------------------------------------------------------


_RELATIONS = {
    r"at\s+least|no\s+(?:less|fewer)\s+than|not\s+less\s+than|\\ge(?:q|qslant)?(?![a-zA-Z])": r"\ge",
    r"at\s+most|(?:no|not)\s+more\s+than|up\s+to|\\le(?:q|qslant)?(?![a-zA-Z])": r"\le",
    r"(?:more|greater|larger|bigger)\s+than|over|above|>|\\gt(?![a-zA-Z])": ">",
    r"(?:less|fewer|smaller)\s+than|under|below|<|\\lt(?![a-zA-Z])": "<",
    r"not|\\neq?(?![a-zA-Z])": r"\neq",
}
_BEFORE = {
    re.compile(rf"(?:{words})(?:(?<=[a-z])\s+|(?<![a-z])\s*)", re.IGNORECASE): relation
    for words, relation in _RELATIONS.items()
}
_BEHIND = {
    re.compile(r"\s+(?:or|and)\s+(?:more|greater|above|over|larger)$", re.IGNORECASE): r"\ge",
    re.compile(r"\s+(?:or|and)\s+(?:less|fewer|below|under|smaller)$", re.IGNORECASE): r"\le",
}
_VARIABLE = re.compile(r"[a-zA-Z](?:_\{?\w+\}?)?\s*(?=\\(?:[lg][et]|ne)|[<>])")


def _same_relation(given: str, expected: str) -> bool | None:
    """Compare answers such as "at least 5", "not 5" and "> 5", with or without a variable."""
    if _relation(given) is None and _relation(expected) is None:
        return None
    bounds = [_relation(_VARIABLE.sub("", answer, count=1)) for answer in (given, expected)]
    if bounds[0] and bounds[1]:
        return bounds[0][0] == bounds[1][0] and same_answer(bounds[0][1], bounds[1][1])
    if r"\infty" not in given + expected:  # no interval
        return False
    named = (
        " ".join(("x", *bound)) if bound else answer for bound, answer in zip(bounds, (given, expected), strict=True)
    )
    return _same_mathematics(*named)


def _relation(answer: str) -> tuple[str, str] | None:
    """The relation and the bound in "at least 5" or "5 or more"; None if an answer has no relation, or several."""
    for words, relation in _BEFORE.items():
        if match := words.match(answer):
            bound = answer[match.end() :]
            return None if any(other.match(bound) for other in _BEFORE) else (relation, bound)
    for words, relation in _BEHIND.items():
        if match := words.search(answer):
            return relation, answer[: match.start()]
    return None


# -- quantities --------------------------------------------------------------------------------------------------------


_ASSIGNMENT = re.compile(r"([a-zA-Z])\s*=\s*([^=]+)")
_SEPARATOR = re.compile(r"[()\[\]{}]|;|,(?!\d{3}(?!\d))|(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z])")


def _same_quantity(given: str, expected: str) -> bool | None:
    """Compare numbers with units or names of things; units and names are ignored if only one answer has them."""
    given, expected = with_digits(given), with_digits(expected)
    quantity, reference = quantity_of(given, is_expected=False), quantity_of(expected)
    if quantity.is_plain and reference.is_plain:
        return _same_number(given, expected)
    factor = quantity.factor / reference.factor
    if quantity.units and reference.units:
        size = ratio(quantity.units, reference.units)
        return size is not None and _same_amount(quantity.amount, reference.amount, factor * size)
    names, others = quantity.names, reference.names
    if (quantity.units and others) or (names and reference.units):
        return False
    if names and others and not (names <= others or others <= names):
        return False
    percents = int(PERCENT in quantity.units) - int(PERCENT in reference.units)  # 50% is 50, and 0.5
    factors = dict.fromkeys((factor, factor / Fraction(100) ** percents))
    return any(_same_amount(quantity.amount, reference.amount, factor) for factor in factors)


def _same_amount(given: str, expected: str, factor: Fraction) -> bool:
    """True if `factor` times the first amount is the second one."""
    if factor == 1:
        return same_answer(given, expected)
    number, expected_number = as_number(given.strip()), as_number(expected.strip())
    if number is not None and expected_number is not None:
        return number * factor == expected_number
    return _same_mathematics(rf"({given}) \cdot \frac{{{factor.numerator}}}{{{factor.denominator}}}", expected)


def _same_list(given: str, expected: str) -> bool | None:
    """Compare lists with units, in any order; and a point with the values of variables."""
    elements, others = _elements(given), _elements(expected)
    if _bracket(expected) == "(" and (point := _point(elements)) is not None:
        return _same_mathematics(point, expected)
    if _bracket(given) == "(" and (point := _point(others)) is not None:
        return _same_mathematics(given, point)
    if len(elements) < 2 or len(others) < 2 or all(quantity_of(element).is_plain for element in elements + others):
        return None
    for element in elements:
        match = next((other for other in others if same_answer(element, other)), None)
        if match is None:
            return False
        others.remove(match)
    return not others


def _elements(answer: str) -> list[str]:
    """The parts of a list without brackets."""
    parts, depth, start = [], 0, 0
    for separator in _SEPARATOR.finditer(answer):
        if separator.group() in tuple("([{"):
            depth += 1
        elif separator.group() in tuple(")]}"):
            depth -= 1
        elif depth == 0:
            parts.append(answer[start : separator.start()].strip())
            start = separator.end()
    return [part for part in (*parts, answer[start:].strip()) if part]


def _point(elements: list[str]) -> str | None:
    """The point (1, 2) of the elements y = 2, x = 1; None for other elements."""
    values = {match[1]: match[2] for element in elements if (match := _ASSIGNMENT.fullmatch(element))}
    if len(values) < 2 or len(values) < len(elements):
        return None
    return f"({', '.join(values[name] for name in sorted(values))})"


# -- words and mathematics ---------------------------------------------------------------------------------------------


# Algebra would read a word as a product of letters, so that "on" were "no".
_WORDS = re.compile(r"(?=.*[^\W\d_]{2})[^\W\d_]+(?:[\s,.'’-]+[^\W\d_]+)*")
_NO_SOLUTION = {r"\emptyset", "no solution", "empty set", "the empty set"}


def _same_words(given: str, expected: str) -> bool:
    words, expected_words = _plain_words(given), _plain_words(expected)
    return words == expected_words or {words, expected_words} <= _NO_SOLUTION


def _plain_words(answer: str) -> str:
    """Words in small letters, without punctuation and plural; an answer that is not words, without idle space."""
    if not _WORDS.fullmatch(answer):
        return IDLE_SPACE.sub("", answer)
    return " ".join(map(singular, re.findall(r"[^\W_]+", answer.casefold().replace(".", "").replace("'", ""))))


def _same_mathematics(given: str, expected: str) -> bool:
    if _WORDS.fullmatch(expected):
        return False
    if "," in given and {_bracket(given), _bracket(expected)} in ({"{", "("}, {"{", "["}):
        return False  # math-verify takes a set of two for a point, and for an interval
    return VERIFIER.same(expected, given)


def _bracket(answer: str) -> str:
    """The opening bracket of an answer that ends with a closing one; "" without brackets."""
    return answer.removeprefix("\\")[:1] if answer.endswith(("}", ")", "]")) else ""
