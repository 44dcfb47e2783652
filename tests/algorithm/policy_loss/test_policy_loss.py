"""Promises of all losses of tokens, and PPO against numpy."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.errors import refuses
from support.losses import batch, totals_of, with_gradient

from trinity_lightning.algorithm import policy_loss
from trinity_lightning.algorithm.policy_loss import LOSS_AGG_MODES, POLICY_LOSS_FN, aggregate, create_policy_loss
from trinity_lightning.algorithm.policy_loss.arguments import ARGS
from trinity_lightning.algorithm.policy_loss.create import accepted
from trinity_lightning.algorithm.policy_loss.policy_loss import combine_metrics
from trinity_lightning.config.registry import PARTS
from trinity_lightning.errors import ArgumentError, ConfigError
from trinity_lightning.monitor.presentation import find_metric

# Losses of tokens; those of pairs and of a teacher have tests of their own.
TOKEN_LOSSES = [name for name in POLICY_LOSS_FN if name not in ("dpo", "teacher_kl")]


def numpy_ppo(lp, old, mask, advantages, *, low=0.2, high=0.2, c=3.0):
    """Token losses and which of them were clipped, in plain Python."""
    losses, marks = np.zeros(lp.shape), {"low": 0, "high": 0, "dual": 0}
    for i, j in zip(*np.nonzero(mask), strict=True):
        a, ratio = advantages[i, j], np.exp(lp[i, j] - old[i, j])
        losses[i, j] = -min(ratio * a, np.clip(ratio, 1 - low, 1 + high) * a)
        if a < 0:
            losses[i, j] = min(losses[i, j], -c * a)
        marks["low"] += a < 0 and ratio < 1 - low
        marks["high"] += a > 0 and ratio > 1 + high
        marks["dual"] += a < 0 and ratio > c
    return losses, marks


def test_ppo_and_its_metrics_equal_numpy():
    logprobs, old, mask, advantages = batch(b=40, r=20, spread=1.0)
    loss, metrics = create_policy_loss("ppo", clip_range_high=0.28)(logprobs, old, mask, advantages)
    losses, marks = numpy_ppo(logprobs.numpy(), old.numpy(), mask.numpy(), advantages.numpy(), high=0.28)
    n = int(mask.sum())
    assert loss.item() == pytest.approx(losses.sum() / n, rel=1e-12)
    assert metrics["pg_loss"].item() == loss.item()
    assert metrics["ppo_kl"].item() == pytest.approx((old - logprobs)[mask].mean().item())
    assert min(marks.values()) > 3
    for name, count in marks.items():
        assert metrics[f"pg_clipfrac_{name}"].item() == pytest.approx(count / n, abs=1e-6)
    assert metrics["pg_clipfrac"].item() == pytest.approx((marks["low"] + marks["high"]) / n, abs=1e-6)


@pytest.mark.parametrize("name", sorted(POLICY_LOSS_FN))
def test_metrics_are_in_the_table_of_names(name):
    logprobs, old, mask, advantages = (tensor[:4] for tensor in batch())
    extras = {"ref_logprobs": old, "expert_mask": mask[:, 0]} | {"num_expert_tokens": 2, "num_expert_sequences": 1}
    extras |= dict.fromkeys(("top_k_logprobs", "teacher_top_k_logprobs"), old[..., None])
    fn = create_policy_loss(name)
    _, metrics = fn(logprobs, old, mask, advantages, **accepted(fn, extras))
    assert [metric for metric in metrics if find_metric(f"actor/{metric}") is None] == []


def test_on_policy_ppo_is_reinforce():
    logprobs, _, mask, advantages = batch()
    _, grad, metrics = with_gradient(create_policy_loss("ppo"), logprobs, logprobs, mask, advantages)
    _, expected, _ = with_gradient(create_policy_loss("reinforce"), logprobs, logprobs, mask, advantages)
    torch.testing.assert_close(grad, expected)
    assert metrics["ppo_kl"] == metrics["pg_clipfrac"] == metrics["pg_clipfrac_dual"] == 0


def test_clipped_tokens_have_no_gradient_in_ppo_and_keep_it_in_cispo():
    mask = torch.ones(1, 4, dtype=torch.bool)
    advantages = torch.tensor([[1.0, -1.0, 1.0, -1.0]])
    old = torch.full((1, 4), -1.0)
    logprobs = old + torch.tensor([[1.0, -1.0, -1.0, 2.0]])  # high clip, low clip, no clip, dual clip
    _, grad, metrics = with_gradient(create_policy_loss("ppo"), logprobs, old, mask, advantages)
    assert (grad != 0).tolist() == [[False, False, True, False]]
    assert [metrics[f"pg_clipfrac_{name}"].item() for name in ("high", "low", "dual")] == [0.25] * 3
    _, grad, metrics = with_gradient(create_policy_loss("cispo"), logprobs, old, mask, advantages)
    expected = [[-1.28, np.exp(-1.0), -np.exp(-1.0), 1.28]]
    np.testing.assert_allclose(grad.numpy(), np.array(expected) / 4, rtol=1e-6)
    assert metrics["pg_clipfrac"].item() == 0.5


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("reinforce", lambda lp, a: -a * lp),
        ("opmd", lambda lp, a: -a * lp / 2),
        ("sft", lambda lp, a: -lp),
    ],
)
def test_likelihood_losses(name, expected):
    logprobs, old, mask, advantages = batch()
    loss, metrics = POLICY_LOSS_FN.get(name)(logprobs, old, mask, advantages)
    assert loss.item() == pytest.approx(expected(logprobs, advantages)[mask].mean().item())
    assert metrics["pg_loss"] == loss


def test_aggregation_modes():
    values = torch.tensor([[1.0, 2.0, 9.0], [5.0, 9.0, 9.0], [9.0, 9.0, 9.0], [3.0, 4.0, 5.0]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0], [1, 1, 1]])
    results = {mode: aggregate(values, mask, mode).item() for mode in LOSS_AGG_MODES}
    assert results == {
        "token-mean": pytest.approx(20 / 6),
        "seq-mean-token-mean": pytest.approx((1.5 + 5 + 0 + 4) / 4),
        "seq-mean-token-sum": pytest.approx(20 / 4),
        "seq-mean-token-sum-norm": pytest.approx(20 / (4 * 3)),
    }
    norm = aggregate(values, mask, "seq-mean-token-sum-norm", num_sequences=8, max_response_length=10)
    assert norm.item() == pytest.approx(20 / 80)
    assert aggregate(values, mask, num_tokens=40).item() == pytest.approx(0.5)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("name", TOKEN_LOSSES)
@settings(deadline=None, max_examples=10)
@given(st.integers(0, 1000), st.integers(0, 5), st.permutations(range(5)))
def test_cutting_and_reordering_change_nothing(name, mode, seed, cut, order):
    tensors = batch(seed)
    fn = create_policy_loss(name, loss_agg_mode=mode)
    totals = totals_of(tensors[2])
    loss, grad, metrics = with_gradient(fn, *tensors, **totals)
    alone = with_gradient(fn, *tensors)
    torch.testing.assert_close(alone[0], loss)
    parts = []
    for rows in (order[:cut], order[cut:]):
        longest = int(tensors[2][rows].sum(-1).amax()) + 1 if rows else 7  # trimmed, as a micro-batch is
        parts.append((rows, longest, with_gradient(fn, *(t[rows, :longest] for t in tensors), **totals)))
    torch.testing.assert_close(parts[0][2][0] + parts[1][2][0], loss)
    combined = combine_metrics(metrics for _, _, (_, _, metrics) in parts)
    assert combined.keys() == metrics.keys()
    for key, value in metrics.items():
        torch.testing.assert_close(combined[key], value)
        assert not value.requires_grad
    for rows, longest, (_, part, _) in parts:
        torch.testing.assert_close(part, grad[rows, :longest])
        assert not grad[rows, longest:].any()


@pytest.mark.parametrize("name", TOKEN_LOSSES)
def test_values_outside_the_mask_do_not_matter(name):
    logprobs, old, mask, advantages = batch()
    fn = POLICY_LOSS_FN.get(name)
    loss, grad, metrics = with_gradient(fn, logprobs, old, mask, advantages)
    for garbage in (float("nan"), -float("inf"), 1e30):
        dirty, dirty_old, dirty_advantages = (t.masked_fill(~mask, garbage) for t in (logprobs, old, advantages))
        dirty_loss, dirty_grad, dirty_metrics = with_gradient(fn, dirty, dirty_old, mask, dirty_advantages)
        assert dirty_loss == loss
        assert torch.equal(dirty_grad, grad)
        assert dirty_metrics == metrics
    assert not grad[~mask].any()


@pytest.mark.parametrize("name", TOKEN_LOSSES)
def test_losses_stay_finite_in_float32(name):
    mask = torch.ones(1, 4, dtype=torch.bool)
    logprobs, old = torch.tensor([[-1e4, 0.0, -1e4, 0.0]]), torch.tensor([[0.0, -1e4, 0.0, -1e4]])
    advantages = torch.tensor([[1.0, 1.0, -1.0, -1.0]])
    args = {"dual_clip": None} if name in ("ppo", "grpo") else {}
    loss, grad, metrics = with_gradient(create_policy_loss(name, **args), logprobs, old, mask, advantages)
    assert torch.isfinite(loss)
    assert torch.isfinite(grad).all()
    assert all(torch.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("name", TOKEN_LOSSES)
def test_nothing_to_train_on_is_a_loss_of_zero(name, mode):
    logprobs, old, mask, advantages = batch()
    fn = create_policy_loss(name, loss_agg_mode=mode)
    loss, grad, _ = with_gradient(fn, logprobs, old, torch.zeros_like(mask), advantages)
    assert loss == 0
    assert not grad.any()


def test_gspo_s_token_form_sees_each_token_s_own_advantage():
    logprobs, _, mask, advantages = batch()
    _, grad, _ = with_gradient(create_policy_loss("gspo"), logprobs, logprobs, mask, advantages)
    expected = -advantages * mask / mask.sum(-1, keepdim=True).clamp(min=1) / len(mask)
    torch.testing.assert_close(grad, expected)


def test_combined_metrics_add_except_maxima():
    parts = [{"a": torch.tensor(1.0), "b/max": torch.tensor(3.0)}, {"a": torch.tensor(2.0), "b/max": torch.tensor(1.0)}]
    combined = combine_metrics([*parts, {"c": torch.tensor(5.0)}])
    assert {name: value.item() for name, value in combined.items()} == {"a": 3.0, "b/max": 3.0, "c": 5.0}


@pytest.mark.parametrize(
    ("name", "argument", "value"),
    [
        ("ppo", "clip_range_high", -0.1),
        ("ppo", "clip_range_low", -0.1),
        ("ppo", "clip_range_high", float("nan")),
        ("ppo", "dual_clip", 1.0),
        ("gspo", "clip_range_low", -1),
        ("cispo", "absolute_cap", 0),
        ("sapo", "tau_negative", 0),
        ("opmd", "tau", -1),
    ],
)
def test_values_out_of_range_are_refused(name, argument, value):
    with refuses(f"{ARGS}.{argument}"):
        create_policy_loss(name, **{argument: value})(*batch())


def test_arguments_that_replace_each_other_are_refused_together():
    with refuses(f"{ARGS}.absolute_cap"):
        create_policy_loss("cispo", absolute_cap=5.0, clip_range_high=0.2)(*batch())


@pytest.mark.parametrize(("name", "mode"), [("ppo", "token-men"), ("dpo", "token-mean")])
def test_an_average_that_a_loss_does_not_have_is_refused(name, mode):
    with refuses("algorithm.loss_agg_mode"):
        create_policy_loss(name, loss_agg_mode=mode)(*batch())


@pytest.mark.parametrize("argument", ["clip_rang_low", "num_tokens"])
def test_an_argument_that_is_not_the_configurations_is_refused(argument):
    with refuses(f"{ARGS}.{argument}", ArgumentError):
        create_policy_loss("ppo", **{argument: 1})


def test_an_unknown_loss_is_refused_with_the_nearest_name():
    with pytest.raises(ConfigError, match="Did you mean 'ppo'"):
        create_policy_loss("pppo")


def test_arguments_with_postponed_annotations_are_checked():
    for argument in ("width", "cap"):
        with refuses(f"{ARGS}.{argument}", ArgumentError):
            create_policy_loss("support.postponed_loss.postponed", **{argument: "abc"})
    with refuses(f"{ARGS}.width"):
        create_policy_loss("support.postponed_loss.postponed", width=float("nan"))
    create_policy_loss("support.postponed_loss.postponed", width=2, cap=None)
    create_policy_loss("support.postponed_loss.unresolved", width="anything")  # its types cannot be known


def labelled(logprobs, old_logprobs, action_mask, advantages, *, name: str = "plain", **totals):
    """A loss of one's own with an argument `name`."""
    return aggregate(-advantages * logprobs, action_mask, **totals), {"name": name}


def test_an_argument_of_a_loss_of_ones_own_may_be_called_name():
    assert create_policy_loss(f"{__name__}.labelled", name="other")(*batch())[1] == {"name": "other"}
    with refuses(f"{ARGS}.name", ArgumentError):
        create_policy_loss(f"{__name__}.labelled", name=5)


def test_the_package_exports_the_losses_by_their_names() -> None:
    """`ppo` is the function, not the module. A new loss needs no line in the package's file."""
    exported = [name for name in PARTS["policy loss"] if hasattr(policy_loss, name)]
    assert {"ppo", "gspo", "sft", "dpo", "mix", "streams"} <= {*exported}
    assert [name for name in exported if getattr(policy_loss, name) is not POLICY_LOSS_FN.get(name)] == []
