"""TRL's GRPOTrainer on rollouts that are there already: its own training step, without its generation."""

import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from _rollouts import Rollout
from _turns import EnoughError
from transformers import AutoTokenizer, TrainerCallback
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

# bf16 is what TRL does where nothing is set: autocast over float32 weights. With bf16_weights small updates are lost.
DTYPES: dict[str, dict[str, Any]] = {
    "fp32": {"bf16": False},
    "bf16": {"bf16": True},
    "bf16_weights": {"bf16": True, "model_init_kwargs": {"dtype": "bfloat16"}},
}


class FedTrainer(GRPOTrainer):
    """Trains on `fed` instead of what it would generate and score; sums the losses of its micro-batches."""

    fed: dict[str, torch.Tensor]
    loss: float = 0.0

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, torch.Tensor]:
        return dict(self.fed)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any) -> torch.Tensor:
        loss = super().training_step(model, inputs, num_items_in_batch)
        self.loss += float(loss)
        return loss


def train(trainer: FedTrainer, groups: Sequence[Sequence[Rollout]]) -> None:
    """Train on these rollouts until a callback has had enough."""
    trainer.fed = feed(groups)
    with suppress(EnoughError):
        trainer.train()


def feed(groups: Sequence[Sequence[Rollout]]) -> dict[str, torch.Tensor]:
    """The batch that TRL makes: prompts padded on the left, completions on the right, each to its longest."""
    rows = [row for group in groups for row in group]
    prompts = _padded([row.prompt for row in rows], left=True)
    completions = _padded([row.response for row in rows], left=False)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    batch = {
        "prompt_ids": prompts[0],
        "prompt_mask": prompts[1],
        "completion_ids": completions[0],
        "completion_mask": completions[1],
        "advantages": torch.tensor([row.advantage for row in rows]),
        "num_items_in_batch": completions[1].sum(),
    }
    return {name: tensor.to(device) for name, tensor in batch.items()}


def _padded(rows: list[list[int]], left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and mask, int64 [rows, longest]."""
    side = "left" if left else "right"
    tokens, ones = [torch.tensor(row) for row in rows], [torch.ones(len(row), dtype=torch.int64) for row in rows]
    pad = torch.nn.utils.rnn.pad_sequence
    return pad(tokens, batch_first=True, padding_side=side), pad(ones, batch_first=True, padding_side=side)


def make_trainer(
    model: str, dtype: str, rows: int, rows_a_pass: int, callback: TrainerCallback, **settings: Any
) -> FedTrainer:
    """A trainer of one optimizer step over so many rows, so many of them a forward and backward pass.

    The objective is this project's default one: clipped at 0.2, mean over tokens, no KL. `settings` are GRPOConfig's.
    """
    from datasets import Dataset

    settings = {"gradient_checkpointing": False} | DTYPES[dtype] | settings
    if "model_init_kwargs" in settings:
        settings["model_init_kwargs"] = DTYPES[dtype].get("model_init_kwargs", {}) | settings["model_init_kwargs"]
    arguments = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        loss_type="dapo",
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        max_steps=1_000_000,
        num_generations=rows_a_pass,
        per_device_train_batch_size=rows_a_pass,
        gradient_accumulation_steps=rows // rows_a_pass,
        **settings,
    )
    return FedTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": ["a"] * rows}),
        processing_class=AutoTokenizer.from_pretrained(model),
        callbacks=[callback],
    )


class OnStep(TrainerCallback):
    """Calls functions of no arguments before a step, after its gradient, and after it."""

    def __init__(
        self,
        before: Callable[[], None] = lambda: None,
        gradient: Callable[[], None] = lambda: None,
        after: Callable[[], None] = lambda: None,
    ) -> None:
        self._before, self._gradient, self._after = before, gradient, after

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._before()

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self._gradient()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._after()
