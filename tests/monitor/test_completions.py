import json
import math
from pathlib import Path
from typing import Any

import pytest

from trinity_lightning.common.experience import EID, Experience
from trinity_lightning.common.runs import UNTRAINED
from trinity_lightning.monitor import run_monitor
from trinity_lightning.monitor.run_monitor import write_completions


def experience(run: int = 0, **changes: Any) -> Experience:
    fields: dict[str, Any] = {
        "eid": EID(batch=3, task=7, run=run),
        "tokens": [1, 2, 3, 4, 5],
        "prompt_length": 2,
        "logprobs": [-0.1, -0.2, -0.3],
        "reward": 0.5,
        "advantages": [1.25, 1.25, 1.25],
        "metrics": {"reward/math": 0.5, "accuracy": 1.0},
        "prompt_text": "1 + 1 = ?",
        "response_text": "zwei: ② \n",
    }
    return Experience(**fields | changes)


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_completion_is_one_object(tmp_path: Path) -> None:
    write_completions(tmp_path / "completions", 3, [experience(), experience(run=1)])
    first, second = lines_of(tmp_path / "completions" / "step_3.jsonl")
    assert first == {
        "step": 3,
        "task": 7,
        "run": 0,
        "prompt": "1 + 1 = ?",
        "completion": "zwei: ② \n",
        "reward": 0.5,
        "reward/math": 0.5,
        "advantage": 1.25,
        "length": 3,
        "truncated": False,
        "trained": True,
        "reason": None,
    }
    assert second["run"] == 1


def test_what_is_not_trained_on_says_why(tmp_path: Path) -> None:
    (row,) = write_completions(tmp_path, 3, [experience(info={UNTRAINED: "equal rewards"})])
    assert (row["trained"], row["reason"]) == (False, "equal rewards")
    (row,) = write_completions(tmp_path, 3, [experience()], taskset="held")
    assert not {"trained", "reason"} & row.keys()  # nobody trains on it


def test_table_rows_share_their_columns_and_are_at_most_so_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_monitor, "TABLE_ROWS", 2)
    experiences = [
        experience(metrics={"reward/a": 1.0}),
        experience(metrics={"reward/b": 2.0}),
        experience(),
        experience(),
    ]
    rows = write_completions(tmp_path, 3, experiences)
    columns = ["step", "prompt", "completion", "reward", "reward/a", "reward/b", "advantage", "length", "truncated"]
    assert [list(row) for row in rows] == [[*columns, "trained", "reason"]] * 2
    assert [row["reward/a"] for row in rows] == [1.0, None]
    assert len(lines_of(tmp_path / "step_3.jsonl")) == 4


def test_what_is_missing_is_null(tmp_path: Path) -> None:
    bare = experience(
        reward=math.nan, advantages=None, metrics=None, response_text=None, truncate_status="response_truncated"
    )
    (row,) = write_completions(tmp_path, 3, [bare])
    assert (row["reward"], row["advantage"], row["completion"], row["truncated"]) == (None, None, None, True)
    assert "NaN" not in (tmp_path / "step_3.jsonl").read_text()


def test_evaluations_have_files_of_their_own(tmp_path: Path) -> None:
    write_completions(tmp_path, 3, [experience()], taskset="heldout")
    write_completions(tmp_path, 3, [experience()], taskset="org/set")
    write_completions(tmp_path, 3, [experience(), experience()], taskset="heldout")  # again: replaced as a whole
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "eval_heldout_step_3.jsonl",
        "eval_org_set_step_3.jsonl",
    ]
    assert len(lines_of(tmp_path / "eval_heldout_step_3.jsonl")) == 2
