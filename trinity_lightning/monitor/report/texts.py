"""Numbers and texts as the pages write them, and the environment of the templates."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

LONG = 40  # characters of a cell from which its text may have several lines


def short(value: float, digits: int = 4) -> str:
    """A number in few characters; a very small or large one with fewer digits."""
    if value != 0 and not 1e-3 <= abs(value) < 1e5:
        return f"{value:.{max(digits - 3, 0)}e}".replace("e-0", "e-").replace("e+0", "e")
    return f"{value:.{digits}g}"


def labels(values: Sequence[float]) -> dict[float, str]:
    """Short texts for different numbers, with just enough digits to tell them apart."""
    texts = (dict(zip(values, (short(value, digits) for value in values), strict=True)) for digits in range(4, 18))
    return next(
        (text for text in texts if len({*text.values()}) == len(text)), {value: repr(value) for value in values}
    )


_MOST_CHARACTERS = 1500
_BLANK_LINES = re.compile(r"(?:[^\S\n]*\n){4,}")


def visible(text: str) -> str:
    """The text with long runs of blank lines, or nothing but blanks, replaced by their number in words."""
    if text and not text.strip():
        newlines = text.count("\n")
        others = len(text) - newlines
        counts = [(newlines, "newlines"), (others, "other blank characters" if newlines else "blank characters")]
        return f"⟨{', '.join(f'{count} {kind}' for count, kind in counts if count)}⟩"
    return _BLANK_LINES.sub(lambda lines: f"\n⟨{lines[0].count(chr(10))} newlines⟩\n", text)


def cut(value: Any) -> str:
    """The beginning of a text, and the number of characters that follow."""
    text = visible(value) if isinstance(value, str) else "" if value is None else repr(value)
    left = len(text) - _MOST_CHARACTERS
    return text[:_MOST_CHARACTERS] + (f" … ({left} more characters)" if left > 0 else "")


def anchor(heading: str) -> str:
    """The id of a heading, for links within the page."""
    return re.sub(r"\W+", "-", heading.lower())


def breakable(name: str) -> Markup:
    """A metric's or setting's name as markup that a line may break in."""
    return Markup(re.sub(r"([/_.])(?=\w)", r"\1<wbr>", str(escape(name))))


_LONGEST_NAME = 22


def ending(name: str) -> str:
    """The end of a long dotted name, which tells more than its beginning."""
    return name if len(name) <= _LONGEST_NAME else "…" + name[1 - _LONGEST_NAME :]


# Completions, prompts and configuration are other people's text: markup in them is shown as text.
ENVIRONMENT = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
ENVIRONMENT.filters |= {"short": short, "cut": cut, "anchor": anchor, "ending": ending, "breakable": breakable}
ENVIRONMENT.tests["long"] = lambda text: len(str(text)) > LONG
