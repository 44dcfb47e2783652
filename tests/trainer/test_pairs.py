"""Preference pairs are never parted: any cut, order, layout and number of ranks has the same loss and gradient."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.errors import refuses
from support.policy import (
    Gradients,
    assert_same_gradients,
    batch_of,
    fit,
    load_tiny,
    make_policy,
    naive_gradients,
    pairs,
)
from support.tiers import examples
from torch.nn.functional import logsigmoid

from trinity_lightning.common.experience import Experience, ExperienceError
from trinity_lightning.common.optimizer_batch import OptimizerBatch
from trinity_lightning.config.algorithm import KLConfig, Layout
from trinity_lightning.trainer.layout import collate, cut, deal
from trinity_lightning.trainer.placement import WHOLE
from trinity_lightning.trainer.policy import PolicyModule

token = st.integers(4, 90)
good, bad = (st.lists(st.integers(*ids), min_size=1, max_size=8) for ids in ((4, 50), (51, 90)))  # never the same
prompts = st.lists(token, min_size=1, max_size=6)


@st.composite
def pair_lists(draw):
    """Ragged pairs, some of the same prompt, or of one that begins with another's."""
    common = draw(prompts)
    prompt = st.just(common) | prompts.map(lambda more: common + more) | prompts
    count = draw(st.integers(1, 5))
    return [Experience(tokens=draw(prompt), chosen=draw(good), rejected=draw(bad)) for _ in range(count)]


def moved_reference(batch):
    """A column far enough from the policy for pairs to have different weights."""
    return [0.5 * torch.sin(e.tokens[e.prompt_length :].float()) - 4.5 for e in batch.experiences]


def pairs_of(experiences) -> OptimizerBatch:
    batch = OptimizerBatch.of(experiences, explore_step=1)
    batch.columns["ref_logprobs"] = moved_reference(batch)
    return batch


@pytest.fixture(scope="module")
def policy() -> PolicyModule:
    made = make_policy(policy_loss="dpo")
    made.configure_model()
    return made


def computed(policy, batch, ranks, budget, layout):
    """Loss, gradient and metrics of all micro-batches of all ranks."""
    policy.policy.zero_grad()
    total, metrics = 0.0, {}
    for rows in deal(batch, range(len(batch.experiences)), ranks, budget, layout):
        for part in cut(batch, rows, budget, layout):
            micro = collate(batch, part, policy.device)
            loss, measured = policy.objective(
                *policy.passes().through(policy.policy, micro, WHOLE), micro, batch, batch.num_tokens, 0
            )
            loss.backward()
            total += loss.item()
            metrics = {name: metrics.get(name, 0.0) + value.item() for name, value in measured.items()}
    return total, torch.cat([p.grad.flatten().double() for p in policy.policy.parameters()]), metrics


@settings(deadline=None, max_examples=examples(30))
@given(pair_lists(), st.sampled_from([1, 20, 45, 10_000]), st.sampled_from(Layout), st.integers(1, 3), st.randoms())
def test_cut_order_layout_and_ranks_change_nothing(policy, experiences, budget, layout, ranks, random):
    loss, gradient, metrics = computed(policy, pairs_of(experiences), 1, 10_000, Layout.padded)
    shuffled = pairs_of(random.sample(experiences, len(experiences)))
    other_loss, other, other_metrics = computed(policy, shuffled, ranks, budget, layout)
    assert other_loss == pytest.approx(loss, rel=1e-6, abs=1e-6)
    assert float((other - gradient).norm()) <= 1e-5 * float(gradient.norm())
    assert other_metrics == pytest.approx(metrics, rel=1e-5, abs=1e-5)


@settings(deadline=None, max_examples=examples(100))
@given(pair_lists(), st.sampled_from([1, 20, 45, 10_000]), st.sampled_from(Layout), st.integers(1, 3))
def test_the_two_rows_of_a_pair_are_in_one_micro_batch(experiences, budget, layout, ranks):
    batch = OptimizerBatch.of(experiences, explore_step=1)
    rows = range(len(batch.experiences))
    parts = [part for share in deal(batch, rows, ranks, budget, layout) for part in cut(batch, share, budget, layout)]
    assert sorted(row for part in parts for row in part.rows) == list(rows)
    for part in parts:
        places = collate(batch, part, torch.device("cpu")).pairs
        assert places is not None
        pairs_of_rows = [[part.rows[place] for place in pair] for pair in places.tolist()]
        assert all(chosen % 2 == 0 and rejected == chosen + 1 for chosen, rejected in pairs_of_rows)
        assert len(pairs_of_rows) == len(part.rows) / 2
        assert part.tokens <= budget or len(part.rows) == 2


def trained(experiences, **algorithm):
    """Gradients and metrics of the first of two optimizer steps, and metrics of the second."""
    seen = Gradients()
    trainer = fit(make_policy(**algorithm), [batch_of(experiences), batch_of(experiences)], seen)
    return seen, trainer.logged_metrics


@pytest.mark.parametrize("layout", [Layout.padded, Layout.shared_prefix])
def test_the_first_step_is_the_naive_one_and_the_second_prefers_the_chosen(layout):
    experiences = pairs()
    seen, metrics = trained(experiences, policy_loss="dpo", layout=layout)
    tiny = load_tiny()
    rows = OptimizerBatch.of(experiences, explore_step=1).experiences
    sums = []
    for e in rows:
        logits = tiny(input_ids=e.tokens[None].long()).logits[0, e.prompt_length - 1 : -1]
        sums.append(logits.log_softmax(-1).gather(-1, e.tokens[e.prompt_length :].long()[:, None]).sum())
    logps = torch.stack(sums).view(-1, 2)
    scores = logps - logps.detach()
    loss = -logsigmoid(0.1 * (scores[:, 0] - scores[:, 1])).mean()
    assert seen.losses[0] == pytest.approx(loss.item(), rel=1e-6)
    assert_same_gradients(seen.steps[0], naive_gradients(tiny, loss))
    assert seen.losses[1] < seen.losses[0]
    assert metrics["actor/rewards/margins"] > 0
    assert metrics["actor/trained_rows"] == 8


def test_stored_experiences_have_a_reference_for_the_kl_term():
    rows = OptimizerBatch.of(pairs(), explore_step=1).experiences
    _, metrics = trained(rows, policy_loss="sft", kl=KLConfig(coef=0.1))
    assert metrics["actor/kl_loss"] > 0  # of the second step, whose policy is not the reference


def test_pairs_and_the_loss_go_together():
    experiences = pairs()
    rows = OptimizerBatch.of(experiences, explore_step=1).experiences
    with pytest.raises(ExperienceError, match=f"'dpo'.*{rows[0].eid}"):
        fit(make_policy(policy_loss="dpo"), [batch_of(rows)])
    with pytest.raises(ExperienceError, match=r"'sft'.*algorithm\.policy_loss=dpo"):
        fit(make_policy(policy_loss="sft"), [batch_of(experiences)])
    with pytest.raises(ExperienceError, match="chosen"):
        OptimizerBatch.of([*experiences, *rows], explore_step=1)


@pytest.mark.parametrize("free", [True, False])
def test_a_reference_is_loaded_unless_the_loss_does_without(free):
    policy = make_policy(policy_loss={"name": "dpo", "args": {"reference_free": free}})
    assert policy.objective.needs_reference is not free
    with refuses("algorithm.kl.coef"):
        make_policy(policy_loss={"name": "dpo", "args": {"reference_free": free}}, kl=KLConfig(coef=0.1))
