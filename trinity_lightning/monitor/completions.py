"""What the model wrote, as JSON lines beside the run and as rows for a table."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import wandb

from trinity_lightning.common.experience import Experience
from trinity_lightning.common.files import write_atomically
from trinity_lightning.common.runs import UNTRAINED
from trinity_lightning.monitor.csv_logger import STEP_METRIC

REWARD_PREFIX = "reward/"

# Columns of the table, between `step` and those that follow the rewards; `reward/<function>` comes after `reward`.
_BEFORE_REWARDS = ("step", "prompt", "completion", "reward")
_AFTER_REWARDS = ("advantage", "length", "truncated")
_OF_TRAINING = ("trained", "reason")  # of rollouts that are trained on, not of evaluations


class CompletionsWriter:
    """Writes every completion of a step to a file of its own, and picks the rows of a table.

    Args:
        dir: folder of the files, created with the first one.
        max_table_rows: rows that `write` returns at most: the step's first ones, so that groups stay together.
    """

    def __init__(self, dir: str | Path, max_table_rows: int = 64) -> None:
        self._dir = Path(dir)
        self._max_table_rows = max_table_rows

    def write(self, step: int, experiences: Sequence[Experience], kind: str = "train") -> list[dict[str, Any]]:
        """Write `step_<step>.jsonl`, or `eval_<taskset>_step_<step>.jsonl`, replacing one of the same name as a whole.

        One JSON object a completion: step, task, run, prompt, completion, reward, `reward/<function>` for each reward
        among the experience's metrics, advantage (of the first response token), length (response tokens), truncated;
        of training also trained, and the reason why not (null if it is). Numbers that are not finite, which JSON
        cannot hold, are null.

        Args:
            step: the explore step.
            experiences: its experiences; advantages are there once an add strategy has set them.
            kind: "train" or "eval/<taskset>".

        Returns:
            Rows with one set of columns: step, prompt, completion, reward, each `reward/<function>`, advantage, length,
            truncated; of training also trained and reason.

        Raises:
            ValueError: another kind.
        """
        trains = kind == "train"
        records = [_record(step, each) | (_trained(each) if trains else {}) for each in experiences]
        self._dir.mkdir(parents=True, exist_ok=True)
        path = self._dir / _file_name(step, kind)
        lines = (json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n" for record in records)
        write_atomically(path, "".join(lines).encode())

        shown = records[: self._max_table_rows]
        rewards = dict.fromkeys(name for record in shown for name in record if name.startswith(REWARD_PREFIX))
        columns = (*_BEFORE_REWARDS, *rewards, *_AFTER_REWARDS, *(_OF_TRAINING if trains else ()))
        return [{column: record.get(column) for column in columns} for record in shown]


def _file_name(step: int, kind: str) -> str:
    if kind == "train":
        return f"step_{step}.jsonl"
    group, _, taskset = kind.partition("/")
    if group != "eval" or not taskset:
        raise ValueError(f"kind of completions '{kind}': write 'train' or 'eval/<taskset>'.")
    return f"eval_{taskset.replace('/', '_')}_step_{step}.jsonl"


def _record(step: int, experience: Experience) -> dict[str, Any]:
    rewards = {name: _number(v) for name, v in (experience.metrics or {}).items() if name.startswith(REWARD_PREFIX)}
    advantages = experience.advantages
    return {
        "step": step,
        "task": experience.eid.task,
        "run": experience.eid.run,
        "prompt": experience.prompt_text,
        "completion": experience.response_text,
        "reward": _number(experience.reward),
        **rewards,
        "advantage": _number(advantages[0]) if advantages is not None and len(advantages) else None,
        "length": len(experience.tokens) - experience.prompt_length,
        "truncated": experience.truncate_status is not None,
    }


def _trained(experience: Experience) -> dict[str, Any]:
    return {"trained": UNTRAINED not in experience.info, "reason": experience.info.get(UNTRAINED)}


def _number(value: Any) -> float | None:
    return float(value) if value is not None and math.isfinite(value) else None


# -- what W&B is given beside metrics ---------------------------------------------------------------------------------


def define_metrics(run: wandb.Run) -> None:
    """Draw all metrics over `explore_step`, whatever the optimizer's step is.

    Args:
        run: `WandbLogger.experiment`.
    """
    from trinity_lightning.monitor.metric_names import metric_globs  # a long table, which only W&B and the report read

    run.define_metric(STEP_METRIC)
    # WandbLogger has put "*" on trainer/global_step, and if several globs match, W&B takes any one of them.
    for glob in ("*", *metric_globs()):
        run.define_metric(glob, step_metric=STEP_METRIC, step_sync=True)


def log_completions(
    run: wandb.Run, rows: Sequence[dict[str, Any]], explore_step: int, name: str = "completions"
) -> None:
    """Log the rows that `CompletionsWriter.write` returned as the table `name`; no rows, no table.

    Args:
        run: `WandbLogger.experiment`.
        rows: dicts with one set of keys, the table's columns.
        explore_step: the step the rows belong to.
        name: the table; give evaluations one of their own.
    """
    if rows:
        table = wandb.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
        run.log({name: table, STEP_METRIC: explore_step})
