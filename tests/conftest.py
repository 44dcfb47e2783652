"""Fixtures for whole runs: real commands in processes of their own, from a folder of their own."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

# The models are tiny: two threads win nothing, and wait long for each other where a core is not theirs alone.
# Before torch is imported; the commands that tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

ROOT = Path(__file__).resolve().parents[1]
TRAIN = "trinity_lightning.train"


def environment() -> dict[str, str]:
    """The environment of a command: the checkout is importable, W&B stays offline and quiet."""
    path = f"{ROOT}{os.pathsep}{ROOT / 'tests'}"
    return os.environ | {"PYTHONPATH": path, "WANDB_MODE": "offline", "WANDB_SILENT": "true"}


def train_command(*arguments: str, program: str = TRAIN) -> list[str]:
    """The command line of a training run."""
    return [sys.executable, "-m", program, *arguments]


@pytest.fixture(scope="session")
def run_train() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs `python -m trinity_lightning.train ARGUMENTS` in a folder; stdout and stderr are captured together."""

    def run(
        folder: Path, *arguments: str, timeout: float = 420, program: str = TRAIN
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            train_command(*arguments, program=program),
            cwd=folder,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
            check=False,
        )

    return run
