"""The loss of one micro-batch: policy loss, importance weights, KL and entropy, put together from `algorithm`."""

from typing import Any

from torch import Tensor

from trinity_lightning.algorithm.entropy import entropy_loss
from trinity_lightning.algorithm.kl import kl_loss
from trinity_lightning.algorithm.policy_loss import create_policy_loss
from trinity_lightning.algorithm.policy_loss.aggregate import aggregate
from trinity_lightning.algorithm.rollout_correction import logprob_difference, rollout_correction
from trinity_lightning.common.config import AlgorithmConfig
from trinity_lightning.common.errors import ConfigError
from trinity_lightning.common.optimizer_batch import OptimizerBatch
from trinity_lightning.trainer.packing import MicroBatch


class Objective:
    """What is minimised, and what it needs to be computed.

    Args:
        config: the algorithm.

    Raises:
        ValueError, TypeError: an unknown policy loss, or an argument that it does not have.
    """

    def __init__(self, config: AlgorithmConfig) -> None:
        arguments = dict(config.policy_loss_args)
        if config.loss_agg_mode is not None:
            arguments["loss_agg_mode"] = config.loss_agg_mode
        self._policy_loss = create_policy_loss(config.policy_loss, **arguments)
        self._config = config

    @property
    def needs_reference(self) -> bool:
        """Whether log-probabilities of the initial policy are needed."""
        return self._config.kl.coef != 0

    @property
    def needs_entropy(self) -> bool:
        """Whether the entropy is part of the loss."""
        return self._config.entropy_coef != 0

    @property
    def needs_all_rows(self) -> bool:
        """Whether rows without advantage still have a gradient; otherwise leaving them out is exact."""
        return self.needs_reference or self.needs_entropy

    def __call__(
        self, logprobs: Tensor, entropy: Tensor, micro: MicroBatch, batch: OptimizerBatch, computed_tokens: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and metrics of a micro-batch; both add up over the micro-batches of the optimizer batch.

        Args:
            logprobs: log-probabilities of the response tokens [B, R], with gradient.
            entropy: their entropies [B, R]; with gradient if `needs_entropy`.
            micro: the micro-batch.
            batch: the whole optimizer batch, whose totals normalise the loss.
            computed_tokens: trained tokens that were not skipped, over all micro-batches; normalises measurements.
        """
        if "advantages" not in micro.columns:
            raise ConfigError("experiences without advantages reached the trainer: choose an add strategy that sets them.")
        mask = micro.action_mask
        on_policy = logprobs.detach()
        old = micro.columns.get("old_logprobs", on_policy)
        advantages, metrics = self._corrected(micro, old, computed_tokens)
        totals: dict[str, Any] = {
            "num_tokens": batch.num_tokens,
            "num_sequences": batch.num_sequences,
            "max_response_length": batch.max_response_length,
        }
        loss, policy_metrics = self._policy_loss(logprobs, old, mask, advantages, **totals)
        metrics |= policy_metrics
        mode = {"loss_agg_mode": self._config.loss_agg_mode} if self._config.loss_agg_mode else {}
        if self.needs_reference:
            kl = self._config.kl
            term, kl_metrics = kl_loss(
                kl.name, logprobs, micro.columns["ref_logprobs"], old, mask, coefficient=kl.coef, **mode, **totals
            )
            loss, metrics = loss + term, metrics | kl_metrics
        if self.needs_entropy:
            term, entropy_metrics = entropy_loss(entropy, mask, coefficient=self._config.entropy_coef, **mode, **totals)
            return loss + term, metrics | entropy_metrics
        metrics["entropy"] = aggregate(entropy, mask, num_tokens=computed_tokens)
        return loss, metrics

    def _corrected(self, micro: MicroBatch, old: Tensor, computed_tokens: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Advantages times importance weights for the engine's mismatch, and how far the engine is off."""
        advantages = micro.columns["advantages"]
        if "logprobs" not in micro.columns:  # experiences that no engine made (expert data) have none to correct for
            return advantages, {}
        sampled, mask, config = micro.columns["logprobs"], micro.action_mask, self._config.rollout_correction
        metrics = logprob_difference(old, sampled, mask, num_tokens=computed_tokens)
        if config.level == "none":
            return advantages, metrics
        weights, weight_metrics = rollout_correction(
            old,
            sampled,
            mask,
            level=config.level,
            mode=config.mode,
            min_weight=config.low,
            max_weight=config.high,
            num_tokens=computed_tokens,
        )
        return advantages * weights, metrics | weight_metrics
