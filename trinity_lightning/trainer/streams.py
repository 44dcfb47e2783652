"""Which tokens of an optimizer batch each term of an objective is of, and what a teacher said of them."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trinity_lightning.algorithm.policy_loss.policy_loss import BatchTotals, PolicyLossFn
from trinity_lightning.algorithm.policy_loss.terms import Term, with_terms
from trinity_lightning.common.experience import Experience, ExperienceError
from trinity_lightning.common.optimizer_batch import OptimizerBatch, is_expert, predicted_mask, trained_mask
from trinity_lightning.config.objectives import STREAMS
from trinity_lightning.errors import ConfigError
from trinity_lightning.trainer.layout import CANDIDATES, STREAM, MicroBatch
from trinity_lightning.trainer.objective import tried

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
                    "that sampled or of the reference, and observations have none: use sft."
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
