"""Commands and runs: how they are started, watched, interrupted and compared."""

import csv
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from support.process import Forked

ROOT = Path(__file__).resolve().parents[2]
TRAIN = "trinity_lightning.train"

# A run that is over as soon as it can be: add `+recipe=NAME`.
SMALL = (
    "model=tiny",
    "reward=contains_digits",
    "explorer.batch_size=2",
    "explorer.repeat_times=4",
    "sampling.max_tokens=8",
    "explorer.eval_on_startup=false",
    "explorer.eval_interval=0",
    "logger=csv",
)

# Two processes train.
ON_TWO = ("trainer.accelerator=cpu", "trainer.devices=2")
TWO = ("trainer=ddp", *ON_TWO)
SHARDS = ("trainer=fsdp2", *ON_TWO)
TRAINERS = {"ddp": TWO, "fsdp2": SHARDS}

RunTrain = Callable[..., subprocess.CompletedProcess[str]]


def environment() -> dict[str, str]:
    """The environment of a command: the checkout is importable, W&B stays offline and quiet.

    A W&B service of this process is not the command's: this process may have ended it.
    """
    path = os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "tests"), os.getenv("PYTHONPATH")]))
    inherited = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}
    return inherited | {"PYTHONPATH": path, "WANDB_MODE": "offline", "WANDB_SILENT": "true"}


class Commands:
    """Runs commands of the package in processes forked off one that is warm, see support/warm.py.

    A command that must be a process from its very beginning: `start`.
    """

    def __init__(self) -> None:
        self._warm: subprocess.Popen[str] | None = None
        self._folder = tempfile.TemporaryDirectory()
        self._started: list[Forked] = []

    def __call__(
        self, folder: Path, *arguments: str, program: str = TRAIN, timeout: float = 420
    ) -> subprocess.CompletedProcess[str]:
        """Run `python -m PROGRAM ARGUMENTS` in a folder; stdout and stderr are captured together."""
        with tempfile.NamedTemporaryFile("w+") as output:
            process = Forked(self.address, [program, *arguments], folder, environment(), output)
            try:
                code = process.wait(timeout)
            finally:
                process.kill()
            output.seek(0)
            return subprocess.CompletedProcess([program, *arguments], code, output.read())

    def start(self, folder: Path, *arguments: str, program: str = TRAIN, **variables: str) -> Forked:
        """The same command, at work, with further environment variables; its output goes to the file `stdout`."""
        with (folder / "stdout").open("w") as output:
            run = Forked(self.address, [program, *arguments], folder, environment() | variables, output)
        self._started.append(run)
        return run

    def stop(self) -> None:
        """Kill what was started and has not ended: a failed test left it, and the next would count it as its own."""
        while self._started:
            self._started.pop().kill()

    @property
    def address(self) -> str:
        """Where the warm process listens."""
        address = f"{self._folder.name}/warm"
        if self._warm is None:
            command = [sys.executable, str(Path(__file__).with_name("warm.py")), address]
            self._warm = subprocess.Popen(
                command, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            assert self._warm.stdout is not None
            assert self._warm.stdout.readline() == "ready\n"
        return address

    def at_work(self) -> list[psutil.Process]:
        """The processes forked off, and those that they started."""
        return [] if self._warm is None else psutil.Process(self._warm.pid).children(recursive=True)

    def followers(self, run: Forked) -> list[psutil.Process]:
        """The processes of a run's other ranks, if no other run is at work."""
        return [process for process, leads in self._forked() if not leads and process.pid != run.pid]

    def servers(self) -> list[psutil.Process]:
        """The servers at work."""
        return [process for process, leads in self._forked() if leads]

    def _forked(self) -> list[tuple[psutil.Process, bool]]:
        """The forked processes, each with True if it leads a session."""
        forked = []
        for process in [] if self._warm is None else psutil.Process(self._warm.pid).children():
            with suppress(psutil.NoSuchProcess, ProcessLookupError):  # it has ended since it was listed
                forked.append((process, process.pid == os.getsid(process.pid)))
        return forked

    def close(self) -> None:
        """End the warm process, which waits for those that it forked: a failed test may have left one that hangs."""
        for process in psutil.wait_procs([process for process, _ in self._forked()], 30)[1]:
            process.kill()
        if self._warm is not None:
            self._warm.communicate()
        self._folder.cleanup()


def start(folder: Path, *arguments: str, program: str = TRAIN, **variables: str) -> subprocess.Popen[str]:
    """A process from its very beginning: `python -m PROGRAM ARGUMENTS`, else as `Commands.start`."""
    with (folder / "stdout").open("w") as stdout:
        return subprocess.Popen(
            [sys.executable, "-m", program, *arguments],
            cwd=folder,
            env=environment() | variables,
            stdout=stdout,
            stderr=subprocess.STDOUT,
            text=True,
        )


# How rank 1 ends, or does not, within a pass of a policy in shards: for support/stops.py, and what the run says of it.
WITHIN_A_PASS = {
    "killed": ("1 pass 12", "the process of rank 1 was ended by signal 9"),
    "hangs": ("1 pass 12", "(rank 1 hangs)"),
    "fails": ("1 pass 12 fails", "rank 1: TrinityError: broken on purpose"),
}


def imitation(folder: Path) -> tuple[str, ...]:
    """Arguments of a run that learns from examples, which it finds in the folder, without an engine."""
    example = json.dumps({"prompt": "1 + 1 =", "completion": " 2"})
    (folder / "data.jsonl").write_text(f"{example}\n" * 8)
    return "+recipe=sft", "model=tiny", f"buffer.path={folder}/data.jsonl", "buffer.batch_size=4", "logger=csv"


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def only(folder: Path, pattern: str) -> Path:
    matching = list(folder.glob(pattern))
    assert len(matching) == 1, (pattern, matching)
    return matching[0]


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str] | Forked, seconds: float = 240) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, "the run ended before it could be interrupted"
        assert time.monotonic() < end, "the run did not get there in time"
        time.sleep(0.01)


