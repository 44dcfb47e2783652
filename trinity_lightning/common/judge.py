"""A language model that judges: what it is asked, and the score in its answer, for the operator and the workflow."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from trinity_lightning.common.thoughts import answer_part
from trinity_lightning.config.values import text
from trinity_lightning.errors import ConfigError, RolloutError


class VerdictError(RolloutError):
    """A judge's answer holds no score that can be used; the message says what it holds instead."""


def check_prompt(key: str, prompt: str) -> None:
    """ConfigError unless it is a template that shows the judge the response."""
    if "{response}" not in text(key, prompt):
        raise ConfigError(f"{key} must contain {{response}}, or the judge sees nothing of it.", key=key)


def filled(prompt: str, values: Mapping[str, str]) -> str:
    """A template with {name} replaced by the value of that name, all at once: a value may have braces of its own."""
    return re.sub(r"\{(" + "|".join(values) + r")\}", lambda found: values[found[1]], prompt)


def read_score(verdict: str) -> float:
    """The score, from 0 to 1, of the last JSON object in a text that has one: models may think aloud before it.

    A later score that cannot be used is not passed over for an earlier one, which the judge has taken back. What
    stands in the judge's thoughts is no verdict.

    Raises:
        VerdictError: there is none, or it is no number from 0 to 1; or the judge was cut off in its thoughts.
    """
    answer, score = answer_part(verdict), None
    if answer is None:
        raise VerdictError(f"the judge was cut off in its thoughts: give it more max_tokens; it wrote {verdict!r:.200}")
    for found in _objects(answer):
        score = found.get("score", score)
    if isinstance(score, bool) or not isinstance(score, int | float):
        raise VerdictError(f'the judge\'s verdict has no {{"score": number}}: {verdict!r:.200}')
    if not 0 <= score <= 1:
        raise VerdictError(f"the judge's verdict: the score {score!s:.20} is not from 0 to 1")
    return float(score)


def _objects(text: str) -> Iterator[dict[str, Any]]:
    """The JSON objects in a text, those within others left out."""
    decoder, place = json.JSONDecoder(), text.find("{")
    while place >= 0:
        try:
            found, end = decoder.raw_decode(text, place)
            yield found
        except (ValueError, RecursionError):  # no JSON, numbers of thousands of digits, nesting without end
            end = place + 1
        place = text.find("{", end)
