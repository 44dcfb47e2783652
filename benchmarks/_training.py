"""Training steps for benchmarks: `PolicyModule` under Lightning's Trainer, a step whenever one is asked for."""

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import trinity_lightning  # noqa: F401  first: torch and OpenMP read what it sets when they are loaded

# isort: split
import lightning as L
import torch
from _rollouts import Rollout

from trinity_lightning.common.experience import EID, Experience
from trinity_lightning.common.optimizer_batch import OptimizerBatch
from trinity_lightning.config.algorithm import AlgorithmConfig
from trinity_lightning.config.model import LoRAConfig, OptimizerConfig
from trinity_lightning.config.values import AUTO
from trinity_lightning.trainer.policy import PolicyModule

WARM_UP = 4  # steps until buffers and compiled primitives are there
PROMPT = 32  # tokens


def make_batch(rows: int) -> OptimizerBatch:
    """Responses of 8 to 32 tokens."""
    generator = torch.Generator().manual_seed(0)
    experiences = []
    for row in range(rows):
        length = 8 + row % 4 * 8
        experiences.append(
            Experience(
                eid=EID(batch=1, task=row // 8, run=row % 8),
                tokens=torch.randint(4, 100, (PROMPT + length,), generator=generator),
                prompt_length=PROMPT,
                action_mask=torch.ones(length, dtype=torch.bool),
                logprobs=-torch.rand(length, generator=generator),
                advantages=torch.full((length,), float(row % 2 * 2 - 1)),
                info={"temperature": 1.0},
            )
        )
    return OptimizerBatch.of(experiences, explore_step=1)


def batch_of(groups: Sequence[Sequence[Rollout]]) -> OptimizerBatch:
    """Rollouts that no engine has log-probabilities of, so that nothing is corrected."""
    experiences = [
        Experience(
            eid=EID(batch=1, task=task, run=run),
            tokens=torch.tensor(row.prompt + row.response),
            prompt_length=len(row.prompt),
            action_mask=torch.ones(len(row.response), dtype=torch.bool),
            advantages=torch.full((len(row.response),), row.advantage),
            info={"temperature": 1.0},
        )
        for task, group in enumerate(groups)
        for run, row in enumerate(group)
    ]
    return OptimizerBatch.of(experiences, explore_step=1)


def fit(
    model: str,
    batches: Iterator[OptimizerBatch],
    dtype: str = "bf16",
    algorithm: AlgorithmConfig | None = None,
    callbacks: Sequence[L.Callback] = (),
    accelerator: str = "cpu",
    compile_layers: bool | str = AUTO,
    lora: LoRAConfig | None = None,
    optimizer: str = "adamw",
) -> None:
    """One optimizer step a batch; the iterator goes on when it is done."""

    class Steps:
        def __iter__(self) -> Iterator[Any]:
            return batches

        def __len__(self) -> int:
            """Only what has a length is asked for a batch when it is needed: Lightning fetches others one ahead."""
            return sys.maxsize

    class Data(L.LightningDataModule):
        def train_dataloader(self) -> Any:
            return Steps()

        def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
            return batch

    trainer = L.Trainer(
        accelerator=accelerator,
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
    )
    settings = OptimizerConfig(name=optimizer)
    trainer.fit(PolicyModule(model, algorithm, settings, dtype=dtype, compile_layers=compile_layers, lora=lora), Data())
