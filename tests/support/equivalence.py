"""Optimizer steps that have to be the same however their rows are laid out, cut, ordered and dealt to processes.

`python -m support.equivalence FILE` is one of two processes.
"""

import os
import random
import sys
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch

from support.policy import groups, make_experiences, pairs
from support.replicas import STRATEGIES, move_adapters, settings, trained
from trinity_lightning.common.experience import Experience
from trinity_lightning.config.algorithm import KLConfig
from trinity_lightning.config.model import LoRAConfig
from trinity_lightning.trainer.policy import PolicyModule

STEPS = 8
LAYOUTS = ("padded", "shared_prefix")
BUDGETS = (1, 24, 4096)  # tokens: a row at a time, a row or two, and all rows at once


class Way(NamedTuple):
    """A way to compute the rows of each step; `order` is a seed, None the order in which the rows were made."""

    layout: str = "padded"
    tokens: int = 4096
    order: int | None = None


# All but that which they are compared with; each order is another one.
WAYS = [Way(*way, order=number) for number, way in enumerate(product(LAYOUTS, BUDGETS)) if Way(*way) != Way()]


# -- groups of rollouts ------------------------------------------------------------------------------------------------


PENALTY = {"kl": KLConfig("k3", 0.1), "max_grad_norm": 0.5}
POLICIES: dict[str, dict[str, Any]] = {
    "all weights": PENALTY,
    "adapters": {**PENALTY, "model": {"lora": LoRAConfig(r=2)}, "change": move_adapters},
}


def trajectory(policy: str, way: Way, **trainer: Any) -> dict[str, Any]:
    """Losses, gradients, metrics and last weights of all steps."""
    items = [groups(count=8, seed=step) for step in range(STEPS)]
    if way.order is not None:
        items = [random.Random(way.order + step).sample(rows, len(rows)) for step, rows in enumerate(items)]
    return trained(items, layout=way.layout, max_tokens_per_micro_batch=way.tokens, **POLICIES[policy])(**trainer)


# -- rows of datasets --------------------------------------------------------------------------------------------------


def of_any_number(make: Callable[..., list[Experience]]) -> list[list[Experience]]:
    """Items of one to five each; the first of one, which a second process has no share of."""
    counts = [1, *random.Random(0).choices(range(1, 6), k=STEPS - 1)]
    return [make(count, seed=step) for step, count in enumerate(counts)]


DATASETS: dict[str, Callable[..., list[Experience]]] = {"dpo": pairs, "sft": make_experiences}


def on_dataset(loss: str, way: Way, **trainer: Any) -> dict[str, Any]:
    """The same of a dataset's rows, and which of them each micro-batch of this process had."""
    rows: list[list[list[int]]] = []

    def watch(policy: PolicyModule) -> None:
        accumulate = policy.accumulate

        def watched(batch: Any, shares: Any) -> Any:
            rows.append([list(part.rows) for part in policy.placement.passes(shares) if part is not None])
            return accumulate(batch, shares)

        policy.accumulate = watched

    algorithm = {"policy_loss": loss, "layout": way.layout, "max_tokens_per_micro_batch": way.tokens}
    return trained(of_any_number(DATASETS[loss]), change=watch, **algorithm)(**trainer) | {"rows": rows}


# -- two processes -----------------------------------------------------------------------------------------------------


# A row at a time takes longest, and is dealt as a row or two are.
DEALT = [way for way in WAYS if way.tokens > 1]
ROLLOUTS = {f"{policy}, {way.layout}, {way.tokens}": (policy, way) for policy, way in product(POLICIES, DEALT)}
OFFLINE = {f"{loss}, {layout}": (loss, Way(layout, 48)) for loss, layout in product(DATASETS, LAYOUTS)}
CASES: dict[str, Callable[..., dict[str, Any]]] = {
    **{name: partial(trajectory, *case) for name, case in ROLLOUTS.items()},
    **{name: partial(on_dataset, *case) for name, case in OFFLINE.items()},
}
# Shards take longer for a step, and are less about how rows are dealt: one way of each, in several micro-batches.
IN_SHARDS = [f"{policy}, shared_prefix, 24" for policy in POLICIES] + [f"{loss}, shared_prefix" for loss in DATASETS]
TOGETHER = [*product(["ddp"], CASES), *product(["fsdp2"], IN_SHARDS)]


def _main(file: str) -> None:
    os.chdir(Path(file).parent)  # the folder of the run, for all ranks
    results: dict[str, dict[str, Any]] = {kind: {} for kind in STRATEGIES}
    for kind, case in TOGETHER:
        results[kind][case] = CASES[case](**settings(kind))
    torch.save(results, file)


if __name__ == "__main__":
    _main(sys.argv[1])
