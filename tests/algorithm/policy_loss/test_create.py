"""The needs of losses: declarations of built-in losses hold, and declarations of the user's are checked."""

import inspect
from dataclasses import replace
from typing import Any

import pytest
from support.errors import refuses
from torch import Tensor

from trinity_lightning.algorithm.policy_loss import aggregate, create_policy_loss, declares
from trinity_lightning.algorithm.policy_loss.create import _needs_by_trial, needs_of
from trinity_lightning.config.algorithm import AlgorithmConfig
from trinity_lightning.config.losses import LOSSES, Needs
from trinity_lightning.trainer.objective import Objective

ARGUMENTS: dict[str, list[dict[str, Any]]] = {
    "asymre": [{}, {"baseline_shift": 0.0}],
    "dpo": [{}, {"reference_free": True}],
    "rec": [
        {},
        *({"clip_mode": mode} for mode in ("one-side", "two-side", "ring")),
        *({"weight": weight} for weight in ("importance_sampling", "advantage")),
        *({"regularizer": name, "regularizer_coef": 0.1} for name in ("k2", "forward-kl")),
    ],
}
CASES = [(name, arguments) for name in LOSSES for arguments in ARGUMENTS.get(name, [{}])]


@pytest.mark.parametrize(("name", "arguments"), CASES, ids=str)
def test_a_declaration_says_what_the_trial_finds(name: str, arguments: dict[str, Any]) -> None:
    """A trial cannot find whether a loss is right for experiences of any policy."""
    loss = create_policy_loss(name, **arguments)
    assert replace(needs_of(name, loss), any_policy=True) == _needs_by_trial(name, loss)


@pytest.mark.parametrize("name", LOSSES)
def test_a_reference_is_required_by_the_signature_of_a_loss_that_needs_one(name: str) -> None:
    """A user's loss says so in the same way."""
    parameter = inspect.signature(create_policy_loss(name)).parameters.get("ref_logprobs")
    required = parameter is not None and parameter.default is inspect.Parameter.empty
    assert required == (name == "dpo")


# -- Losses of the user's ----------------------------------------------------------------------------------------------


def clipped(logprobs: Tensor, old_logprobs: Tensor, action_mask: Tensor, advantages: Tensor, **totals: Any) -> Any:
    loss = aggregate(-(logprobs - old_logprobs).exp().clamp(max=2.0) * advantages, action_mask, **totals)
    return loss, {"pg_loss": loss.detach()}


@declares(ratio=True)
def declared(logprobs: Tensor, old_logprobs: Tensor, action_mask: Tensor, advantages: Tensor, **totals: Any) -> Any:
    return clipped(logprobs, old_logprobs, action_mask, advantages, **totals)


@declares(ratio=True)
class DeclaredClass:
    def __init__(self, power: float = 1.0) -> None:
        self.power = power

    def __call__(
        self, logprobs: Tensor, old_logprobs: Tensor, action_mask: Tensor, advantages: Tensor, **totals: Any
    ) -> Any:
        return clipped(logprobs, old_logprobs, action_mask, advantages, **totals)


@declares(ratio=True, all_rows=True, proportional=False)
def trust_region(logprobs: Tensor, old_logprobs: Tensor, action_mask: Tensor, advantages: Tensor, **totals: Any) -> Any:
    """Leaves out tokens whose log-probability has moved by more than 10 nats, which four tokens do not show."""
    inside = action_mask & ((logprobs - old_logprobs).abs() < 10)
    loss = aggregate(-logprobs * advantages * inside, action_mask, **totals)
    return loss, {"pg_loss": loss.detach()}


@declares(any_policy=True)
def without_its_ratio(
    logprobs: Tensor, old_logprobs: Tensor, action_mask: Tensor, advantages: Tensor, **totals: Any
) -> Any:
    return clipped(logprobs, old_logprobs, action_mask, advantages, **totals)


@declares()
def without_its_rows(
    logprobs: Tensor, old_logprobs: Tensor, action_mask: Tensor, advantages: Tensor, **totals: Any
) -> Any:
    loss = aggregate(-logprobs * (advantages + 1), action_mask, **totals)
    return loss, {"pg_loss": loss.detach()}


@declares(all_rows=True)
def not_proportional(
    logprobs: Tensor, old_logprobs: Tensor, action_mask: Tensor, advantages: Tensor, **totals: Any
) -> Any:
    return without_its_rows(logprobs, old_logprobs, action_mask, advantages, **totals)


@declares(supervised=True)
def not_supervised(
    logprobs: Tensor, old_logprobs: Tensor, action_mask: Tensor, advantages: Tensor, **totals: Any
) -> Any:
    loss = aggregate(-logprobs * advantages, action_mask, **totals)
    return loss, {"pg_loss": loss.detach()}


@declares(proportional=True)
def without_its_pairs(
    logprobs: Tensor, old_logprobs: Tensor, action_mask: Tensor, advantages: Tensor, *, pairs: Tensor, **totals: Any
) -> Any:
    return not_supervised(logprobs, old_logprobs, action_mask, advantages, **totals)


@declares()
def without_its_reference(
    logprobs: Tensor, old_logprobs: Tensor, action_mask: Tensor, advantages: Tensor, *, ref_logprobs: Tensor, **_: Any
) -> Any:
    return not_supervised(logprobs, old_logprobs, action_mask, advantages)


@declares()
def without_its_teacher(
    logprobs: Tensor,
    old_logprobs: Tensor,
    action_mask: Tensor,
    advantages: Tensor,
    *,
    teacher_top_k_logprobs: Tensor,
    **totals: Any,
) -> Any:
    return not_supervised(logprobs, old_logprobs, action_mask, advantages, **totals)


def needs(loss: Any) -> Needs:
    name = f"{__name__}.{loss.__name__}"
    return needs_of(name, create_policy_loss(name))


def test_a_loss_without_a_declaration_needs_what_the_trial_finds() -> None:
    assert needs(clipped) == Needs(ratio=True, any_policy=True)


@pytest.mark.parametrize("loss", [declared, DeclaredClass])
def test_a_declaration_counts(loss: Any) -> None:
    assert needs(loss) == Needs(ratio=True)


def test_a_declared_need_counts_even_if_it_does_not_show_on_four_tokens() -> None:
    assert needs(trust_region) == Needs(ratio=True, all_rows=True, proportional=False)


@pytest.mark.parametrize(
    ("loss", "right"),
    [
        (without_its_ratio, "ratio=True"),
        (without_its_reference, "reference=True"),
        (without_its_teacher, "teacher=True"),
        (without_its_pairs, "pairs=True"),
        (without_its_rows, "all_rows=True"),
        (not_proportional, "proportional=False"),
        (not_supervised, "supervised=False"),
    ],
)
def test_a_declaration_that_four_tokens_disprove_is_refused(loss: Any, right: str) -> None:
    with refuses("algorithm.policy_loss") as refused:
        needs(loss)
    assert right in str(refused.value.fix)


def objective(loss: Any) -> Objective:
    config = AlgorithmConfig(policy_loss=f"{__name__}.{loss.__name__}")
    config.rollout_correction.level = "none"
    return Objective(config)


def test_a_declared_loss_needs_a_correction_for_older_weights_unless_it_says_otherwise() -> None:
    objective(clipped).expect_older_weights()
    with refuses("algorithm.policy_loss"):
        objective(declared).expect_older_weights()
