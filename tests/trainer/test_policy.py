"""PolicyModule on the tiny model in float32, through a real Trainer: losses and gradients against plain code."""

import copy
from typing import Any

import lightning as L
import pytest
import torch
from support.errors import refuses
from support.policy import (
    Gradients,
    Prepare,
    assert_same_gradients,
    batch_of,
    fit,
    load_tiny,
    make_experiences,
    make_policy,
    naive_gradients,
    naive_grpo,
    naive_logprobs,
    one_step,
)

from trinity_lightning.buffer.datamodule import ExperienceLoader, MemoryStorage
from trinity_lightning.common.experience import EID, Experience
from trinity_lightning.config.algorithm import KLConfig
from trinity_lightning.config.model import OptimizerConfig
from trinity_lightning.trainer.placement import WHOLE


@pytest.fixture(scope="module")
def tiny():
    return load_tiny()


# -- loss and gradients ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_loss_and_every_gradient_equal_the_naive_ones(tiny, temperature):
    experiences = make_experiences(temperature=temperature)
    loss, gradients = one_step(experiences)
    expected = naive_grpo(tiny, experiences)
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    assert_same_gradients(gradients, naive_gradients(tiny, expected))


@pytest.mark.parametrize("budget", [1, 40, 10_000])
def test_cutting_changes_neither_loss_nor_gradient(budget):
    experiences = make_experiences()
    loss, gradients = one_step(experiences)
    other_loss, other_gradients = one_step(experiences, max_tokens_per_micro_batch=budget)
    assert other_loss == pytest.approx(loss, rel=1e-5)
    assert_same_gradients(other_gradients, gradients)


@pytest.mark.parametrize("policy_loss", ["gspo", "cispo", "sapo"])
def test_cutting_and_row_order_change_nothing_for_other_losses(policy_loss):
    experiences = make_experiences()
    loss, gradients = one_step(experiences, policy_loss=policy_loss, max_tokens_per_micro_batch=10_000)
    other_loss, other_gradients = one_step(experiences[::-1], policy_loss=policy_loss, max_tokens_per_micro_batch=30)
    assert other_loss == pytest.approx(loss, rel=1e-5)
    assert_same_gradients(other_gradients, gradients)


def test_row_order_changes_neither_loss_nor_gradient():
    experiences = make_experiences()
    loss, gradients = one_step(experiences)
    other_loss, other_gradients = one_step(experiences[3:] + experiences[2::-1])
    assert other_loss == pytest.approx(loss, rel=1e-5)
    assert_same_gradients(other_gradients, gradients)


def test_leaving_out_rows_without_advantage_is_exact(tiny):
    experiences = make_experiences(zero_every=2)
    seen = Gradients()
    trainer = fit(make_policy(), [batch_of(experiences)], seen)
    expected = naive_grpo(tiny, experiences)  # with all rows
    assert trainer.logged_metrics["actor/trained_rows"] == 4
    assert seen.losses[0] == pytest.approx(expected.item(), rel=1e-5)
    assert_same_gradients(seen.steps[0], naive_gradients(tiny, expected))


def test_a_loss_that_ignores_advantages_trains_rows_without_any(tiny):
    experiences = make_experiences(zero_every=2)
    for experience in experiences[:3]:
        experience.logprobs = None  # not made by an engine
    loss, gradients = one_step(experiences, policy_loss="sft")
    mask = torch.nn.utils.rnn.pad_sequence([e.action_mask for e in experiences], batch_first=True)
    expected = -(naive_logprobs(tiny, experiences) * mask).sum() / mask.sum()
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    assert_same_gradients(gradients, naive_gradients(tiny, expected))
    for experience in experiences:
        experience.advantages = None
    assert one_step(experiences, policy_loss="sft")[0] == pytest.approx(loss, rel=1e-6)


def test_rows_that_no_engine_made_are_not_corrected_however_the_batch_is_cut(tiny):
    experiences = make_experiences()
    with torch.no_grad():
        naive = naive_logprobs(tiny, experiences)
    as_if_sampled = [copy.copy(e) for e in experiences]
    for row in (0, 3):
        experiences[row].logprobs = None
        as_if_sampled[row].logprobs = naive[row, : experiences[row].response_length]
    expected = naive_grpo(tiny, as_if_sampled)
    gradients = naive_gradients(tiny, expected)
    for budget in (1, 10_000):
        loss, mine = one_step(experiences, max_tokens_per_micro_batch=budget)
        assert loss == pytest.approx(expected.item(), rel=1e-5)
        assert_same_gradients(mine, gradients)


def test_neighbours_are_isolated():
    experiences = make_experiences()
    policy = make_policy(max_tokens_per_micro_batch=10_000, optimizer_steps=2)
    policy.configure_model()
    before = policy.passes().columns(policy.policy, batch_of(experiences), WHOLE)[0]
    experiences[2].tokens = torch.cat([experiences[2].tokens[:-1], torch.tensor([4])])
    after = policy.passes().columns(policy.policy, batch_of(experiences), WHOLE)[0]
    assert not torch.equal(before[2], after[2])
    assert all(torch.equal(a, b) for row, (a, b) in enumerate(zip(before, after, strict=True)) if row != 2)


def test_entropy_bonus_and_its_gradient(tiny):
    experiences = make_experiences(zero_every=2)
    loss, gradients = one_step(experiences, entropy_coef=0.3)
    tokens = [(tiny(input_ids=e.tokens.long()[None]).logits[0, e.prompt_length - 1 : -1], e) for e in experiences]
    entropies = torch.cat([torch.distributions.Categorical(logits=row).entropy()[e.action_mask] for row, e in tokens])
    expected = naive_grpo(tiny, experiences) - 0.3 * entropies.mean()
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    assert_same_gradients(gradients, naive_gradients(tiny, expected))


