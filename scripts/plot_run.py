"""Draw the README's picture of a run: reward, response length, log-probability difference, time split.

python scripts/plot_run.py outputs/grpo/<time> docs/grpo_smollm2.png
"""

import csv
import sys
from pathlib import Path

import matplotlib.pyplot as plt

PANELS = {
    "mean reward": ["reward/mean"],
    "response length (tokens)": ["response_length/mean"],
    "engine - trainer |log-probability|": ["actor/logprob_diff/mean"],
    "seconds a step": ["time/rollout", "time/train", "time/sync_weight"],
}


def column(rows: list[dict[str, str]], name: str) -> tuple[list[int], list[float]]:
    """Explore steps and values of the rows that have the metric."""
    drawn = [row for row in rows if row.get(name) and int(row["explore_step"]) > 0]
    return [int(row["explore_step"]) for row in drawn], [float(row[name]) for row in drawn]


def main(run: Path, picture: Path) -> None:
    with (run / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    figure, axes = plt.subplots(1, len(PANELS), figsize=(13, 2.8), layout="constrained")
    for axis, (title, names) in zip(axes, PANELS.items(), strict=True):
        for name in names:
            axis.plot(*column(rows, name), label=name.partition("/")[2], linewidth=1.8)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("explore step", fontsize=9)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
        if len(names) > 1:
            axis.legend(fontsize=8, frameon=False)
    figure.savefig(picture, dpi=110)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
