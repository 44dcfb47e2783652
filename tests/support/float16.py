"""Fits of a float16 policy that one process and several have to do; `python -m support.float16 FILE` is one of several.

The gradient of one rank overflows in the second of three items; the loss scale doubles after two clean steps.
"""

import os
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor

from support.policy import Gradients, batch_of, fit, make_policy, whole
from support.replicas import (
    NOT_IN_SHARDS,
    SMOOTH,
    STRATEGIES,
    Metrics,
    move_adapters,
    ragged,
    rewarded,
    settings,
    trained,
)
from trinity_lightning.config.algorithm import KLConfig
from trinity_lightning.config.model import LoRAConfig, OptimizerConfig
from trinity_lightning.trainer.checkpoint import AtomicCheckpointIO
from trinity_lightning.trainer.policy import PolicyModule

SCALE, INTERVAL = 2.0**10, 2


class Overflows(L.Callback):
    """Makes the gradients of the last rank's activations overflow in these items, behind the last norm."""

    def __init__(self, *items: int) -> None:
        self.items = items

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        norm = pl_module.policy.base_model.norm
        self.hook = norm.register_forward_hook(self._enlarge)
        self.is_due = batch_idx in self.items and trainer.global_rank == trainer.world_size - 1

    def _enlarge(self, module: Any, arguments: Any, output: Tensor) -> None:
        if self.is_due and output.requires_grad:
            output.register_hook(lambda gradient: gradient * 2.0**60)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.hook.remove()


def half_policy(scale: float = SCALE, interval: int = INTERVAL, **arguments: Any) -> PolicyModule:
    """A float16 policy with this loss scale."""
    policy = make_policy(**{"optimizer": SMOOTH, "dtype": "fp16", "max_tokens_per_micro_batch": 24} | arguments)
    assert policy.loss_scale is not None
    policy.loss_scale.scale, policy.loss_scale.interval = scale, interval
    return policy


def overflow(**trainer: Any) -> dict[str, Any]:
    """Gradients, metrics and weights of three items, the second of which overflows on one rank."""
    seen, metrics, policy = Gradients(), Metrics(), half_policy()
    fit(policy, [batch_of(item) for item in ragged()], seen, metrics, Overflows(1), **trainer)
    model = policy.policy
    return {
        "gradients": seen.steps,
        "metrics": metrics.items,
        "weights": {name: whole(model, value) for name, value in model.state_dict(keep_vars=True).items()},
        "bad": policy.bad_steps,
    }


def resumed(stops: bool, **trainer: Any) -> dict[str, Any]:
    """Weights and loss scale after two epochs of three items; `stops`: resume once, between two doublings."""
    file, batches = Path("half.ckpt"), [batch_of(item) for item in ragged()]
    policy = half_policy()
    for epochs in (1, 2) if stops else (2,):
        policy, before = half_policy(), file if epochs == 2 and stops else None
        arguments = {"max_epochs": epochs, "plugins": [AtomicCheckpointIO()]} | trainer
        if (strategy := trainer.get("strategy")) is not None:
            arguments["strategy"] = type(strategy)(timeout=60)
        fit(policy, batches, ckpt_path=before, **arguments).save_checkpoint(file)
    model, scale = policy.policy, policy.loss_scale
    assert scale is not None
    return {
        "weights": {name: whole(model, value) for name, value in model.state_dict(keep_vars=True).items()},
        "scale": scale.state_dict(),
    }


ON_HOST = "adamw_offload"
CASES = {
    "padded": trained(ragged(), dtype="fp16", layout="padded", max_grad_norm=0.05),
    "several steps": trained(ragged(), True, dtype="fp16", kl=KLConfig(coef=0.1), optimizer_steps=3),
    "adapters": trained(ragged(), True, change=move_adapters, dtype="fp16", model={"lora": LoRAConfig(r=2)}),
    "a critic": trained(rewarded(), True, dtype="fp16", critic={"lr": 1e-2}),
    "adamw_offload": trained(
        ragged(), dtype="fp16", optimizer=OptimizerConfig(name="adamw_offload", lr=1e-3, eps=1e-4)
    ),
}
HERE = [
    (way, case) for way in STRATEGIES for case in CASES if way == "ddp" or case not in (*NOT_IN_SHARDS, "adamw_offload")
]


def _main(file: str) -> None:
    os.chdir(Path(file).parent)
    results = {}
    for way in STRATEGIES:
        results[way] = {"overflow": overflow(**settings(way))}
        results[way] |= {f"resumed {stops}": resumed(stops, **settings(way)) for stops in (False, True)}
    for way, case in HERE:
        results[way][case] = CASES[case](**settings(way))
    torch.save(results, file)


if __name__ == "__main__":
    _main(sys.argv[1])
