"""Metrics for people to read: the meaning of each name, one line for each step, and small tables."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from trinity_lightning.monitor.rows import STEP_METRIC

# -- names, units and meanings: scripts/metrics_docs.py writes docs/metrics.md from the same table ---------------------

TRAINED = "experience_pipeline/trained"  # number of experiences of a step that are trained on
# Prefix of the metrics that count experiences that are not trained on, before the reason. A step in which TRAINED is
# known and a reason is missing has 0 of them.
UNTRAINED_PREFIX = "experience_pipeline/untrained/"


@dataclass(frozen=True, slots=True)
class Metric:
    """One line of the table of metrics.

    Attributes:
        pattern: the name; `{a,b}` stands for each of the alternatives, `<x>` for a name from the configuration.
        unit: "" for a ratio or a plain number.
        meaning: one sentence.
    """

    pattern: str
    unit: str
    meaning: str

    def matches(self, name: str) -> bool:
        """True if `name` is a metric of this line."""
        parts = re.split(r"(\{[^}]*\}|<[^>]*>)", self.pattern)
        return re.fullmatch("".join(map(_part_regex, parts)), name) is not None


def _part_regex(part: str) -> str:
    if part.startswith("{"):
        return "(?:" + "|".join(map(re.escape, part[1:-1].split(","))) + ")"
    return r".+" if part.startswith("<") else re.escape(part)


_LINES = Path(__file__).with_name("metric_names.txt").read_text(encoding="utf-8").splitlines()
METRICS = tuple(Metric(*line.split(" | ")) for line in _LINES if not line.startswith("#"))


def find_metric(name: str) -> Metric | None:
    """The first line of the table that fits a metric's name; None if the metric is not documented."""
    return next((metric for metric in METRICS if metric.matches(name)), None)


def headline_metrics(names: Sequence[str]) -> list[str]:
    """The names without statistics of an evaluation's metrics other than the reward."""
    # failed_tasks and pass@k are counted beside the reward's statistics alone.
    rewards = {name.rpartition("/")[0] for name in names if name.endswith("/failed_tasks") or "/pass@" in name}
    return [name for name in names if "@" not in name or name.rpartition("/")[0] in rewards]


def metric_globs() -> list[str]:
    """Patterns for all documented names, one for each group: `rollout/*`, `frac_reward_zero_std`, ..."""
    globs = (re.sub("/.*", "/*", metric.pattern) for metric in METRICS if metric.pattern != STEP_METRIC)
    return list(dict.fromkeys(globs))


# -- lines and tables in the terminal ----------------------------------------------------------------------------------

# Times of the parts of a step that follow one another, without those that are measured within a part (collate).
WAIT = "time/wait_for_rollout"
ROLLOUT_TIMES = ("time/rollout", "time/operators", "time/add_strategy")
STEP_TIMES = (*ROLLOUT_TIMES, WAIT, "time/train", "time/sync_weight")
# Width of tables outside a terminal (files, pipes): rich would assume 80 and break long paths.
PLAIN_WIDTH = 160
# Metrics in the line of a step if the run has no rollouts.
LOSSES = (
    ("actor/pg_loss", "loss {:.4g}"),
    ("actor/rewards/accuracies", "accuracy {:.0%}"),
    ("eval/loss", "held-out loss {:.4g}"),
    ("eval/accuracy", "accuracy {:.0%}"),
)


def step_seconds(metrics: Mapping[str, float]) -> float:
    """Seconds of an explore step by its metrics: `time/step`, or else the sum of its parts."""
    return metrics.get("time/step", sum(metrics.get(name, 0.0) for name in times_in_turn(WAIT in metrics)))


