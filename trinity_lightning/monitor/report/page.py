"""The page of a run: plain HTML with inline style and pictures, no script and no network.

Completions, prompts and configuration are other people's text: all of it is escaped, and the page's own policy forbids
scripts and requests besides.
"""

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path

from trinity_lightning.monitor.metric_names import UNTRAINED_PREFIX, headline_metrics
from trinity_lightning.monitor.report.completions import completions_section
from trinity_lightning.monitor.report.curves import curves_section, step_times, time_section
from trinity_lightning.monitor.report.record import RunRecord
from trinity_lightning.monitor.report.redaction import without_secrets
from trinity_lightning.monitor.report.svg import short
from trinity_lightning.monitor.step_line import format_seconds

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def report_page(run: RunRecord) -> str:
    """The whole page, ASCII or not, to be written as UTF-8."""
    title = escape(f"{run.folder.parent.name} {run.folder.name}".strip())
    style = Path(__file__).with_name("style.css").read_text(encoding="utf-8")
    sections = [
        _facts(run),
        curves_section(run),
        time_section(run),
        _untrained_section(run),
        completions_section(run),
        _kept_section(run),
        _environment_section(run),
        _config_section(run),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>\n{style}</style>\n</head>\n<body>\n<h1>{title}</h1>\n"
        + "\n".join(section for section in sections if section)
        + "\n</body>\n</html>\n"
    )


def _facts(run: RunRecord) -> str:
    """First and last value of what matters most, and what it took."""
    facts = [
        (name, f"{short(points[0][1])} → {short(points[-1][1])}" if len(points) > 1 else short(points[0][1]))
        for name, points in ((name, _finite(run.series(name))) for name in _headline(run))
        if points
    ]
    if steps := run.steps():
        facts.insert(0, ("explore steps", short(max(steps))))
    if (seconds := sum(sum(by_step.values()) for by_step in step_times(run).values())) > 0:
        facts.append(("rollouts and training", format_seconds(seconds)))
    memory = _finite(run.series("perf/peak_memory_gb"))
    if memory:
        facts.append(("peak memory", f"{memory[-1][1]:.1f} GB"))
    if not facts:
        return '<p class="quiet">No metrics: this run logged none, or none yet.</p>'
    cells = (
        f'<div class="fact"><span class="quiet">{escape(name)}</span><b>{escape(v)}</b></div>' for name, v in facts
    )
    return f'<div class="facts">{"".join(cells)}</div>'


def _headline(run: RunRecord) -> list[str]:
    evaluated = [name for name in headline_metrics(run.names()) if name.startswith("eval/") and "/mean@" in name]
    return ["reward/mean", *evaluated, "response_length/mean"]


def _finite(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    return [point for point in points if math.isfinite(point[1])]


def _untrained_section(run: RunRecord) -> str:
    """The steps of which no response was trained on, with their number for each reason; nothing without any."""
    idle = [step for step, trained in _finite(run.series("experience_pipeline/trained")) if trained == 0]
    if not idle:
        return ""
    counts = {
        name.removeprefix(UNTRAINED_PREFIX).replace("_", " "): dict(_finite(run.series(name)))
        for name in run.names()
        if name.startswith(UNTRAINED_PREFIX)
    }
    rows = ""
    for step in idle:
        reasons = ", ".join(f"{reason} ({short(steps[step])})" for reason, steps in counts.items() if step in steps)
        rows += f'<tr><td class="n">{short(step)}</td><td>{escape(reasons)}</td></tr>'
    return (
        "<h2>Steps that trained on no rollout</h2>\n"
        f'<p class="quiet">{len(idle)} of {len(run.steps())} steps, with the responses for each reason.</p>\n'
        '<div class="wide"><table><thead><tr><th class="n">step</th><th>reasons</th>'
        f"</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _kept_section(run: RunRecord) -> str:
    if not run.kept:
        return ""
    head = "".join(
        f'<th class="n">{name}</th>'
        for name in ("step", "experiences", "of an expert", "trained tokens", "mean reward", "MB")
    )
    rows = "".join(
        "<tr>"
        + "".join(
            f'<td class="n">{value}</td>'
            for value in (
                kept.step,
                kept.experiences,
                kept.experts,
                kept.trained_tokens,
                "" if kept.reward is None else short(kept.reward),
                f"{kept.megabytes:.2f}",
            )
        )
        + "</tr>"
        for kept in run.kept
    )
    some = f"{len(run.kept)} of {run.kept_steps} steps. " if len(run.kept) < run.kept_steps else ""
    how = "Train on them again: <code>+recipe=offline buffer.path=.../experiences</code>"
    return (
        f'<h2>Experiences kept</h2>\n<p class="quiet">{some}{how}</p>\n'
        f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
    )


def _environment_section(run: RunRecord) -> str:
    if not run.environment:
        return ""
    rows = "".join(f"<tr><th>{escape(n)}</th><td>{escape(v)}</td></tr>" for n, v in run.environment.items())
    return f'<h2>Environment</h2>\n<div class="wide"><table><tbody>{rows}</tbody></table></div>'


def _config_section(run: RunRecord) -> str:
    if not run.config:
        return ""
    text = escape(without_secrets(run.config))
    return f"<h2>Configuration</h2>\n<details><summary>config.yaml</summary><pre>{text}</pre></details>"
