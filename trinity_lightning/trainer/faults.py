"""What is wrong with a policy loss, with a batch for it, or with a gradient that is not finite."""

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trinity_lightning.algorithm.policy_loss.arguments import LOSS
from trinity_lightning.algorithm.policy_loss.policy_loss import PolicyLossFn
from trinity_lightning.common.experience import ExperienceError
from trinity_lightning.common.failures import listed
from trinity_lightning.common.optimizer_batch import OptimizerBatch, is_expert, trained_mask
from trinity_lightning.config.own_code import raised_by
from trinity_lightning.config.registry import OFF_POLICY_LOSSES
from trinity_lightning.config.training import AlgorithmConfig
from trinity_lightning.errors import ConfigError, TrinityError
from trinity_lightning.trainer.layout import Part
from trinity_lightning.trainer.objective import call, tried

if TYPE_CHECKING:
    from trinity_lightning.trainer.policy import PolicyModule

logger = logging.getLogger(__name__)

# -- of a loss: by itself, with settings that it has no use for, or with a batch ---------------------------------------


def check_result(name: str, loss_fn: PolicyLossFn) -> None:
    """Refuse a policy loss that cannot be called as it will be, or does not return what it has to; by trying it."""
    try:
        with raised_by(f"policy loss '{name}'", ConfigError):
            returned: Any = call(loss_fn, advantage=1.0)[0]
    except TypeError as error:
        raise ConfigError(
            f"policy loss '{name}' cannot be called as {LOSS}, where totals are the counts of the whole batch: {error}."
        ) from error
    loss, metrics = returned if isinstance(returned, tuple) and len(returned) == 2 else (None, None)
    if not (isinstance(loss, Tensor) and isinstance(metrics, Mapping) and "pg_loss" in metrics):
        raise ConfigError(f"policy loss '{name}' must return (loss, metrics), a tensor and a dict with 'pg_loss'.")
    if loss.numel() != 1:
        raise ConfigError(
            f"policy loss '{name}' returns a loss of shape {list(loss.shape)}: return one number, by aggregate(losses, "
            "action_mask, **totals)."
        )
    if not loss.requires_grad:
        raise ConfigError(f"policy loss '{name}' returns a loss without gradient: compute it of logprobs, undetached.")


def check_settings(
    config: AlgorithmConfig, losses: Sequence[PolicyLossFn], pairs: bool, ignores_advantages: bool
) -> None:
    """Refuse settings that a loss made of these `losses` has no use for; a ConfigError.

    Args:
        pairs: whether it is of preference pairs.
        ignores_advantages: whether it trains on all tokens, whatever their advantage.
    """
    name, against_engine = config.policy_loss.name, config.old_logprobs == "engine"
    if pairs and config.kl.coef != 0:
        raise ConfigError(
            f"algorithm.kl.coef is {config.kl.coef}, and policy loss '{name}' itself holds the policy near the "
            "reference (or, with reference_free, has none): set algorithm.kl.coef=0."
        )
    if against_engine and not any(map(_has_ratio, losses)):
        raise ConfigError(
            f"algorithm.old_logprobs=engine, and policy loss '{name}' has no ratio to them: set "
            "algorithm.old_logprobs=trainer, with algorithm.rollout_correction for importance weights."
        )
    if config.off_policy_mask_threshold is not None and ignores_advantages:
        raise ConfigError(
            "algorithm.off_policy_mask_threshold leaves out tokens of negative advantage, and policy loss "
            f"'{name}' trains on all, whatever their advantage: leave it out."
        )
    if config.critic is not None and ignores_advantages:
        raise ConfigError(
            f"algorithm.critic goes with a loss by advantages alone, and policy loss '{name}' trains without them, "
            "too: choose algorithm.policy_loss=ppo, or set algorithm.critic=null."
        )


