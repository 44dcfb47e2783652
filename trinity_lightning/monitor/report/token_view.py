"""Prepares the responses whose tokens are coloured, by advantage or by the log-probability difference."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from trinity_lightning.monitor.report.texts import short

# Nats between engine and trainer from which each shade begins. Rounding to 16 bits makes hundredths, weights that are
# a few steps old make tenths, and at 1 a token's weight is e or 1/e.
DIFFERENCES = (0.01, 0.05, 0.2, 1.0)
# The shades of advantages begin at these shares of the largest one on the page.
_SHARES = (0.0, 0.25, 0.5, 0.75)
_MOST_TOKENS = 300  # shown of a response
_LARGEST = 5  # differences that are listed


class Token(NamedTuple):
    """A token: its text, its classes in the style sheet, and its values in words."""

    text: str
    css: str
    title: str


@dataclass
class Rollout:
    """A response with its tokens.

    Attributes:
        summary: facts about it, as text.
        left: tokens that are not shown.
        largest: rows of a table of the largest differences: token, place, engine, trainer, difference.
    """

    prompt: str
    summary: list[str]
    tokens: list[Token]
    left: int
    largest: Sequence[Sequence[str]]


@dataclass
class TokenView:
    """The section of the page.

    Attributes:
        steps: by explore step, the rollouts of each task.
        advantages: texts of the legend for the four shades of advantages, the smallest first; empty without any.
        differences: the same for log-probability differences.
        has_others: there are tokens that were not trained on, such as a tool's.
    """

    steps: dict[int, list[list[Rollout]]]
    advantages: list[str]
    differences: list[str]
    has_others: bool


def token_view(records: Mapping[int, Sequence[Mapping[str, Any]]]) -> TokenView | None:
    """The section for the records of a few steps; None without a whole record."""
    whole = {step: [record for record in lines if _is_whole(record)] for step, lines in records.items()}
    everything = [record for lines in whole.values() for record in lines]
    if not everything:
        return None
    advantages = [abs(value) for record in everything for value in _column(record, "advantages") if value is not None]
    largest = max(advantages, default=0.0)
    steps: dict[int, list[list[Rollout]]] = {}
    for step, lines in sorted(whole.items()):
        tasks: dict[str, list[Rollout]] = {}
        for record in lines:
            tasks.setdefault(str(record.get("task")), []).append(_rollout(record, largest))
        if tasks:
            steps[step] = list(tasks.values())
    bounds = [short(share * largest, 2) for share in _SHARES] if largest else []
    shown = any(value is not None for record in everything for value in _differences(record))
    differences = [f"from {bound:g}" for bound in DIFFERENCES] if shown else []
    others = any(trained == 0 for record in everything for trained in _column(record, "trained"))
    return TokenView(steps, [f"beyond {bound}" for bound in bounds], differences, others)


def _is_whole(record: Mapping[str, Any]) -> bool:
    """True if each list of the record has a value for each token."""
    tokens = record.get("tokens")
    return isinstance(tokens, list) and bool(tokens) and all(isinstance(token, str) for token in tokens)


def _column(record: Mapping[str, Any], name: str) -> list[float | None]:
    """A value for each token; None where it is not known."""
    count, values = len(record["tokens"]), record.get(name)
    if not isinstance(values, list) or len(values) != count:
        return [None] * count
    return [float(value) if isinstance(value, int | float) else None for value in values]


def _differences(record: Mapping[str, Any]) -> list[float | None]:
    pairs = zip(_column(record, "engine"), _column(record, "trainer"), strict=True)
    return [None if engine is None or trainer is None else engine - trainer for engine, trainer in pairs]


def _rollout(record: Mapping[str, Any], largest: float) -> Rollout:
    texts, advantages, differences = record["tokens"], _column(record, "advantages"), _differences(record)
    trained, engine, trainer = (_column(record, name) for name in ("trained", "engine", "trainer"))
    columns = zip(_with_breaks(texts), advantages, differences, trained, engine, strict=True)
    tokens = [
        Token(text, _css(advantage, difference, was_trained, largest), _title(advantage, difference, logprob))
        for text, advantage, difference, was_trained, logprob in columns
    ]
    places = sorted(
        (place for place, difference in enumerate(differences) if difference),
        key=lambda place: -abs(differences[place] or 0.0),
    )
    rows = [
        (texts[place], str(place + 1), *(_signed(column[place]) for column in (engine, trainer, differences)))
        for place in places[:_LARGEST]
    ]
    length = record.get("length")
    left = (length if isinstance(length, int) else len(tokens)) - min(len(tokens), _MOST_TOKENS)
    prompt = record.get("prompt")
    summary = _summary(record, advantages, differences)
    return Rollout(prompt if isinstance(prompt, str) else "", summary, tokens[:_MOST_TOKENS], left, rows)


def _with_breaks(texts: Sequence[str]) -> list[str]:
    """The texts with a sign for each line break; of many in a row only the first one breaks the line."""
    shown, in_a_row = [], False
    for text in texts:
        shown.append(text.replace("\n", "↵") if in_a_row and not text.strip() else text.replace("\n", "↵\n"))
        in_a_row = not text.strip() and ("\n" in text or in_a_row)
    return shown


def _summary(
    record: Mapping[str, Any], advantages: Sequence[float | None], differences: Sequence[float | None]
) -> list[str]:
    """The rollout's reward, advantage and differences in words, for those who see no colours."""
    facts = []
    if isinstance(reward := record.get("reward"), int | float):
        facts.append(f"reward {short(reward)}")
    if values := [value for value in advantages if value is not None]:
        low, high = min(values), max(values)
        facts.append(f"advantage {_signed(low)}" + (f" to {_signed(high)}" if high > low else ""))
    if sizes := [abs(value) for value in differences if value is not None]:
        facts.append(f"log-probability difference {short(sum(sizes) / len(sizes), 2)}, at most {short(max(sizes), 2)}")
    return facts


def _css(advantage: float | None, difference: float | None, trained: float | None, largest: float) -> str:
    """The classes of a token: a4 to a1 and n1 to n4 for advantages, d1 to d4 and e1 to e4 for differences."""
    if trained == 0:
        return "other"
    classes = []
    if advantage:
        shade = sum(abs(advantage) > share * largest for share in _SHARES)
        classes.append(f"{'a' if advantage > 0 else 'n'}{shade}")
    if difference is not None and (shade := sum(abs(difference) >= bound for bound in DIFFERENCES)):
        classes.append(f"{'d' if difference > 0 else 'e'}{shade}")
    return " ".join(classes)


def _title(advantage: float | None, difference: float | None, engine: float | None) -> str:
    values = {"advantage": advantage, "difference": difference, "engine": engine}
    return ", ".join(f"{name} {_signed(value)}" for name, value in values.items() if value is not None)


def _signed(value: float | None) -> str:
    if value is None:
        return ""
    return ("−" if value < 0 else "+" if value > 0 else "") + short(abs(value), 3 if abs(value) >= 1e-3 else 4)
