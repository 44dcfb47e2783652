"""Runs with rollouts suspended between steps, killed at any moment: one JSON line.

python benchmarks/group_faults.py [--kills 20] [--steps 8] [--seed 0] [--runs single,turns,dapo]

Runs of the tiny model with explorer.max_staleness=2 and one vLLM engine in their process: one with one call a rollout,
one with several turns, and one whose filter leaves groups out. SIGKILL ends each of them again and again, mostly at a
random moment after its next checkpoint, sometimes before that; it is then resumed with the same command, and at last it
goes on to its end. Every group must have been trained on exactly once, or else have been left out by the filter; every
step must have as many groups as a step has, and none of them may be too old; and what was written of a response when a
checkpoint was saved must be in the response that is trained on.
"""

import argparse
import csv
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: a forked process has none of the threads of OpenMP

import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))  # whose runs are forked off a process that is warm

from support.process import Forked
from support.runs import Commands

from trinity_lightning.buffer.step_files import FOLDER, read_experiences, step_files
from trinity_lightning.common.experience import Experience

SIZE, ROLLOUTS, STALENESS = 4, 4, 2
RUN = ("model=tiny", "model.dtype=fp32", "logger=csv", "buffer.keep=true", "optimizer.lr=1e-3", "ckpt_path=auto")
RUN += (f"explorer.batch_size={SIZE}", f"explorer.repeat_times={ROLLOUTS}", f"explorer.max_staleness={STALENESS}")
RUN += ("explorer.eval_on_startup=false", "explorer.eval_interval=3", "callbacks.checkpoint.every_n_epochs=1")
RUN += ("engine.max_model_len=512", "eval_sampling.max_tokens=8")
RUN += ("sampling.max_tokens=400",)  # few responses have as many: so some are under way while a step is trained
RUNS = {
    "single": ("+recipe=grpo", "reward=contains_digits"),
    "turns": ("+recipe=multi_turn", "sampling.max_tokens=60"),
    "dapo": ("+recipe=grpo", "reward=contains_digits", "add_strategy=[dapo,grpo]"),
}
EARLY = 0.2  # share of the kills that do not wait for a checkpoint, but come while a run begins or resumes
LIFE_SECONDS = 300.0  # within which a run has to write its next checkpoint

Group = tuple[str, str]  # batch, task


