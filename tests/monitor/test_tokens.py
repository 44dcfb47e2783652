"""The tokens of trained responses: their texts, whose log-probabilities they have, and that training stays the same."""

import itertools
import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support.policy import batch_of, fit, groups, load_plain, make_policy, naive_logprobs

from trinity_lightning.common.experience import Experience
from trinity_lightning.config.models import load_tokenizer
from trinity_lightning.monitor import tokens as tokens_module
from trinity_lightning.monitor.report.token_view import Rollout, token_view
from trinity_lightning.monitor.tokens import MOST_STEPS, MOST_TOKENS, TokenKeeper, pieces, record, steps_to_keep

EVIL = "</span><script>alert(1)</script>"


def lines_of(folder: Path, step: int = 1) -> list[dict[str, Any]]:
    file = folder / "completions" / "tokens" / f"step_{step}.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_the_best_and_the_worst_response_of_a_task_have_the_log_probabilities_of_their_step(tmp_path: Path) -> None:
    rows: list[Any] = groups()
    later = groups(seed=1)
    fit(make_policy(), [batch_of(rows), batch_of(later)], TokenKeeper(tmp_path))
    lines = lines_of(tmp_path)
    means = [float(row.advantages[row.action_mask].mean()) for row in rows]
    for task, (best, worst) in enumerate([lines[:2], lines[2:]]):
        of_task = means[4 * task : 4 * task + 4]
        assert (best["task"], best["run"]) == (task, of_task.index(max(of_task)))
        assert (worst["task"], worst["run"]) == (task, of_task.index(min(of_task)))
    expected = naive_logprobs(load_plain(), rows)
    for line in lines:
        row = 4 * line["task"] + line["run"]
        mask = rows[row].action_mask.tolist()
        length = rows[row].response_length
        assert line["trained"] == [int(trained) for trained in mask]
        assert line["length"] == len(line["tokens"]) == length
        columns = {"engine": rows[row].logprobs, "advantages": rows[row].advantages, "trainer": expected[row, :length]}
        for name, values in columns.items():
            known = [pytest.approx(v, abs=1e-4) if m else None for v, m in zip(values.tolist(), mask, strict=True)]
            assert line[name] == known, name


def test_training_is_the_same_to_the_bit(tmp_path: Path) -> None:
    plain, watched = make_policy(), make_policy()
    fit(plain, [batch_of(groups())])
    fit(watched, [batch_of(groups())], TokenKeeper(tmp_path))
    for name, value in plain.state_dict().items():
        assert torch.equal(value, watched.state_dict()[name]), name
    assert watched.on_logprobs is None


def test_a_disk_that_is_full_ends_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "completions").touch()
    with caplog.at_level(logging.WARNING, logger="trinity_lightning"):
        fit(make_policy(), [batch_of(groups()), batch_of(groups(), step=2)], TokenKeeper(tmp_path))
    assert sum("tokens are not kept any more" in line.message for line in caplog.records) == 1


def run_to(last: int, kept: set[int], first: int = 1, every: int = 1) -> set[int]:
    """The steps with files after a run that began with these."""
    for step in range(first, last + 1, every):
        kept = steps_to_keep({*kept, step}, step)
        assert len(kept) <= MOST_STEPS
        assert step in kept
    return kept


@pytest.mark.parametrize("last", [1, 200, 201, 299, 3000])
@pytest.mark.parametrize("every", [1, 3])
def test_a_long_run_keeps_the_newest_steps_the_first_and_some_evenly_between(last: int, every: int) -> None:
    steps = list(range(1, last + 1, every))
    kept = sorted(run_to(last, set(), every=every))
    assert kept == sorted(steps_to_keep(steps, steps[-1])), "which remain does not depend on what was removed when"
    assert kept[-100:] == steps[-100:]
    assert kept[0] == 1
    gaps = {later - earlier for earlier, later in itertools.pairwise(kept[:-100])}
    assert len(steps) > MOST_STEPS or kept == steps
    assert max(gaps, default=1) - min(gaps, default=1) <= every
    assert len(kept) >= min(len(steps), 3 * MOST_STEPS // 4)


def test_a_run_that_goes_on_from_an_earlier_step_keeps_what_it_would_have_kept() -> None:
    kept = run_to(600, run_to(1000, set()), first=501)
    whole = run_to(600, set())
    assert kept <= whole
    assert {step for step in kept if step > 500} == {step for step in whole if step > 500}


def test_old_files_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens_module, "MOST_STEPS", 4)
    folder = tmp_path / "completions" / "tokens"
    folder.mkdir(parents=True)
    for name in ("step_12.jsonl", "step_2.jsonl", "notes.txt"):
        (folder / name).touch()
    for step in range(4, 9):
        fit(make_policy(), [batch_of(groups(), step=step)], TokenKeeper(tmp_path))
    assert {path.name for path in folder.iterdir()} == {f"step_{step}.jsonl" for step in (2, 6, 7, 8)} | {"notes.txt"}
    assert lines_of(tmp_path, 8)


