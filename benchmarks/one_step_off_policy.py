"""Rollouts by a server while the trainer trains, beside rollouts and training in turns in one process: one JSON line.

    python benchmarks/one_step_off_policy.py [--steps 8] [--model smollm2] [--rounds 1]

The recipes grpo and one_step_off_policy train in turns, each in a process of its own; steps before the third are left
out (start-up, and the first step ahead has nothing to overlap with). Seconds a step are wall time, the median over the
steps of all rounds. The overlap is the time that rollouts and training went on at once, as a share of the shorter of
the two, from their timestamps: the smallest of any step, and the median. Both sides have all cores of the machine: in
turns, or half and half.
"""

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

SKIPPED = 2
COMMON = ("explorer.eval_on_startup=false", "explorer.eval_interval=0", "logger=csv", "save_model=false")


def trained(recipe: str, arguments: tuple[str, ...], folder: Path) -> list[dict[str, str]]:
    """The rows of metrics.csv of a run's steps."""
    command = [sys.executable, "-m", "trinity_lightning.train", f"+recipe={recipe}", *COMMON, *arguments]
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    [run] = folder.glob(f"outputs/{recipe}/*")
    with (run / "metrics.csv").open() as file:
        return [row for row in csv.DictReader(file) if row.get("time/step")][SKIPPED:]


def column(rows: list[dict[str, str]], name: str) -> list[float]:
    return [float(row[name]) for row in rows if row.get(name)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=1)
    args = parser.parse_args()
    rows: dict[str, list[dict[str, str]]] = {"grpo": [], "one_step_off_policy": []}
    for _ in range(args.rounds):
        for recipe, seen in rows.items():
            with tempfile.TemporaryDirectory() as folder:
                seen += trained(recipe, (f"model={args.model}", f"steps={args.steps}"), Path(folder))
    seconds = {recipe: statistics.median(column(seen, "time/step")) for recipe, seen in rows.items()}
    overlaps = column(rows["one_step_off_policy"], "rollout/overlap")
    result = {
        "benchmark": "one_step_off_policy",
        **vars(args),
        "cores": len(os.sched_getaffinity(0)),
        "seconds_a_step": {recipe: round(value, 2) for recipe, value in seconds.items()},
        "ratio": round(seconds["grpo"] / seconds["one_step_off_policy"], 2),
        "overlap_min": round(min(overlaps), 3),
        "overlap_median": round(statistics.median(overlaps), 3),
        "lag": statistics.fmean(column(rows["one_step_off_policy"], "sample/lag/mean")),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
