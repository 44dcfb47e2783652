"""Rewards that read a response as text: its last number, its form, and its answer in words or in tags (accuracy)."""

import re
from collections.abc import Iterator
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
from trinity_lightning.explorer.rewards.math_verifier import VERIFIER
from trinity_lightning.explorer.rewards.numerals import as_number
from trinity_lightning.explorer.rewards.spelling import IDLE_SPACE
from trinity_lightning.explorer.rewards.units import read_unit
from trinity_lightning.explorer.tasks.task import Task

_ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
# Thoughts and answer of DeepSeek-R1 (arXiv 2501.12948, table 1). Some chat templates write the first tag.
_UNTAGGED = r"(?:(?!</?(?:think|answer)>).)*"
_THINK_ANSWER = re.compile(rf"\s*+(?:<think>)?({_UNTAGGED})</think>\s*+<answer>({_UNTAGGED})</answer>\s*+", re.DOTALL)


def find_last_answer(text: str) -> str | None:
    """The content of the last `<answer>...</answer>` of a text, without space around it; None if there is none."""
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
    """1 if the last number in the response is the last number in the task's answer, else 0.

    If the answer is a list, any of them is right.

    Raises:
        ConfigError: the task's answer holds no number.
    """
    return float(find_last_number(response) in _expected_numbers(task.raw_task))


@reads_answer(exact_answers)
@judges_answer
def exact_match(response: str, task: Task) -> float:
    """1 if the response is the task's answer, ignoring space around both, else 0.

    If the answer is a list, any of them is right.

    Raises:
        ConfigError: the task has no answer, or one that is neither text nor number.
    """
    return float(response.strip() in exact_answers(task.raw_task))


def think_answer_format(response: str, task: Task) -> float:
    """1 if the response is `<think>thoughts</think> <answer>answer</answer>` and nothing else, else 0.

    Each tag stands there once, and neither part is empty. The opening `<think>` may be missing, since some chat
    templates write it.
    """
    parts = _THINK_ANSWER.fullmatch(response)
    return float(parts is not None and all(part.strip() for part in parts.groups()))


def contains_digits(response: str, task: Task) -> float:
    """The share of the response's characters that are digits: a reward that varies even for an untrained model."""
    return sum(character.isdigit() for character in response) / len(response) if response else 0.0


# -- the answer in words: boxed, tagged, or the mathematics at the end of a response -----------------------------------


