"""Rollouts of a training run without a trainer: nothing is synced, and nothing is shown."""

from collections.abc import Callable
from typing import Any

from trinity_lightning.config.engines import SynchronizerConfig
from trinity_lightning.explorer.explorer import NOBODY, Explorer
from trinity_lightning.explorer.rollouts import PendingSteps, TrainingRollouts, WeightVersions


def training_rollouts(
    explorer: Explorer,
    pending: PendingSteps,
    interrupted: Callable[[], BaseException | None] = lambda: None,
) -> TrainingRollouts:
    policy: Any = None
    return TrainingRollouts(
        explorer,
        pending,
        SynchronizerConfig(),
        policy,
        WeightVersions(),
        None,
        interrupted=interrupted,
        watcher=NOBODY,
    )
