"""Logs which tasks failed and why, and raises an error if none gave an experience."""

import logging
from collections.abc import Sequence
from typing import Never

from trinity_lightning.common.words import listed
from trinity_lightning.errors import RewardError, RolloutError
from trinity_lightning.explorer.workflow_runner import Status

logger = logging.getLogger(__name__)

NAMED_TASKS = 50  # task numbers that a message names
_SHOWN = 3  # different errors of reward functions that a message shows


def report_tasks(label: str, statuses: Sequence[Status], tasks: int, nothing: bool = False, cure: str = "") -> None:
    """Log which tasks of a step failed, and why; tasks that failed alike share a line.

    Args:
        label: the step or evaluation, in words.
        statuses: statuses of the tasks that ended.
        tasks: number of all tasks.
        nothing: True if the tasks gave no experience.
        cure: a fix for reward functions that fail on every task.

    Raises:
        RewardError: there is no experience, because all tasks failed in their reward functions.
        RolloutError: there is no experience, for other reasons.
    """
    kinds: dict[object, list[Status]] = {}
    for status in statuses:
        if not status.ok:
            kinds.setdefault(status.kind, []).append(status)
    for failed in kinds.values():
        names = listed([status.task_id for status in failed], NAMED_TASKS)
        logger.warning("%s: %d of %d tasks failed (%s): %s", label, len(failed), tasks, names, failed[0].message)
    if nothing:
        _raise_without_experiences(f"{label}: none of its {tasks} tasks gave an experience", statuses, cure)


def _raise_without_experiences(message: str, statuses: Sequence[Status], cure: str) -> Never:
    if statuses and all(status.fails_by_reward for status in statuses):
        errors = list(dict.fromkeys(error.partition(": ")[2] for status in statuses for error in status.errors))
        more = f"; and {len(errors) - _SHOWN} other errors" if len(errors) > _SHOWN else ""
        raise RewardError(f"{message}: {'; '.join(errors[:_SHOWN])}{more}{cure and f'. {cure}'}")
    reasons = dict.fromkeys(str(status.message) for status in statuses) or [
        "They were given up: see the errors above in the log"
    ]
    raise RolloutError(f"{message}. {'; '.join(reasons)}")