def test_gradient_checkpointing_changes_no_gradient():
    experiences = make_experiences()
    policy, seen = make_policy(model={"gradient_checkpointing": True}), Gradients()
    fit(policy, [batch_of(experiences)], seen)
    assert policy.policy.is_gradient_checkpointing
    assert_same_gradients(seen.steps[0], one_step(experiences)[1])


def test_sequence_logprobs_are_those_of_the_whole_model(tiny):
    policy = make_policy()
    policy.configure_model()
    tokens = [5, 17, 4, 60, 33]
    log_p = torch.log_softmax(tiny(input_ids=torch.tensor([tokens])).logits[0], -1)
    expected = [log_p[i, token].item() for i, token in enumerate(tokens[1:])]
    assert policy.sequence_logprobs(tokens) == pytest.approx(expected, abs=1e-5)


# -- old log-probabilities and the reference ---------------------------------------------------------------------------


def test_second_optimizer_step_uses_log_probabilities_from_before_the_first(tiny):
    first, second = make_experiences(seed=1), make_experiences(seed=2)
    batches = [batch_of(first), batch_of(second)]
    policy, seen = make_policy(OptimizerConfig(lr=2e-2), optimizer_steps=2), Gradients()  # far enough to be clipped
    after_first = {}

    class Keep(L.Callback):
        def on_train_batch_end(self, trainer, pl_module: Any, outputs, batch, batch_idx):
            if batch_idx == 0:
                after_first.update({k: v.clone() for k, v in pl_module.policy.state_dict().items()})

    fit(policy, batches, Prepare(batches), seen, Keep())
    with torch.no_grad():
        old = naive_logprobs(tiny, second)
    moved = copy.deepcopy(tiny)
    moved.load_state_dict(after_first)
    expected = naive_grpo(moved, second, old=old)
    assert seen.losses[1] == pytest.approx(expected.item(), rel=1e-5)
    assert_same_gradients(seen.steps[1], naive_gradients(moved, expected))
    assert seen.losses[1] != pytest.approx(naive_grpo(moved, second).item(), rel=1e-4)  # it is not on-policy


def test_one_on_policy_step_prepares_nothing():
    batches = [batch_of(make_experiences())]
    fit(make_policy(), batches, Prepare(batches))
    assert batches[0].columns == {}


def test_columns_that_were_never_prepared_are_an_error():
    with refuses(None):
        fit(make_policy(inner_epochs=2), [batch_of(make_experiences())])


def test_the_reference_s_column_is_computed_if_it_was_not_prepared():
    trainer = fit(make_policy(kl=KLConfig(coef=0.1)), [batch_of(make_experiences())])
    assert trainer.logged_metrics["actor/kl_loss"] == 0.0


def test_kl_to_the_frozen_reference(tiny, tmp_path):
    experiences = make_experiences(zero_every=2)
    batches = [batch_of(experiences), batch_of(experiences)]
    policy, seen = make_policy(kl=KLConfig("k3", 0.5)), Gradients()
    after_first = {}

    class Keep(L.Callback):
        def on_train_batch_end(self, trainer, pl_module: Any, outputs, batch, batch_idx):
            if batch_idx == 0:
                after_first.update({k: v.clone() for k, v in pl_module.policy.state_dict().items()})

    trainer = fit(policy, batches, Prepare([batches[0]]), Copy(batches), seen, Keep())
    with torch.no_grad():
        ref = naive_logprobs(tiny, experiences)
    moved = copy.deepcopy(tiny)
    moved.load_state_dict(after_first)
    expected = naive_grpo(moved, experiences, ref=ref, kl=0.5)
    assert seen.losses[1] == pytest.approx(expected.item(), rel=1e-5)
    assert_same_gradients(seen.steps[1], naive_gradients(moved, expected))
    assert trainer.logged_metrics["actor/kl_loss"] > 0
    assert trainer.logged_metrics["actor/trained_rows"] == len(experiences)

    assert not policy.reference.training
    assert all(torch.equal(a, b) for a, b in zip(policy.reference.parameters(), tiny.parameters(), strict=True))
    trainer.save_checkpoint(tmp_path / "it.ckpt")
    state = torch.load(tmp_path / "it.ckpt", weights_only=True)["state_dict"]
    assert state
    assert not any(name.startswith("reference") for name in state)
    fresh = make_policy(kl=KLConfig("k3", 0.5))
    fresh.configure_model()
    fresh.load_state_dict(state)
    assert all(torch.equal(a, b) for a, b in zip(fresh.policy.parameters(), policy.policy.parameters(), strict=True))


class Copy(L.Callback):
    """The second batch has the columns of the first."""

    def __init__(self, batches):
        self.batches = batches

    def on_train_start(self, trainer, pl_module: Any):
        self.batches[1].columns = self.batches[0].columns


# -- what a row without advantage leaves alone -------------------------------------------------------------------------


def test_the_length_of_a_row_without_advantage_does_not_change_the_gradient():
    """Normalised sums (Dr. GRPO) are divided by what the run allows, not by the longest response there is."""
    gradients = []
    for length in (5, 40):
        experiences = make_experiences()
        experiences.append(
            Experience(
                eid=EID(batch=1, task=2), tokens=[5] * (length + 1), prompt_length=1, advantages=torch.zeros(length)
            )
        )
        storage = MemoryStorage()
        storage.ready[1] = experiences
        storage.advance(1)
        seen = Gradients()
        loader = ExperienceLoader(storage, max_response_length=64)
        fit(make_policy(loss_agg_mode="seq-mean-token-sum-norm"), list(loader), seen)
        gradients.append(seen.steps[0])
    assert_same_gradients(gradients[1], gradients[0])
