"""Write `docs/metrics.md`: the table of metrics, and why a step trains nothing.

python scripts/metrics_docs.py
"""

from pathlib import Path

from trinity_lightning.common.untrained import REASONS
from trinity_lightning.monitor.presentation import METRICS

PAGE = Path(__file__).resolve().parents[1] / "docs" / "metrics.md"

WHY_UNTRAINED = """\
## Why a step trains nothing

1. The run says it. A step of which no response is trained on ends its line with `no rollout trained`; a warning above
   the line, in `train.log` too, counts the responses for each reason, and one says what helps. `report.html` lists such
   steps.
2. The table below says what each reason means.

In `metrics.csv` and W&B, `experience_pipeline/trained` is 0 in such a step, the reasons are counted in
`experience_pipeline/untrained/<reason>`, `actor/trained_rows` is 0, and `actor/skipped_items` has grown. If it is
`actor/bad_steps` that has grown, there was something to train on, and the gradient was not finite: a warning names the
experiences.

Every completion says whether it is `trained` and, if not, the `reason`: in `completions/step_<n>.jsonl`, in the W&B
table and in `report.html`. Where the loss needs no advantage (`policy_loss=sft`, `kl.coef` or `entropy_coef` not 0),
responses without one are trained on, and neither of the first two reasons is given.

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
            "The same names stand in `metrics.csv` and in W&B, where `explore_step` is the axis. `metrics.csv` has a",
            "row an optimizer step, and one for an evaluation before the first; its column `step` counts from 0, as",
            "Lightning does.",
            "`{a,b}` stands for each of the alternatives, `<x>` for a name that the configuration or a workflow gives.",
            "",
            "| name | unit | meaning |",
            "|---|---|---|",
            *rows,
            "",
            WHY_UNTRAINED + "".join(reasons),
        ]
    )


if __name__ == "__main__":
    PAGE.write_text(metrics_page())