def steps_done(folder: Path, name: str) -> int:
    return len(list(folder.glob(f"outputs/{name}/*/completions/step_*.jsonl")))


# What is measured in seconds, tokens a second, bytes or cores differs between runs.
MEASURED = (
    "time/",
    "perf/peak",
    "perf/mfu",
    "perf/other_cores",
    "perf/tok",
    "perf/trained",
    "rollout/tokens_per_second",
    "rollout/overlap",
    "sync/",
)


# How an item is cut, which is up to each rank's budget.
CUT = ("actor/micro_batches", "perf/computed_tokens", "perf/padding_ratio", "perf/shared_prefix")


def unmeasured(row: dict[str, str]) -> dict[str, str]:
    """The entries of a row that are the same in each run."""
    return {
        name: value
        for name, value in row.items()
        if value and not name.startswith(MEASURED) and not re.search("time|seconds", name)
    }


def same_metrics(a: Path, b: Path) -> None:
    assert list(map(unmeasured, rows(a))) == list(map(unmeasured, rows(b)))


def finished(run_train: Commands, folder: Path, *arguments: str, program: str = TRAIN) -> Path:
    """The folder of a run that came to its end."""
    done = run_train(folder, *arguments, program=program)
    assert done.returncode == 0, done.stdout[-4000:]
    return only(folder, "outputs/*/*")


def with_a_server_killed(run_train: Commands, folder: Path, *arguments: str) -> Path:
    """The same of a run, named run, of two servers, one of which is killed after its first step, and started again."""
    run = run_train.start(folder, *arguments, "engine.servers=2")
    wait_for(lambda: steps_done(folder, "run") >= 1, run)
    os.killpg(run_train.servers()[0].pid, signal.SIGKILL)
    code, printed = run.wait(120), (folder / "stdout").read_text()
    assert code == 0, printed[-4000:]
    assert "died and is started again" in printed
    return only(folder, "outputs/*/*")


def rolled_out(folder: Path) -> dict[str, str]:
    """The recorded completions of each step, by file name."""
    return {file.name: file.read_text() for file in folder.glob("completions/step_*.jsonl")}


def alike(folder: Path, expected: Path, *apart: str) -> None:
    """The same experiences, and the same metrics but for the order of float32 sums, and for those named."""
    assert rolled_out(folder) == rolled_out(expected)
    for row, other in zip(rows(folder), rows(expected), strict=True):
        named, wanted = ({name for name, value in metrics.items() if value} for metrics in (row, other))
        # There if other programs were at work.
        missing = wanted - named - {"perf/other_cores"}
        assert not missing, missing
        mine, others = (
            {name: float(value) for name, value in unmeasured(metrics).items() if name not in (*CUT, *apart)}
            for metrics in (row, other)
        )
        close = {name: pytest.approx(value, rel=1e-4, abs=1e-6) for name, value in others.items()}
        differ = {name: (mine[name], value) for name, value in others.items() if mine[name] != close[name]}
        assert not differ, differ
    assert any(float(row["actor/trained_rows"] or 0) > 0 for row in rows(folder))


def same_model(folder: Path, expected: Path) -> None:
    """The same bits."""
    mine, others = ((path / "model" / "model.safetensors").read_bytes() for path in (folder, expected))
    assert mine == others


def equal(folder: Path, expected: Path) -> None:
    """The same bits, also of metrics."""
    same_model(folder, expected)
    same_metrics(folder, expected)
