"""What a judge's answer comes down to: one score, wherever in its words it stands."""

import json
from collections.abc import Iterator
from typing import Any

from trinity_lightning.errors import RolloutError


class VerdictError(RolloutError):
    """A judge's answer holds no score that can be used; the message says what it holds instead."""


def read_score(verdict: str) -> float:
    """The score, from 0 to 1, of the last JSON object in a text that has one: models may think aloud before it.

    A later score that cannot be used is not passed over for an earlier one, which the judge has taken back.

    Raises:
        VerdictError: there is none, or it is no number from 0 to 1.
    """
    score = None
    for found in _objects(verdict):
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
