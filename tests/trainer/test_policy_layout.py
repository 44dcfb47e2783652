"""The training step in every layout: the same loss and gradient, and neighbours that cannot be told from each other."""

import copy
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.errors import refuses
from support.layouts import batches
from support.policy import (
    Gradients,
    Prepare,
    assert_same_gradients,
    batch_of,
    fit,
    groups,
    load_tiny,
    make_experiences,
    make_policy,
    naive_gradients,
    naive_grpo,
)
from support.streams import STREAMS, read
from support.tiers import examples

from trinity_lightning.common.experience import EID, Experience
from trinity_lightning.common.optimizer_batch import OptimizerBatch
from trinity_lightning.config.algorithm import AlgorithmConfig, KLConfig, Layout
from trinity_lightning.trainer import head
from trinity_lightning.trainer.layout import better_layout, collate, cut, rows_to_train
from trinity_lightning.trainer.placement import WHOLE
from trinity_lightning.trainer.policy import PolicyModule


@pytest.fixture(scope="module", autouse=True)
def small_chunks() -> Iterator[None]:
    """Logits of 20 tokens of the tiny model: a micro-batch has several chunks, all but the first computed again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head, "CHUNK_BYTES", 20 * 4 * load_tiny().config.vocab_size)
        yield


# Of mixed batches, too; and of tokens that only some terms are of.
@pytest.fixture(scope="module", params=["ppo", "mix", STREAMS["policy_loss"]], ids=["ppo", "mix", "streams"])
def policy(request) -> PolicyModule:
    return make_loaded(policy_loss=request.param, entropy_coef=0.1)


def make_loaded(**settings) -> PolicyModule:
    policy = make_policy(**settings)
    policy.configure_model()
    return policy


def micro_batches(policy: PolicyModule, batch: OptimizerBatch, layout: Layout, budget: int) -> Iterator[float]:
    """The loss of each micro-batch, computed without a Trainer; its gradient is added to those before."""
    read(batch.experiences)
    policy.objective.add_columns(batch)
    for part in cut(batch, rows_to_train(batch, skip_zero_advantage=False), budget, layout):
        micro = collate(batch, part, policy.device)
        logprobs, entropies = policy.passes().through(policy.policy, micro, WHOLE)
        loss, _ = policy.objective(logprobs, entropies, micro, batch, batch.num_tokens, batch.num_tokens)
        loss.backward()
        yield float(loss.detach())


def gradient_of(policy: PolicyModule) -> torch.Tensor:
    return torch.cat([p.grad.flatten().double() for p in policy.policy.parameters()])


def step(policy: PolicyModule, batch: OptimizerBatch, layout: Layout, budget: int) -> tuple[float, torch.Tensor]:
    """Loss and gradient of an optimizer batch."""
    policy.policy.zero_grad()
    return sum(micro_batches(policy, batch, layout, budget)), gradient_of(policy)


def size_of_rows(policy: PolicyModule, batch: OptimizerBatch) -> float:
    """The sum of the norms of the gradients of all rows, each row's by itself."""
    total = 0.0
    policy.policy.zero_grad()
    for _ in micro_batches(policy, batch, Layout.padded, 1):
        total += float(gradient_of(policy).norm())
        policy.policy.zero_grad()
    return total


def cancelling() -> OptimizerBatch:
    """One token after one prompt twice, to become likelier and unlikelier: gradients of nearly one size."""
    likelier = {"advantages": [2.0], "action_mask": [True], "info": {"temperature": 1.0}}
    unlikelier = {"advantages": [-1.0, -1.0], "action_mask": [False, True], "info": {"temperature": 0.5}}
    rows = [
        Experience(eid=EID(batch=1, run=run), tokens=[1, 1], prompt_length=1 - run, **fields)
        for run, fields in enumerate((likelier, unlikelier))
    ]
    return OptimizerBatch.of(rows, explore_step=1)


