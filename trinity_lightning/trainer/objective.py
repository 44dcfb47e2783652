"""The loss of one micro-batch: policy loss, importance weights, KL and entropy, put together from `algorithm`."""

import inspect
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trinity_lightning.algorithm.correction import logprob_difference, rollout_correction
from trinity_lightning.algorithm.policy_loss import create_policy_loss
from trinity_lightning.algorithm.policy_loss.arguments import LOSS
from trinity_lightning.algorithm.policy_loss.policy_loss import BatchTotals, PolicyLossFn, accepted, aggregate
from trinity_lightning.algorithm.policy_loss.terms import Term, with_terms
from trinity_lightning.common.experience import Experience, ExperienceError
from trinity_lightning.common.failures import listed
from trinity_lightning.common.optimizer_batch import OptimizerBatch, is_expert, predicted_mask, trained_mask
from trinity_lightning.config.algorithm import STREAMS, AlgorithmConfig
from trinity_lightning.config.own_code import raised_by
from trinity_lightning.config.registry import OFF_POLICY_LOSSES, PARTS
from trinity_lightning.errors import ConfigError, TrinityError
from trinity_lightning.trainer.layout import CANDIDATES, STREAM, MicroBatch, Part

if TYPE_CHECKING:
    from trinity_lightning.trainer.policy import PolicyModule


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
            self._policy_loss, self._streams, losses, of_rollouts = terms_of(config.policy_loss.name, self._policy_loss)
        if takes_terms or self.pairs or config.policy_loss.name not in PARTS["policy loss"]:
            check_result(config.policy_loss.name, self._policy_loss)

        # what the loss is
        train_all = [self.pairs or has_gradient_without_advantage(each) for each in of_rollouts]
        self._ignores_advantages = all(train_all)
        mode = inspect.signature((of_rollouts or losses)[0]).parameters.get("loss_agg_mode")
        self._mode = "token-mean" if mode is None else mode.default  # KL and entropy are aggregated as the loss is
        self._has_kl = config.kl.coef != 0
        self._against_engine = config.old_logprobs == "engine"
        if self.pairs or self._against_engine or self._ignores_advantages:
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
        from trinity_lightning.config.algorithm import check_corrected, needs_correction

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
            from trinity_lightning.algorithm.correction import off_policy_mask  # an option

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
        raise ConfigError(
            "experiences without advantages reached the trainer", fix="choose an add strategy that sets them"
        )

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
    raise ConfigError(
        f"the optimizer batch lacks the column '{name}'", fix="set it to PolicyModule.prepare_step's result"
    )


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


# Entries of `Experience.info`. Weights by the stream's name, a number for each token of the response; and the teacher's
# likeliest tokens at each of them: {"ids": int [response, k], "logprobs": float [response, k]}.
TOKEN_WEIGHTS, TEACHER_TOP_K = "token_weights", "teacher_top_k"

TEACHER = "teacher_top_k_logprobs"  # a column, and the argument of the loss


