"""Losses of one's own: whatever their names and order, each tensor arrives as what it is, or the loss is refused."""

import inspect
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support.errors import refuses
from torch import nn

from trinity_lightning.algorithm.policy_loss import aggregate, create_policy_loss
from trinity_lightning.algorithm.policy_loss.arguments import ARGS
from trinity_lightning.config.algorithm import AlgorithmConfig
from trinity_lightning.errors import ArgumentError, ConfigError
from trinity_lightning.trainer.objective import Objective

TENSORS = {
    "logprobs": torch.tensor([[-1.0]]),
    "old_logprobs": torch.tensor([[-2.0]]),
    "action_mask": torch.tensor([[True]]),
    "advantages": torch.tensor([[4.0]]),
}
REF = torch.tensor([[-3.0]])
# The names and orders of TRL, verl, OpenRLHF, Trinity and torchtune; and names that people shorten them to.
ORDERS = (
    "logprobs, old_logprobs, action_mask, advantages",
    "old_log_prob, log_prob, advantages, response_mask",
    "old_log_prob, log_prob, advantages, response_mask, cliprange=0.2",
    "log_probs, old_log_probs, advantages, action_mask=None",
    "logprob, old_logprob, action_mask, advantages",
    "pi_old_logprobs, pi_logprobs, ref_logprobs, advantages, loss_mask",
    "per_token_logps, old_per_token_logps, ref_per_token_logps, advantages, completion_mask",
    "advantages, logprobs, old_logprobs, action_mask",
    "adv, lp, old_lp, mask",
    "old, new, adv, mask",
    "lp, old, mask, something",
    "a, b, c, d",
    "a, b, c, d, /",
    "advantages, logprobs, /, action_mask, old_logprobs",
    "*, advantages, logprobs, old_logprobs, action_mask",
    "logprobs, old_logprobs, action_mask, advantages, *, reference_logprobs=None",
    "logprobs, action_mask, advantages",
    "curr_logprobs, prev_logprobs, token_mask, advantage",
    "logprobs, tau=1.0, *, old_logprobs, action_mask, advantages",
)
LETTERS = dict(zip("abcd", TENSORS, strict=True))


def loss_of(parameters: str) -> Any:
    """A loss with these parameters, which returns their values by name."""
    scope: dict[str, Any] = {}
    names = [text.split("=")[0].strip() for text in parameters.split(",") if text.strip() not in ("*", "/")]
    pairs = ", ".join(f"{name!r}: {name}" for name in names)
    exec(f"def loss({parameters}, **totals): return {{{pairs}}}", scope)
    return scope["loss"]


def meant(name: str) -> str | None:
    """The tensor that a reader expects under such a name."""
    parts = {"ref": "ref", "old": "old_logprobs", "prev": "old_logprobs", "mask": "action_mask", "adv": "advantages"}
    if name in ("cliprange", "tau", "something"):
        return None
    if name in LETTERS:
        return LETTERS[name]
    return next((tensor for part, tensor in parts.items() if part in name), "logprobs")


def given_to(loss: Any, **args: Any) -> dict[str, Any]:
    fn: Any = create_policy_loss(loss, **args)
    extras = {"ref_logprobs": REF} if "ref_logprobs" in inspect.signature(fn).parameters else {}
    return fn(*TENSORS.values(), num_tokens=1, num_sequences=1, max_response_length=1, **extras)


@pytest.mark.parametrize("parameters", ORDERS)
def test_each_tensor_arrives_under_the_name_that_means_it(parameters: str) -> None:
    for name, value in given_to(loss_of(parameters)).items():
        if (expected := meant(name)) is not None:
            assert value is (REF if expected == "ref" else TENSORS[expected]), name


def test_a_loss_in_our_order_is_called_as_it_is() -> None:
    loss = loss_of(ORDERS[0])
    assert create_policy_loss(loss).func is loss  # type: ignore[attr-defined]


