"""The last score that a judge gives counts, and only from 0 to 1."""

import json

import pytest

from trinity_lightning.common.judge import VerdictError, read_score


@pytest.mark.parametrize(
    ("verdict", "score"),
    [
        ('{"score":1}', 1.0),
        (json.dumps({"reason": "it is {right}", "score": 0.75}), 0.75),
        ('```json\n{"reason": "{ok}", "score": 0.75}\n```', 0.75),
        ('{"score": 0.5} or {"score": 1}', 1.0),
        ('{"score": 0.5} {"x": 1} {', 0.5),
        ("a set {1, 2}, then {\"score\": 0.5} and {'x'}", 0.5),
        ('{"a": ' * 3000 + '{"score": 1}', 1.0),
        ('{"long": ' + "9" * 5000 + '} {"score": 0}', 0.0),
    ],
)
def test_the_last_score_counts(verdict: str, score: float) -> None:
    assert read_score(verdict) == score


@pytest.mark.parametrize(
    "verdict",
    [
        "",
        "{}",
        '{"score": true}',
        '{"score": "1"}',
        '{"score": NaN}',
        "{score: 1}",
        "[1]",
        '{"score": 1.5}',
        '{"score": -Infinity}',
        '{"score": 0.5}, no: {"score": 7}',
        '{"score": ' + "9" * 4000 + "}",
    ],
)
def test_a_verdict_without_a_usable_score_is_refused_in_few_words(verdict: str) -> None:
    with pytest.raises(VerdictError) as refused:
        read_score(verdict)
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize("verdict", ['<think>Perhaps {"score": 0.1}, or', '[THINK]a[/THINK]{"score": 1}[THINK]b'])
def test_a_judge_that_was_cut_off_in_its_thoughts_gave_no_score(verdict: str) -> None:
    with pytest.raises(VerdictError):
        read_score(verdict)


def test_a_score_in_the_judges_thoughts_is_none() -> None:
    assert read_score('<think>{"score": 0.1}? No.</think>{"score": 0.9}') == 0.9
    with pytest.raises(VerdictError):
        read_score('<think>{"score": 0.1}</think>I cannot say.')
