"""Policy losses by name, and the shape they all share."""

import functools
import inspect
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from trinity_lightning.common.registry import Registry
from trinity_lightning.common.suggest import unknown_name

# exp(20) = 5e8: far beyond any useful ratio, and finite in float32 with room for products.
MAX_LOG_RATIO = 20.0

# Keyword arguments that the trainer gives, not the configuration.
_GIVEN = ("ref_logprobs", "expert_mask", "num_expert_tokens", "num_expert_sequences")


class PolicyLossFn(Protocol):
    """A policy loss: a pure function of per-token tensors [b, r] of one micro-batch.

    Args:
        logprobs: log pi_theta of each response token.
        old_logprobs: the same at the start of the step, without gradient (on-policy: `logprobs.detach()`).
        action_mask: which tokens are trained.
        advantages: A.
        ref_logprobs: of the reference model, for losses that need them.
        num_tokens, num_sequences, max_response_length: see `BatchTotals`.

    A loss with an argument `expert_mask` (which rows are an expert's, bool [b]) is given it, with the totals
    `num_expert_tokens` and `num_expert_sequences` of the whole optimizer batch; the other totals count those too.

    Returns:
        The loss, whose sum over micro-batches is the optimizer batch's, and metrics that combine by `combine_metrics`.
        `pg_loss` is always among them.
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


def create_policy_loss(name: str, **args: Any) -> PolicyLossFn:
    """The policy loss `name`, or at that dotted path, its arguments set: `create_policy_loss("ppo", dual_clip=None)`.

    Raises:
        ValueError: unknown name; the message lists the known ones.
        TypeError: unknown argument; the message lists the valid ones.
    """
    fn = cast(PolicyLossFn, POLICY_LOSS_FN.resolve(name))
    parameters = inspect.signature(fn).parameters.values()
    valid = [p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY and p.name not in _GIVEN]
    for arg in args:
        if arg not in valid:
            raise TypeError(unknown_name(f"argument of policy loss '{name}'", arg, valid))
    return functools.partial(fn, **args)


def log_ratio(logprobs: Tensor, old_logprobs: Tensor, action_mask: Tensor) -> Tensor:
    """log(pi_theta / pi_old) of each token, clamped to +-20; 0 outside the mask, whatever is there. [b, r]"""
    difference = (logprobs - old_logprobs).masked_fill(~action_mask.bool(), 0.0)
    return torch.clamp(difference, -MAX_LOG_RATIO, MAX_LOG_RATIO)