@dataclass
class Killed:
    """A run that is killed and resumed.

    Attributes:
        kept: tokens of responses that checkpoints held when the run was killed: by batch, task, run, and call.
        under_way: number of rollouts under way in the checkpoint that each kill left.
    """

    commands: Commands
    folder: Path
    arguments: Sequence[str]
    kept: dict[tuple[str, str, int, int], list[int]] = field(default_factory=dict)
    under_way: list[int] = field(default_factory=list)
    step_seconds: float = 2.0

    @property
    def run(self) -> Path:
        return self.folder / "run"

    def checkpoints(self) -> set[str]:
        return {path.name for path in self.run.glob("checkpoints/*.ckpt")}

    def live(self, random_: random.Random) -> bool:
        """Begin or resume the run, and kill it; False if it ended before."""
        before, life = self.checkpoints(), self.begin()
        try:
            if random_.random() < EARLY:
                time.sleep(random_.uniform(0, 3 * self.step_seconds))
            else:
                start = time.monotonic()
                while not self.checkpoints() - before and life.poll() is None:
                    require(time.monotonic() - start < LIFE_SECONDS, "no checkpoint in time", self.printed())
                    time.sleep(0.01)
                time.sleep(random_.uniform(0, 2 * self.step_seconds))
            ended = life.poll()
        finally:
            life.kill()
        require(ended in (None, 0), "an error", self.printed())
        if ended is None:
            self.remember()
        return ended is None

    def begin(self) -> Forked:
        return self.commands.start(self.folder, *self.arguments, f"output_dir={self.run}")

    def printed(self) -> str:
        return (self.folder / "stdout").read_text()

    def remember(self) -> None:
        """Keep what the newest checkpoint holds of responses under way."""
        files = sorted(self.run.glob("checkpoints/*.ckpt"), key=lambda path: path.stat().st_mtime)
        if not files:
            self.under_way.append(0)
            return
        states = torch.load(files[-1], weights_only=False)["callbacks"]
        groups = next(state for name, state in states.items() if name.startswith("ExplorerCallback"))["explorer"]
        calls, outstanding = groups["groups"]["calls"], groups["groups"]["controller"]["outstanding"]
        self.under_way.append(ROLLOUTS * sum(not group["complete"] for group in outstanding))
        tokens, lengths = calls["tokens"].tolist(), iter(sample[0] for sample in calls["samples"])
        for batch, task, run, number, _, count in calls["calls"]:
            for index in range(count):
                length = next(lengths)
                self.kept[batch, task, run + index, number], tokens = tokens[:length], tokens[length:]

    def finish(self) -> None:
        """Let the run go on to its end."""
        life = self.begin()
        require(life.wait(4 * LIFE_SECONDS) == 0, "an error", self.printed())

    # -- what it left --------------------------------------------------------------------------------------------------

    def check(self, steps: int, filtered: bool) -> dict[str, Any]:
        """Counts of what was trained on; a RuntimeError if anything is lost, or there twice."""
        by_step = {step: read_experiences(file) for step, file in sorted(step_files(self.run / FOLDER).items())}
        require(list(by_step) == list(range(1, steps + 1)), "steps are missing", str(list(by_step)))
        trained: Counter[Group] = Counter()
        responses: dict[tuple[str, str, int], list[int]] = {}
        for step, experiences in by_step.items():
            groups: dict[Group, list[Experience]] = defaultdict(list)
            for experience in experiences:
                eid = experience.eid
                groups[str(eid.batch), str(eid.task)].append(experience)
                responses[str(eid.batch), str(eid.task), eid.run] = experience.tokens[
                    experience.prompt_length :
                ].tolist()
                check_experience(experience, step)
            require(len(groups) == SIZE, f"step {step} has not {SIZE} groups", str(list(groups)))
            for group, members in groups.items():
                runs = sorted(member.eid.run for member in members)
                require(runs == list(range(ROLLOUTS)), f"group {group} has not all runs", str(runs))
            trained.update(groups.keys())
        require(max(trained.values()) == 1, "a group was trained on twice", str(trained))
        numbers = sorted((int(batch) - 1) * SIZE + int(task) for batch, task in trained)
        gaps = sorted(set(range(numbers[-1] + 1)) - set(numbers))
        require(filtered or not gaps, "groups were lost", str(gaps))
        self._check_rows(steps)
        return {"groups": len(numbers), "left_out": len(gaps), "kept_responses": self._check_kept(responses)}

    def _check_rows(self, steps: int) -> None:
        with (self.run / "metrics.csv").open() as file:
            rows = [row for row in csv.DictReader(file) if row.get("sample/staleness/max")]
        require([int(row["explore_step"]) for row in rows] == list(range(1, steps + 1)), "rows are missing", str(rows))
        oldest = max(float(row["sample/staleness/max"]) for row in rows)
        require(oldest <= STALENESS, "a group was too old", str(oldest))
        diverged = sum(float(row["rollout/replay_diverged"]) for row in rows)
        require(diverged == 0, "calls were not repeated", str(diverged))

    def _check_kept(self, responses: dict[tuple[str, str, int], list[int]]) -> int:
        """Number of responses that were under way in a checkpoint; each must have been gone on with."""
        checked = 0
        for (batch, task, run, call), tokens in self.kept.items():
            response = responses.get((batch, task, run))
            if response is None or not tokens:  # left out, or not begun
                continue
            places = [0] if call == 0 else range(len(response))
            found = any(response[place : place + len(tokens)] == tokens for place in places)
            require(found, f"{batch}/{task}/{run}, call {call} was begun anew", f"{tokens} {response}")
            checked += 1
        return checked


def check_experience(experience: Experience, step: int) -> None:
    """Refuse an experience that names another step than its file, or spans that are none."""
    require(experience.info["trained_step"] == step, "another step", f"{step} {experience.info}")
    spans, length = experience.info["versions"], len(experience.tokens) - experience.prompt_length
    holds = spans[0][0] == 0 and spans[-1][0] < length
    holds &= all(one[0] < other[0] and one[1] != other[1] for one, other in pairwise(spans))
    holds &= experience.info["model_version"] == min(version for _, version in spans)
    require(holds and max(version for _, version in spans) < step, "no spans", f"{spans} {length} {step}")


def require(holds: bool, what: str, printed: str) -> None:
    """A RuntimeError with the end of what was printed, unless this holds."""
    if not holds:
        raise RuntimeError(f"{what}: {printed[-4000:]}")


def shares(kills: int, names: Sequence[str]) -> Iterator[tuple[str, int]]:
    """The kills of each run."""
    for index, name in enumerate(names):
        yield name, kills // len(names) + (index < kills % len(names))


def main(kills: int, steps: int, seed: int, names: Sequence[str]) -> None:
    """Print the line."""
    random_, results, suspended = random.Random(seed), {}, 0
    with tempfile.TemporaryDirectory() as folder, closing(Commands()) as commands:
        for name, of_run in shares(kills, names):
            (own := Path(folder) / name).mkdir()
            run = Killed(commands, own, (*RUNS[name], *RUN, f"steps={steps}"))
            while len(run.under_way) < of_run and run.live(random_):
                print(f"{name}: kill {len(run.under_way)}, {run.under_way[-1]} under way", file=sys.stderr, flush=True)
            run.finish()
            results[name] = {"kills": len(run.under_way), **run.check(steps, filtered="dapo" in name)}
            suspended += sum(map(bool, run.under_way))
    total = sum(result["kills"] for result in results.values())
    print(json.dumps({"benchmark": "group_faults", "kills": total, "with_rollouts_under_way": suspended} | results))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", default=",".join(RUNS))
    args = parser.parse_args()
    main(args.kills, args.steps, args.seed, args.runs.split(","))
