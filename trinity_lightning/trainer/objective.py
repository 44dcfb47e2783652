"""The loss of one micro-batch: policy loss, importance weights, KL and entropy, put together from `algorithm`."""

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trinity_lightning.algorithm.correction import logprob_difference, rollout_correction
from trinity_lightning.algorithm.policy_loss import create_policy_loss
from trinity_lightning.algorithm.policy_loss.policy_loss import PolicyLossFn, accepted, aggregate
from trinity_lightning.common.optimizer_batch import OptimizerBatch
from trinity_lightning.config.own_code import raised_by
from trinity_lightning.config.registry import PARTS
from trinity_lightning.config.training import AlgorithmConfig
from trinity_lightning.errors import ConfigError
from trinity_lightning.trainer.layout import MicroBatch

if TYPE_CHECKING:
    from trinity_lightning.trainer.streams import Streams


class Objective:
    """What is minimised, and what it needs to be computed.

    Attributes:
        needs_old_logprobs: whether log-probabilities from before the step's first update are needed: several optimizer
            steps follow one rollout batch. With one, they are the detached new ones; and the engine has its own.
        needs_reference: whether log-probabilities of the initial policy are needed, by the KL term or the policy loss.
        needs_entropy: whether the entropy is part of the loss.
        caveats: what to warn of, once.
        needs_all_rows: whether rows without advantage still have a gradient; otherwise leaving them out is exact.
        pairs: whether the loss is of preference pairs.

    Raises:
        ConfigError: the ratio is to be against the engine, and the loss has none; or a KL term with a loss of pairs.
        ValueError, TypeError: an unknown policy loss, or an argument that the loss does not have.
    """

    def __init__(self, config: AlgorithmConfig) -> None:
        arguments = dict(config.policy_loss.args)
        if config.loss_agg_mode is not None:
            arguments["loss_agg_mode"] = config.loss_agg_mode
        self._config = config
        self._policy_loss = create_policy_loss(config.policy_loss.name, **arguments)
        self._streams: Streams | None = None
        losses = of_rollouts = [self._policy_loss]
        parameters = inspect.signature(self._policy_loss).parameters
        self.pairs = "pairs" in parameters
        takes_terms = "terms" in parameters or "teacher_top_k_logprobs" in parameters
        if takes_terms:
            from trinity_lightning.trainer.streams import terms_of

            self._policy_loss, self._streams, losses, of_rollouts = terms_of(config.policy_loss.name, self._policy_loss)
        if takes_terms or self.pairs or config.policy_loss.name not in PARTS["policy loss"]:
            from trinity_lightning.trainer.faults import check_result  # no usual loss

            check_result(config.policy_loss.name, self._policy_loss)

        # what the loss is
        train_all = [self.pairs or has_gradient_without_advantage(each) for each in of_rollouts]
        self._ignores_advantages = all(train_all)
        mode = inspect.signature((of_rollouts or losses)[0]).parameters.get("loss_agg_mode")
        self._mode = "token-mean" if mode is None else mode.default  # KL and entropy are aggregated as the loss is
        self._has_kl = config.kl.coef != 0
        self._against_engine = config.old_logprobs == "engine"
        if self.pairs or self._against_engine or self._ignores_advantages:
            from trinity_lightning.trainer.faults import check_settings  # each rule needs one of these

            check_settings(config, losses, self.pairs, self._ignores_advantages)

        # what it needs
        kl_in_reward = config.critic is not None and config.critic.kl_coef != 0
        self.needs_entropy = config.entropy_coef != 0
        self.needs_all_rows = self._has_kl or self.needs_entropy or any(train_all) or config.critic is not None
        self.needs_reference = self._has_kl or any(map(_requires_reference, losses)) or kl_in_reward
        self.needs_old_logprobs = config.optimizer_steps * config.inner_epochs > 1 and not self._against_engine
        self._needs_engine = self._against_engine
        self.caveats = []
        if self._has_kl and config.kl.name == "k1":
            self.caveats.append(
                "algorithm.kl.name=k1 does not hold the policy near the reference: as a loss its expected gradient is "
                "0. Choose k2 or k3."
            )
        if config.rollout_correction.level != "none" and not self.pairs and not all(map(is_weighed, of_rollouts)):
            self.caveats.append(
                f"algorithm.rollout_correction multiplies advantages by its weights, and policy loss "
                f"'{config.policy_loss.name}' is not proportional to those: the weights are not its own. Set "
                "algorithm.rollout_correction.level=none."
            )

    def expect_older_weights(self) -> None:
        """Experiences are going to be of weights before the present ones; a ConfigError if nothing corrects for it."""
        from trinity_lightning.config.objectives import check_corrected, needs_correction

        check_corrected(self._config)
        self._needs_engine = self._against_engine or needs_correction(self._config)

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
            logprobs: log-probabilities of the response tokens [B, R], with gradient; if the micro-batch has candidates,
                theirs follow, [B, R, 1 + k].
            entropy: their entropies [B, R], with gradient.
            micro, batch: the micro-batch, and the whole, whose totals normalise the loss.
            computed_tokens: trained tokens that were not skipped, over all micro-batches; normalises measurements.
            sampled_tokens: those of them that an engine sampled; normalises what compares it with the trainer.

        Raises:
            ConfigError: the experiences lack advantages, or columns of `PolicyModule.prepare_step`.
        """
        mask, config = micro.action_mask, self._config
        logprobs, top_k_logprobs = (logprobs[..., 0], logprobs[..., 1:]) if logprobs.dim() == 3 else (logprobs, None)
        trainer = column(micro.columns, "old_logprobs") if self.needs_old_logprobs else logprobs.detach()
        advantages, metrics = self._corrected(self._advantages(micro), micro, trainer, sampled_tokens)
        sampled = self._engine(micro, trainer)
        old = sampled if self._against_engine else trainer
        if config.off_policy_mask_threshold is not None:
            from trinity_lightning.algorithm.kl import off_policy_mask  # an option

            keep, mask_metrics = off_policy_mask(
                logprobs,
                sampled,
                mask,
                advantages,
                threshold=config.off_policy_mask_threshold,
                num_tokens=computed_tokens,
            )
            advantages, metrics = advantages * keep, metrics | mask_metrics
        totals: dict[str, Any] = {
            "num_tokens": batch.num_tokens,
            "num_sequences": batch.num_sequences,
            "max_response_length": batch.max_response_length,
        }
        ref = column(micro.columns, "ref_logprobs") if self.needs_reference else None
        extras = {
            "ref_logprobs": ref,
            "num_computed_tokens": computed_tokens,
            "expert_mask": micro.expert,
            "num_expert_tokens": batch.num_expert_tokens,
            "num_expert_sequences": batch.num_expert_sequences,
            "pairs": micro.pairs,
        }
        if self._streams is not None:
            extras |= self._streams.extras(micro, batch) | {"top_k_logprobs": top_k_logprobs}
        with raised_by(f"policy loss '{config.policy_loss.name}'"):
            loss, policy_metrics = self._policy_loss(
                logprobs, old, mask, advantages, **totals, **accepted(self._policy_loss, extras)
            )
        metrics |= policy_metrics
        totals["loss_agg_mode"] = self._mode
        if ref is not None and self._has_kl:
            from trinity_lightning.algorithm.kl import kl_loss  # an option

            kl, kl_metrics = kl_loss(config.kl.name, logprobs, ref, old, mask, coefficient=config.kl.coef, **totals)
            loss, metrics = loss + kl, metrics | kl_metrics
        if self.needs_entropy:
            loss = loss - config.entropy_coef * aggregate(entropy, mask, **totals)
        metrics["entropy"] = aggregate(entropy.detach(), mask, num_tokens=computed_tokens)
        return loss, metrics

    def add_columns(self, batch: OptimizerBatch) -> None:
        """Give the batch the columns that only the loss needs; an ExperienceError if an experience lacks something."""
        if self._streams is not None:
            self._streams.add_columns(batch)

    def check(self, batch: OptimizerBatch) -> None:
        """Refuse what the loss cannot be computed of; an ExperienceError, which names an experience."""
        if self._needs_engine or self.pairs != (batch.unit == 2):
            from trinity_lightning.trainer.faults import check_batch

            check_batch(batch, self._config, self.pairs)

    def _engine(self, micro: MicroBatch, trainer: Tensor) -> Tensor:
        """The engine's log-probabilities; in an expert's rows, which have none, the trainer's."""
        if "logprobs" not in micro.columns:
            return trainer
        return torch.where(micro.sampled[:, None], micro.columns["logprobs"], trainer)

    def _advantages(self, micro: MicroBatch) -> Tensor:
        if "advantages" in micro.columns:
            return micro.columns["advantages"]
        if self._ignores_advantages:
            return torch.zeros_like(micro.action_mask, dtype=torch.float32)
        raise ConfigError("experiences without advantages reached the trainer: choose an add strategy that sets them.")

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


