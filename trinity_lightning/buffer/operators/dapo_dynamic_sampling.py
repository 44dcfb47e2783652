"""DAPO's dynamic sampling by correctness: groups that are all right or all wrong are left out."""

import logging
from typing import Any

from trinity_lightning.buffer.operators.experience_operator import ExperienceOperatorV1
from trinity_lightning.common.experience import Experience, ExperienceError, group_by
from trinity_lightning.common.rewards import is_valid_reward
from trinity_lightning.common.runs import Run, judged, metric_of, runs_of
from trinity_lightning.config.values import number, text

logger = logging.getLogger(__name__)


class DAPODynamicSampling(ExperienceOperatorV1):
    """Keeps task groups with 0 < correct < G, of G runs (DAPO, arXiv 2503.14476, equation 11).

    A run is correct when its metric is above the threshold, or where it has no such metric its reward as it was before
    operators: a penalty for length makes no answer wrong. A group with a value that is no finite number is dropped
    whole and logged, and is neither all correct nor all wrong.

    Args:
        metric_key: a metric of the experiences, the name of a reward function ("accuracy" is also
            `metrics["reward/accuracy"]`), or an entry of info.
        correct_threshold: the value that a correct one exceeds.
    """

    def __init__(self, metric_key: str = "accuracy", correct_threshold: float = 0.0) -> None:
        self.metric_key = text("metric_key", metric_key)
        self.correct_threshold = number("correct_threshold", correct_threshold)

    async def process(self, exps: list[Experience]) -> tuple[list[Experience], dict[str, Any]]:
        """What is kept, in its order; the metrics count the experiences dropped.

        Raises:
            ExperienceError: an experience has neither the metric nor a reward.
        """
        counts = {"dropped_all_correct": 0, "dropped_all_wrong": 0}
        dropped, invalid = set(), []
        for tid, group in group_by(exps, "task").items():
            values = [self._value(run) for run in runs_of(group)]
            correct = sum(value > self.correct_threshold for value in values)
            if not all(map(is_valid_reward, values)):
                invalid.append(tid)
            elif correct in (0, len(values)):
                counts["dropped_all_correct" if correct else "dropped_all_wrong"] += len(group)
                dropped.add(tid)
        if invalid:
            logger.warning("dropped groups with a value that is no finite number: %s", ", ".join(invalid))
        kept = [exp for exp in exps if exp.eid.tid not in dropped.union(invalid)]
        return kept, {"filtered_count": len(exps) - len(kept), **counts}

    def _value(self, run: Run) -> float:
        metric = metric_of(run, self.metric_key)
        value = judged(run) if metric is None else metric
        if value is None:
            raise ExperienceError(
                f"experience {run[-1].eid} has neither metrics['{self.metric_key}'] nor a reward that says whether it "
                "is correct."
            )
        return value
