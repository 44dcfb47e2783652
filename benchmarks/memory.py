"""The parts of a training run's memory: they are loaded one after the other, then the run trains.

    python benchmarks/memory.py [--model smollm2] [--tokens 512] [--steps 6] [--lora RANK] [--optimizer adamw]

One process, as `+recipe=grpo` has it: libraries, vLLM, the policy in bfloat16; then steps over 8 groups of 8 rollouts
(45 + 2 to 25 tokens) of changing lengths, in micro-batches of so many computed tokens. `gb` is what each part takes
while the trainer trains, in GB (10^9 bytes): libraries and vLLM by how much the process grew with them, its cache given
back; weights, masters, moments, gradients and activations (what autograd saves of one micro-batch) by the size of their
tensors; the rest of the peak is what is computed with, and what the allocator lost. With `--lora` adapters are
trained, of that rank. Prints one JSON line.
"""

import argparse
import json
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import trinity_lightning  # noqa: F401  first: torch and OpenMP read what it sets when they are loaded

# isort: split
import lightning as L
import torch
from _rollouts import CASES
from _training import batch_of, fit
from torch import Tensor

from trinity_lightning.build import build  # noqa: F401  imports all that a run does
from trinity_lightning.common.optimizer_batch import OptimizerBatch
from trinity_lightning.config.algorithm import AlgorithmConfig
from trinity_lightning.config.engines import EngineDtype
from trinity_lightning.config.model import LoRAConfig
from trinity_lightning.explorer.driver import Driver
from trinity_lightning.explorer.models.vllm_engine import VLLMEngine
from trinity_lightning.monitor.machine import GB, MemoryMeter, resident_gb
from trinity_lightning.trainer.host import moments_of
from trinity_lightning.trainer.masters import MasterWeights


class Parts(L.Callback):
    """Sizes of what a policy trains with, and the peak of each step.

    Attributes:
        tensors: GB by name.
        checkpoint: GB of a checkpoint.
        meter: the peaks, by number of the step.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, float] = {}
        self.checkpoint = 0.0
        self.meter = MemoryMeter(interval=0.02)

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Let autograd say what it saves, from here on."""
        weights = list(pl_module.policy.parameters())
        self.tensors |= {"weights": _gb(weights), "activations": 0.0}
        passes, storages = pl_module.passes(), {weight.untyped_storage().data_ptr() for weight in weights}

        def counted(*arguments: Any) -> Any:
            saved: dict[int, int] = {}

            def pack(tensor: Tensor) -> Tensor:
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in storages:
                    saved[storage.data_ptr()] = storage.nbytes()
                return tensor.detach()  # an operation's own result would hold on to the operation

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                result = passes.function(*arguments)
            self.tensors["activations"] = max(self.tensors["activations"], sum(saved.values()) / GB)
            return result

        pl_module._passes = replace(passes, function=counted)
        self.meter.start()

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """A step of its own."""
        self.meter.mark(str(batch_idx))

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: Any, optimizer: Any) -> None:
        """Gradients are there now alone."""
        self.tensors["gradients"] = _gb(p.grad for p in pl_module.policy.parameters() if p.grad is not None)

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """The optimizer's state, and the memory of all that stays."""
        self.meter.stop()
        with tempfile.TemporaryDirectory() as folder:
            trainer.save_checkpoint(file := Path(folder) / "it.ckpt", weights_only=False)
            self.checkpoint = file.stat().st_size / GB
        optimizer: Any = trainer.optimizers[0]
        if isinstance(optimizer, MasterWeights):
            self.tensors |= {"masters": _gb(optimizer.masters), "moments": _gb(moments_of(optimizer))}


def _gb(tensors: Iterable[Tensor]) -> float:
    return sum(tensor.nbytes for tensor in tensors) / GB


def batches(steps: int, vocabulary: int) -> Iterator[OptimizerBatch]:
    """Rollouts of other lengths for each step."""
    for seed in range(steps):
        yield batch_of(CASES["short"].rollouts(8, 8, vocabulary, seed))


def measure(model: str, tokens: int, steps: int, rank: int | None, optimizer: str) -> dict[str, Any]:
    gb = {"libraries": resident_gb()}
    engine = VLLMEngine(model, dtype=EngineDtype.bf16, max_model_len=256)
    driver = Driver([engine])
    driver.run(engine.load())
    driver.run(engine.sleep())
    gb["vLLM"] = resident_gb() - gb["libraries"]
    parts = Parts()
    vocabulary = len(engine.tokenizer)
    algorithm = AlgorithmConfig(max_tokens_per_micro_batch=tokens)
    lora = LoRAConfig(rank)
    fit(model, batches(steps, vocabulary), algorithm=algorithm, callbacks=[parts], lora=lora, optimizer=optimizer)
    driver.run(engine.shutdown())
    driver.close()
    peak = parts.meter.peak_gb
    gb |= parts.tensors
    gb["rest"] = peak - sum(gb.values())
    return {
        "benchmark": "memory",
        "model": model,
        "tokens": tokens,
        "lora": rank,
        "optimizer": optimizer,
        "gb": {name: round(size, 3) for name, size in gb.items()},
        "peak_gb": round(peak, 2),
        "checkpoint_gb": round(parts.checkpoint, 3),
        "step_peaks_gb": [round(peak, 2) for peak in parts.meter.by_part.values()],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="What the memory of a training run is made of.")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--lora", type=int, default=None)
    parser.add_argument("--optimizer", default="adamw")
    args = parser.parse_args()
    print(json.dumps(measure(args.model, args.tokens, args.steps, args.lora, args.optimizer)))


if __name__ == "__main__":
    main()