def column(columns: Mapping[str, Any], name: str) -> Any:
    """The column of that name; a ConfigError if there is none."""
    if name in columns:
        return columns[name]
    raise ConfigError(f"the optimizer batch lacks the column '{name}': set it to PolicyModule.prepare_step's result.")


def _requires_reference(loss_fn: PolicyLossFn) -> bool:
    """Whether the loss has an argument `ref_logprobs` that it cannot do without, unless `reference_free` is set."""
    parameters = inspect.signature(loss_fn).parameters
    required = "ref_logprobs" in parameters and parameters["ref_logprobs"].default is inspect.Parameter.empty
    return required and not ("reference_free" in parameters and parameters["reference_free"].default)


# -- what a policy loss depends on, found out by trying it on four tokens ----------------------------------------------


def has_gradient_without_advantage(loss_fn: PolicyLossFn) -> bool:
    """Whether tokens of advantage 0 are trained nevertheless (as in supervised fine-tuning), found out by trying."""
    return bool(tried(loss_fn, advantage=0.0, moved=0.5)[1].any())


def is_weighed(loss_fn: PolicyLossFn) -> bool:
    """Whether a weight of an advantage is one of the token's loss, which is proportional to it, or ignores it."""
    for sign in (1.0, -1.0):
        (loss, _), (double, _) = (tried(loss_fn, sign * scale, moved=0.1) for scale in (1.0, 2.0))
        if not (torch.allclose(double, 2 * loss) or torch.equal(double, loss)):
            return False
    return True


