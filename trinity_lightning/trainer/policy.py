"""The LightningModule: one optimizer batch in, one optimizer step out.

It knows neither explorer nor buffer. Optimization is manual because an optimizer batch is cut into micro-batches by a
token budget, so that their number varies; there is exactly one optimizer step a `training_step`, so that
`global_step`, loggers, checkpoints and schedulers behave as in any Lightning module.
"""

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
from trinity_lightning.common.errors import ModelLoadError
from trinity_lightning.common.experience import Experience
from trinity_lightning.common.model_files import load_tokenizer, resolve_model
from trinity_lightning.common.optimizer_batch import OptimizerBatch
from trinity_lightning.common.random_state import random_state, restore_random_state
from trinity_lightning.trainer.logprobs import Head, token_logprobs
from trinity_lightning.trainer.master_weights import MasterWeights
from trinity_lightning.trainer.objective import Objective
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
        self.automatic_optimization = False
        self.model_name = model
        self.algorithm = algorithm or AlgorithmConfig()
        self.optimizer_config = optimizer or OptimizerConfig()
        self.objective = Objective(self.algorithm)
        self.skipped_items = 0
        self.model: nn.Module | None = None
        self.reference: nn.Module | None = None
        self._optimizer_factory = optimizer_factory
        self._dtype = TORCH_DTYPES[WeightDtype(dtype) if isinstance(dtype, str) else dtype]
        self._gradient_checkpointing = gradient_checkpointing
        self._attn_implementation = attn_implementation
        self._random_state: dict[str, Any] | None = None

    # -- set-up -------------------------------------------------------------------------------------------------------

    def configure_model(self) -> None:
        """Load the policy (and the reference, where the objective needs one), once, in training mode."""
        if self.model is None:
            self.model = self._load_model()
            self.model.train()
            if self._gradient_checkpointing:
                self.model.gradient_checkpointing_enable()
            if self.objective.needs_reference:
                self.reference = self._load_model().eval().requires_grad_(False)

    def configure_optimizers(self) -> Any:
        """One optimizer, over float32 masters where the weights are bfloat16, and its schedule."""
        parameters = [p for p in self.policy.parameters() if p.requires_grad]
        factory = self._optimizer_factory or self._adamw
        low_precision = any(p.dtype in (torch.bfloat16, torch.float16) for p in parameters)
        optimizer = MasterWeights(parameters, factory) if low_precision else factory(parameters)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": self._schedule(optimizer), "interval": "step"}}

    def _adamw(self, parameters: Any) -> Optimizer:
        config = self.optimizer_config
        beta1, beta2 = config.betas
        return torch.optim.AdamW(
            parameters, config.lr, (beta1, beta2), config.eps, weight_decay=config.weight_decay, fused=True
        )

    def _schedule(self, optimizer: Optimizer) -> Any:
        from transformers import get_scheduler

        config = self.optimizer_config
        return get_scheduler(config.lr_scheduler, optimizer, config.warmup_steps, config.total_steps)

    def _load_model(self) -> nn.Module:
        from transformers import AutoModelForCausalLM

        path = str(resolve_model(self.model_name))
        try:
            return AutoModelForCausalLM.from_pretrained(
                path, dtype=self._dtype, attn_implementation=self._attn_implementation
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

    @cached_property
    def tokenizer(self) -> Any:
        """The policy's tokenizer."""
        return load_tokenizer(self.model_name)

    def training_step(self, batch: OptimizerBatch, batch_idx: int) -> dict[str, Tensor] | None:
        """One optimizer step over a whole optimizer batch; an item with nothing to train takes none and is counted."""
        rows = trainable_rows(batch, skip_zero_advantage=not self.objective.needs_all_rows)
        if not rows:
            self.skipped_items += 1
            self._log({"actor/skipped_items": float(self.skipped_items)}, batch.explore_step)
            return None
        optimizer = self.optimizers()
        optimizer.zero_grad()
        parts = self._cut(batch, rows)
        computed_tokens = sum(int(batch.experiences[row].action_mask.sum()) for row in rows)
        metrics: list[dict[str, Tensor]] = []
        loss = torch.zeros((), device=self.device)
        for index, part in enumerate(parts):
            with nullcontext() if index == len(parts) - 1 else self._no_sync():
                part_loss, part_metrics = self._micro_step(batch, part, computed_tokens)
                self.manual_backward(part_loss)
            loss += part_loss.detach()
            metrics.append(part_metrics)
        grad_norm = self._clip(optimizer)
        optimizer.step()
        self.lr_schedulers().step()
        self._log_step(batch, rows, parts, combine_metrics(metrics), grad_norm)
        return {"loss": loss}

    def _micro_step(
        self, batch: OptimizerBatch, part: list[int], computed_tokens: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        micro = collate(batch, part, self.device)
        logprobs, entropy = self._logprobs(self.policy, micro)
        return self.objective(logprobs, entropy, micro, batch, computed_tokens)

    def _logprobs(self, model: Any, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies [B, R] of the trained tokens; 0 elsewhere."""
        states = model.base_model(input_ids=micro.tokens, use_cache=False).last_hidden_state
        positions, targets = micro.positions(micro.action_mask)
        temperature = micro.temperature[micro.action_mask.nonzero(as_tuple=True)[0]]
        logprobs, entropies = token_logprobs(
            Head.of(model), states.flatten(0, 1)[positions], targets, temperature, self.objective.needs_entropy
        )
        zeros = torch.zeros(micro.action_mask.shape, device=logprobs.device)
        return zeros.masked_scatter(micro.action_mask, logprobs), zeros.masked_scatter(micro.action_mask, entropies)

    def _cut(self, batch: OptimizerBatch, rows: Sequence[int]) -> list[list[int]]:
        lengths = [len(e.tokens) for e in batch.experiences]
        return cut(lengths, rows, self.algorithm.max_tokens_per_micro_batch)

    def _no_sync(self) -> Any:
        strategy_model = self.trainer.strategy.model
        return strategy_model.no_sync() if hasattr(strategy_model, "no_sync") else nullcontext()

    def _clip(self, optimizer: Any) -> float:
        gradients = [p.grad for p in self.policy.parameters() if p.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(gradients))
        if self.algorithm.max_grad_norm is not None:
            self.clip_gradients(optimizer, self.algorithm.max_grad_norm, "norm")
        return norm

    def _log_step(
        self, batch: OptimizerBatch, rows: list[int], parts: list[list[int]], totals: dict[str, Tensor], grad_norm: float
    ) -> None:
        lengths = [len(e.tokens) for e in batch.experiences]
        metrics = {f"actor/{name}": float(value) for name, value in totals.items()}
        metrics |= {
            "actor/grad_norm": grad_norm,
            "actor/lr": self.lr_schedulers().get_last_lr()[0],
            "actor/trained_rows": float(len(rows)),
            "actor/micro_batches": float(len(parts)),
            "actor/skipped_items": float(self.skipped_items),
            "perf/padding_ratio": padding_ratio(lengths, parts),
        }
        self._log(metrics, batch.explore_step)

    def _log(self, metrics: dict[str, float], explore_step: int) -> None:
        self.log_dict(metrics | {"explore_step": float(explore_step)}, on_step=True, on_epoch=False, batch_size=1)

    # -- columns, probes ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def prepare_step(self, experiences: Sequence[Experience]) -> dict[str, list[Tensor]]:
        """Per-token columns that must be computed before the step's first update; none for a plain on-policy step.

        `old_logprobs` where several optimizer steps follow one rollout batch, `ref_logprobs` where the objective has a
        reference. Each is a list of float32 CPU tensors [response], one an experience.
        """
        columns: dict[str, list[Tensor]] = {}
        if self.algorithm.optimizer_steps * self.algorithm.inner_epochs > 1:
            columns["old_logprobs"] = self._column(self.policy, experiences)
        if self.reference is not None:
            columns["ref_logprobs"] = self._column(self.reference, experiences)
        return columns

    def _column(self, model: Any, experiences: Sequence[Experience]) -> list[Tensor]:
        batch = OptimizerBatch.of(experiences, explore_step=0)
        column = [torch.zeros(len(e.tokens) - e.prompt_length) for e in experiences]
        for part in self._cut(batch, trainable_rows(batch, skip_zero_advantage=False)):
            values, _ = self._logprobs(model, collate(batch, part, self.device))
            for row, value in zip(part, values.cpu(), strict=True):
                column[row] = value[: len(column[row])].clone()
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

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The policy's weights; a frozen reference is loaded anew on resume, not saved."""
        state = super().state_dict(*args, **kwargs)
        return {name: value for name, value in state.items() if not name.startswith("reference.")}

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Restore what `state_dict` saved."""
        if self.reference is not None:
            state_dict = dict(state_dict) | {f"reference.{k}": v for k, v in self.reference.state_dict().items()}
        return super().load_state_dict(state_dict, strict=strict, assign=assign)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Counters and random states beside the weights."""
        checkpoint["policy"] = {"skipped_items": self.skipped_items, "rng": random_state()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the counter; random states are set when training starts, after everything else drew from them."""
        self.skipped_items = checkpoint["policy"]["skipped_items"]
        self._random_state = checkpoint["policy"]["rng"]

    def on_train_start(self) -> None:
        """Set the random states of a resumed run."""
        if self._random_state is not None:
            restore_random_state(self._random_state)
            self._random_state = None