def check_batch(batch: OptimizerBatch, config: AlgorithmConfig, pairs: bool) -> None:
    """Refuse what does not fit a loss that is of preference pairs, or not, or lacks an engine's log-probabilities.

    Raises:
        ExperienceError: names an experience.
    """
    if pairs != (batch.unit == 2):
        found, fit = ("no preference pairs", "another loss") if pairs else ("preference pairs", "dpo")
        raise ExperienceError(
            f"policy loss '{config.policy_loss.name}' does not fit experience {batch.experiences[0].eid}, "
            f"which is one of {found}: choose algorithm.policy_loss={fit}."
        )
    if config.old_logprobs == "engine":
        need = "algorithm.old_logprobs=engine needs: choose algorithm.old_logprobs=trainer."
    else:
        need = (
            "algorithm.rollout_correction needs for experiences of older weights: let the workflow record them, or "
            f"choose a loss for experiences of any policy ({', '.join(OFF_POLICY_LOSSES)})."
        )
    for each in batch.experiences:
        if each.logprobs is None and not is_expert(each) and trained_mask(each).any():
            raise ExperienceError(
                f"experience {each.eid} has no log-probabilities of the engine that sampled it, which {need}"
            )


def _has_ratio(loss_fn: PolicyLossFn) -> bool:
    """Whether the loss depends on the old log-probabilities, found out by trying: some only where A < 0."""
    return any(
        not torch.equal(one, other)
        for advantage in (1.0, -1.0)
        for one, other in zip(tried(loss_fn, advantage, moved=0.0), tried(loss_fn, advantage, moved=-1.0), strict=True)
    )


# -- of a gradient: what of the optimizer batch it came from -----------------------------------------------------------

MAX_NAMED = 5


def count_bad_step(
    policy: "PolicyModule", batch: OptimizerBatch, norm: float, parts: Sequence[Part], losses: Tensor
) -> None:
    """Count a step without a finite gradient, and log what is at fault.

    Raises:
        TrinityError: too many come in a row.
    """
    faulty = policy.placement.faulty_gradients(policy.policy)
    if policy.critic is not None:
        faulty += [f"critic.{name}" for name in policy.placement.faulty_gradients(policy.critic)]
    fault = describe_fault(batch, [part.rows for part in parts], losses, faulty)
    in_a_row = policy.bad_steps_in_a_row + 1
    what = f"the gradient of explore step {batch.explore_step} has norm {norm} ({fault})"
    if in_a_row >= policy.algorithm.max_bad_steps:
        policy.bad_steps_in_a_row = 0  # a resumed run begins with this item, and may skip as many again
        raise TrinityError(
            f"{what}, {in_a_row} optimizer steps in a row without a finite gradient (algorithm.max_bad_steps). "
            "Look at these experiences and at the learning rate; the weights are those of the last good step."
        )
    policy.bad_steps, policy.bad_steps_in_a_row = policy.bad_steps + 1, in_a_row
    logger.warning("%s: no optimizer step was taken, %d so far.", what, policy.bad_steps)


def describe_fault(
    batch: OptimizerBatch, parts: Sequence[Sequence[int]], losses: Tensor, parameters: Sequence[str]
) -> str:
    """The experiences with values that are not finite, or whose loss is not, and the first parameter at fault.

    `losses` [parts] are those of micro-batches of these rows; `parameters` have gradients that are not finite.
    """
    computed = sorted(row for part in parts for row in part)
    wrong = {row: names for row in computed if (names := _not_finite(batch, row))}
    rows = list(wrong) or sorted(
        row for part, loss in zip(parts, losses, strict=True) if not loss.isfinite() for row in part
    )
    named = listed([batch.experiences[row].eid for row in rows], MAX_NAMED)
    values = sorted({name for names in wrong.values() for name in names})
    found = [f"{' and '.join(values) or 'the loss'} of experiences {named}"] if rows else []
    found += [f"the gradient of {name}" for name in parameters[:1]]
    return f"not finite: {', '.join(found) or 'the norm alone, which overflowed'}"


def _not_finite(batch: OptimizerBatch, row: int) -> list[str]:
    experience = batch.experiences[row]
    values = {"advantages": experience.advantages, "logprobs": experience.logprobs}
    values |= {name: column[row] for name, column in batch.columns.items()}
    return [name for name, value in values.items() if value is not None and not value.isfinite().all()]
