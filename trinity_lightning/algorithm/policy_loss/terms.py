"""Objectives of several terms, each over tokens of its own: `streams`, and `mix`, which has two."""

import functools
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Unpack, cast

from torch import Tensor

from trinity_lightning.algorithm.policy_loss.create import accepted, create_policy_loss, needs_of
from trinity_lightning.algorithm.policy_loss.policy_loss import BatchTotals, PolicyLossFn
from trinity_lightning.config.algorithm import STREAMS, TERM_LOSSES, StreamConfig, stream_configs
from trinity_lightning.config.loss_arguments import ARGS, KEY
from trinity_lightning.config.losses import LOSSES, Needs
from trinity_lightning.config.values import number, one_of
from trinity_lightning.errors import ConfigError


@dataclass(frozen=True)
class Term:
    """One loss of an objective.

    Attributes:
        name: name of the loss.
        loss: the loss, its arguments set.
        needs: the needs of the loss.
        tokens: the tokens it is computed on, see `StreamConfig`.
        weight: the weight of the term.
    """

    name: str
    loss: PolicyLossFn
    needs: Needs
    tokens: str = "rollouts"
    weight: float = 1.0


def with_terms(name: str, loss: PolicyLossFn, needs: Needs) -> tuple[PolicyLossFn, dict[str, Term]]:
    """A loss with its terms bound to it, and the terms by name.

    The terms of a mixture are made once, here. Any other loss is unchanged, and one term of its own name.

    Args:
        name: name of the loss.
        loss: the loss, its arguments set.
        needs: the needs of the loss.

    Raises:
        ConfigError: an argument of a mixture is out of its range, or names a loss that cannot be a term.
        ValueError, TypeError: an argument that a term's loss does not have.
    """
    if not needs.terms:
        return loss, {name: Term(name, loss, needs)}
    arguments = {name: parameter.default for name, parameter in inspect.signature(loss).parameters.items()}
    if is_mix := "usual" in arguments:
        configs = _mixed(arguments["mu"], arguments["usual"], arguments["usual_args"])
    else:
        configs = stream_configs(arguments["streams"])
    terms = _terms(configs, arguments["loss_agg_mode"], is_mix)
    return functools.partial(cast(Any, loss), terms=terms), terms


def _terms(configs: Mapping[str, StreamConfig], loss_agg_mode: str | None, is_mix: bool = False) -> dict[str, Term]:
    mode = {} if loss_agg_mode is None else {"loss_agg_mode": loss_agg_mode}
    terms = {}
    for name, stream in configs.items():
        with _in_its_stream(name, is_mix):
            loss = create_policy_loss(stream.loss, **(mode | stream.args))
            terms[name] = Term(stream.loss, loss, needs_of(stream.loss, loss), stream.tokens, stream.weight)
            if terms[name].needs.pairs:
                raise ConfigError(
                    f"term '{name}': loss {stream.loss} is of preference pairs, which are no stream.", key=KEY
                )
    return terms


@contextmanager
def _in_its_stream(name: str, is_mix: bool) -> Iterator[None]:
    """Let an error of a loss have the key of its stream, instead of the one that it has as the only loss of a run."""
    whole, args = (f"{STREAMS}.{name}.loss", f"{STREAMS}.{name}.args")
    if is_mix:  # its arguments make its streams
        whole, args = (f"{ARGS}.usual", f"{ARGS}.usual_args") if name == "rollouts" else (KEY, ARGS)
    try:
        yield
    except ConfigError as error:
        key = error.key or KEY
        key = whole if key == KEY else key.replace(ARGS, args, 1)
        raise type(error)(str(error).replace(ARGS, args), key=key) from error


def _mixed(mu: float, usual: str, usual_args: Mapping[str, Any] | None) -> dict[str, StreamConfig]:
    """The two streams of `mix`."""
    number("algorithm.policy_loss.args.mu", mu, least=0, most=1)
    without_teacher = [name for name in TERM_LOSSES if not LOSSES[name].needs.teacher]
    one_of("algorithm.policy_loss.args.usual", usual, without_teacher, with_paths=True)
    return {
        "rollouts": StreamConfig(usual, weight=1 - mu, args=dict(usual_args or {})),
        "sft": StreamConfig("sft", "expert", mu),
    }


