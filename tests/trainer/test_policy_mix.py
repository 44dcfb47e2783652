"""PolicyModule with expert data: the mix loss on a model, however the batch is cut."""

from typing import Any

import torch
from support.policy import (
    Gradients,
    assert_same_gradients,
    batch_of,
    fit,
    load_tiny,
    make_experiences,
    make_policy,
    naive_gradients,
    naive_logprobs,
    one_step,
    padded,
)

from trinity_lightning.buffer.offline import marked

MIX: dict[str, Any] = {"policy_loss": {"name": "mix", "args": {"mu": 0.25}}}


def mixed(rollouts=8, experts=5):
    """Rollouts, a third of them without advantage, and an expert's experiences as the buffer joins them."""
    experiences = make_experiences(rollouts, zero_every=3)
    for experience in make_experiences(experts, seed=7, batch=2):
        expert = marked(experience, expert=True)
        expert.logprobs, expert.advantages = None, torch.zeros(experience.response_length)
        experiences.append(expert)
    return experiences


def naive_mix(model, rollouts, experts, mu=0.25):
    """Both losses written out by hand, each a mean over its own tokens; on-policy, weights truncated at 2."""
    logprobs, mask = naive_logprobs(model, rollouts), padded(rollouts, "action_mask")
    weight = (logprobs.detach() - padded(rollouts, "logprobs")).exp().clamp(max=2.0)
    usual = -((logprobs - logprobs.detach()).exp() * padded(rollouts, "advantages") * weight * mask).sum() / mask.sum()
    expert_mask = padded(experts, "action_mask")
    sft = -(naive_logprobs(model, experts) * expert_mask).sum() / expert_mask.sum()
    return (1 - mu) * usual + mu * sft


def test_loss_and_gradients_equal_the_formula_written_out():
    experiences = mixed()
    loss, gradients = one_step(experiences, **MIX)
    tiny = load_tiny()
    expected = naive_mix(tiny, experiences[:8], experiences[8:])
    torch.testing.assert_close(torch.tensor(loss), expected.detach(), rtol=1e-5, atol=1e-6)
    assert_same_gradients(gradients, naive_gradients(tiny, expected), tolerance=2e-5)


def test_the_cut_into_micro_batches_changes_nothing():
    results = [one_step(mixed(), max_tokens_per_micro_batch=budget, **MIX) for budget in (10, 40, 4096)]
    for loss, gradients in results[1:]:
        torch.testing.assert_close(loss, results[0][0], rtol=1e-5, atol=1e-6)
        assert_same_gradients(gradients, results[0][1])


def test_rows_without_advantage_are_skipped_and_the_experts_are_not():
    policy = make_policy(**MIX)
    trainer = fit(policy, [batch_of(mixed(rollouts=9))])
    assert not policy.objective.needs_all_rows
    assert trainer.logged_metrics["actor/trained_rows"] == 9 - 3 + 5
    assert trainer.logged_metrics["actor/sft_loss"] > 0


def test_expert_data_alone_make_a_step():
    seen = Gradients()
    trainer = fit(make_policy(**MIX), [batch_of(mixed(rollouts=0))], seen)
    assert trainer.global_step == 1
    assert seen.losses[0] > 0


def test_expert_data_do_not_dilute_what_compares_engine_and_trainer():
    rollouts = make_experiences(8)
    alone, among = (
        fit(make_policy(max_tokens_per_micro_batch=30, **MIX), [batch_of(experiences)]).logged_metrics
        for experiences in (rollouts, rollouts + mixed(rollouts=0, experts=6))
    )
    for name in ("logprob_diff/mean", "logprob_diff/max", "is_weight/mean", "is_weight/max", "is_weight/clipfrac"):
        torch.testing.assert_close(among[f"actor/{name}"], alone[f"actor/{name}"], rtol=1e-5, atol=1e-6)
    assert among["actor/sft_loss"] > alone["actor/sft_loss"] == 0