_WORD = re.compile(r"(?<![\\\w])[^\W\d_]{2}")  # two letters, and no command of LaTeX
# An introduction of the answer, its end, a denial, a formula, and the exponent of a unit (m^2).
_INTRODUCTION = re.compile(
    r"\b(?:(?:answer|result|solution)s?|(?:correct|right|best)\s+(?:option|choice))\b"
    r"[^.,;:\n]{0,100}?(?:\b(?:is|are|equals)\b|[=:])",
    re.IGNORECASE,
)
_SENTENCE_END = re.compile(r"[.;!\n](?!\d)\s*\S?.*", re.DOTALL)
_CLAUSE_END = re.compile(r"[;:(!\n].*|[.,](?!\d).*|\s+(?:because|since|as|so|which)\s.*", re.DOTALL)
_DENIAL = re.compile(r"\b(?:not|nor|neither|never)\b|n['’]t\b", re.IGNORECASE)
_FORMULA = re.compile(r"\$([^$]+)\$")
_EXPONENT = re.compile(r"(?<=[a-zA-Z])\^\{?-?\d+\}?")
# Surroundings of a number within a longer term. Before it: an operand and an operator. Behind it: x, or an operator and
# an operand.
_OPERATOR = r"[ \t]*(?:[-+*/^×·÷]|\\(?:times|cdot|div|pm)(?![a-zA-Z]))[ \t]*"
_TERM_BEFORE = re.compile(rf"(?:(?<![a-zA-Z\\])[a-zA-Z]|[\d)\]}}]){_OPERATOR}$")
_TERM_AFTER = re.compile(
    rf"[ \t]?[xyz](?![a-zA-Z])|{_OPERATOR}(?:[a-zA-Z](?!\s*[a-zA-Z])|[\d(\[{{\\])"
    r"|\s+(?:times|plus|minus|divided\s+by)\s+[$\\(]*\d"
)
# Surroundings of a number that make it another answer, or one of two; a currency before it; a unit or base behind it.
_QUALIFIER = re.compile(
    r"(?:\b((?:at\s+(?:least|most)|(?:no\s+|not\s+)?(?:more|less|fewer|greater)\s+than|over|under|above|below|up\s+to)"
    r"|not|nearly|almost)(?:\s+(?:be|exactly|equal(?:\s+to)?))?|(n['’]t)|([<>≤≥]|\\[lg]eq?(?![a-zA-Z])))[\s$(\\*]*$",
    re.IGNORECASE,
)
_OR_BEFORE, _OR_AFTER = re.compile(r"\d[$\\)*]*\s+or\s+[$\\(*]*$"), re.compile(r"[$\\)*]*\s+or\s+[$\\(*-]*\d")
_CURRENCY = re.compile(r"(\\?\$|[€£¥₹])\s*$")
_UNIT = re.compile(r"_\{?\d+\}?|\s*(?:\\?%|°|\^\{?\\circ\}?)|(?:\s*+(?:/\s*+)?[a-zA-Z]++[²³]?(?:\^\{?\d\}?)?){1,4}")
# Characters that math-verify reads at once: for some texts its time grows with the square of their length.
_PART = 2000
_EXCERPT = 300  # characters around an introduction further up
_EXCERPTS = 4
_LONGEST_LINE = 100  # characters of a response that may be nothing but an answer
_MENTION = re.compile(r"\b(?:final )?answer\b", re.IGNORECASE)


@reads_answer(expected_answers)
@judges_answer
def accuracy(response: str, task: Task) -> float:
    """1 if the response's answer is the task's, else 0; for responses whose answer need not be in a box.

    The content of the last `<answer>...</answer>` is read, or else the whole response. The answer is the content of its
    last boxes; or else all of the text, if it stood between the tags or is one short line; or the words behind "the
    answer is" (or "result", "solution"). Among other words it is the mathematics that math-verify finds behind the last
    mentions of an answer, or else the last in the response. A number is read with its unit, and "at least" or "not"
    before it makes it another answer. A number within a longer term, as in "the answer is x + 3", is no answer, and
    neither is one of two, as in "12 or 13". Between tags it must be the only number or formula behind "the answer is"
    (without such words, the only one at all), and nothing may be denied: "not 12, but 13" is no answer. Boxes, thoughts
    and the task's answer are read as by `math`.

    Raises:
        ConfigError: the task has no answer, or one that is neither text nor number.
    """
    expected = expected_answers(task.raw_task)
    tagged = find_last_answer(response)
    text = response if tagged is None else tagged
    boxed = find_boxed(text)
    if boxed is not None:
        return float(is_any(boxed, expected))
    is_line = len(line := text.strip()) <= _LONGEST_LINE and "\n" not in line
    if (tagged is not None or is_line) and is_any(text, expected):
        return 1.0
    if tagged is not None and not _WORD.search(tagged):  # mathematics throughout: a number in it is not the answer
        return 0.0
    introduced = _introduced(text)
    if introduced is not None:
        if any(is_any(phrase, expected) for phrase in ([introduced] if tagged else _phrases(introduced))):
            return 1.0
        if tagged:
            text = introduced
    for part in _parts(text):
        if (mathematics := VERIFIER.find(part)) is not None:
            answer = None if tagged and _hedges(text, mathematics) else _in_context(part, mathematics)
            return float(answer is not None and is_any(answer, expected))
    return 0.0


