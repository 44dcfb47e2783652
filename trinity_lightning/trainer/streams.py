"""Which tokens of an optimizer batch each term of an objective is of, and what a teacher said of them."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trinity_lightning.algorithm.policy_loss.policy_loss import POLICY_LOSS_FN, BatchTotals
from trinity_lightning.common.experience import Experience, ExperienceError
from trinity_lightning.common.optimizer_batch import OptimizerBatch, is_expert, trained_mask
from trinity_lightning.config.streams import SUPERVISED, TEACHER_LOSS, StreamConfig
from trinity_lightning.trainer.layout import CANDIDATES, STREAM, MicroBatch

# Entries of `Experience.info`. Weights by the stream's name, a number for each token of the response; and the teacher's
# likeliest tokens at each of them: {"ids": int [response, k], "logprobs": float [response, k]}.
TOKEN_WEIGHTS, TEACHER_TOP_K = "token_weights", "teacher_top_k"
TEACHER = "teacher_top_k_logprobs"  # a column, and the argument of the loss


class Streams:
    """The terms of an objective, on experiences.

    Args:
        streams: by name.
    """

    def __init__(self, streams: Mapping[str, StreamConfig]) -> None:
        self._streams = streams
        losses = [POLICY_LOSS_FN.resolve(stream.loss) for stream in streams.values()]
        self._has_teacher = any(TEACHER in inspect.signature(loss).parameters for loss in losses)  # type: ignore[arg-type]

    def add_columns(self, batch: OptimizerBatch) -> None:
        """Give the batch the weights of its tokens, the totals of each stream, and the teacher's likeliest tokens.

        Raises:
            ExperienceError: weights that do not fit the response, or a rollout that the teacher has not read.
        """
        for name, stream in self._streams.items():
            weights = [_weights(name, stream, each) for each in batch.experiences]
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
        if self._has_teacher:
            said = [each.info[TEACHER_TOP_K]["ids"] for each in batch.experiences if TEACHER_TOP_K in each.info]
            k = said[0].shape[-1] if said else 1  # none is needed of experts alone
            read = [_teacher(each, k) for each in batch.experiences]
            batch.columns[CANDIDATES], batch.columns[TEACHER] = map(list, zip(*read, strict=True))

    def extras(self, micro: MicroBatch, batch: OptimizerBatch) -> dict[str, Any]:
        """What the loss of a micro-batch is given of all this."""
        weights = {name: micro.columns[STREAM + name] for name in self._streams}
        return {"stream_weights": weights, "stream_totals": batch.stream_totals, TEACHER: micro.columns.get(TEACHER)}


def _weights(name: str, stream: StreamConfig, experience: Experience) -> Tensor | None:
    """The weight of each token of the response in the stream; None: the experience has nothing to do with it.

    An experience none of whose own tokens is trained (an operator masked it, say) is in no stream but by zeros.
    """
    own, expert = trained_mask(experience), is_expert(experience)
    if stream.tokens in ("rollouts", "expert"):
        return own.float() if expert == (stream.tokens == "expert") else None
    if not own.any() or (expert and (stream.tokens == "observations" or stream.loss == TEACHER_LOSS)):
        return None
    predicted = torch.ones_like(own)
    predicted[: 1 - min(experience.prompt_length, 1)] = False  # nothing predicts the first token of all
    if stream.tokens == "observations":
        return (predicted & ~experience.action_mask.bool()).float()  # type: ignore[union-attr]
    given = experience.info.get(TOKEN_WEIGHTS, {}).get(name)
    if given is None:
        return None
    weights = torch.as_tensor(given, dtype=torch.float32)
    if weights.shape != own.shape or not weights.isfinite().all():
        raise ExperienceError(
            f"experience {experience.eid}: info['{TOKEN_WEIGHTS}']['{name}'] must be {len(own)} finite numbers, one "
            f"for each token of the response, not {list(weights.shape)}."
        )
    return weights * (predicted if stream.loss in SUPERVISED else own)


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
