"""A training step beside busy processes: the OpenMP waiting time that this package sets against libgomp's default.

    python benchmarks/contended_training.py [--model smollm2] [--rows 8] [--rounds 6] [--turns 3000 30000]

Steps in bfloat16 by `PolicyModule` under Lightning's Trainer, in processes that take turns: one as the package sets
itself up, one with the default of libgomp, and one with a single thread, which never waits; `--turns` adds some whose
threads wait for so many turns. Beside them run as many single-threaded busy processes as said: 0, 1 and 2. Seconds are
medians, without busy processes of three times as many rounds. Prints one JSON line: `quiet_cost` is the package's time
divided by the default's, `gain` the default's divided by the package's, `fewer_threads_gain` the package's divided by
that of the single thread, which is what a run begins with on two cores of which others use one.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle, islice, permutations
from typing import Any

from _turns import Requests, Side

SETTINGS = {
    "package": {},
    "libgomp": {"GOMP_SPINCOUNT": "300000"},  # its own default
    "one_thread": {"OMP_NUM_THREADS": "1"},
}
INHERITED = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "OMP_NUM_THREADS")  # from the environment: not part of the comparison
BUSY = "while True: pass"


# -- the process that trains ------------------------------------------------------------------------------------------


def train(model: str, rows: int) -> None:
    """A training step a request, after the first ones; the answer is its seconds."""
    from _training import WARM_UP, fit, make_batch

    requests = Requests()

    def batches() -> Iterator[Any]:
        batch = make_batch(rows)
        for _ in range(WARM_UP):
            yield batch
        requests.answer("ready")
        for _ in requests:
            start = time.perf_counter()
            yield batch
            requests.answer(time.perf_counter() - start)

    fit(model, batches())


# -- the process that measures ----------------------------------------------------------------------------------------


def start(model: str, rows: int, setting: dict[str, str]) -> Side:
    """A process that trains when it is asked to."""
    environment = {name: value for name, value in os.environ.items() if name not in INHERITED}
    return Side([__file__, "--train", "--model", model, "--rows", str(rows)], environment | setting)


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Start `count` single-threaded processes that compute all the time."""
    processes = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]
    try:
        time.sleep(0.3)
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def measure(
    settings: dict[str, dict[str, str]], model: str, rows: int, rounds: int, busy: list[int]
) -> dict[int, dict[str, float]]:
    """Seconds of a step, by the number of busy processes and by setting."""
    trainers: dict[str, Side] = {}
    seen: dict[int, dict[str, list[float]]] = {count: {name: [] for name in settings} for count in busy}
    try:
        for name, setting in settings.items():
            trainers[name] = start(model, rows, setting)
        for trainer in trainers.values():
            trainer.answer()
        for count in busy:
            with busy_processes(count):
                # In every order as often: the kernel deals the cores by what ran before.
                orders = cycle(permutations(trainers))
                # A cost of 3% needs more rounds than a gain of 300%.
                for order in islice(orders, rounds if count else 3 * rounds):
                    for name in order:
                        seen[count][name].append(trainers[name].ask("step"))
    finally:
        for trainer in trainers.values():
            trainer.close()
    return {
        count: {name: statistics.median(values) for name, values in by_name.items()} for count, by_name in seen.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--busy", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--turns", nargs="+", default=[], help="further values of GOMP_SPINCOUNT")
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train:
        train(args.model, args.rows)
        return
    settings = SETTINGS | {turns: {"GOMP_SPINCOUNT": turns} for turns in args.turns}
    seconds = measure(settings, args.model, args.rows, args.rounds, args.busy)
    result = {
        "benchmark": "contended_training",
        "model": args.model,
        "rows": args.rows,
        "cores": len(os.sched_getaffinity(0)),
        "seconds": {count: {name: round(value, 3) for name, value in by.items()} for count, by in seconds.items()},
        "quiet_cost": {count: round(by["package"] / by["libgomp"], 3) for count, by in seconds.items() if not count},
        "gain": {count: round(by["libgomp"] / by["package"], 2) for count, by in seconds.items() if count},
        "fewer_threads_gain": {
            count: round(by["package"] / by["one_thread"], 2) for count, by in seconds.items() if count
        },
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
