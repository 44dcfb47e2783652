"""What all policy losses share: how they are called, and how values per token become one number, however cut."""

import functools
import inspect
from collections.abc import Iterable, Mapping
from typing import Any, Protocol, TypedDict, cast

import torch
from torch import Tensor

from trinity_lightning.config.algorithm import LOSS_AGG_MODES
from trinity_lightning.config.registry import PARTS, Registry
from trinity_lightning.config.values import unknown_name
from trinity_lightning.errors import ConfigError


class BatchTotals(TypedDict, total=False):
    """Totals of the *whole optimizer batch*, on all ranks; None or left out: of the tensors at hand.

    Keys:
        num_tokens: trained tokens, N.
        num_sequences: sequences, B; those without a trained token count.
        max_response_length: longest response that the run allows, in tokens, R: a constant, so that the length of one
            response does not weigh the others (Dr. GRPO).
    """

    num_tokens: int | None
    num_sequences: int | None
    max_response_length: int | None


def aggregate(
    values: Tensor,
    action_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    *,
    num_tokens: int | None = None,
    num_sequences: int | None = None,
    max_response_length: int | None = None,
) -> Tensor:
    """One number of `values` [b, r], those outside the mask ignored whatever they are.

    With t the values, m the mask and T_i the trained tokens of sequence i:

    - "token-mean": sum(t m) / N (DAPO, arXiv 2503.14476);
    - "seq-mean-token-mean": sum_i (sum(t m) / T_i) / B (GRPO, arXiv 2402.03300);
    - "seq-mean-token-sum": sum(t m) / B;
    - "seq-mean-token-sum-norm": sum(t m) / (B R) (Dr. GRPO, arXiv 2503.20783).

    The results of the micro-batches of an optimizer batch, each called with the totals of the whole, *add up* to the
    result of the whole. Without a trained token it is 0.

    Args:
        values: [b, r].
        action_mask: which tokens are trained, bool [b, r]; or their weights, float: t m is then t times the weight, and
            a token with one counts as one.
        loss_agg_mode: one of the four above.
        num_tokens, num_sequences, max_response_length: N, B and R; see `BatchTotals`.

    Raises:
        ConfigError: unknown mode.
    """
    mask = action_mask.bool()
    values = trained(values, mask)
    if action_mask.is_floating_point():
        values = values * action_mask
    if loss_agg_mode == "token-mean":
        return values.sum() / (mask.sum().clamp(min=1) if num_tokens is None else max(num_tokens, 1))

    return mean_of_sequences(values, mask, loss_agg_mode, num_sequences, max_response_length)


def trained(values: Tensor, action_mask: Tensor) -> Tensor:
    """The values, 0 outside the mask: what is not finite there would reach a product's gradient as 0 * inf. [b, r]"""
    return values.masked_fill(~action_mask.bool(), 0.0)


def token_share(condition: Tensor, action_mask: Tensor, num_tokens: int | None = None) -> Tensor:
    """Share of the optimizer batch's trained tokens for which `condition` [b, r] holds; adds over micro-batches."""
    return aggregate(condition.float(), action_mask, num_tokens=num_tokens)


def ratio_metrics(
    loss: Tensor, log_r: Tensor, action_mask: Tensor, computed: int | None, totals: BatchTotals, **conditions: Tensor
) -> dict[str, Tensor]:
    """pg_loss and ppo_kl as in `ppo`, and the share of tokens for which each condition [b, r] holds.

    `computed`: how many tokens they are of; None: all.
    """
    n = computed or totals.get("num_tokens")
    metrics = {"pg_loss": loss.detach(), "ppo_kl": -aggregate(log_r.detach(), action_mask, num_tokens=n)}
    return metrics | {name: token_share(condition, action_mask, n) for name, condition in conditions.items()}


def peak(values: Tensor) -> Tensor:
    """The maximum of values of at least 0; 0 if there are none."""
    return values.amax() if values.numel() else values.new_zeros(())


