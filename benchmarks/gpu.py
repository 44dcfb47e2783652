"""Measure this project on a GPU: vLLM beside the trainer, training, whole steps, TRL's beside them. Stage by stage.

    python benchmarks/gpu.py [--stages a,c] [--minutes 10] [--model 0.5B]
    python benchmarks/gpu.py --table RESULTS.jsonl

The stages, in the order of their worth:

  a  tests/test_on_gpu.py
  b  the engine: start, weight sync, sleep, and its speed at 512 and 1,024 requests against vLLM's LLM.generate
  c  the training phase: 128 and 512 rows of 1k tokens with 512, 4,096 and 16,384 tokens a micro-batch, MFU, peak memory
     beside the memory plan's, compilations, and a profile by kind of work
  d  the training phase against TRL's GRPOTrainer: the same rollouts, TRL's best settings of those that are tried
  e  a whole step of 512 rollouts of 1k tokens: ours, and TRL's with vLLM in its process
  f  vLLM as a server on the trainer's GPU, whose weights arrive by CUDA IPC, and as a folder
  g  optimizer.name=adamw_offload with a model of 7 billion
  h  a run in bfloat16 and one in float16

Each stage is a process of its own with a time limit, and prints a line of JSON for each result at once. A stage that
fails or takes too long does not end the others; within a stage, an error is the result of its part, and so is a refusal
of the project's (`refused`). `--minutes` leaves
out the stages for which no time is left, and each line of a stage that is left out or fails says why. What else a stage
prints is in a file that its line names. Models are random, of published shapes, and made on the spot: no network is
needed. `--device cpu --model qwen2` takes the same steps with few and short rollouts: whether it all works.

`--table` writes the lines of a file into docs/gpu.md, between its two marks.
"""

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import _gpu
from _gpu import BENCHMARK, Job, sentence

BEGINNING = f'{{"benchmark": "{BENCHMARK}"'  # of the lines that are results
LAST_WORDS = 3  # lines of a failed stage's log that its line quotes


@dataclass(frozen=True)
class Stage:
    """A stage: the function that takes it, `module.name`; the seconds that it may take, and those that make sense."""

    function: str
    most: float
    least: float = 60


STAGES = {
    "a": Stage("_gpu_runs.tests", 900),
    "b": Stage("_gpu_engine.engine", 480),
    "c": Stage("_gpu_training.training", 600),
    "d": Stage("_gpu_trl.training", 900, 180),
    "e": Stage("_gpu_trl.whole_step", 900, 240),
    "f": Stage("_gpu_runs.servers", 600, 120),
    "g": Stage("_gpu_training.offload", 600, 120),
    "h": Stage("_gpu_runs.float16", 480, 120),
}


def work(job: Job) -> None:
    """Take a stage, in this process."""
    module, _, name = STAGES[job.stage].function.partition(".")
    getattr(importlib.import_module(module), name)(job)


def take(job: Job, log: Path) -> dict[str, Any]:
    """Take a stage in a process of its own and pass its lines on; what failed in it, if anything."""
    command = [sys.executable, __file__, "--work", job.to_json()]
    late = threading.Event()
    with log.open("w") as file, _gpu.started(command, file) as process:
        alarm = threading.Timer(max(job.left, 0), lambda: (late.set(), end(process)))
        alarm.start()
        try:
            assert process.stdout is not None
            failed_parts = pass_on(process.stdout, file)
            code = process.wait()
        finally:
            alarm.cancel()
            end(process)
    if late.is_set():
        return {"failed": "it took longer than it may, and was ended"}
    if code != 0:
        last_words = log.read_text().splitlines()[-LAST_WORDS:]
        return {"failed": sentence(f"exit code {code}: " + " ".join(last_words))}
    return {"failed_parts": failed_parts} if failed_parts else {}


def pass_on(lines: IO[str], log: IO[str]) -> int:
    """Print results at once, and write everything else to the log; the number of results that are failures."""
    failures = 0
    for line in lines:
        if line.startswith(BEGINNING):
            print(line, end="", flush=True)
            failures += "failed" in json.loads(line)
        else:
            log.write(line)
            log.flush()
    return failures


def end(process: "subprocess.Popen[str]") -> None:
    """Kill the stage's process and those that it started in its session."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def take_all(letters: Sequence[str], args: argparse.Namespace) -> int:
    """Take these stages while there is time; the number of those that failed."""
    until = time.time() + 60 * args.minutes
    logs, failures = Path(args.logs or tempfile.mkdtemp(prefix="gpu_benchmark_")), 0
    logs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.scratch) as folder:
        for letter in letters:
            stage, left = STAGES[letter], until - time.time()
            head = {"benchmark": BENCHMARK, "stage": letter, "what": "stage"}
            if left < stage.least:
                print(json.dumps(head | {"left_out": f"{max(left, 0):.0f} s are left of --minutes"}), flush=True)
                continue
            ends = time.time() + min(stage.most, left)
            job = Job(letter, args.device, args.model, folder, ends, args.trl_python)
            log, start = logs / f"{letter}.log", time.time()
            failed = take(job, log)
            failures += bool(failed)
            print(json.dumps(head | failed | {"seconds": round(time.time() - start, 1), "log": str(log)}), flush=True)
    return failures


def main() -> None:
    args = arguments()
    if args.work:
        work(Job(**json.loads(args.work)))
        return
    if args.table:
        from _gpu_table import write

        write(Path(args.table))
        return
    letters = args.stages.split(",")
    if unknown := [letter for letter in letters if letter not in STAGES]:
        sys.exit(f"gpu.py: there is no stage {', '.join(map(repr, unknown))}; there are {', '.join(STAGES)}.")
    if args.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            sys.exit("gpu.py: this machine has no NVIDIA GPU; --device cpu --model qwen2 tries it all on a CPU.")
    if take_all(letters, args):
        sys.exit(1)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", default=",".join(STAGES), help="letters, such as a,c; all of them by default")
    parser.add_argument("--minutes", type=float, default=90.0, help="for all stages together")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--model", default="0.5B", help="qwen2, 0.5B, 1.5B, 7B, or any of this package's")
    parser.add_argument("--scratch", help="folder for models, such as /dev/shm; by default the system's for such files")
    parser.add_argument("--logs", help="folder for what stages print besides results; by default a new one")
    parser.add_argument("--trl-python", help="the Python of TRL's side of stage e, with a vLLM that it works with")
    parser.add_argument("--table", metavar="RESULTS", help="write this file's lines into docs/gpu.md, and end")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