def format_step_line(metrics: Mapping[str, float], step: int, total_steps: int, pace: float) -> str:
    """One line about an explore step, without the parts whose metrics are missing.

    The time left assumes that every further step takes `pace` seconds; with 0 it is left out.

    Example:
        step 3/30  reward 0.42 ± 0.49  equal rewards 25%  length 11.4  logprob diff 0.021  grad norm 1.30
        rollout 2.8s  train 8.0s  sync 0.3s  left 5m 0s     (on the same line)
    """
    parts = [f"step {step}/{total_steps}"]
    if "reward/mean" in metrics:
        spread = f" ± {metrics['reward/std']:.2f}" if "reward/std" in metrics else ""
        parts.append(f"reward {metrics['reward/mean']:.2f}{spread}")
    for name, template in (
        ("frac_reward_zero_std", "equal rewards {:.0%}"),
        *(() if "reward/mean" in metrics else LOSSES),
        ("response_length/mean", "length {:.1f}"),
        ("actor/logprob_diff/mean", "logprob diff {:.3f}"),
        ("actor/grad_norm", "grad norm {:.2f}"),
        ("time/rollout", "rollout {:.1f}s"),
        (WAIT, "waited {:.1f}s"),
        ("time/train", "train {:.1f}s"),
        ("time/sync_weight", "sync {:.1f}s"),
    ):
        if name in metrics:
            parts.append(template.format(metrics[name]))
    trained, received = (metrics.get(name, math.nan) for name in (TRAINED, "rollout/experiences"))
    if trained == 0:
        parts.append("no rollout trained")
    elif trained < received / 4:
        parts.append(f"trained {trained:.0f} of {received:.0f}")
    if pace > 0:
        parts.append(f"left {format_seconds((total_steps - step) * pace)}")
    return "  ".join(parts)


def format_evaluation(
    metrics: Mapping[str, float], step: int, total_steps: int, solved: Mapping[str, str]
) -> list[str]:
    """One line about each taskset of an evaluation.

    Args:
        metrics: the evaluation's metrics.
        step: the explore step.
        total_steps: explore steps of the run.
        solved: the criterion of pass@k, in words, by taskset.

    Example:
        evaluated at step 12/24  sums mean@4 0.45  pass@4 0.80 (math at 1)  2 tasks failed  5s
    """
    lines = []
    for name in metrics:
        if not name.startswith("eval/") or not name.endswith("/seconds"):
            continue
        prefix = name.removesuffix("seconds")
        taskset = prefix.removeprefix("eval/").removesuffix("/")
        values = {key.removeprefix(prefix): value for key, value in metrics.items() if key.startswith(prefix)}
        parts = [f"evaluated at step {step}/{total_steps}  {taskset}"]
        parts[0] += "".join(f" {key} {value:.3g}" for key, value in values.items() if re.fullmatch(r"mean@\d+", key))
        if passes := [key for key in values if re.fullmatch(r"pass@\d+", key)]:
            parts.append(f"{passes[-1]} {values[passes[-1]]:.3g} ({solved.get(taskset, 'solved')})")
        if values.get("failed_tasks"):
            parts.append(f"{values['failed_tasks']:.0f} tasks failed")
        lines.append("  ".join([*parts, format_seconds(values["seconds"])]))
    return lines


def times_in_turn(ahead: bool) -> tuple[str, ...]:
    """The parts of a step whose times add up; if it was rolled out `ahead`, rollouts count by the wait alone."""
    return tuple(name for name in STEP_TIMES if not (ahead and name in ROLLOUT_TIMES))


def format_seconds(seconds: float) -> str:
    """A duration in the two units that matter: `42s`, `5m 0s`, `3h 20m`, `2d 4h`."""
    whole = round(seconds)
    for size, unit, below, small in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if whole >= size:
            return f"{whole // size}{unit} {whole % size // below}{small}"
    return f"{whole}s"


def summary_table(rows: Sequence[tuple[str, str]]) -> str:
    """Names and values in two columns, with colour on a terminal, as plain text elsewhere."""
    console = Console(width=None if Console().is_terminal else PLAIN_WIDTH)
    table = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(Text(name), Text(value))  # Text: brackets in a path are no markup
    with console.capture() as capture:
        console.print(table)
    return "\n".join(line.rstrip() for line in capture.get().splitlines() if line.strip())
