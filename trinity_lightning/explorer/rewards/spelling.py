"""The usual spelling of an answer: symbols as LaTeX, text in LaTeX as plain text, nothing around the answer."""

import re
import unicodedata

IDLE_SPACE = re.compile(r"(?<!\w)\s+|\s+(?!\w)")  # not between two words, or two digits

_AROUND = "*` \t\n"
_PUNCTUATION = re.compile(r"(?<!\\)[.,;:?]+$")
_ROOT = re.compile(r"√\s*([0-9]+|[a-zA-Z])")
_SYMBOLS = str.maketrans(
    {
        **{"−": "-", "×": r" \times ", "·": r" \cdot ", "÷": "/", "≤": r" \le ", "≥": r" \ge ", "≠": r" \neq "},
        **{"≈": r" \approx ", "∞": r" \infty ", "∪": r" \cup ", "∩": r" \cap ", "∈": r" \in ", "±": r" \pm "},
        **{"π": r" \pi ", "∅": r" \emptyset ", "√": r"\sqrt ", "°": " degree ", "º": " degree ", "˚": " degree "},
        **{digit: f"^{unicodedata.normalize('NFKC', digit)}" for digit in "⁰¹²³⁴⁵⁶⁷⁸⁹"},
        **{digit: f"_{unicodedata.normalize('NFKC', digit)}" for digit in "₀₁₂₃₄₅₆₇₈₉"},
        **{part: " " + unicodedata.normalize("NFKC", part).replace("⁄", "/") for part in "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"},
        **dict.fromkeys("“”„", '"'),
        **dict.fromkeys("‘’", "'"),
    }
)
_DASH = re.compile(r"^[–—](?=\s*[\d.\\])")
_THOUSANDS = re.compile(r"(?<=\d)(?:\s?\{\s?,\s?\}\s?|,?\\[!,])(?=\d{3}(?!\d))")
_DELIMITERS = re.compile(r"(?<!\\)(\$+)((?:\\.|[^$\\])*)\1")
_TEXT = re.compile(r"((?<=[\w})]))?\\(?:text|math|mbox)(?:rm|bf|it|sf|tt|up|normal)?\s*\{((?:[^{}]|\{[^{}]*\})*)\}")
_SPACING = re.compile(r"(?<!\\)\\(?:[,;!: ]|q?quad(?![a-zA-Z]))|~")  # but not the end of a row, \\, before a space
# The usual spelling by other spellings, in the order of their replacement.
_USUAL = [
    (re.compile(spelling, re.IGNORECASE if spelling.startswith("^") else 0), usual)
    for spelling, usual in {
        r"\\(?:left|right|displaystyle)(?![a-zA-Z])|\\[()]": "",
        r"\\[dtc]frac(?![a-zA-Z])": r"\\frac",
        r"\\langle(?![a-zA-Z])": "(",
        r"\\rangle(?![a-zA-Z])": ")",
        r"\\(?:varnothing(?![a-zA-Z])|\{\s*\\\})": r"\\emptyset",
        r"(?<![\\a-zA-Z])pi(?![a-zA-Z])": r"\\pi",
        r"(?<![\\a-zA-Z])(?:infinity|inf)(?![a-zA-Z])": r"\\infty",
        r"(?<=[\w)}])\s*\*\*\s*(?=[\w({-])": "^",
        r"(?<![\\a-zA-Z])(arc(?:sin|cos|tan)|(?:sin|cos|tan)h?|cot|ln|log|exp)"
        r"(?=\s*[({\\\d^_]|\s*[a-z](?![a-zA-Z]))": r"\\\1 ",
        r"\\_": "_",
        r"^all\s+real(?:\s+numbers?)?$": r"(-\\infty,\\infty)",
        r"<=": r"\\le ",
        r">=": r"\\ge ",
        r"\^\s*(?:\\circ(?![a-zA-Z])|\{\s*\\circ\s*\})(?=\s*(?:$|[,;]|(?:C|F|and|or)(?![a-zA-Z])))": " degree ",
        r"(?<=\d)\s*\\frac\{([a-zA-Z]+)\}\{([a-zA-Z]+(?:\^\{?\d\}?)?)\}$": r" \1/\2",
        r"degrees?\s*C(?:elsius)?(?![a-zA-Z])": "celsius",
        r"degrees?\s*F(?:ahrenheit)?(?![a-zA-Z])": "fahrenheit",
        r"(?<=\d)\s*\^?\s*\{?\s*(?:st|nd|rd|th)\s*\}?(?![a-zA-Z])": "",
        r"(?<=\d)\s*([aApP])\.?[mM](?![a-zA-Z])\.?": r" \1m",
        r"^(?:the\s+)?(?:final\s+)?answer(?:\s+is\b)?\s*[:=]?\s+": "",
        r"^(?:about|approximately|approx\.?|around|roughly|exactly|\\approx|\\sim|=)\s*(?=[-+\d.\\$€£])": "",
        r"\s*\(?(?:approximately|approx\.?)\)?$": "",
        r"^(?:negative|minus)\s+(?=[\d.\\])": "-",
        r"^([^=<>a-z]+)=\s*([a-z])$": r"\2=\1",
        r"^(\d+)\s+to\s+(\d+)$": r"\1:\2",
    }.items()
]


def bare(answer: str) -> str:
    """An answer without bold type and a full stop around it."""
    answer = answer.replace("−", "-").strip(_AROUND)
    return _PUNCTUATION.sub("", answer).strip(_AROUND)


def written(answer: str) -> str:
    r"""A bare answer in its usual spelling; `\text{cm}` behind a number becomes a unit apart from it."""
    if not answer.isascii():
        answer = unicodedata.normalize("NFKC", _DASH.sub("-", _ROOT.sub(r"\\sqrt{\1}", answer)).translate(_SYMBOLS))
    answer = _THOUSANDS.sub(",", _DELIMITERS.sub(r"\2", answer))
    for _ in range(2):  # bold type within a text
        answer = _TEXT.sub(lambda text: text[2] if text[1] is None else f" {text[2]}", answer)
    answer = _SPACING.sub(" ", answer).strip()
    for spelling, usual in _USUAL:
        answer = spelling.sub(usual, answer)
    answer = bare(answer)
    return answer[1:-1] if len(answer) > 1 and answer[0] == answer[-1] and answer[0] in "\"'" else answer