@settings(deadline=None, max_examples=examples(30))
@given(batch=batches(), budget=st.sampled_from([1, 20, 40, 10_000]), random=st.randoms())
@example(batch=cancelling(), budget=1, random=Random(0))
def test_every_layout_budget_and_order_has_the_same_loss_and_gradient(policy, batch, budget, random):
    loss, gradient = step(policy, batch, Layout.padded, 10_000)
    shuffled = OptimizerBatch.of(random.sample(batch.experiences, len(batch.experiences)), explore_step=1)
    for ordered in (batch, shuffled):
        other_loss, other = step(policy, ordered, Layout.shared_prefix, budget)
        assert other_loss == pytest.approx(loss, rel=1e-6, abs=1e-6)
        # Float32 rounds each row's gradient relative to that gradient, and no order of adding them can do better. Where
        # they nearly cancel, the sum is far smaller than its terms, and so are the digits that are left of it: hence an
        # error may also be some sixteen roundings of the terms, whose norms are summed only then.
        error = float((other - gradient).norm())
        assert error <= 1e-5 * float(gradient.norm()) or error <= 2e-6 * size_of_rows(policy, batch)


def column(policy: PolicyModule, batch: OptimizerBatch) -> list[torch.Tensor]:
    return policy.passes().columns(policy.policy, batch, WHOLE)[0]


@pytest.fixture(scope="module")
def sharing() -> PolicyModule:
    return make_loaded(layout=Layout.shared_prefix, max_tokens_per_micro_batch=10_000, entropy_coef=0.1)


@settings(deadline=None, max_examples=examples(30))
@given(batches(), st.data())
def test_neighbours_are_isolated(sharing, batch, data):
    row = data.draw(st.sampled_from(range(len(batch.experiences))))
    changed = copy.copy(batch.experiences[row])
    changed.tokens = changed.tokens.clone()
    changed.tokens[changed.prompt_length :] = 91 + torch.arange(changed.response_length) % 8
    before = column(sharing, batch)
    after = column(sharing, OptimizerBatch.of([*batch.experiences[:row], changed, *batch.experiences[row + 1 :]], 1))
    assert all(torch.equal(a, b) for i, (a, b) in enumerate(zip(before, after, strict=True)) if i != row)


# -- through a Trainer -------------------------------------------------------------------------------------------------


def trained(experiences, *callbacks, **settings):
    """Loss, gradients and logged metrics of one optimizer step."""
    seen = Gradients()
    trainer = fit(make_policy(**settings), [batch_of(experiences)], seen, *callbacks)
    return seen.losses[0], seen.steps[0], trainer.logged_metrics


@pytest.mark.slow
@pytest.mark.parametrize("zero_every", [None, 2])
def test_the_step_is_the_naive_one_though_prefixes_are_shared(zero_every):
    experiences = groups(zero_every=zero_every)
    loss, gradients, metrics = trained(experiences, layout=Layout.shared_prefix)
    tiny = load_tiny()
    expected = naive_grpo(tiny, experiences)
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    assert_same_gradients(gradients, naive_gradients(tiny, expected))
    computed = [e for e in experiences if e.advantages is not None and e.advantages.any()]
    prompts = {e.eid.task: e.prompt_length for e in computed}
    tokens = sum(prompts.values()) + sum(e.response_length for e in computed)
    assert metrics["perf/computed_tokens"] == tokens
    assert metrics["perf/padding_ratio"] == pytest.approx(tokens / sum(len(e.tokens) for e in computed))
    assert metrics["perf/shared_prefix"] == 1


def test_auto_shares_long_prompts_and_pads_others():
    assert trained(groups(), layout=Layout.auto)[2]["perf/shared_prefix"] == 1
    alike = make_experiences(count=2)
    alike[1].tokens, alike[1].prompt_length = alike[0].tokens + 1, alike[0].prompt_length
    for name in ("advantages", "action_mask", "logprobs"):
        setattr(alike[1], name, getattr(alike[0], name).clone())
    metrics = trained(alike, layout=Layout.auto)[2]
    assert metrics["perf/shared_prefix"] == 0
    assert metrics["perf/computed_tokens"] == 2 * len(alike[0].tokens)


