"""A run's folder as another process reads it: a little at a time, whatever the run does to its files meanwhile."""

import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiers import examples

from trinity_lightning.config.explain import LOCK
from trinity_lightning.monitor import live
from trinity_lightning.monitor.csv_logger import MetricsCSVLogger
from trinity_lightning.monitor.folders import RUN_FILES, is_locked, runs_in
from trinity_lightning.monitor.live import (
    MetricsFile,
    Record,
    RunFolder,
    differing_settings,
    end_of_log,
    newest_completions,
    newest_run,
    state_of,
    warnings_of,
)
from trinity_lightning.monitor.progress import FILE as PROGRESS
from trinity_lightning.monitor.progress import this_machine
from trinity_lightning.monitor.rows import FILE


def read_at_once(path: Path) -> list[dict[str, float]]:
    file = MetricsFile(path)
    file.refresh()
    return file.rows


# -- metrics.csv -------------------------------------------------------------------------------------------------------

NAMES = ("reward/mean", "time/step", "actor/entropy", "not/read", "eval/a/mean@4", 'eval/x,"y/mean@1')


@settings(max_examples=examples(20), deadline=None)
@given(st.lists(st.tuples(st.integers(1, 5), st.sampled_from(NAMES), st.booleans()), max_size=12))
def test_a_followed_file_is_the_file(logged: list[tuple[int, str, bool]]) -> None:
    """Rows grow, columns come along, and a resumed run drops rows: looks in between change nothing of the last one."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        logger, file = MetricsCSVLogger(folder), MetricsFile(folder / FILE)
        for row, (step, metric, looks) in enumerate(logged):
            logger.log_metrics({"explore_step": step, metric: row / 7}, step=row)
            if looks:
                file.refresh()
            if step == 5:
                logger.resume_at(4)
        file.refresh()
        assert file.rows == read_at_once(folder / FILE)
        assert all("not/read" not in row for row in file.rows)


def test_a_line_that_is_not_whole_waits_for_the_next_look(tmp_path: Path) -> None:
    path = tmp_path / FILE
    path.write_text("explore_step,reward/mean\n1,0.5\n2,0.")
    file = MetricsFile(path)
    file.refresh()
    assert file.series("reward/mean") == [(1, 0.5)]
    path.write_text("explore_step,reward/mean\n1,0.5\n2,0.75\n")
    file.refresh()
    assert file.series("reward/mean") == [(1, 0.5), (2, 0.75)]


def test_damaged_cells_and_lines_are_left_out(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(
        b"explore_step,reward/mean\n1,x\n\xff,3\n\n2\n3,nan\n4,0.5,9,9\n5," + b"a" * 200_000 + b"\n"
    )
    file = MetricsFile(tmp_path / FILE)
    file.refresh()
    assert file.series("reward/mean") == [(4, 0.5)]


def test_a_file_that_is_missing_or_goes_away_is_empty(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / FILE)
    file.refresh()
    assert (file.rows, file.steps_done, file.pace(), file.last_times()) == ([], 0, None, {})
    (tmp_path / FILE).write_text("explore_step,time/step\n1,2\n")
    file.refresh()
    assert file.steps_done == 1
    (tmp_path / FILE).unlink()
    file.refresh()
    assert (file.rows, file.columns) == ([], [])


def test_of_a_large_file_little_is_read(tmp_path: Path) -> None:
    """A week of steps: samples of its rows, all of its end, and afterwards only what is new."""
    path, count = tmp_path / FILE, 100_000
    line = "{0},{1},1.5" + ",0.123456789" * 8 + "\n"
    columns = "explore_step,reward/mean,time/step," + ",".join(f"other/{i}" for i in range(8))
    path.write_text(f"{columns}\n" + "".join(line.format(step, step / count) for step in range(1, count + 1)))
    assert path.stat().st_size > live.WHOLE_BYTES
    file = MetricsFile(path)
    file.refresh()
    assert live.PLACES < len(file.rows) < 5000
    assert file.steps_done == count
    points = file.series("reward/mean")
    assert points[0][0] < count / 100
    assert all(value == pytest.approx(step / count) for step, value in points)
    gaps = [late - early for (early, _), (late, _) in itertools.pairwise(points)]
    assert max(gaps) < 3 * count / live.PLACES
    assert file.one_in == pytest.approx(count / live.PLACES, rel=0.1)
    rows = len(file.rows)
    with path.open("a") as more:
        more.write(line.format(count + 1, 2.0))
    file.refresh()
    assert len(file.rows) == rows + 1
    assert file.series("reward/mean")[-1] == (count + 1, 2.0)


def test_the_parts_of_the_last_step_that_ended(tmp_path: Path) -> None:
    logger = MetricsCSVLogger(tmp_path)
    logger.log_metrics({"explore_step": 0, "eval/a/seconds": 9.0, "eval/a/mean@1": 0.1}, step=0)
    logger.log_metrics({"explore_step": 1, "time/rollout": 3.0, "time/train": 1.0}, step=0)
    logger.log_metrics({"explore_step": 1, "time/train": 2.0}, step=1)
    logger.log_metrics({"explore_step": 1, "time/step": 7.0}, step=1)
    logger.log_metrics({"explore_step": 1, "eval/a/seconds": 5.0, "eval/a/mean@1": 0.2}, step=1)
    logger.log_metrics({"explore_step": 2, "time/rollout": 100.0, "time/train": 1.0}, step=2)  # it goes on
    file = MetricsFile(tmp_path / FILE)
    file.refresh()
    assert file.steps_done == 1
    assert file.last_times() == {"rollout": 3.0, "train": 3.0, "other": 1.0, "evaluation": 5.0}
    assert file.pace() == 12.0
    assert file.series("eval/a/mean@1") == [(0, 0.1), (1, 0.2)]


def test_rollouts_that_were_ahead_count_by_the_wait(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("explore_step,time/rollout,time/wait_for_rollout,time/train,time/step\n1,50,2,8,10\n")
    file = MetricsFile(tmp_path / FILE)
    file.refresh()
    assert file.last_times() == {"wait_for_rollout": 2.0, "train": 8.0, "other": 0.0}


def test_a_run_without_rollouts_has_no_time_of_a_step(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("explore_step,actor/pg_loss,time/train\n1,2.0,4\n2,1.5,6\n")
    file = MetricsFile(tmp_path / FILE)
    file.refresh()
    assert (file.steps_done, file.pace()) == (2, 6.0)


# -- train.log and completions -----------------------------------------------------------------------------------------


def test_warnings_of_a_kind_are_one(tmp_path: Path) -> None:
    lines = [
        f"[2026-01-01 00:00:0{n},1] WARNING a.b: step {n}: none of its 16 responses is trained on" for n in range(9)
    ]
    lines.insert(4, "[2026-01-01 00:00:04,1] ERROR a.b: boom\nTraceback (most recent call last):\n  File x")
    (tmp_path / "train.log").write_text("\n".join(["x" * 100_000, *lines, "[2026-01-01 00:00:10,1] INFO a: fine"]))
    records = end_of_log(tmp_path / "train.log")
    assert len(records) == 11
    warned, last = warnings_of(records)
    assert (warned.level, warned.text, warned.count) == ("ERROR", "boom", 1)
    assert (last.text, last.count) == ("step 8: none of its 16 responses is trained on", 9)


def test_the_newest_completions_are_found_without_listing_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert newest_completions(tmp_path, 5) == 0
    folder = tmp_path / "completions"
    folder.mkdir()
    assert newest_completions(tmp_path, 5) == 0
    for step in (9, 10):
        (folder / f"step_{step}.jsonl").write_text(json.dumps({"step": step}) + '\n{"torn\n[]\n')
    (folder / "eval_a_step_99.jsonl").write_text("{}\n")
    assert newest_completions(tmp_path, 0) == 10  # listed
    monkeypatch.delattr(live.os, "scandir")
    assert newest_completions(tmp_path, 7) == 10
    assert newest_completions(tmp_path, 11) == 10
    monkeypatch.undo()
    run = RunFolder(tmp_path)
    assert [run.look().completions for _ in range(2)] == [(10, [{"step": 10}])] * 2
    (folder / "step_11.jsonl").write_text(json.dumps({"step": 11}))
    assert run.look().completions == (11, [{"step": 11}])


# -- whether a run goes on ---------------------------------------------------------------------------------------------

ERROR = Record("", "ERROR", "the disk is full")
STOPPED = Record("", "WARNING", "stopped in step 3, with a checkpoint. Resume with: x")
NOTE, INFO = Record("", "WARNING", "other programs use 1 of 2 cores"), Record("", "INFO", "step 3/9  reward 0.5")


@pytest.mark.parametrize(
    ("locked", "age", "log", "done", "expected"),
    [
        (True, None, [], 0, "starting"),
        (True, 1.0, [], 0, "running"),
        (True, 900.0, [INFO], 3, "silent"),
        (True, 1.0, [ERROR], 3, "running"),  # resumed
        (False, 5.0, [INFO], 3, "running"),  # on another machine, whose lock is not seen here
        (None, 30.0, [INFO], 3, "running"),  # a file system without locks
        (False, None, [INFO, NOTE], 9, "ended"),
        (False, None, [ERROR], 9, "died"),  # the model could not be saved
        (False, None, [INFO, ERROR], 3, "died"),
        (False, None, [ERROR, INFO], 9, "ended"),  # resumed
        (False, None, [ERROR, INFO, STOPPED], 5, "stopped"),  # resumed
        (False, 300.0, [INFO], 3, "died"),
        (False, None, [INFO], 3, "died"),
        (False, None, [INFO, STOPPED], 3, "stopped"),
        (False, None, [STOPPED, Record("", "WARNING", "interrupted.")], 3, "stopped"),
        (False, None, [Record("", "WARNING", "training stopped after step 3 of 9: patience"), INFO], 3, "stopped"),
        (False, None, [], 0, "unknown"),
    ],
)
def test_the_state_of_a_run(
    locked: bool | None, age: float | None, log: list[Record], done: int, expected: str
) -> None:
    state = state_of(locked, age, log, done, steps=9)
    assert state.name == expected
    assert state.goes_on == (expected in ("starting", "running", "silent"))


def test_a_run_of_this_machine_without_a_lock_does_not_go_on() -> None:
    assert state_of(False, 1.0, [INFO], 3, 9, here=True).name == "died"
    assert state_of(True, 1.0, [INFO], 3, 9, here=True).name == "running"
    assert state_of(None, 30.0, [INFO], 3, 9, here=True).name == "running"  # a file system without locks


def test_a_run_that_was_killed_is_resumed_if_it_has_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / LOCK).touch()
    (tmp_path / PROGRESS).write_text(json.dumps({"machine": this_machine(), "resume": "train ckpt_path=last"}))
    run = RunFolder(tmp_path)
    assert run.look().state.name == "died"
    assert run.look().resume == ""
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "step=3.ckpt").touch()
    assert run.look().resume == "train ckpt_path=last"
    (tmp_path / "config.yaml").write_text("steps: 0")  # all of its steps are done
    view = run.look()
    assert (view.state.name, view.resume) == ("ended", "")


def test_an_error_is_named() -> None:
    assert state_of(False, None, [ERROR, INFO, NOTE], 3, 9).name == "died"
    assert "the disk is full" in state_of(False, None, [INFO, ERROR], 3, 9).why
    assert "killed" in state_of(False, 300.0, [INFO], 3, 9).why


@pytest.mark.slow
def test_a_lock_is_seen_and_not_taken(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    assert is_locked(path) is None
    path.touch()
    assert is_locked(path) is False
    code = "import fcntl, sys; file = open(sys.argv[1], 'a'); fcntl.lockf(file, fcntl.LOCK_EX); print(); input()"
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    holder.stdout.readline()
    assert is_locked(path) is True
    holder.communicate("\n")
    assert is_locked(path) is False


def test_the_clock_of_another_machine_counts_once(tmp_path: Path) -> None:
    """Its clock may be an hour late: what counts afterwards is that the file changes."""
    (tmp_path / PROGRESS).write_text('{"part": "training", "step": 2}')
    run, late = RunFolder(tmp_path), time.time() - 3600
    os.utime(tmp_path / PROGRESS, (late, late))
    assert not run.look().state.goes_on
    os.utime(tmp_path / PROGRESS, (late + 1, late + 1))
    assert run.look().state.name == "running"


# -- which run ---------------------------------------------------------------------------------------------------------


def test_the_newest_run_is_the_one_that_was_written_to_last(tmp_path: Path) -> None:
    assert newest_run(tmp_path / "missing") is None
    for age, name in enumerate(("grpo/b/metrics.csv", "grpo/a/config.yaml", "sweep/c/1/train.log", "sweep/c/0/.lock")):
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        path.touch()
        os.utime(path, (1000 - age, 1000 - age))
    assert newest_run(tmp_path) == tmp_path / "grpo" / "b"
    os.utime(tmp_path / "sweep/c/0/.lock", (2000, 2000))
    assert newest_run(tmp_path) == tmp_path / "sweep" / "c"
    assert [run.name for run in runs_in(tmp_path / "sweep" / "c")] == ["0", "1"]
    assert LOCK in RUN_FILES


def test_settings_in_which_runs_differ() -> None:
    runs = [{"seed": "1", "lr": "2"}, {"seed": "2", "lr": "2"}, {"lr": "2"}]
    assert differing_settings(runs) == ["seed=1", "seed=2", ""]


def test_a_folder_without_anything_is_a_view(tmp_path: Path) -> None:
    for name in ("config.yaml", "environment.json", "train.log", ".progress.json", ".hydra"):
        (tmp_path / name).mkdir() if name == ".hydra" else (tmp_path / name).write_bytes(b"\xff{: [")
    view = RunFolder(tmp_path).look()
    assert (view.settings, view.machine, view.steps, view.seconds_left) == ({}, {}, None, None)