def _introduced(text: str) -> str | None:
    """The text behind the last "the answer is", or else the last "the result is" or the like; None without one."""
    introductions = list(_INTRODUCTION.finditer(text))
    answers = [match for match in introductions if match.group()[0] in "aA"]
    last = next(reversed(answers or introductions), None)
    return None if last is None else text[last.end() :]


def _phrases(introduced: str) -> list[str]:
    """The sentence and the clause that an introduction begins."""
    opening = introduced[:_EXCERPT].lstrip("*:_ \n\t")
    phrases = (_SENTENCE_END.sub("", opening), _CLAUSE_END.sub("", opening))
    return [phrase for phrase in dict.fromkeys(phrases) if phrase.strip()]


def _hedges(text: str, answer: str) -> bool:
    """True if a text denies something, or has numbers or formulas beside the answer that math-verify took from it."""
    others = set(find_numbers(_EXPONENT.sub("", text))).difference(find_numbers(answer))
    formulas = {IDLE_SPACE.sub("", formula) for formula in _FORMULA.findall(text)}
    return bool(_DENIAL.search(text) or others or len(formulas) > 1)


def _in_context(text: str, answer: str) -> str | None:
    """The answer that math-verify took from a text; a number gets its qualifier, currency and unit in the text.

    None if the number is part of a longer term, or one of two.
    """
    if as_number(answer) is None:
        return answer
    introduced = _introduced(text)
    sentence = text if introduced is None else introduced
    places = list(re.finditer(rf"(?<![\d.]){re.escape(answer.lstrip('+-'))}(?!\d)", sentence))
    if not places:
        return answer
    place = places[-1] if introduced is None else places[0]
    before, after = sentence[: place.start()].removesuffix("-"), sentence[place.end() :]
    if _TERM_BEFORE.search(sentence[: place.start()]) or _TERM_AFTER.match(after):
        return None
    if _OR_BEFORE.search(before) or _OR_AFTER.match(after):
        return None
    qualifier, currency = _QUALIFIER.search(before), _CURRENCY.search(before)
    sign = currency[1] if currency and not after.startswith("$") else ""
    return f"{_word_of(qualifier)} {sign}{answer}{_unit_of(after)}".strip()


def _word_of(qualifier: re.Match[str] | None) -> str:
    """The word or sign before a number that changes it."""
    if qualifier is None:
        return ""
    return "not" if qualifier[2] else qualifier[1] or qualifier[3]


def _unit_of(after: str) -> str:
    """The unit or the base that follows a number; the word "in" is no unit."""
    match = _UNIT.match(after)
    if match is None or not match.group()[-1].isalpha():
        return match.group() if match else ""
    words = match.group().split()
    texts = (" ".join(words[:count]) for count in range(len(words), 0, -1) if words[count - 1] != "in")
    return next((f" {text}" for text in texts if read_unit(text)), "")


def _parts(text: str) -> Iterator[str]:
    """Parts of a text that are short enough for math-verify, which reads them in turn until it finds something.

    The first part is the end, with excerpts around earlier mentions of an answer; then the rest follows, backwards.
    """
    text = text.replace("−", "-")  # the minus that math-verify knows
    begin = _word_begin(text, len(text) - _PART)
    places = [match.start() for match in _MENTION.finditer(text, 0, begin)][-_EXCERPTS:]
    excerpts = [text[place : _word_begin(text, place + _EXCERPT)] for place in places]
    yield "\n\n".join((*excerpts, text[begin:]))
    while begin:
        end = begin
        begin = _word_begin(text, end - _PART)
        yield text[begin:end]


def _word_begin(text: str, place: int) -> int:
    """The beginning of the first word at or behind a place; the place itself if there are no words nearby."""
    if place <= 0:
        return 0
    space = re.compile(r"\s").search(text, place, place + _EXCERPT)
    return min(place, len(text)) if space is None else space.end()