def test_columns_of_policy_and_reference_are_computed_alike():
    experiences = groups()
    settings: dict[str, Any] = {"optimizer_steps": 2, "kl": KLConfig(coef=0.1), "layout": Layout.shared_prefix}
    batches = [batch_of(experiences)]
    trainer = fit(make_policy(**settings), batches, Prepare(batches))
    assert trainer.logged_metrics["actor/ppo_kl"] == 0.0
    assert trainer.logged_metrics["actor/kl_loss"] == 0.0
    padded, settings["layout"] = [batch_of(experiences)], Layout.padded
    fit(make_policy(**settings), padded, Prepare(padded))
    for name, column in padded[0].columns.items():
        for mine, expected in zip(batches[0].columns[name], column, strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-5)


def test_all_batches_of_a_step_have_the_layout_that_its_columns_were_computed_in():
    def group(task, prompt, response):
        tokens = torch.arange(4, 4 + prompt) + task
        return [
            Experience(
                eid=EID(batch=1, task=task, run=run),
                tokens=torch.cat([tokens, torch.arange(5 + run, 5 + run + response)]),
                prompt_length=prompt,
                advantages=[float(run % 2 * 2 - 1)] * response,
                info={"temperature": 1.0},
            )
            for run in range(4)
        ]

    long_prompt, long_responses = group(0, 60, 4), group(1, 4, 40)
    first, second = batch_of(long_responses), batch_of(long_prompt)
    assert better_layout(first, range(4), 1000) is Layout.padded
    first.step = second.step = long_responses + long_prompt
    policy = make_policy(dtype="bf16", optimizer_steps=2, layout=Layout.auto, max_tokens_per_micro_batch=1000)
    metrics = fit(policy, [first], Prepare([first, second])).logged_metrics
    assert metrics["perf/shared_prefix"] == 1
    assert metrics["actor/ppo_kl"] == 0.0


def test_gradient_checkpointing_changes_no_gradient_of_shared_prefixes():
    experiences = groups()
    policy, seen = make_policy(model={"gradient_checkpointing": True}, layout=Layout.shared_prefix), Gradients()
    fit(policy, [batch_of(experiences)], seen)
    tiny = load_tiny()  # with autograd's own gradients of embeddings and head
    assert_same_gradients(seen.steps[0], naive_gradients(tiny, naive_grpo(tiny, experiences)))


def test_a_probe_has_one_row(sharing):
    assert sharing.sequence_logprobs([5, 17, 4, 60, 33]) == pytest.approx(
        make_loaded(layout=Layout.padded).sequence_logprobs([5, 17, 4, 60, 33]), abs=1e-6
    )


def test_bfloat16_gradients_are_as_near_the_truth_as_those_of_padded_rows():
    batch = batch_of(groups(count=32))
    rounded, exact = make_loaded(dtype="bf16"), make_loaded()
    exact.policy.load_state_dict(rounded.policy.state_dict())
    _, truth = step(exact, batch, Layout.padded, 10_000)
    distances = {}
    for layout in (Layout.padded, Layout.shared_prefix):
        distances[layout] = float((step(rounded, batch, layout, 10_000)[1] - truth).norm() / truth.norm())
    assert distances[Layout.shared_prefix] <= 1.05 * distances[Layout.padded]


@pytest.mark.slow
def test_smollm2_has_one_gradient_in_both_layouts():
    policy = PolicyModule("smollm2", AlgorithmConfig(), dtype="fp32")
    policy.configure_model()
    batch = batch_of(groups(count=3))
    loss, gradient = step(policy, batch, Layout.padded, 10_000)
    other_loss, other = step(policy, batch, Layout.shared_prefix, 10_000)
    assert other_loss == pytest.approx(loss, rel=1e-6, abs=1e-6)
    assert float((other - gradient).norm()) <= 1e-5 * float(gradient.norm())


@pytest.mark.slow
def test_smollm2_shares_prefixes_in_bfloat16_too():
    policy = PolicyModule("smollm2", AlgorithmConfig(layout=Layout.shared_prefix), dtype="bf16")
    policy.configure_model()
    policy.check_trainable()  # it would be refused


def test_a_model_that_cannot_share_is_refused_by_name_before_it_is_trained():
    policy = PolicyModule(
        "tiny", AlgorithmConfig(layout=Layout.shared_prefix), dtype="fp32", attn_implementation="eager"
    )
    with refuses("algorithm.layout"):
        fit(policy, [batch_of(groups())])
