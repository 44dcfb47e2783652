"""The LightningModule: one optimizer batch in, one optimizer step out.

It knows neither explorer nor buffer. Optimization is manual because an optimizer batch is cut into micro-batches by a
token budget, so that their number varies; there is exactly one optimizer step a `training_step`, so that
`global_step`, loggers, checkpoints and schedulers behave as in any Lightning module.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trinity_lightning.algorithm.metrics import combine_metrics
from trinity_lightning.common.config import AlgorithmConfig, OptimizerConfig, WeightDtype
from trinity_lightning.common.errors import ModelLoadError, TrinityError
from trinity_lightning.common.experience import Experience
from trinity_lightning.common.model_files import load_tokenizer, resolve_model
from trinity_lightning.common.optimizer_batch import OptimizerBatch, trained_mask
from trinity_lightning.common.random_state import random_state, restore_random_state
from trinity_lightning.trainer.attention import attention_implementation
from trinity_lightning.trainer.cpu_memory import bound_primitive_caches, reuse_large_buffers
from trinity_lightning.trainer.logprobs import Head, token_logprobs
from trinity_lightning.trainer.master_weights import MasterWeights
from trinity_lightning.trainer.objective import Objective
from trinity_lightning.trainer.optimization import adamw, learning_rate_schedule
from trinity_lightning.trainer.packing import MicroBatch, collate, cut, padding_ratio, trainable_rows

TORCH_DTYPES = {WeightDtype.bf16: torch.bfloat16, WeightDtype.fp32: torch.float32}


class PolicyModule(L.LightningModule):
    """Trains a causal language model by policy gradients.

    Args:
        model: `smollm2`, `tiny`, a folder with a Hugging Face checkpoint, or a hub name.
        algorithm: the objective and how batches are cut.
        optimizer: AdamW's knobs and the learning-rate schedule.
        optimizer_factory: makes an optimizer of your own from the parameter groups, instead of AdamW.
        dtype: `bf16` computes in bfloat16 with float32 masters in the optimizer; `fp32` is float32 throughout.
        gradient_checkpointing: recompute activations in the backward pass.
        attn_implementation: attention of transformers.

    Attributes:
        skipped_items: optimizer batches with nothing to train so far; they took no optimizer and no schedule step.

    Raises:
        ValueError, TypeError: an unknown policy loss, or an argument that it does not have.
    """

    def __init__(
        self,
        model: str,
        algorithm: AlgorithmConfig | None = None,
        optimizer: OptimizerConfig | None = None,
        *,
        optimizer_factory: Callable[[Any], Optimizer] | None = None,
        dtype: WeightDtype | str = WeightDtype.bf16,
        gradient_checkpointing: bool = False,
        attn_implementation: str = "sdpa",
    ) -> None:
        super().__init__()
        bound_primitive_caches()  # before anything is computed
        self.automatic_optimization = False
        self.model_name = model
        self.algorithm = algorithm or AlgorithmConfig()
        self.optimizer_config = optimizer or OptimizerConfig()
        self.objective = Objective(self.algorithm)
        self.skipped_items = 0
        self.model: nn.Module | None = None
        # In a list it is no submodule: not saved, not synchronized between devices, never in training mode.
        self._reference: list[Any] = []
        self._optimizer_factory = optimizer_factory
        self._dtype = TORCH_DTYPES[WeightDtype(dtype) if isinstance(dtype, str) else dtype]
        self._gradient_checkpointing = gradient_checkpointing
        self._attn_implementation = attn_implementation
        self._random_state: dict[str, Any] | None = None

    # -- set-up -------------------------------------------------------------------------------------------------------

    def configure_model(self) -> None:
        """Load the policy (and the reference, where the objective needs one), once, in training mode."""
        if self.model is None:
            self.model = self._load_model().train()
            if self._gradient_checkpointing:
                self.policy.gradient_checkpointing_enable({"use_reentrant": False})
            if self.objective.needs_reference:
                self._reference = [self._load_model().eval().requires_grad_(False)]

    def configure_optimizers(self) -> Any:
        """One optimizer, over float32 masters where the weights are bfloat16, and its schedule."""
        parameters = [p for p in self.policy.parameters() if p.requires_grad]
        factory = self._optimizer_factory or (lambda groups: adamw(groups, self.optimizer_config))
        low_precision = any(p.dtype in (torch.bfloat16, torch.float16) for p in parameters)
        optimizer = MasterWeights(parameters, factory) if low_precision else factory(parameters)
        schedule = learning_rate_schedule(optimizer, self.optimizer_config)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _load_model(self) -> Any:
        from transformers import AutoModelForCausalLM

        path = str(resolve_model(self.model_name))
        try:
            return AutoModelForCausalLM.from_pretrained(
                path, dtype=self._dtype, attn_implementation=attention_implementation(self._attn_implementation)
            )
        except (OSError, ValueError) as error:
            raise ModelLoadError(f"cannot load the model '{self.model_name}': {error}") from error

    # -- training -----------------------------------------------------------------------------------------------------

    @property
    def policy(self) -> Any:
        """The Hugging Face model; an error before `configure_model`."""
        if self.model is None:
            raise ModelLoadError("the policy is not loaded yet: call configure_model() first.")
        return self.model

    @property
    def reference(self) -> Any:
        """The frozen initial policy, where the objective has a KL term, else None; never in a checkpoint."""
        return self._reference[0] if self._reference else None

    @cached_property
    def tokenizer(self) -> Any:
        """The policy's tokenizer."""
        return load_tokenizer(self.model_name)

    def training_step(self, batch: OptimizerBatch, batch_idx: int) -> dict[str, Tensor] | None:
        """One optimizer step over a whole optimizer batch; an item with nothing to train takes none and is counted.

        Raises:
            ConfigError: the batch lacks advantages, or columns of `prepare_step`.
            TrinityError: the gradient is not finite; weights and optimizer are as they were.
        """
        start = time.perf_counter()
        rows = trainable_rows(batch, skip_zero_advantage=not self.objective.needs_all_rows)
        if not rows:
            self.skipped_items += 1
            self._log({"actor/skipped_items": self.skipped_items}, batch)
            return None
        optimizer: Any = self.optimizers()
        schedule: Any = self.lr_schedulers()
        optimizer.zero_grad()
        parts = self._cut(batch, rows)
        loss, metrics = self._accumulate(batch, parts)
        metrics |= {"actor/grad_norm": self._clip(batch), "actor/lr": optimizer.param_groups[0]["lr"]}
        optimizer.step()
        schedule.step()
        self._log(metrics | self._costs(batch, parts, time.perf_counter() - start), batch)
        return {"loss": loss}

    def _accumulate(self, batch: OptimizerBatch, parts: list[list[int]]) -> tuple[Tensor, dict[str, float]]:
        """Gradients of all micro-batches, added up; the loss, and metrics of the whole optimizer batch."""
        computed_tokens = _trained_tokens(batch, parts)
        sampled_tokens = _trained_tokens(batch, parts, sampled=True)
        measured: list[dict[str, Tensor]] = []
        loss = torch.zeros((), device=self.device)
        collating = 0.0
        for index, part in enumerate(parts):
            start = time.perf_counter()
            micro = collate(batch, part, self.device)
            collating += time.perf_counter() - start
            with nullcontext() if index == len(parts) - 1 else self._no_sync():
                part_loss, part_metrics = self.objective(
                    *self._logprobs(self.policy, micro), micro, batch, computed_tokens, sampled_tokens
                )
                self.manual_backward(part_loss)
            loss += part_loss.detach()
            measured.append(part_metrics)
        metrics = {f"actor/{name}": float(value) for name, value in combine_metrics(measured).items()}
        return loss, metrics | {"time/collate": collating}

    def _logprobs(self, model: Any, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies [B, R] of the trained tokens; 0 elsewhere."""
        states = model.base_model(input_ids=micro.tokens, use_cache=False).last_hidden_state
        positions, targets, rows = micro.positions()
        values = token_logprobs(Head.of(model), states.flatten(0, 1)[positions], targets, micro.temperature[rows])
        zeros = torch.zeros(micro.action_mask.shape, device=states.device)
        logprobs, entropies = (zeros.masked_scatter(micro.action_mask, value) for value in values)
        return logprobs, entropies

    def _cut(self, batch: OptimizerBatch, rows: Sequence[int]) -> list[list[int]]:
        lengths = [len(e.tokens) for e in batch.experiences]
        return cut(lengths, rows, self.algorithm.max_tokens_per_micro_batch)

    def _no_sync(self) -> Any:
        model: Any = self.trainer.strategy.model
        return model.no_sync() if hasattr(model, "no_sync") else nullcontext()

    def _clip(self, batch: OptimizerBatch) -> float:
        """Norm of the gradient, before it is clipped.

        Clips by torch itself: Lightning's `clip_gradients` computes the norm once more, and refuses fused optimizers
        under mixed precision, though only a gradient scaler (float16) could not do with them.
        """
        parameters = [p for p in self.policy.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        if not norm.isfinite():
            raise TrinityError(
                f"the gradient of explore step {batch.explore_step} has norm {float(norm)}: look for infinite or NaN "
                "advantages and log-probabilities among its experiences, and at the learning rate."
            )
        if self.algorithm.max_grad_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, self.algorithm.max_grad_norm, norm)
        return float(norm)

    def _costs(self, batch: OptimizerBatch, parts: list[list[int]], seconds: float) -> dict[str, float]:
        """What the optimizer step cost: of the rows computed, without padding."""
        lengths = [len(e.tokens) for e in batch.experiences]
        return {
            "actor/trained_rows": sum(map(len, parts)),
            "actor/micro_batches": len(parts),
            "actor/skipped_items": self.skipped_items,
            "perf/padding_ratio": padding_ratio(lengths, parts),
            "perf/tokens_per_second": sum(lengths[row] for part in parts for row in part) / seconds,
            "perf/trained_tokens_per_second": _trained_tokens(batch, parts) / seconds,
            "time/train": seconds,
        }

    def _log(self, metrics: dict[str, float], batch: OptimizerBatch) -> None:
        values = {name: float(value) for name, value in (metrics | {"explore_step": batch.explore_step}).items()}
        self.log_dict(values, on_step=True, on_epoch=False, batch_size=1)

    # -- columns, probes ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def prepare_step(self, experiences: Sequence[Experience]) -> dict[str, list[Tensor]]:
        """Per-token columns that must be computed before the step's first update; none for a plain on-policy step.

        `old_logprobs` where several optimizer steps follow one rollout batch, `ref_logprobs` where the objective has a
        reference. Each is a list of float32 CPU tensors [response], one an experience; 0 in rows that are not trained.
        """
        columns: dict[str, list[Tensor]] = {}
        with self.trainer.precision_plugin.forward_context():  # as in training: the first ratio must be 1
            if self.objective.needs_old_logprobs:
                columns["old_logprobs"] = self._column(self.policy, experiences)
            if self.reference is not None:
                columns["ref_logprobs"] = self._column(self.reference.to(self.device), experiences)
        return columns

    def _column(self, model: Any, experiences: Sequence[Experience]) -> list[Tensor]:
        batch = OptimizerBatch.of(experiences, explore_step=0)
        column = [torch.zeros(e.response_length) for e in experiences]
        rows = trainable_rows(batch, skip_zero_advantage=not self.objective.needs_all_rows)
        was_training = model.training
        model.eval()  # dropout would make them another model's
        for part in self._cut(batch, rows):
            values, _ = self._logprobs(model, collate(batch, part, self.device))
            for row, value in zip(part, values.cpu(), strict=True):
                column[row] = value[: len(column[row])].clone()
        model.train(was_training)
        return column

    @torch.no_grad()
    def sequence_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probability, at temperature 1, of each token given those before it: [len - 1]. What probes compare."""
        experience = Experience(tokens=list(token_ids), prompt_length=1)
        return self._column(self.policy, [experience])[0].tolist()

    # -- saving -------------------------------------------------------------------------------------------------------

    def save_pretrained(self, folder: str | Path) -> None:
        """Write model and tokenizer as a folder that transformers, vLLM and TRL load."""
        self.policy.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Counters and random states beside the weights."""
        checkpoint["policy"] = {"skipped_items": self.skipped_items, "rng": random_state()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the counter; random states are set once everything else that draws from them is set up."""
        self.skipped_items = checkpoint["policy"]["skipped_items"]
        self._random_state = checkpoint["policy"]["rng"]

    def on_fit_start(self) -> None:
        """Set the random states of a resumed run: after engines were loaded, before callbacks explore."""
        if self.device.type == "cpu":
            reuse_large_buffers()
        self._restore_random_state()

    def on_train_start(self) -> None:
        """The same, for strategies that read the checkpoint only after `on_fit_start`."""
        self._restore_random_state()

    def _restore_random_state(self) -> None:
        if self._random_state is not None:
            restore_random_state(self._random_state)
            self._random_state = None


def _trained_tokens(batch: OptimizerBatch, parts: list[list[int]], sampled: bool = False) -> int:
    """Trained tokens of the parts; `sampled`: of their rows with an engine's log-probabilities."""
    experiences = [batch.experiences[row] for part in parts for row in part]
    return sum(int(trained_mask(e).sum()) for e in experiences if not sampled or e.logprobs is not None)
