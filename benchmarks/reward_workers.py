"""Training steps while a reward function computes in pure Python: in a thread of the run's process, or in a process.

    python benchmarks/reward_workers.py [--model smollm2] [--rows 8] [--rounds 3]

Steps in bfloat16, as in `contended_training.py`, while the loop of the rollouts scores one response after the other, as
in a run whose rollouts go on while the trainer trains: not at all, in a thread (`explorer.reward_workers=0`), in one
that hands the interpreter over after 5 ms, Python's default, instead of the 0.1 ms that the package sets, or in a
process (`explorer.reward_workers=1`). They take turns; seconds are the median of the rounds. Prints one JSON line:
`gain` is the time of a step beside a thread divided by that beside a process, `gain_of_interval` the time with 5 ms
divided by that with 0.1 ms.
"""

import argparse
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from trinity_lightning.explorer.driver import Driver
from trinity_lightning.explorer.rewards import SCORER, resolve_rewards, score
from trinity_lightning.explorer.rewards.workers import RewardWorkers
from trinity_lightning.explorer.tasks.task import Task

PLACES = ("none", "thread_5ms", "thread", "process")
ADDITIONS = 2_000_000  # of one call: about 0.1 s


def busy_reward(response: str, task: Task) -> float:
    """A slow parser, say."""
    total = 0
    for number in range(ADDITIONS):
        total += number & 1
    return float(total)


class Rewards:
    """Scores responses in the background, and counts them."""

    def __init__(self) -> None:
        self.scored = 0
        self._workers = RewardWorkers(1, timeout=60.0)
        self._driver = Driver()
        self._driver.run(self._workers.start())

    @contextmanager
    def at(self, place: str) -> Iterator[None]:
        """Rewards are computed there, one after the other."""
        if place == "none":
            yield
            return
        interval = sys.getswitchinterval()
        if place == "thread_5ms":
            sys.setswitchinterval(0.005)
        scoring = self._driver.start(self._score_for_ever(self._workers if place == "process" else None))
        try:
            yield
        finally:
            self._driver.cancel(scoring)
            sys.setswitchinterval(interval)
            time.sleep(1.0)  # the call under way

    def close(self) -> None:
        self._driver.run(self._workers.stop())
        self._driver.close()

    async def _score_for_ever(self, workers: RewardWorkers | None) -> None:
        SCORER.set(workers)
        while True:
            await score(resolve_rewards("reward_workers.busy_reward"), "4", Task("simple"))
            self.scored += 1


def measure(model: str, rows: int, rounds: int) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Seconds of each step and responses scored meanwhile, by place."""
    from _training import WARM_UP, fit, make_batch

    rewards = Rewards()
    seconds: dict[str, list[float]] = {place: [] for place in PLACES}
    scored: dict[str, int] = dict.fromkeys(PLACES, 0)

    def batches() -> Iterator[Any]:
        batch = make_batch(rows)
        for _ in range(WARM_UP):
            yield batch
        for _ in range(rounds):
            for place in PLACES:
                with rewards.at(place):
                    before, start = rewards.scored, time.perf_counter()
                    yield batch
                    seconds[place].append(time.perf_counter() - start)
                    scored[place] += rewards.scored - before

    fit(model, batches())
    rewards.close()
    return seconds, scored


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    seconds, scored = measure(args.model, args.rows, args.rounds)
    median = {place: statistics.median(values) for place, values in seconds.items()}
    result = {
        "benchmark": "reward_workers",
        **vars(args),
        "cores": len(os.sched_getaffinity(0)),
        "seconds": {place: round(value, 2) for place, value in median.items()},
        "rewards_per_second": {place: round(scored[place] / sum(seconds[place]), 1) for place in PLACES[1:]},
        "gain": round(median["thread"] / median["process"], 2),
        "gain_of_interval": round(median["thread_5ms"] / median["thread"], 2),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
