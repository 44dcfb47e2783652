"""Losses without a ratio: SFT, REINFORCE, OPMD, distillation over a teacher's likeliest tokens, and DPO."""

from typing import Unpack

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from trinity_lightning.algorithm.policy_loss.policy_loss import BatchTotals, aggregate, trained
from trinity_lightning.common.experience import ExperienceError
from trinity_lightning.config.values import number, one_of
from trinity_lightning.errors import ConfigError

DIRECTIONS = ("reverse", "forward")  # of `teacher_kl`
# Least probability of the rest: below it, 1 minus the other probabilities is rounding in float32.
LEAST_REST = 1e-6
LOSS_TYPES = ("sigmoid", "hinge", "ipo")  # of `dpo`


def sft(
    logprobs: Tensor,
    old_logprobs: Tensor,
    action_mask: Tensor,
    advantages: Tensor,
    *,
    ref_logprobs: Tensor | None = None,
    loss_agg_mode: str = "token-mean",
    **totals: Unpack[BatchTotals],
) -> tuple[Tensor, dict[str, Tensor]]:
    """Supervised fine-tuning: -lp, whatever the advantages. The only metric is pg_loss. ConfigError: unknown mode."""
    loss = aggregate(-logprobs, action_mask, loss_agg_mode, **totals)
    return loss, {"pg_loss": loss.detach()}


def reinforce(
    logprobs: Tensor,
    old_logprobs: Tensor,
    action_mask: Tensor,
    advantages: Tensor,
    *,
    ref_logprobs: Tensor | None = None,
    loss_agg_mode: str = "token-mean",
    **totals: Unpack[BatchTotals],
) -> tuple[Tensor, dict[str, Tensor]]:
    """REINFORCE: -A lp (Williams 1992). The only metric is pg_loss. ConfigError: unknown mode."""
    loss = aggregate(-advantages * trained(logprobs, action_mask), action_mask, loss_agg_mode, **totals)
    return loss, {"pg_loss": loss.detach()}


def opmd(
    logprobs: Tensor,
    old_logprobs: Tensor,
    action_mask: Tensor,
    advantages: Tensor,
    *,
    ref_logprobs: Tensor | None = None,
    tau: float = 1.0,
    loss_agg_mode: str = "token-mean",
    **totals: Unpack[BatchTotals],
) -> tuple[Tensor, dict[str, Tensor]]:
    """OPMD, its simple form: -A lp / (1 + tau) (Trinity-RFT, arXiv 2505.17826). The only metric is pg_loss."""
    number("algorithm.policy_loss.args.tau", tau, least=0)
    return reinforce(logprobs, old_logprobs, action_mask, advantages / (1 + tau), loss_agg_mode=loss_agg_mode, **totals)


# -- A teacher's likeliest tokens --------------------------------------------------------------------------------------


def teacher_kl(
    logprobs: Tensor,
    old_logprobs: Tensor,
    action_mask: Tensor,
    advantages: Tensor,
    *,
    teacher_top_k_logprobs: Tensor,
    top_k_logprobs: Tensor,
    ref_logprobs: Tensor | None = None,
    direction: str = "reverse",
    loss_agg_mode: str = "token-mean",
    **totals: Unpack[BatchTotals],
) -> tuple[Tensor, dict[str, Tensor]]:
    """KL of policy and teacher over the teacher's top k and the rest: reverse sum p log(p/q), forward sum q log(q/p).

    p is the policy and q the teacher, at every token of the responses. The sum is over the teacher's k likeliest tokens
    and, as one more, all others together: p_rest = 1 - sum p, q_rest = 1 - sum q. The result is a lower bound of the KL
    over the whole vocabulary, and equals it if k is the size of the vocabulary. Without the rest, a policy would lose
    nothing by moving its mass out of the top k. Reverse and forward KL on the policy's own responses: GKD (arXiv
    2306.13649); the rest as one more token: arXiv 2503.16870. Advantages are ignored.

    Args:
        teacher_top_k_logprobs: log q of the teacher's k likeliest tokens [b, r, k].
        top_k_logprobs: log p of the same tokens, with gradient [b, r, k].
        direction: "reverse" lets the policy leave out tokens, and punishes tokens that the teacher would not choose;
            "forward" punishes leaving out tokens that the teacher might choose.
        loss_agg_mode: see `aggregate`.

    Returns:
        The loss; the only metric is pg_loss, the loss: the KL in nats.
    """
    one_of("algorithm.policy_loss.args.direction", direction, DIRECTIONS)
    policy, teacher = with_rest(top_k_logprobs), with_rest(teacher_top_k_logprobs)
    a, b = (policy, teacher) if direction == "reverse" else (teacher, policy)
    loss = aggregate((a.exp() * (a - b)).sum(-1), action_mask, loss_agg_mode, **totals)  # KL(a || b)
    return loss, {"pg_loss": loss.detach()}


