"""`.progress.json`: written beside a run by a thread, whole at every moment, and removed at the run's end."""

import json
import os
import threading
from pathlib import Path

import pytest

from trinity_lightning.monitor import progress
from trinity_lightning.monitor.progress import FILE, Progress, ProgressFile, read_progress
from trinity_lightning.monitor.run_monitor import RunMonitor


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "WRITE_SECONDS", 0.01)


def written(folder: Path, **expected: object) -> Progress:
    """The progress, once it has these values."""
    for _ in range(500):
        read = read_progress(folder)
        if read and all(getattr(read[0], name) == value for name, value in expected.items()):
            return read[0]
        threading.Event().wait(0.01)
    raise AssertionError(f"not written: {expected}; {read_progress(folder)}")


def test_it_says_what_the_run_does_and_is_gone_at_the_end(tmp_path: Path) -> None:
    file = ProgressFile(tmp_path)
    file.enter("training", 9)  # before it starts, and forgotten
    file.start()
    file.start()  # once more: nothing happens
    assert written(tmp_path, part="loading", step=0).total == 0
    file.enter("rollout", 3)
    file.count(3, 5, 8)
    first = written(tmp_path, part="rollout", step=3, batch="3", done=5, total=8)
    assert first.last >= first.since > 0
    file.enter("rollout", 3)  # it goes on
    file.count(3, 6, 8)
    assert written(tmp_path, done=6).since == first.since
    file.stop()
    file.stop()
    assert list(tmp_path.iterdir()) == []


def test_it_beats_though_nothing_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "BEAT_SECONDS", 0.02)
    file = ProgressFile(tmp_path)
    file.start()
    written(tmp_path, part="loading")
    before = (tmp_path / FILE).stat().st_mtime_ns
    for _ in range(500):
        if (tmp_path / FILE).stat().st_mtime_ns > before:
            break
        threading.Event().wait(0.01)
    else:
        raise AssertionError("no second beat")
    file.stop()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_to_does_not_matter(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    file = ProgressFile(tmp_path)
    file.start()
    file.stop()


def test_a_missing_folder_does_not_matter(tmp_path: Path) -> None:
    file = ProgressFile(tmp_path / "missing")
    file.start()
    file.stop()
    assert not (tmp_path / "missing").exists()


@pytest.mark.parametrize("text", ["", "{", "[1]", '"text"', "\ud83d"])
def test_a_file_that_is_not_whole_is_none(text: str, tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(text.encode(errors="surrogatepass"))
    assert read_progress(tmp_path) is None


def test_a_file_of_another_version_is_read_as_far_as_it_fits(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(json.dumps({"part": "dreaming", "step": "many", "total": 8, "since": 3, "new": [1]}))
    read = read_progress(tmp_path)
    assert read is not None
    assert read[0] == Progress(part="dreaming", total=8, since=3)


def test_the_monitor_tells_rollouts_from_evaluations(tmp_path: Path) -> None:
    monitor = RunMonitor(tmp_path, 9)
    monitor._progress.start()
    monitor.show_tasks("4/held out", 0, 2)
    monitor.count_tasks("4/held out", 0, 2)
    assert written(tmp_path, part="evaluation", step=4, batch="4/held out").total == 2
    monitor.show_tasks(5, 0, 8)
    written(tmp_path, part="rollout", step=5)
    monitor._progress.stop()
