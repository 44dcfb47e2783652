"""The loss of one micro-batch: policy loss, importance weights, KL and entropy, put together from `algorithm`."""

import inspect
from typing import Any

import torch
from torch import Tensor

from trinity_lightning.algorithm.entropy import entropy_loss
from trinity_lightning.algorithm.kl import KL_FN, kl_loss
from trinity_lightning.algorithm.policy_loss import create_policy_loss
from trinity_lightning.algorithm.policy_loss.aggregate import aggregate
from trinity_lightning.algorithm.policy_loss.registry import PolicyLossFn
from trinity_lightning.algorithm.rollout_correction import logprob_difference, rollout_correction
from trinity_lightning.common.config import AlgorithmConfig
from trinity_lightning.common.errors import ConfigError
from trinity_lightning.common.optimizer_batch import OptimizerBatch
from trinity_lightning.trainer.packing import MicroBatch


class Objective:
    """What is minimised, and what it needs to be computed.

    Args:
        config: the algorithm.

    Attributes:
        needs_old_logprobs: whether log-probabilities from before the step's first update are needed: several optimizer
            steps follow one rollout batch. With one, they are the detached new ones.
        needs_reference: whether log-probabilities of the initial policy are needed.
        needs_entropy: whether the entropy is part of the loss.
        needs_all_rows: whether rows without advantage still have a gradient; otherwise leaving them out is exact.

    Raises:
        ValueError, TypeError: an unknown policy loss or KL estimate, or an argument that the loss does not have.
    """

    def __init__(self, config: AlgorithmConfig) -> None:
        arguments = dict(config.policy_loss_args)
        if config.loss_agg_mode is not None:
            arguments["loss_agg_mode"] = config.loss_agg_mode
        KL_FN.get(config.kl.name)
        self._config = config
        self._policy_loss = create_policy_loss(config.policy_loss, **arguments)
        self._mode = _aggregation(self._policy_loss)
        self._tells_experts_apart = "expert_mask" in inspect.signature(self._policy_loss).parameters
        self._ignores_advantages = _has_gradient_without_advantage(self._policy_loss)
        self.needs_old_logprobs = config.optimizer_steps * config.inner_epochs > 1
        self.needs_reference = config.kl.coef != 0 and config.kl.name != "none"
        self.needs_entropy = config.entropy_coef != 0
        self.needs_all_rows = self.needs_reference or self.needs_entropy or self._ignores_advantages

    def __call__(
        self,
        logprobs: Tensor,
        entropy: Tensor,
        micro: MicroBatch,
        batch: OptimizerBatch,
        computed_tokens: int,
        sampled_tokens: int,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and metrics of a micro-batch; both add up over the micro-batches of the optimizer batch.

        Args:
            logprobs: log-probabilities of the response tokens [B, R], with gradient.
            entropy: their entropies [B, R], with gradient.
            micro: the micro-batch.
            batch: the whole optimizer batch, whose totals normalise the loss.
            computed_tokens: trained tokens that were not skipped, over all micro-batches; normalises measurements.
            sampled_tokens: those of them that an engine sampled; normalises what compares it with the trainer.

        Raises:
            ConfigError: the experiences lack advantages, or columns of `PolicyModule.prepare_step`.
        """
        mask, config = micro.action_mask, self._config
        old = _column(micro, "old_logprobs") if self.needs_old_logprobs else logprobs.detach()
        advantages, metrics = self._corrected(self._advantages(micro), micro, old, sampled_tokens)
        totals: dict[str, Any] = {
            "num_tokens": batch.num_tokens,
            "num_sequences": batch.num_sequences,
            "max_response_length": batch.max_response_length,
        }
        loss, policy_metrics = self._policy_loss(
            logprobs, old, mask, advantages, **totals, **self._expert_arguments(micro, batch)
        )
        metrics |= policy_metrics
        totals["loss_agg_mode"] = self._mode
        if self.needs_reference:
            ref = _column(micro, "ref_logprobs")
            term, kl_metrics = kl_loss(config.kl.name, logprobs, ref, old, mask, coefficient=config.kl.coef, **totals)
            loss, metrics = loss + term, metrics | kl_metrics
        if self.needs_entropy:
            term, _ = entropy_loss(entropy, mask, coefficient=config.entropy_coef, **totals)
            loss = loss + term
        metrics["entropy"] = aggregate(entropy.detach(), mask, num_tokens=computed_tokens)
        return loss, metrics

    def _advantages(self, micro: MicroBatch) -> Tensor:
        if "advantages" in micro.columns:
            return micro.columns["advantages"]
        if self._ignores_advantages:
            return torch.zeros_like(micro.action_mask, dtype=torch.float32)
        raise ConfigError("experiences without advantages reached the trainer: choose an add strategy that sets them.")

    def _expert_arguments(self, micro: MicroBatch, batch: OptimizerBatch) -> dict[str, Any]:
        """What a loss is told that treats an expert's rows apart."""
        if not self._tells_experts_apart:
            return {}
        return {
            "expert_mask": micro.expert,
            "num_expert_tokens": batch.num_expert_tokens,
            "num_expert_sequences": batch.num_expert_sequences,
        }

    def _corrected(
        self, advantages: Tensor, micro: MicroBatch, old: Tensor, sampled_tokens: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Advantages times importance weights for the engine's mismatch, and how far the engine is off."""
        if "logprobs" not in micro.columns:
            return advantages, {}
        # A row that no engine made has nothing to correct, and would only dilute what is measured.
        sampled, config = micro.sampled[:, None], self._config.rollout_correction
        rollout, mask = micro.columns["logprobs"], micro.action_mask & sampled
        metrics = logprob_difference(old, rollout, mask, num_tokens=sampled_tokens)
        if config.level == "none":
            return advantages, metrics
        weights, weight_metrics = rollout_correction(
            old,
            rollout,
            mask,
            level=config.level,
            mode=config.mode,
            min_weight=config.low,
            max_weight=config.high,
            num_tokens=sampled_tokens,
        )
        return torch.where(sampled, advantages * weights, advantages), metrics | weight_metrics


def _column(micro: MicroBatch, name: str) -> Tensor:
    if name not in micro.columns:
        raise ConfigError(
            f"the optimizer batch lacks the column '{name}': set it to PolicyModule.prepare_step's result."
        )
    return micro.columns[name]


def _aggregation(loss_fn: PolicyLossFn) -> str:
    """The loss's own `loss_agg_mode`, for KL and entropy to be aggregated alike."""
    parameter = inspect.signature(loss_fn).parameters.get("loss_agg_mode")
    return "token-mean" if parameter is None else parameter.default


def _has_gradient_without_advantage(loss_fn: PolicyLossFn) -> bool:
    """Whether tokens of advantage 0 are trained nevertheless (as in supervised fine-tuning), found out by trying."""
    logprobs = torch.tensor([[-1.0, -2.0], [-3.0, -0.5]], requires_grad=True)
    old = torch.tensor([[-1.5, -1.5], [-2.0, -0.5]])
    loss, _ = loss_fn(logprobs, old, torch.ones(2, 2, dtype=torch.bool), torch.zeros(2, 2))
    (gradient,) = torch.autograd.grad(loss, logprobs, allow_unused=True)
    return gradient is not None and bool(gradient.any())