def with_rest(logprobs: Tensor) -> Tensor:
    """Log-probabilities of k tokens, and as one more of all other tokens together: [..., k] becomes [..., k + 1]."""
    rest = 1 - logprobs.exp().sum(-1, keepdim=True)
    return torch.cat([logprobs, rest.clamp(min=LEAST_REST).log()], -1)


# -- Preference pairs --------------------------------------------------------------------------------------------------


def dpo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    action_mask: Tensor,
    advantages: Tensor,
    *,
    ref_logprobs: Tensor,
    pairs: Tensor | None = None,
    beta: float = 0.1,
    loss_type: str = "sigmoid",
    label_smoothing: float = 0.0,
    reference_free: bool = False,
    **totals: Unpack[BatchTotals],
) -> tuple[Tensor, dict[str, Tensor]]:
    """DPO: -logsigmoid(beta D) of each pair, D = sum(lp - ref) of chosen less that of rejected (arXiv 2305.18290).

    The mean is over all pairs of the optimizer batch. Tensors are [b, r]; see `PolicyLossFn` for arguments not named
    here.

    Args:
        ref_logprobs: log-probabilities of the reference model; not used with `reference_free`.
        pairs: rows of chosen and rejected, int64 [b / 2, 2]; None: the rows are chosen, rejected, chosen, ...
        beta: how strongly the policy is held near the reference.
        loss_type: "sigmoid"; "hinge", max(0, 1 - beta D) (SLiC, arXiv 2305.10425); or "ipo", (D - 1 / (2 beta))^2 with
            means over tokens in place of the sums of D (arXiv 2310.12036).
        label_smoothing: with "sigmoid", the share s of pairs whose labels are taken to be wrong, from 0 to below 0.5:
            -(1 - s) logsigmoid(beta D) - s logsigmoid(-beta D).
        reference_free: use 0 for ref; no reference model is loaded.

    Returns:
        The loss; and metrics, each a mean over all pairs: `pg_loss`; `rewards/chosen` and `rewards/rejected`, which
        are beta sum(lp - ref); `rewards/margins`, their difference; `rewards/accuracies`, 1 where that is above 0; and
        `logps/chosen` and `logps/rejected`, which are sum(lp).

    Raises:
        ExperienceError: an odd number of rows, and no `pairs`.
    """
    key = "algorithm.policy_loss.args"
    number(f"{key}.beta", beta, above=0)
    one_of(f"{key}.loss_type", loss_type, LOSS_TYPES)
    number(f"{key}.label_smoothing", label_smoothing, least=0)
    if label_smoothing >= 0.5:
        raise ConfigError(
            f"{key}.label_smoothing is {label_smoothing}",
            key=f"{key}.label_smoothing",
            fix="give a number from 0 to below 0.5",
        )
    if label_smoothing > 0 and loss_type != "sigmoid":
        raise ConfigError(
            f"{key}.label_smoothing applies to loss_type=sigmoid only, not to {loss_type}",
            key=f"{key}.label_smoothing",
            fix="leave it out",
        )
    mask = action_mask.bool()
    if pairs is None and len(mask) % 2:
        raise ExperienceError(f"dpo is of pairs of rows, chosen and rejected, and here are {len(mask)}: leave one out.")
    rows = torch.arange(len(mask), device=mask.device).view(-1, 2) if pairs is None else pairs
    count = max(totals.get("num_sequences") or len(mask), 2) // 2
    policy = trained(logprobs, mask).sum(-1)
    scores = policy if reference_free else trained(logprobs - ref_logprobs, mask).sum(-1)
    compared = scores / mask.sum(-1).clamp(min=1) if loss_type == "ipo" else scores
    chosen, rejected = compared[rows].unbind(1)
    loss = _pair_losses(chosen - rejected, beta, loss_type, label_smoothing).sum() / count

    rewards, logps = beta * scores.detach()[rows], policy.detach()[rows]
    margins = rewards[:, 0] - rewards[:, 1]
    measured = {
        "rewards/chosen": rewards[:, 0],
        "rewards/rejected": rewards[:, 1],
        "rewards/margins": margins,
        "rewards/accuracies": (margins > 0).float(),
        "logps/chosen": logps[:, 0],
        "logps/rejected": logps[:, 1],
    }
    return loss, {"pg_loss": loss.detach()} | {name: values.sum() / count for name, values in measured.items()}


def _pair_losses(difference: Tensor, beta: float, loss_type: str, label_smoothing: float) -> Tensor:
    """The loss of each pair, from the difference of the scores of chosen and rejected, both [pairs]."""
    if loss_type == "hinge":
        return torch.relu(1 - beta * difference)
    if loss_type == "ipo":
        return (difference - 1 / (2 * beta)) ** 2
    scaled = beta * difference
    return -(1 - label_smoothing) * logsigmoid(scaled) - label_smoothing * logsigmoid(-scaled)