def combine_metrics(micro_batches: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Metrics of the optimizer batch: the maximum of keys that end in `/max`, the sum of all others.

    Every metric of losses, KL and corrections is a detached 0-d tensor, normalised by the totals of the whole optimizer
    batch: so metrics *add* over micro-batches and ranks, but for a maximum, which is known by its name.
    """
    combined: dict[str, Tensor] = {}
    for metrics in micro_batches:
        for name, value in metrics.items():
            if name not in combined:
                combined[name] = value
            elif name.endswith("/max"):
                combined[name] = torch.maximum(combined[name], value)
            else:
                combined[name] = combined[name] + value
    return combined


# -- Policy losses by name, and the shape they all share ---------------------------------------------------------------

MAX_LOG_RATIO = 20.0  # exp(20) = 5e8: far beyond any useful ratio, and finite in float32 with room for products


class PolicyLossFn(Protocol):
    """A policy loss: a pure function of per-token tensors [b, r] of one micro-batch.

    Args:
        logprobs: log pi_theta of each response token.
        old_logprobs: the same at the start of the step, without gradient (on-policy: `logprobs.detach()`); or the
            engine's, with algorithm.old_logprobs=engine.
        action_mask: which tokens are trained, bool; or their weights, float (of a stream).
        advantages: A.
        ref_logprobs: of the reference model, if one is loaded: for the KL term, or because the loss has this argument
            without a default, which says that it needs it (unless its argument `reference_free` is true).
        num_tokens, num_sequences, max_response_length: see `BatchTotals`.

    A loss is given further totals of the whole optimizer batch that it has an argument for: `num_computed_tokens`,
    trained tokens in rows that are computed at all (rows without advantage may be skipped), which measurements are
    normalised by; and, with `expert_mask` (which rows are an expert's, bool [b]), `num_expert_tokens` and
    `num_expert_sequences`; the other totals count those too.

    A loss with an argument `pairs` is of preference pairs, which are never parted: it is given their rows, int64
    [pairs, 2], chosen and rejected, and `num_sequences` is twice their number.

    A loss with an argument `teacher_top_k_logprobs` [b, r, k], of the k tokens that a teacher finds likeliest, is given
    the policy's log-probabilities of the same tokens as `top_k_logprobs`. Mixtures alone are given `stream_weights`,
    `stream_totals` and `terms`.

    Returns:
        The loss, whose sum over micro-batches is the optimizer batch's, and metrics that combine by `combine_metrics`.
        `pg_loss` is always among them.

    Raises:
        ConfigError: an argument of the loss's own is out of its range, or a name that it does not know.
    """

    def __call__(
        self,
        logprobs: Tensor,
        old_logprobs: Tensor,
        action_mask: Tensor,
        advantages: Tensor,
        *,
        ref_logprobs: Tensor | None = None,
        num_tokens: int | None = None,
        num_sequences: int | None = None,
        max_response_length: int | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]: ...


POLICY_LOSS_FN: Registry[PolicyLossFn] = Registry("policy loss")


def create_policy_loss(name: str, /, **args: Any) -> PolicyLossFn:
    """The policy loss `name`, or at that dotted path, its arguments set: `create_policy_loss("ppo", dual_clip=None)`.

    One of your own may be a function, or a class whose constructor takes the arguments. Its tensors may have the names
    that TRL, verl or OpenRLHF give them, in any order.

    Raises:
        ConfigError: unknown name, the message lists the known ones; or tensors of names that do not say what they are.
        ArgumentError: unknown argument, the message lists the valid ones; or one that is missing, or of the wrong type.
    """
    loss = POLICY_LOSS_FN.resolve(name)
    if args or name not in PARTS["policy loss"]:
        from trinity_lightning.algorithm.policy_loss.arguments import with_arguments

        return with_arguments(name if isinstance(name, str) else getattr(loss, "__name__", repr(loss)), loss, args)
    return functools.partial(cast("PolicyLossFn", loss))


def accepted(fn: PolicyLossFn, extras: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the extras that the loss has an argument for."""
    parameters = inspect.signature(fn).parameters
    return {name: value for name, value in extras.items() if name in parameters}


def log_ratio(logprobs: Tensor, old_logprobs: Tensor, action_mask: Tensor) -> Tensor:
    """log(pi_theta / pi_old) of each token, clamped to +-20; 0 outside the mask, whatever is there. [b, r]"""
    return trained(logprobs - old_logprobs, action_mask).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def mean_of_sequences(
    values: Tensor, mask: Tensor, loss_agg_mode: str, num_sequences: int | None, max_response_length: int | None
) -> Tensor:
    """One number of `values` [b, r], which are 0 outside the mask; modes, totals and errors as of `aggregate`."""
    sequences = max(mask.shape[0] if num_sequences is None else num_sequences, 1)
    if loss_agg_mode == "seq-mean-token-mean":
        return (values.sum(-1) / mask.sum(-1).clamp(min=1)).sum() / sequences
    if loss_agg_mode == "seq-mean-token-sum":
        return values.sum() / sequences
    if loss_agg_mode == "seq-mean-token-sum-norm":
        longest = mask.shape[1] if max_response_length is None else max_response_length
        return values.sum() / (sequences * max(longest, 1))
    raise ConfigError(unknown_name("loss_agg_mode", loss_agg_mode, LOSS_AGG_MODES))
