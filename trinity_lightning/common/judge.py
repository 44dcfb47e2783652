"""Prompts and verdicts of a language model that judges responses, for the operator and the workflow that ask one."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from trinity_lightning.common.thoughts import answer_part
from trinity_lightning.config.values import text
from trinity_lightning.errors import ConfigError, RolloutError


class VerdictError(RolloutError):
    """A judge's answer holds no usable score; the message shows what it holds instead."""


def check_prompt(key: str, prompt: str) -> None:
    """Refuse a template that does not show the judge the response; a ConfigError."""
    if "{response}" not in text(key, prompt):
        raise ConfigError(f"{key} must contain {{response}}, or the judge sees nothing of it.", key=key)


def filled(prompt: str, values: Mapping[str, str]) -> str:
    """A template with each {name} replaced by its value, all at once: a value may have braces of its own."""
    return re.sub(r"\{(" + "|".join(values) + r")\}", lambda match: values[match[1]], prompt)


def read_score(verdict: str) -> float:
    """The score, from 0 to 1, in the last JSON object of a text that has one; models may think aloud before it.

    The last score counts even if it is unusable: the judge has taken back the earlier ones. A score in the judge's
    thoughts does not count.

    Raises:
        VerdictError: there is no score, or it is no number from 0 to 1; or the judge was cut off in its thoughts.
    """
    answer, score = answer_part(verdict), None
    if answer is None:
        raise VerdictError(f"the judge was cut off in its thoughts: give it more max_tokens; it wrote {verdict!r:.200}")
    for verdict_object in _objects(answer):
        score = verdict_object.get("score", score)
    if isinstance(score, bool) or not isinstance(score, int | float):
        raise VerdictError(f'the judge\'s verdict has no {{"score": number}}: {verdict!r:.200}')
    if not 0 <= score <= 1:
        raise VerdictError(f"the judge's verdict: the score {score!s:.20} is not from 0 to 1")
    return float(score)


def _objects(text: str) -> Iterator[dict[str, Any]]:
    """The JSON objects in a text, without those that are part of another."""
    decoder, place = json.JSONDecoder(), text.find("{")
    while place >= 0:
        try:
            value, end = decoder.raw_decode(text, place)
            yield value
        except (ValueError, RecursionError):  # no JSON, numbers of thousands of digits, nesting without end
            end = place + 1
        place = text.find("{", end)