class Streams:
    """The terms of an objective, by name, on experiences.

    Raises:
        ConfigError: a loss of observations that needs what only tokens of the policy have.
    """

    def __init__(self, terms: Mapping[str, Term]) -> None:
        self._terms = terms
        self._supervised = {name: _is_supervised(term.loss) for name, term in terms.items()}
        self._taught = {name: TEACHER in inspect.signature(term.loss).parameters for name, term in terms.items()}
        for name, term in terms.items():
            if term.stream.tokens == "observations" and not self._supervised[name]:
                raise ConfigError(
                    f"{STREAMS}.{name}: loss {term.stream.loss} uses advantages, or log-probabilities of the policy "
                    "that sampled or of the reference, and observations have none",
                    fix="use sft",
                )

    def add_columns(self, batch: OptimizerBatch) -> None:
        """Give the batch the weights of its tokens, the totals of each stream, and the teacher's likeliest tokens.

        Raises:
            ExperienceError: weights that do not fit the response, or a rollout that the teacher has not read.
        """
        for name in self._terms:
            weights = [self._weights(name, each) for each in batch.experiences]
            batch.columns[STREAM + name] = [
                torch.zeros(each.response_length) if its is None else its
                for each, its in zip(batch.experiences, weights, strict=True)
            ]
            there = [its for its in weights if its is not None]
            batch.stream_totals[name] = BatchTotals(
                num_tokens=sum(int(its.count_nonzero()) for its in there),
                num_sequences=len(there),
                max_response_length=batch.max_response_length,
            )
        if any(self._taught.values()):
            said = [each.info[TEACHER_TOP_K]["ids"] for each in batch.experiences if TEACHER_TOP_K in each.info]
            k = said[0].shape[-1] if said else 1  # none is needed of experts alone
            read = [_teacher(each, k) for each in batch.experiences]
            batch.columns[CANDIDATES], batch.columns[TEACHER] = map(list, zip(*read, strict=True))

    def extras(self, micro: MicroBatch, batch: OptimizerBatch) -> dict[str, Any]:
        weights = {name: micro.columns[STREAM + name] for name in self._terms}
        return {"stream_weights": weights, "stream_totals": batch.stream_totals, TEACHER: micro.columns.get(TEACHER)}

    def _weights(self, name: str, experience: Experience) -> Tensor | None:
        """The weight of each token of the response in the stream; None: the experience has nothing to do with it.

        An experience none of whose own tokens is trained (an operator masked it, say) is in no stream but by zeros.
        """
        tokens, own, expert = self._terms[name].stream.tokens, trained_mask(experience), is_expert(experience)
        if tokens in ("rollouts", "expert"):
            return own.float() if expert == (tokens == "expert") else None
        if not own.any() or (expert and (tokens == "observations" or self._taught[name])):
            return None
        predicted = predicted_mask(experience)
        if tokens == "observations":
            return (predicted & ~own).float()
        given = experience.info.get(TOKEN_WEIGHTS, {}).get(name)
        if given is None:
            return None
        weights, where = torch.as_tensor(given, dtype=torch.float32), f"info['{TOKEN_WEIGHTS}']['{name}']"
        if weights.shape != own.shape or not weights.isfinite().all():
            raise ExperienceError(
                f"experience {experience.eid}: {where} must be {len(own)} finite numbers, one for each token of the "
                f"response, not {list(weights.shape)}."
            )
        mask, needs = (
            (predicted, "a token before it") if self._supervised[name] else (own, "tokens of the policy's own")
        )
        if weights[~mask].any():
            raise ExperienceError(
                f"experience {experience.eid}: {where} weighs token {int((weights * ~mask).nonzero()[0])} of the "
                f"response, and loss {self._terms[name].stream.loss} needs {needs}: give it weight 0."
            )
        return weights


def _teacher(experience: Experience, k: int) -> tuple[Tensor, Tensor]:
    """Ids, and log-probabilities under the teacher, of its likeliest tokens at each of the response [response, k]."""
    said, shape = experience.info.get(TEACHER_TOP_K), (experience.response_length, k)
    if said is None and (is_expert(experience) or not trained_mask(experience).any()):
        return torch.zeros(shape, dtype=torch.int64), torch.zeros(shape)
    if said is None or said["ids"].shape != shape or said["logprobs"].shape != shape:
        raise ExperienceError(
            f"experience {experience.eid} lacks the {k} tokens that a teacher finds likeliest at each of its "
            f"{shape[0]}: use the operator teacher_top_k, which loss teacher_kl needs."
        )
    return said["ids"].long(), said["logprobs"].float()


def _is_supervised(loss_fn: PolicyLossFn) -> bool:
    """Whether the loss is of any token: without advantages, and log-probabilities of another policy than the present.

    Nothing but the policy's own tokens has those.
    """
    plain = tried(loss_fn, advantage=0.0)
    others = tried(loss_fn, 1.0), tried(loss_fn, 0.0, moved=-1.0), tried(loss_fn, 0.0, apart=1.0)
    return bool(plain[1].any()) and all(
        torch.equal(one, other) for each in others for one, other in zip(plain, each, strict=True)
    )


def terms_of(
    name: str, policy_loss: PolicyLossFn
) -> tuple[PolicyLossFn, Streams | None, list[PolicyLossFn], list[PolicyLossFn]]:
    """A policy loss of several terms, whose losses are made here, once.

    Returns:
        the loss of all; its terms on experiences, if a teacher says anything of them; the losses of all terms, those of
        rollouts first; and of these the ones that are not an expert's.
    """
    policy_loss, terms = with_terms(name, policy_loss)
    streams = Streams(terms) if TEACHER in inspect.signature(policy_loss).parameters else None
    ordered = sorted(terms.values(), key=lambda term: term.stream.tokens != "rollouts")
    of_rollouts = [each.loss for each in ordered if each.stream.tokens != "expert"]
    return policy_loss, streams, [each.loss for each in ordered], of_rollouts


logger = logging.getLogger(__name__)


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
            "reference (or, with reference_free, has none)",
            key="algorithm.kl.coef",
            fix="set algorithm.kl.coef=0",
        )
    if against_engine and not any(map(_has_ratio, losses)):
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
