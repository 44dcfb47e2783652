"""The shape that all policy losses share, and the averages and metrics that they are made of."""

from collections.abc import Iterable, Mapping
from typing import Protocol, TypedDict

import torch
from torch import Tensor

from trinity_lightning.config.algorithm import LOSS_AGG_MODES
from trinity_lightning.config.values import unknown_name
from trinity_lightning.errors import ConfigError


class PolicyLossFn(Protocol):
    """A policy loss: a pure function of per-token tensors [b, r] of one micro-batch.

    Further totals of the whole optimizer batch are given to a loss that has an argument for them. `num_computed_tokens`
    are the trained tokens in rows that are computed at all (rows without advantage may be skipped); measurements are
    normalised by it. `expert_mask` marks an expert's rows, bool [b]; `num_expert_tokens` and `num_expert_sequences` are
    the expert's share of the other totals.

    A loss with an argument `pairs` learns from preference pairs, which are never parted. It is given their rows, int64
    [pairs, 2], chosen and rejected, and `num_sequences` is twice their number.

    A loss with an argument `teacher_top_k_logprobs` [b, r, k], for the k tokens that a teacher finds likeliest, is
    given the policy's log-probabilities of the same tokens as `top_k_logprobs`. Mixtures alone are given
    `stream_weights`, `stream_totals` and `terms`.
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
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the loss of a micro-batch.

        Args:
            logprobs: log pi_theta of each response token.
            old_logprobs: the same before the step's first update, without gradient (on-policy: `logprobs.detach()`);
                or the engine's, with algorithm.old_logprobs=engine.
            action_mask: True for trained tokens, bool; or the weights of the tokens, float (in a stream).
            advantages: A.
            ref_logprobs: log-probabilities of the reference model, if one is loaded: for the KL term, or for a loss
                that has this argument without a default (unless its argument `reference_free` is true).
            num_tokens, num_sequences, max_response_length: see `BatchTotals`.

        Returns:
            The loss, whose sum over micro-batches is the optimizer batch's, and metrics that combine by
            `combine_metrics`. `pg_loss` is always among them.

        Raises:
            ConfigError: an argument of the loss's own is out of its range, or is an unknown name.
        """
        ...


class BatchTotals(TypedDict, total=False):
    """Totals of the *whole optimizer batch*, on all ranks. One that is None is counted in the tensors at hand.

    Keys:
        num_tokens: trained tokens, N.
        num_sequences: sequences, B; those without a trained token count.
        max_response_length: longest response that the run allows, in tokens, R: a constant, so that the length of one
            response does not weigh the others (Dr. GRPO).
    """

    num_tokens: int | None
    num_sequences: int | None
    max_response_length: int | None


# -- From tokens to one number -----------------------------------------------------------------------------------------


def aggregate(
    values: Tensor,
    action_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    *,
    num_tokens: int | None = None,
    num_sequences: int | None = None,
    max_response_length: int | None = None,
) -> Tensor:
    """The average of `values` [b, r] as one number; values outside the mask are ignored, also NaN.

    With t the values, m the mask and T_i the trained tokens of sequence i:

    - "token-mean": sum(t m) / N (DAPO, arXiv 2503.14476);
    - "seq-mean-token-mean": sum_i (sum(t m) / T_i) / B (GRPO, arXiv 2402.03300);
    - "seq-mean-token-sum": sum(t m) / B;
    - "seq-mean-token-sum-norm": sum(t m) / (B R) (Dr. GRPO, arXiv 2503.20783).

    The results of the micro-batches of an optimizer batch, each called with the totals of the whole, *add up* to the
    result of the whole. Without a trained token it is 0.

    Args:
        values: [b, r].
        action_mask: True for trained tokens, bool [b, r]; or their weights, float: t m is then t times the weight, and
            a token with a weight counts as one.
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
    sequences = max(mask.shape[0] if num_sequences is None else num_sequences, 1)
    if loss_agg_mode == "seq-mean-token-mean":
        return (values.sum(-1) / mask.sum(-1).clamp(min=1)).sum() / sequences
    if loss_agg_mode == "seq-mean-token-sum":
        return values.sum() / sequences
    if loss_agg_mode == "seq-mean-token-sum-norm":
        longest = mask.shape[1] if max_response_length is None else max_response_length
        return values.sum() / (sequences * max(longest, 1))
    raise ConfigError(unknown_name("loss_agg_mode", loss_agg_mode, LOSS_AGG_MODES), key="algorithm.loss_agg_mode")


def trained(values: Tensor, action_mask: Tensor) -> Tensor:
    """The values [b, r], 0 outside the mask: NaN or infinity there would reach a product's gradient as 0 * inf."""
    return values.masked_fill(~action_mask.bool(), 0.0)


# -- The ratio ---------------------------------------------------------------------------------------------------------

MAX_LOG_RATIO = 20.0  # exp(20) = 5e8: far beyond any useful ratio, and finite in float32 with room for products


def log_ratio(logprobs: Tensor, old_logprobs: Tensor, action_mask: Tensor) -> Tensor:
    """log(pi_theta / pi_old) of each token [b, r], clamped to +-20; 0 outside the mask, also for NaN."""
    return trained(logprobs - old_logprobs, action_mask).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


# -- Metrics, which add up over micro-batches --------------------------------------------------------------------------


def ratio_metrics(
    loss: Tensor,
    log_r: Tensor,
    action_mask: Tensor,
    num_computed_tokens: int | None,
    totals: BatchTotals,
    **conditions: Tensor,
) -> dict[str, Tensor]:
    """pg_loss and ppo_kl as in `ppo`, and the share of tokens for which each condition [b, r] holds.

    The shares are of the `num_computed_tokens`, or without them of all trained tokens.
    """
    n = num_computed_tokens or totals.get("num_tokens")
    metrics = {"pg_loss": loss.detach(), "ppo_kl": -aggregate(log_r.detach(), action_mask, num_tokens=n)}
    return metrics | {name: token_share(condition, action_mask, n) for name, condition in conditions.items()}


def token_share(condition: Tensor, action_mask: Tensor, num_tokens: int | None = None) -> Tensor:
    """Share of the optimizer batch's trained tokens for which `condition` [b, r] holds; adds over micro-batches."""
    return aggregate(condition.float(), action_mask, num_tokens=num_tokens)


def peak(values: Tensor) -> Tensor:
    """The maximum of values of at least 0; 0 if there are none."""
    return values.amax() if values.numel() else values.new_zeros(())


def combine_metrics(micro_batches: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Metrics of the optimizer batch: the maximum of keys that end in `/max`, the sum of all others.

    Every metric of losses, KL and corrections is a detached 0-d tensor, normalised by the totals of the whole optimizer
    batch. So metrics *add* over micro-batches and ranks, except a maximum, whose name ends in `/max`.
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
