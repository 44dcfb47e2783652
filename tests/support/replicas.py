"""Fits that one process and several have to do alike; `python -m support.replicas FILE` is one of the several."""

import os
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from support.policy import Gradients, Prepare, batch_of, fit, groups, make_experiences, make_policy, whole
from trinity_lightning.common.experience import Experience
from trinity_lightning.common.optimizer_batch import marked
from trinity_lightning.config.training import KLConfig, OptimizerConfig
from trinity_lightning.errors import TrinityError
from trinity_lightning.trainer.ddp import ReplicaStrategy
from trinity_lightning.trainer.fsdp import ShardStrategy

RANKS = 2
STRATEGIES = {"ddp": ReplicaStrategy, "fsdp2": ShardStrategy}


# Adam's own epsilon turns the last bit of a tiny gradient into a whole step.
SMOOTH = OptimizerConfig(lr=1e-3, eps=1e-4, weight_decay=0.1)


class Metrics(L.Callback):
    """Keeps what each item logged."""

    def __init__(self) -> None:
        self.items: list[dict[str, float]] = []

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.items.append({name: float(value) for name, value in trainer.logged_metrics.items()})


def trained(items: list[list[Experience]], prepare: bool = False, **settings: Any) -> Callable[..., dict[str, Any]]:
    """A fit of fresh weights to these items; what came of it."""

    def case(**trainer: Any) -> dict[str, Any]:
        batches, seen, metrics = [batch_of(each) for each in items], Gradients(), Metrics()
        policy = make_policy(**{"optimizer": SMOOTH, **settings})
        fit(policy, batches, seen, metrics, *([Prepare(batches)] if prepare else []), **trainer)
        model = policy.policy
        return {
            "losses": seen.losses,
            "gradients": seen.steps,
            "metrics": metrics.items,
            "weights": {name: whole(model, value) for name, value in model.state_dict(keep_vars=True).items()},
        }

    return case


def ragged() -> list[list[Experience]]:
    return [make_experiences(count, seed=seed, zero_every=3) for seed, count in enumerate((12, 7, 9))]


def sparse() -> list[list[Experience]]:
    """One row, rows without advantage, nothing at all, and a row among those."""
    one, none = make_experiences(1), make_experiences(6, zero_every=1)
    return [one, none, [], [*none, *make_experiences(3, seed=4)[1:]]]


def with_experts() -> list[list[Experience]]:
    items = ragged()
    for each in items:
        for row in each[::4]:
            each.append(marked(row, expert=True))
            each[-1].logprobs = None
    return items


def broken() -> list[list[Experience]]:
    """The second item has an advantage that is not finite."""
    items = ragged()
    advantages = items[1][1].advantages
    assert advantages is not None
    items[1][1].advantages = advantages * torch.inf
    return items


class Draws(L.Callback):
    """Keeps a random number after each item."""

    def __init__(self) -> None:
        self.numbers: list[float] = []

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.numbers.append(float(torch.rand(())))


def noise(**trainer: Any) -> dict[str, Any]:
    """What dropout would draw after each item of a fit from the same state."""
    torch.manual_seed(3)
    fit(make_policy(model={"dropout": "keep"}), [batch_of(each) for each in ragged()], drawn := Draws(), **trainer)
    return {"drawn": drawn.numbers}


LOSSES = {"max_grad_norm": 0.05, "loss_agg_mode": "seq-mean-token-mean", "entropy_coef": 0.01}
CASES: dict[str, Callable[..., dict[str, Any]]] = {
    "padded": trained(ragged(), layout="padded"),
    "shared prefixes": trained([groups(count=8, seed=seed) for seed in range(3)], layout="shared_prefix"),
    "one large group": trained([groups(count=4)], layout="shared_prefix", max_tokens_per_micro_batch=4096),
    "few rows": trained(sparse()),
    "reference and several steps": trained(ragged(), True, kl=KLConfig(coef=0.1), optimizer_steps=3),
    "clipped, by sequences": trained(ragged(), **LOSSES),
    "gspo": trained(ragged(), policy_loss="gspo"),
    "sft": trained(ragged(), policy_loss="sft"),
    "experts": trained(with_experts(), policy_loss={"name": "mix", "args": {"mu": 0.25}}),
    "a bad step": trained(broken()),
    "bfloat16": trained(ragged(), dtype="bf16"),
}


class Fails(L.Callback):
    """Fails on one rank when an item begins."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_rank == self.rank and trainer.global_step == 1:
            raise TrinityError(f"broken on purpose on {self.rank}")


def failed(rank: int, **trainer: Any) -> dict[str, Any]:
    """What this process raises if that rank fails."""
    try:
        fit(make_policy(), [batch_of(each) for each in ragged()], Fails(rank), **trainer)
    except TrinityError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"error": None}


def start(folder: Path) -> list[dict[str, dict[str, dict[str, Any]]]]:
    """What every rank has found of all cases by strategy, by rank, each in a process of its own."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(minutes=1))
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(RANKS), "GROUP_RANK": "0"}
    shared |= {"TORCHELASTIC_RUN_ID": "tests", "TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "1"}
    shared |= {"LOCAL_WORLD_SIZE": str(RANKS), "PYTHONPATH": os.pathsep.join(sys.path)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "support.replicas", str(folder / f"{rank}.pt")],
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(RANKS)
    ]
    try:
        assert [process.wait(240) for process in processes] == [0] * RANKS
    finally:
        for process in processes:
            process.kill()
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(RANKS)]


def _main(file: str) -> None:
    cases = CASES | {f"rank {rank} fails": partial(failed, rank) for rank in range(RANKS)}
    cases |= {"noise": noise, "noise again": noise}
    found = {
        kind: {name: case(devices=RANKS, strategy=strategy(timeout=60)) for name, case in cases.items()}
        for kind, strategy in STRATEGIES.items()
    }
    torch.save(found, file)


if __name__ == "__main__":
    _main(sys.argv[1])
