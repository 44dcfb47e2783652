"""Warnings, once in a run, of what slows it down or misleads it."""

import logging
import math
import os

import torch

from trinity_lightning.monitor.machine import NOTABLE

logger = logging.getLogger(__name__)


def warn_of_engine(metric: str, difference: float, step: int) -> None:
    """That the engine's log-probabilities, by this metric, are so many nats from the trainer's at an explore step."""
    logger.warning(
        "explore step %d: the log-probabilities that the engine gave its responses are %.1f nats from the "
        "trainer's in the mean (%s). Either they are not those of the distribution that it samples from, or "
        "the weights that it samples with are too old: look at the engine's own log-probabilities, and at "
        "synchronizer and explorer.sync_interval.",
        step,
        difference,
        metric,
    )


def warn_of_load(others: float) -> bool:
    """Say what to do about other programs that use so many cores; whether there is anything to do."""
    advised = advice(others, torch.get_num_threads(), len(os.sched_getaffinity(0)))
    if advised is not None:
        logger.warning("%s", advised)
    return advised is not None


def advice(others: float, threads: int, cores: int) -> str | None:
    """What to do if so many training threads and others (in cores) do not fit on the usable cores; None if they do.

    The threads of an operation wait for its slowest: one that others hold back holds back all.
    """
    fitting = max(cores - math.ceil(others), 1)
    if others < NOTABLE or threads + others <= cores or fitting >= threads:
        return None
    return (
        f"other programs use {others:.1f} of {cores} cores while {threads} threads train, which wait for each other at "
        f"every operation: if that lasts, restart with OMP_NUM_THREADS={fitting} and ckpt_path=last, which is faster."
    )
