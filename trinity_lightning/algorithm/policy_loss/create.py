"""Makes policy losses by name, with their arguments set, and tells their needs: declared, or found by trying them."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from trinity_lightning.algorithm.policy_loss.arguments import KEY, LOSS, with_arguments
from trinity_lightning.algorithm.policy_loss.policy_loss import PolicyLossFn
from trinity_lightning.config.losses import LOSSES, Needs
from trinity_lightning.config.own_code import raised_by
from trinity_lightning.config.registry import PARTS, Registry
from trinity_lightning.errors import ConfigError, configured_at

L = TypeVar("L")

POLICY_LOSS_FN: Registry[PolicyLossFn] = Registry("policy loss")


def create_policy_loss(name: str, /, **args: Any) -> PolicyLossFn:
    """The policy loss of that name or dotted path, its arguments set: `create_policy_loss("ppo", dual_clip=None)`.

    One of your own may be a function, or a class whose constructor takes the arguments. Its tensors may have the names
    that TRL, verl or OpenRLHF give them, in any order.

    Raises:
        ConfigError: unknown name, the message lists the known ones; or tensors whose names have no clear meaning.
        ArgumentError: unknown argument, the message lists the valid ones; or one that is missing, or of the wrong type.
    """
    with configured_at(KEY):
        loss = POLICY_LOSS_FN.resolve(name)
        if args or name not in PARTS["policy loss"]:
            title = name if isinstance(name, str) else getattr(loss, "__name__", repr(loss))
            return with_arguments(title, loss, args)
        return functools.partial(cast("PolicyLossFn", loss))


def accepted(fn: PolicyLossFn, extras: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of `extras` that the loss has an argument for."""
    parameters = inspect.signature(fn).parameters
    return {name: value for name, value in extras.items() if name in parameters}


# -- What a loss needs -------------------------------------------------------------------------------------------------

# The declared values that a trial on four tokens can disprove. A need may not show on them (a ratio that only a wide
# trust region asks for, say), so a declared need counts.
DISPROVABLE: Mapping[str, tuple[bool, ...]] = {
    **dict.fromkeys(("ratio", "reference", "pairs", "teacher", "all_rows"), (False,)),
    **dict.fromkeys(("supervised", "proportional"), (True,)),
    "terms": (False, True),
}


def declares(**needs: bool) -> Callable[[L], L]:
    """Declare the needs of a loss of your own, by the attributes of `Needs`: `@declares(ratio=True)`.

    Without a declaration the needs are found by trying the loss, and it counts as right for experiences of any policy.
    With a declaration the trial only checks it: it refuses a need that the loss shows and that is not declared, and
    `supervised` or `proportional` where the loss is not. Experiences of older weights need a correction unless the
    declaration says `any_policy=True`.
    """

    def decorator(loss: L) -> L:
        loss.needs = Needs(**needs)  # type: ignore[attr-defined]
        return loss

    return decorator


def needs_of(name: str, loss: PolicyLossFn) -> Needs:
    """The needs of a loss whose arguments are set: declared, or found by trying it if it is the user's.

    Raises:
        ConfigError: the user's loss cannot be used (see `check_result`), or its declaration is wrong.
    """
    if name in LOSSES:
        parameters = inspect.signature(loss).parameters
        return LOSSES[name].needs_with({key: parameter.default for key, parameter in parameters.items()})
    with configured_at(KEY):
        tried = _needs_by_trial(name, loss)
    declared = getattr(POLICY_LOSS_FN.resolve(name), "needs", None)
    if not isinstance(declared, Needs):
        return tried
    for need, disprovable in DISPROVABLE.items():
        says, does = getattr(declared, need), getattr(tried, need)
        if says != does and says in disprovable:
            raise ConfigError(
                f"policy loss '{name}' declares {need}={says}, and on four tokens it is {does}",
                key=KEY,
                fix=f"write @declares({need}={does})",
            )
    return declared


def _needs_by_trial(name: str, loss: PolicyLossFn) -> Needs:
    parameters = inspect.signature(loss).parameters
    check_result(name, loss)
    if "terms" in parameters and parameters.keys() & {"usual", "streams"}:
        return Needs(terms=True, any_policy=True)
    reference = "ref_logprobs" in parameters and parameters["ref_logprobs"].default is inspect.Parameter.empty
    reference_free = "reference_free" in parameters and parameters["reference_free"].default
    pairs = "pairs" in parameters
    with raised_by(f"policy loss '{name}'", ConfigError):
        return Needs(
            ratio=_has_ratio(loss),
            reference=reference and not reference_free,
            pairs=pairs,
            teacher="teacher_top_k_logprobs" in parameters,
            any_policy=True,
            supervised=not pairs and _is_supervised(loss),
            all_rows=pairs or bool(_try(loss, advantage=0.0, old=0.5)[1].any()),
            proportional=_is_proportional(loss),
        )