def test_a_loss_without_advantages_and_engine_has_nothing_to_show(tmp_path: Path) -> None:
    rows = groups()
    for row in rows:
        row.advantages = row.logprobs = None
    fit(make_policy(policy_loss="sft"), [batch_of(rows)], TokenKeeper(tmp_path))
    assert not (tmp_path / "completions").exists()


def test_long_responses_are_cut_and_numbers_that_are_not_finite_are_null() -> None:
    tokens = MOST_TOKENS + 9
    logprobs = torch.full((tokens,), -1.0)
    logprobs[0] = math.nan
    experience = Experience(tokens=[5] * (tokens + 2), prompt_length=2, logprobs=logprobs, reward=math.inf)
    line = record(3, experience, None, logprobs, load_tokenizer("tiny"))
    assert (line["length"], len(line["tokens"]), line["reward"], line["advantages"]) == (
        tokens,
        MOST_TOKENS,
        None,
        None,
    )
    assert line["engine"][:2] == [None, -1.0]


class Bytes:
    """A tokenizer whose tokens are the bytes of UTF-8, with a blank before the first of several words, as some have."""

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode(errors="replace").removeprefix(" ")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ab", ["a", "b"]),
        ("a②b", ["a", "", "", "②", "b"]),
        (" a b", ["", "a", " ", "b"]),
        ("", []),
    ],
)
def test_the_texts_of_tokens_make_up_the_response(text: str, expected: list[str]) -> None:
    assert pieces(Bytes(), list(text.encode())) == expected


def test_a_character_that_the_end_cuts_is_shown_as_such() -> None:
    assert pieces(Bytes(), list("a②".encode())[:3]) == ["a", "", "�"]


# -- on the page -------------------------------------------------------------------------------------------------------


def line(**changes: Any) -> dict[str, Any]:
    values = {"tokens": ["a", EVIL, "c"], "trained": [1, 0, 1], "advantages": [0.5, None, -1.0], "reward": 0.5}
    values |= {"engine": [-1.0, None, -2.0], "trainer": [-1.3, None, -1.98], "prompt": "Q", "task": 1, "length": 3}
    return values | changes


def rollout_of(**changes: Any) -> Rollout:
    view = token_view({4: [line(**changes)]})
    assert view is not None
    return view.steps[4][0][0]


def test_shades_are_by_share_of_the_largest_advantage_and_by_nats() -> None:
    rollout = rollout_of()
    assert [token.css for token in rollout.tokens] == ["a2 d3", "other", "n4 e1"]
    assert rollout.tokens[0].title == "advantage +0.5, difference +0.3, engine −1"
    assert rollout.summary == ["reward 0.5", "advantage −1 to +0.5", "log-probability difference 0.16, at most 0.3"]
    assert rollout.largest[0] == ("a", "1", "−1", "−1.3", "+0.3")
    assert rollout.left == 0


def test_what_is_not_known_is_not_shown() -> None:
    view = token_view({4: [line(engine=None, advantages=[1, 2])]})
    assert view is not None
    assert (view.advantages, view.differences) == ([], [])
    assert [token.css for token in view.steps[4][0][0].tokens] == ["", "other", ""]
    assert token_view({4: [{}, line(tokens=[]), line(tokens=[1])]}) is None
    assert token_view({}) is None


def test_a_long_response_says_how_much_is_left() -> None:
    rollout = rollout_of(tokens=["x"] * 400, length=1000)
    assert (len(rollout.tokens), rollout.left) == (300, 700)


def test_many_line_breaks_take_one_line() -> None:
    rollout = rollout_of(tokens=["a\n", "\n", "\n\n", "b"])
    assert [token.text for token in rollout.tokens] == ["a↵\n", "↵\n", "↵↵", "b"]
