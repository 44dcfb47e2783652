"""The losses of a run on two processes, one of which is killed: one JSON line.

python benchmarks/rank_faults.py [--kills 20] [--only FROM:TO] [--steps 6]

A run of the tiny model with a vLLM server that rolls out ahead is done once undisturbed with trainer=ddp, and once with
trainer=fsdp2. Then each is done again, and at a random moment of a random step SIGKILL ends a process of it, in turns:
rank 0, which is the head of the run; rank 1; the server; and a worker of Ray, of a run that has its runners there. The
run must go on, or end within a minute with none of its processes left: with a message, if there is a rank to write one,
and with a checkpoint, if it was past its first step. Resumed, it must have the bits of the undisturbed run.
`--only 4:8` does a part of the kills, the same as in a whole run.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from safetensors.torch import load_file

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))  # whose runs are forked off a process that is warm

from support.process import Forked
from support.runs import SMALL, Commands, only, steps_done

RUN = ("+recipe=one_step_off_policy", *SMALL, "explorer.batch_size=4", "optimizer.lr=1e-3", "name=run")
RUN += ("model.dtype=fp32", "callbacks.checkpoint.every_n_epochs=1", "trainer.accelerator=cpu", "trainer.devices=2")
TRAINERS = ("ddp", "fsdp2")
VICTIMS = ("rank 0", "rank 1", "server", "Ray worker")
ON_RAY = ("explorer.runner=ray", "explorer.runner_per_model=1")
END_SECONDS = 60.0
STEP_SECONDS = 0.5  # within which the moment of a step is drawn


@dataclass(frozen=True)
class Kill:
    """The process of a run that is ended, and the moment."""

    trainer: str
    victim: str
    step: int
    seconds: float  # after that step has been rolled out

    @property
    def arguments(self) -> tuple[str, ...]:
        """The arguments of the run."""
        return (f"trainer={self.trainer}", *(ON_RAY if self.victim == "Ray worker" else ()))


def drawn(kills: int, steps: int) -> list[Kill]:
    """The kills, the same each time."""
    random_ = random.Random(0)
    return [
        Kill(
            TRAINERS[number // len(VICTIMS) % len(TRAINERS)],
            VICTIMS[number % len(VICTIMS)],
            random_.randrange(1, steps),
            random_.uniform(0, STEP_SECONDS),
        )
        for number in range(kills)
    ]


def finished(commands: Commands, folder: Path, *arguments: str) -> dict[str, torch.Tensor]:
    """The weights that a run has in the end."""
    done = commands(folder, *RUN, *arguments)
    require(done.returncode == 0, done.stdout)
    return load_file(only(folder, "outputs/run/*/model/model.safetensors"))


def process_of(kill: Kill, commands: Commands, run: Forked) -> psutil.Process | None:
    """The process to kill; None if there is none any more."""
    if kill.victim == "rank 0":
        return psutil.Process(run.pid)
    if kill.victim == "Ray worker":
        return next((process for process in commands.at_work() if "RayWorker" in process.name()), None)
    wanted = commands.servers() if kill.victim == "server" else commands.followers(run)
    return wanted[0] if wanted else None


def outcome(commands: Commands, folder: Path, kill: Kill, steps: int, expected: dict[str, torch.Tensor]) -> str:
    """Disturb a run, resume it unless it goes on, and return its results; a RuntimeError if anything is lost."""
    folder.mkdir()
    run = commands.start(folder, *RUN, *kill.arguments, f"steps={steps}")
    try:
        return judged(commands, folder, kill, steps, expected, run)
    finally:
        family = commands.at_work()
        run.kill()
        for process in family:
            with suppress(psutil.NoSuchProcess):
                process.kill()


def judged(
    commands: Commands, folder: Path, kill: Kill, steps: int, expected: dict[str, torch.Tensor], run: Forked
) -> str:
    """`outcome` of a run that is at work."""
    while steps_done(folder, "run") < kill.step and run.poll() is None:
        time.sleep(0.01)
    time.sleep(kill.seconds)
    family = commands.at_work()
    if run.poll() is not None or (victim := process_of(kill, commands, run)) is None:
        require(run.wait() == 0, (folder / "stdout").read_text())
        return "came too late"
    victim.kill()
    goes_on = kill.victim in ("server", "Ray worker")
    code = run.wait(4 * END_SECONDS if goes_on else END_SECONDS)
    printed = (folder / "stdout").read_text()
    left = psutil.wait_procs(family, END_SECONDS)[1]
    require(not left, f"{printed}\n{left} outlived the run")
    if goes_on:
        require(code == 0, printed)
        require(same(load_file(only(folder, "outputs/run/*/model/model.safetensors")), expected), "other bits")
        return "went on"
    require(code != 0, f"{printed}\nno error without {kill.victim}")
    require(kill.victim != "rank 1" or "the process of rank 1 was ended by signal 9" in printed, printed)
    saved = any(folder.glob("outputs/run/*/checkpoints/*.ckpt"))
    require(saved or kill.step <= 2, printed)  # one of two steps is rolled out ahead
    require(kill.victim == "rank 0" or not saved or "Resume with" in printed, printed)
    resume = ("ckpt_path=last",) if saved else ()
    resumed = finished(commands, folder, *kill.arguments, f"steps={steps}", *resume)
    require(same(resumed, expected), "other bits")
    return "resumed" if saved else "begun again"


def same(weights: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    """True if two models have the same bits."""
    return weights.keys() == expected.keys() and all(
        torch.equal(weights[name], value) for name, value in expected.items()
    )


def require(holds: bool, printed: str) -> None:
    """A RuntimeError with the end of what was printed, unless this holds."""
    if not holds:
        raise RuntimeError(printed[-4000:])


def main(kills: int, steps: int, part: slice) -> None:
    """Print the line."""
    outcomes: dict[str, Counter[str]] = {victim: Counter() for victim in VICTIMS}
    chosen = list(enumerate(drawn(kills, steps)))[part]
    with tempfile.TemporaryDirectory() as folder, closing(Commands()) as commands:
        expected = {}
        for trainer in {kill.trainer for _, kill in chosen}:
            (whole := Path(folder) / trainer).mkdir()
            expected[trainer] = finished(commands, whole, f"trainer={trainer}", f"steps={steps}")
        for number, kill in chosen:
            came = outcome(commands, Path(folder) / str(number), kill, steps, expected[kill.trainer])
            print(f"{number}: {kill}: {came}", file=sys.stderr, flush=True)
            outcomes[kill.victim][came] += 1
    print(json.dumps({"benchmark": "rank_faults", "kills": len(chosen), "steps": steps, "outcomes": outcomes}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--only", default=":")
    args = parser.parse_args()
    main(args.kills, args.steps, slice(*(int(bound) if bound else None for bound in args.only.split(":"))))
