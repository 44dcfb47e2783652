"""The loss of one micro-batch: policy loss, importance weights, KL and entropy, put together from `algorithm`."""

import inspect
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trinity_lightning.algorithm.correction import logprob_difference, off_policy_mask, rollout_correction
from trinity_lightning.algorithm.kl import kl_loss
from trinity_lightning.algorithm.policy_loss.create import accepted, check_result, create_policy_loss, needs_of
from trinity_lightning.algorithm.policy_loss.policy_loss import BatchTotals, aggregate
from trinity_lightning.algorithm.policy_loss.terms import Term, with_terms
from trinity_lightning.common.experience import Experience, ExperienceError
from trinity_lightning.common.optimizer_batch import OptimizerBatch, is_expert, predicted_mask, trained_mask
from trinity_lightning.common.words import listed
from trinity_lightning.config.algorithm import STREAMS, AlgorithmConfig, refuse_uncorrected
from trinity_lightning.config.losses import LOSSES
from trinity_lightning.config.own_code import raised_by
from trinity_lightning.errors import ConfigError, TrinityError
from trinity_lightning.trainer.layout import CANDIDATES, STREAM, MicroBatch, Part

if TYPE_CHECKING:
    from trinity_lightning.trainer.policy import PolicyModule

logger = logging.getLogger(__name__)