@pytest.mark.parametrize("old", ["behavior_logprobs", "behaviour_logps", "mu_logprobs", "log_q"])
def test_a_name_of_the_policy_that_wrote_is_right_where_old_logprobs_stand(old: str) -> None:
    loss = loss_of(f"logprobs, {old}, action_mask, advantages")
    assert given_to(loss)[old] is TENSORS["old_logprobs"]


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ("behavior_logprobs, logprobs, action_mask, advantages", "'behavior_logprobs'"),
        ("old_log_prob, log_prob, returns, response_mask", "'returns'"),
        ("advantages, logprobs, x, action_mask", "'x'"),
        ("logprobs, log_probs, mask, advantages", "'log_probs'"),
        ("logprobs, rollout_log_probs, mask, adv", "'rollout_log_probs'"),
        ("old_logprobs, action_mask, advantages", "logprobs"),
    ],
)
def test_names_of_no_clear_meaning_are_refused(parameters: str, named: str) -> None:
    with refuses("algorithm.policy_loss") as refused:
        create_policy_loss(loss_of(parameters))
    assert named in str(refused.value)


# -- arguments ---------------------------------------------------------------------------------------------------------


def by_position(logprobs: Any, old_logprobs: Any, action_mask: Any, advantages: Any, tau=1.0, **totals: Any) -> Any:
    return {"tau": tau}


def without_default(logprobs: Any, old_logprobs: Any, action_mask: Any, advantages: Any, *, tau: Any, **_: Any) -> Any:
    return {"tau": tau}


class Plain:
    def __init__(self, tau=1.0) -> None:
        self.tau = tau

    def __call__(self, logprobs: Any, old_logprobs: Any, action_mask: Any, advantages: Any, **totals: Any) -> Any:
        return {"logprobs": logprobs, "tau": self.tau}


class Named(Plain):
    def __init__(self, *, tau: float) -> None:
        self.tau = tau


@dataclass
class Data:
    tau: float = 1.0

    def __call__(self, old_log_prob: Any, log_prob: Any, advantages: Any, response_mask: Any, **totals: Any) -> Any:
        return {"logprobs": log_prob, "tau": self.tau}


class Module(nn.Module):
    def __init__(self, tau: float = 1.0) -> None:
        super().__init__()
        self.tau = tau

    def forward(self, log_probs: Any, old_log_probs: Any, advantages: Any, action_mask: Any, **totals: Any) -> Any:
        return {"logprobs": log_probs, "tau": self.tau}


@pytest.mark.parametrize("loss", [by_position, without_default, Plain, Named, Data, Module])
def test_a_loss_with_one_argument_works_however_it_is_written(loss: Any) -> None:
    received = given_to(loss, tau=3.0)
    assert received["tau"] == 3.0
    assert received.get("logprobs", TENSORS["logprobs"]) is TENSORS["logprobs"]
    with refuses(f"{ARGS}.tao", ArgumentError) as refused:
        create_policy_loss(loss, tao=3.0)
    assert "'tau'" in str(refused.value)
    if loss in (without_default, Named):
        with refuses(f"{ARGS}.tau", ArgumentError):
            given_to(loss)
    else:
        assert given_to(loss)["tau"] == 1.0


def test_a_class_that_cannot_be_called_is_refused() -> None:
    with refuses("algorithm.policy_loss"):
        create_policy_loss(dict)  # type: ignore[arg-type]


# -- In an objective ---------------------------------------------------------------------------------------------------


def of_verl(old_log_prob: Any, log_prob: Any, advantages: Any, response_mask: Any, **totals: Any) -> Any:
    """Verl's order and names."""
    loss = aggregate(-advantages * (log_prob - old_log_prob).exp(), response_mask, **totals)
    return loss, {"pg_loss": loss.detach()}


def failing(logprobs: Any, old_logprobs: Any, action_mask: Any, advantages: Any, **totals: Any) -> Any:
    return logprobs["nothing"]


def test_a_loss_in_verl_s_order_trains_what_its_names_say() -> None:
    objective = Objective(AlgorithmConfig(policy_loss=f"{__name__}.of_verl"))
    logprobs = torch.tensor([[-1.0, -2.0], [-3.0, -4.0]], requires_grad=True)
    mask, advantages = torch.tensor([[True, True], [True, False]]), torch.tensor([[2.0, 2.0], [-1.0, -1.0]])
    loss, _ = objective._policy_loss(logprobs, logprobs.detach(), mask, advantages, num_tokens=3)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    torch.testing.assert_close(gradient, -advantages * mask / 3)


def test_an_error_in_a_loss_names_its_line_before_anything_is_loaded() -> None:
    with pytest.raises(ConfigError, match=r"test_arguments\.py:\d+ in failing"):
        Objective(AlgorithmConfig(policy_loss=f"{__name__}.failing"))