def check_result(name: str, loss: PolicyLossFn) -> None:
    """Try a loss on four tokens.

    Raises:
        ConfigError: it cannot be called, does not return (loss, metrics), or has an argument that is out of its range.
    """
    try:
        with raised_by(f"policy loss '{name}'", ConfigError):
            returned: Any = _call(loss, advantage=1.0)[0]
    except TypeError as error:
        raise ConfigError(
            f"policy loss '{name}' cannot be called as {LOSS}, where totals are the counts of the whole batch: "
            f"{error}.",
            key=KEY,
        ) from error
    value, metrics = returned if isinstance(returned, tuple) and len(returned) == 2 else (None, None)
    if not (isinstance(value, Tensor) and isinstance(metrics, Mapping) and "pg_loss" in metrics):
        raise ConfigError(
            f"policy loss '{name}' must return (loss, metrics), a tensor and a dict with 'pg_loss'.", key=KEY
        )
    if value.numel() != 1:
        raise ConfigError(
            f"policy loss '{name}' returns a loss of shape {list(value.shape)}",
            key=KEY,
            fix="return one number, by aggregate(losses, action_mask, **totals)",
        )
    if not value.requires_grad:
        raise ConfigError(
            f"policy loss '{name}' returns a loss without gradient",
            key=KEY,
            fix="compute it of logprobs, undetached",
        )


def _has_ratio(loss: PolicyLossFn) -> bool:
    """True if the loss depends on the old log-probabilities; some losses only where A < 0."""
    return any(_differ(_try(loss, advantage, old=0.0), _try(loss, advantage, old=-1.0)) for advantage in (1.0, -1.0))


def _is_supervised(loss: PolicyLossFn) -> bool:
    """True if the loss trains tokens of advantage 0, and depends on nothing but the policy's log-probabilities."""
    plain = _try(loss, advantage=0.0)
    changed = _try(loss, advantage=1.0), _try(loss, advantage=0.0, old=-1.0), _try(loss, advantage=0.0, ref=1.0)
    return bool(plain[1].any()) and not any(_differ(plain, other) for other in changed)


def _is_proportional(loss: PolicyLossFn) -> bool:
    """True if twice the advantage gives twice the loss, or the same loss, which then ignores advantages."""
    for sign in (1.0, -1.0):
        single, double = (_try(loss, sign * scale, old=0.1)[0] for scale in (1.0, 2.0))
        if not (torch.allclose(double, 2 * single) or torch.equal(double, single)):
            return False
    return True


def _differ(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> bool:
    return not all(map(torch.equal, one, other))


def _try(loss: PolicyLossFn, advantage: float, old: float = 0.0, ref: float = 0.3) -> tuple[Tensor, Tensor]:
    """Loss and gradient of four tokens, see `_call`."""
    (value, _), logprobs = _call(loss, advantage, old, ref)
    (gradient,) = torch.autograd.grad(value, logprobs, allow_unused=True)
    return value.detach(), torch.zeros(2, 2) if gradient is None else gradient


def _call(
    loss: PolicyLossFn, advantage: float, old: float = 0.0, ref: float = 0.3
) -> tuple[tuple[Tensor, dict[str, Tensor]], Tensor]:
    """The result of a loss for four tokens of two responses, and the tokens' log-probabilities [2, 2].

    Args:
        loss: the loss, its arguments set.
        advantage: of all tokens.
        old, ref: how much less likely the tokens are under the old policy and the reference, in nats. They differ by
            default: a loss may depend on the reference, and have no ratio.
    """
    logprobs = torch.tensor([[-1.0, -2.0], [-3.0, -0.5]], requires_grad=True)
    present, mask = logprobs.detach(), torch.ones(2, 2, dtype=torch.bool)
    teacher = present - 0.3
    extras = {
        "ref_logprobs": present - ref,
        "num_computed_tokens": 4,
        "expert_mask": torch.zeros(2, dtype=torch.bool),
        "num_expert_tokens": 0,
        "num_expert_sequences": 0,
        "pairs": torch.tensor([[0, 1]]),
        "top_k_logprobs": torch.stack([logprobs, logprobs - 1], -1),
        "teacher_top_k_logprobs": torch.stack([teacher, teacher - 2], -1),
    }
    totals: dict[str, Any] = {"num_tokens": 4, "num_sequences": 2, "max_response_length": 2}
    advantages = torch.full((2, 2), advantage)
    return loss(logprobs, present - old, mask, advantages, **totals, **accepted(loss, extras)), logprobs
