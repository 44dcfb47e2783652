"""The curves of a report, in the order in which people look, and where the time went."""

import math
from collections.abc import Sequence
from fnmatch import fnmatchcase
from html import escape

from trinity_lightning.monitor.metric_names import find_metric, headline_metrics
from trinity_lightning.monitor.report.record import RunRecord
from trinity_lightning.monitor.report.svg import legend, line_chart, stacked_bars
from trinity_lightning.monitor.step_line import STEP_TIMES, WAIT, format_seconds, times_in_turn

# Title, and the metrics in one picture; `*` stands for the rest of a name.
_PANELS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Reward", ("reward/mean", "reward/std")),
    ("Held-out", ("eval/*/mean@*",)),
    ("Held-out, solved", ("eval/*/pass@*",)),
    ("Reward functions", ("reward/*/mean",)),
    ("Groups with equal rewards", ("frac_reward_zero_std",)),
    ("Not trained on", ("experience_pipeline/untrained/*",)),
    ("Response length", ("response_length/mean", "response_length/max")),
    ("Responses cut off", ("response_length/clip_ratio",)),
    ("Entropy", ("actor/entropy",)),
    ("Clipped tokens", ("actor/pg_clipfrac",)),
    ("KL", ("actor/kl_loss", "actor/ppo_kl")),
    ("Expert data", ("actor/sft_loss",)),
    ("Gradient norm", ("actor/grad_norm",)),
    ("Engine against trainer", ("actor/logprob_diff/mean", "actor/logprob_diff/max")),
    ("Learning rate", ("actor/lr",)),
    ("Tokens a second", ("rollout/tokens_per_second", "perf/trained_tokens_per_second")),
    ("Failed tasks", ("rollout/failed_tasks",)),
    ("Memory", ("perf/peak_memory_gb",)),
)


def curves_section(run: RunRecord) -> str:
    """Every panel with something to see: what never changes (no failed task, a constant rate) is left out."""
    figures = [figure for title, names in _PANELS if (figure := _figure(run, title, names))]
    return f'<h2>Curves</h2>\n<div class="grid-of">{"".join(figures)}</div>' if figures else ""


def _figure(run: RunRecord, title: str, patterns: Sequence[str]) -> str:
    headlines = headline_metrics(run.names())
    names = [name for pattern in patterns for name in headlines if fnmatchcase(name, pattern)]
    series = {name: run.series(name) for name in dict.fromkeys(names)}
    series = {name: points for name, points in series.items() if any(math.isfinite(y) for _, y in points)}
    values = [y for points in series.values() for _, y in points if math.isfinite(y)]
    if not values or (len(values) > 1 and len(set(values)) == 1):
        return ""
    metric = find_metric(next(iter(series)))
    unit = f' <span class="unit">{escape(metric.unit)}</span>' if metric and metric.unit else ""
    label = f"{title} over explore steps: {', '.join(series)}"
    return f"<figure><h3>{escape(title)}{unit}</h3>{line_chart(series, label)}{legend(list(series))}</figure>"


def step_times(run: RunRecord) -> dict[str, dict[float, float]]:
    """Seconds by part and explore step, of the parts that follow one another and so add up."""
    ahead = run.totals([WAIT]).keys()  # rolled out while the step before was trained on
    return {
        name: {step: seconds for step, seconds in run.totals([name]).items() if name in times_in_turn(step in ahead)}
        for name in STEP_TIMES
    }


def time_section(run: RunRecord) -> str:
    """The parts of an explore step that follow one another, and its evaluation: in all, and step by step."""
    seconds = {name.removeprefix("time/"): by_step for name, by_step in step_times(run).items()}
    seconds["prepare"] = run.totals(["time/prepare"])
    seconds["evaluation"] = run.totals([name for name in run.names() if fnmatchcase(name, "eval/*/seconds")])
    seconds = {part: by_step for part, by_step in seconds.items() if any(by_step.values())}
    steps = sorted({step for by_step in seconds.values() for step in by_step})
    if not steps:
        return ""
    columns = {part: [by_step.get(step, 0.0) for step in steps] for part, by_step in seconds.items()}
    whole = sum(map(sum, columns.values()))
    rows = "".join(
        f'<tr><td>{escape(part)}</td><td class="n">{format_seconds(sum(values))}</td>'
        f'<td class="n">{sum(values) / whole:.0%}</td></tr>'
        for part, values in columns.items()
    )
    chart = stacked_bars(steps, columns, "Seconds of each explore step by part")
    return (
        '<h2>Where the time went</h2>\n<div class="grid-of">'
        f'<figure><h3>Explore steps <span class="unit">s</span></h3>{chart}{legend(list(columns))}</figure>'
        '<div class="wide"><table><thead><tr><th>part</th><th class="n">time</th><th class="n">share</th></tr></thead>'
        f"<tbody>{rows}</tbody></table></div></div>"
    )
