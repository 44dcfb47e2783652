"""Reward curves of runs with rollouts of older weights (`asynchrony.py --learning`)."""

import csv
import hashlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# The settings that are compared. With run_ahead=2 nearly every group waits for two steps, the worst that k = 2 allows.
SETTINGS: dict[str, tuple[str, ...]] = {
    "k=0": ("explorer.max_staleness=0",),
    "k=1": ("explorer.max_staleness=1",),
    "k=2": ("explorer.max_staleness=2",),
    "k=2, d=2": ("explorer.max_staleness=2", "explorer.run_ahead=2"),
}
WITHOUT_THE_KEY: tuple[str, ...] = ()  # has to give the weights of k=0, to the bit
COMMON = ("+recipe=grpo", "logger=csv", "steps=24", "explorer.eval_on_startup=false", "explorer.eval_interval=0")
# The tiny model learns to write digits; SmolLM2 learns the sums of the recipe.
MODELS: dict[str, tuple[str, ...]] = {
    "tiny": ("model=tiny", "optimizer.lr=5e-3", "reward=contains_digits"),
    "smollm2": ("model=smollm2",),
}
LAST = 5  # steps whose mean says what a run has learned
COLUMNS: tuple[str, ...] = ("model", "setting", "seed", "step", "reward", "staleness")


def trained(model: str, arguments: Sequence[str], seed: int) -> tuple[list[dict[str, Any]], str]:
    """Train a model; returns the reward and the staleness of each step, and a hash of the weights."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-m", "trinity_lightning.train", *COMMON, *MODELS[model], *arguments]
        done = subprocess.run(
            [*command, f"seed={seed}", f"hydra.run.dir={run}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if done.returncode:
            sys.exit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout[-4000:]}")
        with (run / "metrics.csv").open() as file:
            rows = [row for row in csv.DictReader(file) if row.get("reward/mean")]
        weights = hashlib.sha256((run / "model" / "model.safetensors").read_bytes()).hexdigest()
    points = [
        {
            "step": int(float(row["explore_step"])),
            "reward": round(float(row["reward/mean"]), 4),
            "staleness": round(float(row.get("sample/staleness/mean") or 0), 2),
        }
        for row in rows
    ]
    return points, weights


def record(model: str, seeds: Sequence[int], settings: Sequence[str], path: Path) -> dict[str, Any]:
    """Train every setting with every seed, and add their curves to a CSV file as each run ends.

    Returns the mean reward of the last steps by setting and seed; and, of the first seed, True if k=0 has the bits of a
    run without the key.
    """
    weights: dict[str, str] = {}
    last: dict[str, dict[str, float]] = {setting: {} for setting in settings}
    for seed in seeds:
        for setting in settings:
            points, weights[f"{setting} {seed}"] = trained(model, SETTINGS[setting], seed)
            append(path, [{"model": model, "setting": setting, "seed": seed, **point} for point in points])
            last[setting][str(seed)] = round(statistics.fmean(point["reward"] for point in points[-LAST:]), 3)
            print(model, setting, f"seed={seed}", last[setting][str(seed)], file=sys.stderr, flush=True)
    results: dict[str, Any] = {"reward_of_last_steps": last}
    if model == "tiny" and "k=0" in settings:
        _, hash_without = trained(model, WITHOUT_THE_KEY, seeds[0])
        results["same_bits_without_the_key"] = hash_without == weights[f"k=0 {seeds[0]}"]
    return results


def append(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Add rows to the file; earlier ones of the same model, setting and seed are replaced."""

    def run_of(row: Mapping[str, Any]) -> tuple[str, str, str]:
        return str(row["model"]), str(row["setting"]), str(row["seed"])

    replaced = {run_of(row) for row in rows}
    others = [row for row in read(path) if run_of(row) not in replaced]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows([*others, *rows])


def read(path: Path) -> list[dict[str, str]]:
    """Rows of a file of curves; none if there is no file yet."""
    if not path.exists():
        return []
    with path.open() as file:
        return list(csv.DictReader(file))


def plot(rows: Sequence[Mapping[str, str]], path: Path) -> None:
    """Draw a panel a model: the mean reward by step, a thick line for the mean of the seeds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    models = [model for model in MODELS if any(row["model"] == model for row in rows)]
    figure, panels = plt.subplots(1, len(models), figsize=(5 * len(models), 3.4), squeeze=False)
    for panel, model in zip(panels[0], models, strict=True):
        for number, setting in enumerate(SETTINGS):
            curves: dict[str, dict[int, float]] = {}
            for row in rows:
                if (row["model"], row["setting"]) == (model, setting):
                    curves.setdefault(row["seed"], {})[int(row["step"])] = float(row["reward"])
            if not curves:
                continue
            if len(curves) > 1:
                for curve in curves.values():
                    panel.plot(list(curve), list(curve.values()), color=f"C{number}", alpha=0.25, linewidth=0.8)
            steps = sorted(set.intersection(*(set(curve) for curve in curves.values())))
            means = [statistics.fmean(curve[step] for curve in curves.values()) for step in steps]
            panel.plot(steps, means, color=f"C{number}", linewidth=1.8, label=setting)
        panel.set(title=model, xlabel="explore step", ylim=(0, 1))
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("mean reward of the step's rollouts")
    panels[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
