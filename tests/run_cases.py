"""Runs that are started, watched, interrupted and compared."""

import csv
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
from conftest import TRAIN, environment, train_command


def quiet_trainer(folder: Path, *callbacks: lightning.Callback, **settings: Any) -> lightning.Trainer:
    """On the CPU, one epoch; without logger, checkpoints and what is printed, unless the settings say otherwise."""
    quiet = {"max_epochs": 1, "accelerator": "cpu", "logger": False, "enable_checkpointing": False}
    quiet |= {"enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
    return lightning.Trainer(**(quiet | settings), callbacks=list(callbacks), default_root_dir=folder)


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def only(folder: Path, pattern: str) -> Path:
    found = list(folder.glob(pattern))
    assert len(found) == 1, (pattern, found)
    return found[0]


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str], seconds: float = 240) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, "the run ended before it could be interrupted"
        assert time.monotonic() < end, "the run did not get there in time"
        time.sleep(0.01)


def start(folder: Path, *arguments: str, program: str = TRAIN) -> subprocess.Popen[str]:
    with (folder / "stdout").open("w") as stdout:
        return subprocess.Popen(
            train_command(*arguments, program=program),
            cwd=folder,
            env=environment(),
            stdout=stdout,
            stderr=subprocess.STDOUT,
            text=True,
        )


def steps_done(folder: Path, name: str) -> int:
    return len(list(folder.glob(f"outputs/{name}/*/completions/step_*.jsonl")))


# What is measured in seconds, tokens a second or bytes differs between runs.
MEASURED = (
    "time/",
    "perf/peak",
    "perf/mfu",
    "perf/tok",
    "perf/trained",
    "rollout/tokens_per_second",
    "rollout/overlap",
    "sync/",
)


def same_metrics(a: Path, b: Path) -> None:
    left, right = rows(a), rows(b)
    assert len(left) == len(right)
    for one, other in zip(left, right, strict=True):
        measured = [
            name for name in one.keys() | other.keys() if name.startswith(MEASURED) or re.search("time|seconds", name)
        ]
        names = (one.keys() | other.keys()) - set(measured)
        assert {name: one.get(name, "") for name in names} == {name: other.get(name, "") for name in names}