class Objective:
    """The loss that is minimised, and the inputs that it needs.

    Attributes:
        needs_old_logprobs: log-probabilities from before the step's first update are needed, because several optimizer
            steps follow one rollout batch, and the ratio is not against the engine. With one step they are the detached
            new ones.
        needs_reference: log-probabilities of the initial policy are needed, by the KL term or the policy loss.
        needs_entropy: the entropy is part of the loss.
        needs_all_rows: rows without advantage still have a gradient; otherwise leaving them out is exact.
        pairs: the loss learns from preference pairs.
        teacher: the loss learns from the distribution of a teacher, whatever the rewards.
        caveats: warnings about this objective, for the log.

    Raises:
        ConfigError: the ratio is to be against the engine, and the loss has none; or a KL term with a loss of pairs.
        ValueError, TypeError: an unknown policy loss, or an argument that the loss does not have.
    """

    def __init__(self, config: AlgorithmConfig) -> None:
        name, arguments = config.policy_loss.name, dict(config.policy_loss.args)
        if config.loss_agg_mode is not None:
            arguments["loss_agg_mode"] = config.loss_agg_mode
        self._config = config
        loss = create_policy_loss(name, **arguments)
        needs = needs_of(name, loss)
        self._policy_loss, terms = with_terms(name, loss, needs)
        takes_streams = needs.terms and "stream_weights" in inspect.signature(loss).parameters  # mix makes its own
        self._streams = Streams(terms) if takes_streams or needs.teacher else None
        check_result(name, self._policy_loss)
        all_terms = sorted(terms.values(), key=lambda term: term.tokens != "rollouts")
        rollout_terms = [term for term in all_terms if term.tokens != "expert"]
        mode = inspect.signature((rollout_terms or all_terms)[0].loss).parameters.get("loss_agg_mode")
        self._mode = "token-mean" if mode is None else mode.default  # KL and entropy are averaged as the loss is

        self._ignores_advantages = all(term.needs.all_rows for term in rollout_terms)
        self._needs_correction = not all(term.needs.any_policy for term in all_terms)
        self._has_kl = config.kl.coef != 0
        self._against_engine = config.old_logprobs == "engine"
        self._needs_rollout_logprobs = self._against_engine
        self.pairs = any(term.needs.pairs for term in all_terms)
        self.teacher = bool(rollout_terms) and all(term.needs.teacher for term in rollout_terms)
        self.needs_entropy = config.entropy_coef != 0
        all_rows = any(term.needs.all_rows for term in rollout_terms)
        self.needs_all_rows = self._has_kl or self.needs_entropy or all_rows or config.critic is not None
        kl_in_reward = config.critic is not None and config.critic.kl_coef != 0
        self.needs_reference = self._has_kl or any(term.needs.reference for term in all_terms) or kl_in_reward
        self.needs_old_logprobs = config.optimizer_steps * config.inner_epochs > 1 and not self._against_engine
        check_settings(config, all_terms, self._ignores_advantages)
        self.caveats = _caveats(config, rollout_terms)

    def expect_older_weights(self) -> None:
        """Prepare for experiences of weights before the present ones; a ConfigError if nothing corrects for them."""
        if self._needs_correction:
            refuse_uncorrected(self._config)
        self._needs_rollout_logprobs = self._against_engine or self._needs_correction

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
            logprobs: log-probabilities of the response tokens [B, R], with gradient. If the micro-batch has candidates,
                their log-probabilities follow, [B, R, 1 + k].
            entropy: their entropies [B, R], with gradient.
            micro, batch: the micro-batch, and the whole, whose totals normalise the loss.
            computed_tokens: trained tokens that were not skipped, over all micro-batches; normalises measurements.
            sampled_tokens: computed tokens that an engine sampled; normalises the comparison of engine and trainer.

        Raises:
            ConfigError: the experiences lack advantages, or columns of `PolicyModule.prepare_step`.
        """
        mask, config = micro.action_mask, self._config
        logprobs, top_k_logprobs = (logprobs[..., 0], logprobs[..., 1:]) if logprobs.dim() == 3 else (logprobs, None)
        # Log-probabilities of the policy before the step, and of the engine that sampled: one of them is in the ratio.
        old_logprobs = column(micro.columns, "old_logprobs") if self.needs_old_logprobs else logprobs.detach()
        rollout_logprobs = self._rollout_logprobs(micro, old_logprobs)
        against = rollout_logprobs if self._against_engine else old_logprobs

        advantages, metrics = self._corrected(self._advantages(micro), micro, old_logprobs, sampled_tokens)
        if (threshold := config.off_policy_mask_threshold) is not None:
            keep, mask_metrics = off_policy_mask(
                logprobs, rollout_logprobs, mask, advantages, threshold=threshold, num_tokens=computed_tokens
            )
            advantages, metrics = advantages * keep, metrics | mask_metrics

        totals: dict[str, Any] = {
            "num_tokens": batch.num_tokens,
            "num_sequences": batch.num_sequences,
            "max_response_length": batch.max_response_length,
        }
        ref_logprobs = column(micro.columns, "ref_logprobs") if self.needs_reference else None
        extras = {
            "ref_logprobs": ref_logprobs,
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
                logprobs, against, mask, advantages, **totals, **accepted(self._policy_loss, extras)
            )
        metrics |= policy_metrics

        totals["loss_agg_mode"] = self._mode
        if ref_logprobs is not None and self._has_kl:
            name, coef = config.kl.name, config.kl.coef
            kl, kl_metrics = kl_loss(name, logprobs, ref_logprobs, against, mask, coefficient=coef, **totals)
            loss, metrics = loss + kl, metrics | kl_metrics
        if self.needs_entropy:
            loss = loss - config.entropy_coef * aggregate(entropy, mask, **totals)
        metrics["entropy"] = aggregate(entropy.detach(), mask, num_tokens=computed_tokens)
        return loss, metrics

    def _rollout_logprobs(self, micro: MicroBatch, old_logprobs: Tensor) -> Tensor:
        """The engine's log-probabilities [B, R]; in an expert's rows, which have none, the trainer's."""
        if "logprobs" not in micro.columns:
            return old_logprobs
        return torch.where(micro.sampled[:, None], micro.columns["logprobs"], old_logprobs)

    def _advantages(self, micro: MicroBatch) -> Tensor:
        if "advantages" in micro.columns:
            return micro.columns["advantages"]
        if self._ignores_advantages:
            return torch.zeros_like(micro.action_mask, dtype=torch.float32)
        raise ConfigError(
            "experiences without advantages reached the trainer",
            key="add_strategy",
            fix="choose an add strategy that sets them",
        )

    def _corrected(
        self, advantages: Tensor, micro: MicroBatch, old_logprobs: Tensor, sampled_tokens: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Advantages times importance weights for the engine's mismatch, and how far the engine is off, as metrics."""
        if "logprobs" not in micro.columns:
            return advantages, {}
        # A row that no engine made has nothing to correct, and would only dilute the metrics.
        sampled, config = micro.sampled[:, None], self._config.rollout_correction
        rollout_logprobs, mask = micro.columns["logprobs"], micro.action_mask & sampled
        metrics = logprob_difference(old_logprobs, rollout_logprobs, mask, num_tokens=sampled_tokens)
        if config.level == "none":
            return advantages, metrics
        weights, weight_metrics = rollout_correction(
            old_logprobs,
            rollout_logprobs,
            mask,
            level=config.level,
            mode=config.mode,
            min_weight=config.low,
            max_weight=config.high,
            num_tokens=sampled_tokens,
        )
        return torch.where(sampled, advantages * weights, advantages), metrics | weight_metrics

    def add_columns(self, batch: OptimizerBatch) -> None:
        """Give the batch the columns that only the loss needs; an ExperienceError if an experience lacks something."""
        if self._streams is not None:
            self._streams.add_columns(batch)

    def check(self, batch: OptimizerBatch) -> None:
        """Refuse a batch that the loss cannot be computed on.

        Raises:
            ExperienceError: names an experience that is a preference pair or not, unlike the loss, or that lacks the
                engine's log-probabilities.
        """
        if self.pairs != (batch.unit == 2):
            kind, loss = ("no preference pairs", "another loss") if self.pairs else ("preference pairs", "dpo")
            raise ExperienceError(
                f"policy loss '{self._config.policy_loss.name}' does not fit experience {batch.experiences[0].eid}, "
                f"which is one of {kind}: choose algorithm.policy_loss={loss}."
            )
        if self._needs_rollout_logprobs:
            _check_rollout_logprobs(batch, self._against_engine)


def column(columns: Mapping[str, Any], name: str) -> Any:
    """The column of that name; a ConfigError if there is none."""
    if name in columns:
        return columns[name]
    raise ConfigError(
        f"the optimizer batch lacks the column '{name}'", fix="set it to PolicyModule.prepare_step's result"
    )


def _check_rollout_logprobs(batch: OptimizerBatch, against_engine: bool) -> None:
    """Refuse experiences that an engine sampled and that lack its log-probabilities; an ExperienceError."""
    if against_engine:
        need = "algorithm.old_logprobs=engine needs: choose algorithm.old_logprobs=trainer."
    else:
        any_policy = ", ".join(name for name, loss in LOSSES.items() if loss.needs.any_policy)
        need = (
            "algorithm.rollout_correction needs for experiences of older weights: let the workflow record them, or "
            f"choose a loss for experiences of any policy ({any_policy})."
        )
    for experience in batch.experiences:
        if experience.logprobs is None and not is_expert(experience) and trained_mask(experience).any():
            raise ExperienceError(
                f"experience {experience.eid} has no log-probabilities of the engine that sampled it, which {need}"
            )


# -- settings that do not fit the loss ---------------------------------------------------------------------------------


def check_settings(config: AlgorithmConfig, terms: Sequence[Term], ignores_advantages: bool) -> None:
    """Refuse settings that an objective of these terms has no use for; a ConfigError.

    Args:
        config: the settings.
        terms: the terms.
        ignores_advantages: the terms on rollouts train all tokens, whatever their advantage.
    """
    name = config.policy_loss.name
    if any(term.needs.pairs for term in terms) and config.kl.coef != 0:
        raise ConfigError(
            f"algorithm.kl.coef is {config.kl.coef}, and policy loss '{name}' itself holds the policy near the "
            "reference (or, with reference_free, has none)",
            key="algorithm.kl.coef",
            fix="set algorithm.kl.coef=0",
        )
    if config.old_logprobs == "engine" and not any(term.needs.ratio for term in terms):
        raise ConfigError(
            f"algorithm.old_logprobs=engine, and policy loss '{name}' has no ratio to them",
            key="algorithm.old_logprobs",
            fix="set algorithm.old_logprobs=trainer, with algorithm.rollout_correction for importance weights",
        )
    if config.off_policy_mask_threshold is not None and ignores_advantages:
        raise ConfigError(
            "algorithm.off_policy_mask_threshold leaves out tokens of negative advantage, and policy loss "
            f"'{name}' trains on all, whatever their advantage",
            key="algorithm.off_policy_mask_threshold",
            fix="leave it out",
        )
    if config.critic is not None and ignores_advantages:
        raise ConfigError(
            f"algorithm.critic goes with a loss by advantages alone, and policy loss '{name}' trains without them, too",
            key="algorithm.critic",
            fix="choose algorithm.policy_loss=ppo, or set algorithm.critic=null",
        )


def _caveats(config: AlgorithmConfig, rollout_terms: Sequence[Term]) -> list[str]:
    """Warnings about settings that may not do what they seem to do with these terms on the rollouts."""
    caveats = []
    if config.kl.coef != 0 and config.kl.name == "k1":
        caveats.append(
            "algorithm.kl.name=k1 does not hold the policy near the reference: as a loss its expected gradient is "
            "0. Choose k2 or k3."
        )
    proportional = all(term.needs.proportional or term.needs.pairs for term in rollout_terms)
    if config.rollout_correction.level != "none" and not proportional:
        caveats.append(
            f"algorithm.rollout_correction multiplies advantages by its weights, and policy loss "
            f"'{config.policy_loss.name}' is not proportional to advantages: this does not correct it. Set "
            "algorithm.rollout_correction.level=none."
        )
    return caveats


# -- the terms of an objective, on experiences -------------------------------------------------------------------------

# Entries of `Experience.info`. Weights by the stream's name, a number for each token of the response; and the teacher's
# likeliest tokens at each of them: {"ids": int [response, k], "logprobs": float [response, k]}.
TOKEN_WEIGHTS, TEACHER_TOP_K = "token_weights", "teacher_top_k"

TEACHER = "teacher_top_k_logprobs"  # a column, and the argument of the loss


class Streams:
    """Gives an objective's terms, by name, their columns of a batch and their arguments of the loss.

    Raises:
        ConfigError: a loss on observations that needs advantages, or log-probabilities that only the policy's tokens
            have.
    """

    def __init__(self, terms: Mapping[str, Term]) -> None:
        self._terms = terms
        for name, term in terms.items():
            if term.tokens == "observations" and not term.needs.supervised:
                raise ConfigError(
                    f"{STREAMS}.{name}: loss {term.name} uses advantages, or log-probabilities of the policy "
                    "that sampled or of the reference, and observations have none",
                    key=f"{STREAMS}.{name}.loss",
                    fix="use sft",
                )

    def add_columns(self, batch: OptimizerBatch) -> None:
        """Give the batch the weights of its tokens, the totals of each stream, and the teacher's likeliest tokens.

        Raises:
            ExperienceError: weights that do not fit the response, or a rollout that the teacher has not read.
        """
        for name, term in self._terms.items():
            weights = [_weights(name, term, experience) for experience in batch.experiences]
            batch.columns[STREAM + name] = [
                torch.zeros(experience.response_length) if row is None else row
                for experience, row in zip(batch.experiences, weights, strict=True)
            ]
            in_stream = [row for row in weights if row is not None]
            batch.stream_totals[name] = BatchTotals(
                num_tokens=sum(int(row.count_nonzero()) for row in in_stream),
                num_sequences=len(in_stream),
                max_response_length=batch.max_response_length,
            )
        if any(term.needs.teacher for term in self._terms.values()):
            entries = [exp.info[TEACHER_TOP_K] for exp in batch.experiences if TEACHER_TOP_K in exp.info]
            k = entries[0]["ids"].shape[-1] if entries else 1  # experts alone need none
            rows = [_teacher(experience, k) for experience in batch.experiences]
            batch.columns[CANDIDATES], batch.columns[TEACHER] = map(list, zip(*rows, strict=True))

    def extras(self, micro: MicroBatch, batch: OptimizerBatch) -> dict[str, Any]:
        """Arguments of the loss made from the columns of the micro-batch."""
        weights = {name: micro.columns[STREAM + name] for name in self._terms}
        return {"stream_weights": weights, "stream_totals": batch.stream_totals, TEACHER: micro.columns.get(TEACHER)}


def _weights(name: str, term: Term, experience: Experience) -> Tensor | None:
    """The weight of each token of the response in the stream; None: the experience is not in it.

    If none of the policy's tokens in an experience is trained (an operator masked it, say), it is in no stream, or its
    weights are 0.
    """
    written, expert = trained_mask(experience), is_expert(experience)
    if term.tokens in ("rollouts", "expert"):
        return written.float() if expert == (term.tokens == "expert") else None
    if not written.any() or (expert and (term.tokens == "observations" or term.needs.teacher)):
        return None
    predicted = predicted_mask(experience)
    if term.tokens == "observations":
        return (predicted & ~written).float()
    entry = experience.info.get(TOKEN_WEIGHTS, {}).get(name)
    if entry is None:
        return None
    weights, where = torch.as_tensor(entry, dtype=torch.float32), f"info['{TOKEN_WEIGHTS}']['{name}']"
    if weights.shape != written.shape or not weights.isfinite().all():
        raise ExperienceError(
            f"experience {experience.eid}: {where} must be {len(written)} finite numbers, one for each token of the "
            f"response, not {list(weights.shape)}."
        )
    mask, need = (predicted, "a token before it") if term.needs.supervised else (written, "tokens of the policy's own")
    if weights[~mask].any():
        raise ExperienceError(
            f"experience {experience.eid}: {where} weighs token {int((weights * ~mask).nonzero()[0])} of the "
            f"response, and loss {term.name} needs {need}: give it weight 0."
        )
    return weights


def _teacher(experience: Experience, k: int) -> tuple[Tensor, Tensor]:
    """Ids and log-probabilities of the teacher's likeliest tokens at each token of the response, [response, k] each."""
    entry, shape = experience.info.get(TEACHER_TOP_K), (experience.response_length, k)
    if entry is None and (is_expert(experience) or not trained_mask(experience).any()):
        return torch.zeros(shape, dtype=torch.int64), torch.zeros(shape)
    if entry is None or entry["ids"].shape != shape or entry["logprobs"].shape != shape:
        raise ExperienceError(
            f"experience {experience.eid} lacks the {k} tokens that a teacher finds likeliest at each of its "
            f"{shape[0]}: use the operator teacher_top_k, which loss teacher_kl needs."
        )
    return entry["ids"].long(), entry["logprobs"].float()


# -- a step without a finite gradient ----------------------------------------------------------------------------------

MAX_NAMED = 5


def count_bad_step(
    policy: "PolicyModule", batch: OptimizerBatch, norm: float, parts: Sequence[Part], losses: Tensor
) -> None:
    """Count a step without a finite gradient, and log the experiences and parameters at fault.

    In float16 a gradient that is not finite, of a loss that is, has overflowed, and the loss scale counts it instead.

    Raises:
        TrinityError: too many come in a row.
        LossScaleError: a float16 gradient overflows at the least loss scale.
    """
    if policy.loss_scale is not None and losses.isfinite().all():
        policy.loss_scale.overflowed(batch.explore_step)
        return
    faulty = policy.placement.faulty_gradients(policy.policy)
    if policy.critic is not None:
        faulty += [f"critic.{name}" for name in policy.placement.faulty_gradients(policy.critic)]
    fault = describe_fault(batch, [part.rows for part in parts], losses, faulty)
    in_a_row = policy.bad_steps_in_a_row + 1
    bad_step = f"the gradient of explore step {batch.explore_step} has norm {norm} ({fault})"
    if in_a_row >= policy.algorithm.max_bad_steps:
        in_float16 = "" if policy.loss_scale is None else ", or choose another model.dtype: float16 ends at 65,504"
        policy.bad_steps_in_a_row = 0  # a resumed run begins with this item, and may skip as many again
        raise TrinityError(
            f"{bad_step}, {in_a_row} optimizer steps in a row without a finite gradient (algorithm.max_bad_steps). "
            f"Look at these experiences and at the learning rate{in_float16}; the weights are those of the last good "
            "step."
        )
    policy.bad_steps, policy.bad_steps_in_a_row = policy.bad_steps + 1, in_a_row
    logger.warning("%s: no optimizer step was taken, %d so far.", bad_step, policy.bad_steps)


def describe_fault(
    batch: OptimizerBatch, parts: Sequence[Sequence[int]], losses: Tensor, parameters: Sequence[str]
) -> str:
    """The experiences with values that are not finite, or whose loss is not, and the first parameter at fault.

    Args:
        batch: the optimizer batch.
        parts: the rows of each micro-batch.
        losses: the loss of each micro-batch [parts].
        parameters: names of the parameters whose gradients are not finite.
    """
    computed = sorted(row for part in parts for row in part)
    wrong = {row: names for row in computed if (names := _not_finite(batch, row))}
    rows = list(wrong) or sorted(
        row for part, loss in zip(parts, losses, strict=True) if not loss.isfinite() for row in part
    )
    named = listed([batch.experiences[row].eid for row in rows], MAX_NAMED)
    values = sorted({name for names in wrong.values() for name in names})
    faults = [f"{' and '.join(values) or 'the loss'} of experiences {named}"] if rows else []
    faults += [f"the gradient of {name}" for name in parameters[:1]]
    return f"not finite: {', '.join(faults) or 'the norm alone, which overflowed'}"


def _not_finite(batch: OptimizerBatch, row: int) -> list[str]:
    """Names of the values of an experience that are not finite."""
    experience = batch.experiences[row]
    values = {"advantages": experience.advantages, "logprobs": experience.logprobs}
    values |= {name: column[row] for name, column in batch.columns.items()}
    return [name for name, value in values.items() if value is not None and not value.isfinite().all()]
