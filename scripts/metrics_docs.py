"""Write `docs/metrics.md`: the table of metrics, and why a step trains nothing; and the charts of `docs/wandb.md`.

python scripts/metrics_docs.py
"""

from pathlib import Path

from trinity_lightning.common.runs import REASONS
from trinity_lightning.monitor.dashboard import SECTIONS, Panel
from trinity_lightning.monitor.presentation import METRICS

PAGE = Path(__file__).resolve().parents[1] / "docs" / "metrics.md"
WANDB_PAGE = PAGE.with_name("wandb.md")
BEGIN, END = "<!-- sections: begin -->\n", "<!-- sections: end -->\n"

WHY_UNTRAINED = """\
## Why a step trains nothing

1. The run reports it. If a step trains on no response, its log line says `no rollout trained`. A warning above the
   line, also in `train.log`, counts the responses for each reason, and another one says what helps. `report.html` lists
   such steps.
2. The table below explains each reason.

In `metrics.csv` and W&B, such a step has `experience_pipeline/trained` at 0, the reasons counted in
`experience_pipeline/untrained/<reason>` (a reason is logged from the first step on that has it, then also as 0),
`actor/trained_rows` at 0, and a larger `actor/skipped_items` than the step before. If `actor/bad_steps` is what has
grown, there was something to train on, but the gradient was not finite. A warning then names the experiences. If
`actor/skipped_steps` has grown, the gradient overflowed float16 (`model.dtype=fp16`), and the loss scale was halved.

Every completion says whether it is `trained` and, if not, the `reason`. You find this in `completions/step_<n>.jsonl`,
in the W&B table and in `report.html`. If the loss needs no advantage (`policy_loss=sft`, `kl.coef` or `entropy_coef`
not 0), responses without an advantage are trained on, and the first two reasons in the table do not occur.

| reason | meaning | what helps |
|---|---|---|
"""


def metrics_page() -> str:
    """The text of the page."""
    reasons = [f"| `{reason}` | {meaning} | {helps} |\n" for reason, (meaning, helps) in REASONS.items()]
    rows = [f"| `{metric.pattern}` | {metric.unit} | {metric.meaning} |" for metric in METRICS]
    return "\n".join(
        [
            "# Metrics",
            "",
            "`metrics.csv` and W&B use the same names. In W&B the x-axis is `explore_step`. `metrics.csv` has one row",
            "per optimizer step, and one row for an evaluation before the first step. Its column `step` counts from 0,",
            "as in Lightning. In the names below, `{a,b}` stands for each of the alternatives, and `<x>` for a name",
            "that the configuration or a workflow gives.",
            "",
            "| name | unit | meaning |",
            "|---|---|---|",
            *rows,
            "",
            WHY_UNTRAINED + "".join(reasons),
        ]
    )


def wandb_page() -> str:
    """The text of docs/wandb.md with the dashboard's sections as they are now."""
    before, _, rest = WANDB_PAGE.read_text().partition(BEGIN)
    sections = (f"### {section.name}\n\n{''.join(map(_line, section.panels))}\n" for section in SECTIONS)
    return before + BEGIN + "\n" + "".join(sections) + END + rest.partition(END)[2]


def _line(panel: Panel) -> str:
    """A chart as an item of a list."""
    names = ", ".join(f"`{name}`" for name in panel.metrics) or f"all of `{panel.regex}`"
    only = f" Only {panel.only}." if panel.only else ""
    return f"- **{panel.title}.** {panel.why} ({names}){only}\n"


if __name__ == "__main__":
    PAGE.write_text(metrics_page())
    WANDB_PAGE.write_text(wandb_page())