def tried(loss_fn: PolicyLossFn, advantage: float, moved: float = 0.0, apart: float = 0.3) -> tuple[Tensor, Tensor]:
    """Loss and gradient of four tokens; see `call`."""
    (loss, _), logprobs = call(loss_fn, advantage, moved, apart)
    (gradient,) = torch.autograd.grad(loss, logprobs, allow_unused=True)
    return loss.detach(), torch.zeros(2, 2) if gradient is None else gradient


def call(
    loss_fn: PolicyLossFn, advantage: float, moved: float = 0.0, apart: float = 0.3
) -> tuple[tuple[Tensor, dict[str, Tensor]], Tensor]:
    """What a loss returns of four tokens, so far from old policy and reference; and their log-probabilities."""
    logprobs = torch.tensor([[-1.0, -2.0], [-3.0, -0.5]], requires_grad=True)
    old, mask = logprobs.detach() - moved, torch.ones(2, 2, dtype=torch.bool)
    ref = logprobs.detach() - apart  # whatever `moved` is: a loss may depend on it, and have no ratio
    teacher = logprobs.detach() - 0.3
    extras = {"ref_logprobs": ref, "num_computed_tokens": 4, "expert_mask": torch.zeros(2, dtype=torch.bool)}
    extras |= {"num_expert_tokens": 0, "num_expert_sequences": 0, "pairs": torch.tensor([[0, 1]])}
    extras |= {"top_k_logprobs": torch.stack([logprobs, logprobs - 1], -1)}
    extras |= {"teacher_top_k_logprobs": torch.stack([teacher, teacher - 2], -1)}
    totals: dict[str, Any] = {"num_tokens": 4, "num_sequences": 2, "max_response_length": 2}
    advantages = torch.full((2, 2), advantage)
    return loss_fn(logprobs, old, mask, advantages, **totals, **accepted(loss_fn, extras)), logprobs
