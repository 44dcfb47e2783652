"""What recipes learn, seed by seed: mean reward of a run's first and last steps, and its minutes.

    python benchmarks/learning.py [--recipes grpo gspo ...] [--model tiny] [--seeds 1 2 3] [--steps 24]

The tiny model starts from random weights and a reward that it varies in (the share of digits in a response); smollm2
learns the sums of the recipe. `before` and `after` are means over the first and the last fifth of the steps. A run a
recipe and seed, one after the other, each in a process of its own. Prints one JSON line when all have ended, and on
stderr a line a run.
"""

import argparse
import csv
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RECIPES = (
    *("grpo", "ppo", "opmd", "dapo", "dr_grpo", "gspo", "cispo", "sapo", "dppo", "rloo", "reinforce_plus_plus"),
    "rewards_mixed",
)
COMMON = ("explorer.eval_on_startup=false", "explorer.eval_interval=0", "logger=csv", "save_model=false")
TINY = ("model=tiny", "optimizer.lr=5e-3")


def learned(recipe: str, arguments: tuple[str, ...]) -> dict[str, float]:
    """The rewards and minutes of one run."""
    command = [sys.executable, "-m", "trinity_lightning.train", f"+recipe={recipe}", *COMMON, *arguments]
    with tempfile.TemporaryDirectory() as folder:
        begin = time.monotonic()
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        minutes = (time.monotonic() - begin) / 60
        [metrics] = Path(folder).glob("outputs/*/*/metrics.csv")
        with metrics.open() as file:
            rewards = [float(row["reward/mean"]) for row in csv.DictReader(file) if row.get("reward/mean")]
    share = max(len(rewards) // 5, 1)
    before, after = statistics.fmean(rewards[:share]), statistics.fmean(rewards[-share:])
    return {"before": round(before, 3), "after": round(after, 3), "minutes": round(minutes, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES))
    parser.add_argument("--model", choices=("tiny", "smollm2"), default="tiny")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=24)
    args = parser.parse_args()
    runs: dict[str, dict[str, dict[str, float]]] = {}
    for recipe in args.recipes:
        model = (f"model={args.model}",)
        if args.model == "tiny":  # a mixture of rewards has it as one more
            model = (*TINY, "+reward.contains_digits=1" if recipe == "rewards_mixed" else "reward=contains_digits")
        for seed in args.seeds:
            result = learned(recipe, (*model, f"seed={seed}", f"steps={args.steps}"))
            runs.setdefault(recipe, {})[str(seed)] = result
            print(recipe, f"seed={seed}", *(f"{name} {value}" for name, value in result.items()), file=sys.stderr)
    print(json.dumps({"benchmark": "learning", "model": args.model, "steps": args.steps, "runs": runs}))


if __name__ == "__main__":
    main()
