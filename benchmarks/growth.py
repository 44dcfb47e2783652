"""The growth of a training step's time with the number of rollouts and with their length.

    python benchmarks/growth.py [--model smollm2] [--rounds 2]

Steps by `PolicyModule` under Lightning's Trainer, with its defaults, in the dtype that is faster here: 2 groups of 8
rollouts with prompts of 64 and responses of 32 to 96 tokens; twice, four and eight times as many groups; and responses
twice and four times as long. Sizes take turns; seconds are the median of the rounds. Prints one JSON line: `growth` is
the time of a response token relative to that of the first size. 1 is linear, below 1 is better. (Prompts are not
counted: they are computed once a group, and stay as long while responses grow.)
"""

import argparse
import json
import os
import statistics
import time
import warnings
from collections.abc import Iterator
from typing import Any

from _rollouts import Case
from _turns import spread

import trinity_lightning  # noqa: F401  before torch, which reads what it sets

GROUPS, GROUP_SIZE = 2, 8
SIZES = {"1": (1, 1), "rollouts x2": (2, 1), "rollouts x4": (4, 1), "rollouts x8": (8, 1)}
SIZES |= {"responses x2": (1, 2), "responses x4": (1, 4)}


def measure(model: str, rounds: int, dtype: str) -> tuple[dict[str, int], dict[str, list[float]]]:
    """Response tokens of each size, and the seconds of its steps."""
    from _training import batch_of, fit
    from transformers import AutoConfig

    from trinity_lightning.config.models import resolve_model

    vocabulary = AutoConfig.from_pretrained(resolve_model(model)).vocab_size
    batches = {
        name: batch_of(Case((64, 64), (32 * longer, 96 * longer)).rollouts(GROUPS * more, GROUP_SIZE, vocabulary))
        for name, (more, longer) in SIZES.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in batches}

    def steps() -> Iterator[Any]:
        yield batches["1"]
        for _ in range(rounds):
            for name, batch in batches.items():
                start = time.perf_counter()
                yield batch
                seconds[name].append(time.perf_counter() - start)

    fit(model, steps(), dtype)
    return {name: sum(e.response_length for e in batch.experiences) for name, batch in batches.items()}, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    warnings.simplefilter("ignore")

    from trinity_lightning.common.hardware import faster_dtype

    dtype = faster_dtype("cpu").value
    tokens, seconds = measure(args.model, args.rounds, dtype)
    a_response_token = {name: statistics.median(values) / tokens[name] for name, values in seconds.items()}
    result = {
        "benchmark": "growth",
        **vars(args),
        "dtype": dtype,
        "cores": len(os.sched_getaffinity(0)),
        "response_tokens": tokens,
        "seconds": {name: spread(values) for name, values in seconds.items()},
        "growth": {name: round(value / a_response_token["1"], 2) for name, value in a_response_token.items()},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