def streams(
    logprobs: Tensor,
    old_logprobs: Tensor,
    action_mask: Tensor,
    advantages: Tensor,
    *,
    ref_logprobs: Tensor | None = None,
    num_computed_tokens: int | None = None,
    stream_weights: Mapping[str, Tensor] | None = None,
    stream_totals: Mapping[str, BatchTotals] | None = None,
    top_k_logprobs: Tensor | None = None,
    teacher_top_k_logprobs: Tensor | None = None,
    terms: Mapping[str, Term] | None = None,
    streams: Mapping[str, Any] | None = None,
    loss_agg_mode: str | None = None,
    **totals: Unpack[BatchTotals],
) -> tuple[Tensor, dict[str, Tensor]]:
    """Several terms: sum over streams of weight x loss, averaged over the stream's own tokens in the batch.

    Policy gradient on rollouts, cross-entropy on expert data or on the answers of tools, KL to a teacher: a token may
    be in several streams, with a weight in each. A stream is normalised by its own tokens and sequences in the whole
    optimizer batch: the number of other tokens does not change its weight. Tensors are [b, r]; see `PolicyLossFn` for
    arguments not named here.

    Args:
        stream_weights: by stream, the weight of each token, 0 for tokens that are not in it [b, r]; None: all tokens
            are of rollouts, and in every stream but an expert's.
        stream_totals: by stream, its totals; None: they are counted in the tensors at hand.
        terms: the streams with their losses, by `with_terms`; None: they are made from `streams`, for this call.
        streams: {name: {loss, tokens, weight, args}}, see `StreamConfig`; null: `ppo` on rollouts.
        loss_agg_mode: average of all streams, see `aggregate`; None: each stream has its loss's default. The `args` of
            a stream may have another one.

    Returns:
        The loss; the metrics of the first stream; and each further stream's loss, before its weight, as
        `<stream>_loss`.

    Raises:
        ConfigError, ValueError, TypeError: as `stream_configs`, or as the loss of a stream.
    """
    extras: dict[str, Any] = {
        "ref_logprobs": ref_logprobs,
        "top_k_logprobs": top_k_logprobs,
        "teacher_top_k_logprobs": teacher_top_k_logprobs,
    }
    tokens = totals.get("num_tokens")
    skipped = 0 if tokens is None or num_computed_tokens is None else tokens - num_computed_tokens
    loss, metrics = logprobs.new_zeros(()), {}
    for name, term in (_terms(stream_configs(streams), loss_agg_mode) if terms is None else terms).items():
        weights = action_mask.bool() & (term.tokens != "expert") if stream_weights is None else stream_weights[name]
        term_totals = totals if stream_totals is None else stream_totals[name]
        # Only rows without advantage may have been left out, and these are rollouts.
        count = term_totals.get("num_tokens")
        extras["num_computed_tokens"] = None if count is None or term.tokens != "rollouts" else count - skipped
        term_loss, term_metrics = term.loss(
            logprobs, old_logprobs, weights, advantages, **term_totals, **accepted(term.loss, extras)
        )
        loss = loss + term.weight * term_loss
        metrics |= {f"{name}_loss": term_loss.detach()} if metrics else term_metrics
    return loss, metrics


def mix(
    logprobs: Tensor,
    old_logprobs: Tensor,
    action_mask: Tensor,
    advantages: Tensor,
    *,
    ref_logprobs: Tensor | None = None,
    num_computed_tokens: int | None = None,
    expert_mask: Tensor | None = None,
    num_expert_tokens: int | None = None,
    num_expert_sequences: int | None = None,
    terms: Mapping[str, Term] | None = None,
    mu: float = 0.1,
    usual: str = "ppo",
    usual_args: Mapping[str, Any] | None = None,
    loss_agg_mode: str | None = None,
    **totals: Unpack[BatchTotals],
) -> tuple[Tensor, dict[str, Tensor]]:
    """MIX: (1 - mu) usual policy loss of the rollouts + mu SFT loss of the expert's (Trinity-RFT, arXiv 2505.17826).

    Two `streams`: mu is the weight of the expert data however many there are, and an optimizer batch without any takes
    (1 - mu) times the usual step. "seq-mean-token-sum-norm" divides both by the longest response that the run allows.
    Tensors are [b, r]; see `PolicyLossFn` for arguments not named here.

    Args:
        expert_mask: True for an expert's rows, bool [b]; None: there are none.
        num_expert_tokens, num_expert_sequences: the expert's share of `num_tokens` and `num_sequences`; None: it is
            counted in the tensors at hand.
        terms: as in `streams`; None: made of the arguments below.
        mu: weight of the expert data, from 0 to 1.
        usual: name of the loss of the rollouts, or the dotted path of your own.
        usual_args: its arguments, such as clip_range_high.
        loss_agg_mode: average of both terms, see `aggregate`; None: each term has its loss's default. `usual_args` may
            have another one for the rollouts.

    Returns:
        The loss; the metrics of the usual loss, on the rollouts and before the weighting; and `sft_loss`, the expert's
        term before the weighting.

    Raises:
        ConfigError, ValueError, TypeError: mu is out of range, or the usual loss is not for rollouts; or as that loss.
    """
    mask = action_mask.bool()
    expert = mask.new_zeros(len(mask)) if expert_mask is None else expert_mask.bool()
    both = _totals(mask, expert, num_expert_tokens, num_expert_sequences, totals)
    return streams(
        logprobs,
        old_logprobs,
        mask,
        advantages,
        ref_logprobs=ref_logprobs,
        num_computed_tokens=num_computed_tokens,
        stream_weights={"rollouts": mask & ~expert[:, None], "sft": mask & expert[:, None]},
        stream_totals=dict(zip(("rollouts", "sft"), both, strict=True)),
        terms=_terms(_mixed(mu, usual, usual_args), loss_agg_mode, is_mix=True) if terms is None else terms,
        **totals,
    )


def _totals(
    mask: Tensor, expert: Tensor, expert_tokens: int | None, expert_sequences: int | None, totals: BatchTotals
) -> tuple[BatchTotals, BatchTotals]:
    """Totals of the rollouts and of the expert's data; a total that is None is counted in the tensors at hand."""
    tokens, sequences = totals.get("num_tokens"), totals.get("num_sequences")
    tokens = int(mask.sum()) if tokens is None else tokens
    sequences = len(mask) if sequences is None else sequences
    expert_tokens = int(mask[expert].sum()) if expert_tokens is None else expert_tokens
    expert_sequences = int(expert.sum()) if expert_sequences is None else expert_sequences
    longest = totals.get("max_response_length")
    counts = (tokens - expert_tokens, sequences - expert_sequences), (expert_tokens, expert_sequences)
    rollouts, experts = (BatchTotals(num_tokens=n, num_sequences=b, max_response_length=longest) for n, b in counts)
    return rollouts, experts
