"""PolicyModule with an objective of several terms: policy gradient, expert, teacher, tools, weights of the user's."""

from typing import Any

import pytest
import torch
from support.errors import refuses
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
    naive_logprobs,
    one_step,
    padded,
)
from support.streams import ALL_STREAMS, STREAMS, read
from torch import Tensor

from trinity_lightning.algorithm.policy_loss import aggregate
from trinity_lightning.buffer.offline import marked
from trinity_lightning.common.experience import Experience, ExperienceError
from trinity_lightning.config.algorithm import KLConfig


def mixed() -> list[Experience]:
    """Rollouts with tokens of others among their own, some without advantage, and an expert's experiences."""
    experiences = groups(zero_every=3)
    for experience in make_experiences(4, seed=7, batch=2):
        expert = marked(experience, expert=True)
        expert.logprobs, expert.advantages = None, torch.zeros(experience.response_length)
        experiences.append(expert)
    read(experiences)
    return experiences


def naive_top_k(model: Any, experience: Experience) -> Tensor:
    """The policy's log-probabilities of the teacher's likeliest tokens [response, k]."""
    logits = model(input_ids=experience.tokens[None].long()).logits[0, experience.prompt_length - 1 : -1]
    return logits.log_softmax(-1).gather(-1, experience.info["teacher_top_k"]["ids"].long())


def with_rest(logprobs: Tensor) -> Tensor:
    return torch.cat([logprobs, (1 - logprobs.exp().sum(-1, keepdim=True)).log()], -1)


def naive(model: Any, experiences: list[Experience]) -> Tensor:
    """All terms written out by hand, each a mean over its own tokens; on-policy, importance weights cut at 2."""
    rollouts = experiences[:8]
    of_all, of_rollouts = naive_logprobs(model, experiences), naive_logprobs(model, rollouts)
    mask, praise = padded(rollouts, "action_mask").bool(), [e.info["token_weights"]["praised"] for e in experiences]
    weight = (of_rollouts.detach() - padded(rollouts, "logprobs")).exp().clamp(max=2.0)
    rl = -((of_rollouts - of_rollouts.detach()).exp() * padded(rollouts, "advantages") * weight)[mask].mean()
    expert = -naive_logprobs(model, experiences[8:])[padded(experiences[8:], "action_mask").bool()].mean()
    observed = [~e.action_mask.bool() for e in rollouts if e.action_mask is not None]
    tools = -torch.cat([row[: len(seen)][seen] for row, seen in zip(of_rollouts, observed, strict=True)]).mean()
    divergences = []
    for rollout in rollouts:
        p, q = with_rest(naive_top_k(model, rollout)), with_rest(rollout.info["teacher_top_k"]["logprobs"])
        assert rollout.action_mask is not None
        divergences.append((p.exp() * (p - q)).sum(-1)[rollout.action_mask.bool()])
    praised = torch.nn.utils.rnn.pad_sequence(praise, batch_first=True)
    liked = -(praised * of_all).sum() / (praised != 0).sum()
    return rl + 0.5 * expert + 0.3 * torch.cat(divergences).mean() + 0.2 * tools + 0.1 * liked


def test_loss_and_gradients_equal_the_formula_written_out() -> None:
    loss, gradients = one_step(mixed(), **STREAMS)
    tiny = load_tiny()
    expected = naive(tiny, mixed())
    torch.testing.assert_close(torch.tensor(loss), expected.detach(), rtol=1e-5, atol=1e-6)
    assert_same_gradients(gradients, naive_gradients(tiny, expected), tolerance=2e-5)


def test_stored_experiences_train_as_fresh_ones() -> None:
    """Ids, log-probabilities and weights are in the payload."""
    loss, gradients = one_step(Experience.deserialize_many(Experience.serialize_many(mixed())), **STREAMS)
    fresh_loss, fresh_gradients = one_step(mixed(), **STREAMS)
    assert loss == fresh_loss
    assert_same_gradients(gradients, fresh_gradients, tolerance=0)


def test_the_metrics_are_of_each_stream() -> None:
    settings: dict[str, Any] = STREAMS | {"max_tokens_per_micro_batch": 30, "kl": KLConfig(coef=0.1)}
    logged = fit(make_policy(**settings), [batch_of(mixed())]).logged_metrics
    assert {f"actor/{name}_loss" for name in ALL_STREAMS if name != "rl"} <= logged.keys()
    assert all(logged[f"actor/{name}_loss"] > 0 for name in ALL_STREAMS if name != "rl")
    assert logged["actor/kl_loss"] == 0


def test_an_experience_that_a_filter_masked_is_in_no_stream() -> None:
    experiences = mixed()
    left = one_step(experiences[1:], **STREAMS)
    experiences[0].action_mask = torch.zeros(experiences[0].response_length, dtype=torch.bool)
    masked = one_step(experiences, **STREAMS)
    assert masked[0] == pytest.approx(left[0], rel=1e-5)
    assert_same_gradients(masked[1], left[1])


def test_a_loss_of_a_teacher_alone_needs_no_advantages() -> None:
    experiences = groups()
    read(experiences)
    for experience in experiences:
        experience.advantages = None
    results = [one_step(experiences, policy_loss="teacher_kl", max_tokens_per_micro_batch=n) for n in (10, 4096)]
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-5)
    assert_same_gradients(results[0][1], results[1][1])


@pytest.mark.parametrize(
    ("entry", "value"),
    [
        ("teacher_top_k", None),
        ("teacher_top_k", {"ids": torch.zeros(2, 5), "logprobs": torch.zeros(2, 5)}),
        ("token_weights", {"praised": [1.0]}),
        ("token_weights", {"praised": torch.full((99,), torch.nan)}),
    ],
)
def test_an_experience_that_lacks_something_is_named(entry: str, value: Any) -> None:
    experiences = mixed()
    info = {name: content for name, content in experiences[2].info.items() if name != entry}
    experiences[2].info = info if value is None else info | {entry: value}
    with pytest.raises(ExperienceError, match=f"{experiences[2].eid}.*{entry}"):
        make_policy(**STREAMS).objective.add_columns(batch_of(experiences))


# -- Losses of one's own -----------------------------------------------------------------------------------------------


def near_reference(
    logprobs: Tensor,
    old_logprobs: Tensor,
    action_mask: Tensor,
    advantages: Tensor,
    *,
    ref_logprobs: Tensor,
    **totals: Any,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Squared difference from the reference, and the ratio."""
    ratio = (logprobs - old_logprobs).exp()
    loss = aggregate((logprobs - ref_logprobs) ** 2 - ratio * advantages, action_mask, **totals)
    return loss, {"pg_loss": loss.detach()}


def praise(logprobs: Tensor, old_logprobs: Tensor, action_mask: Tensor, advantages: Tensor, **totals: Any) -> Any:
    """Cross-entropy."""
    loss = aggregate(-logprobs, action_mask, **totals)
    return loss, {"pg_loss": loss.detach()}


NEAR, PRAISE = f"{__name__}.near_reference", f"{__name__}.praise"


def streams(**terms: Any) -> dict[str, Any]:
    return {"policy_loss": {"name": "streams", "args": {"streams": terms}}}


def test_a_loss_of_ones_own_in_a_mixture_has_its_reference_and_old_log_probabilities() -> None:
    """In the second optimizer step of two, when neither is the policy's present one."""
    results = []
    for loss in (streams(one={"loss": NEAR}), {"policy_loss": NEAR}):
        batches = [batch_of(groups(seed=seed)) for seed in (1, 2)]
        policy, seen = make_policy(optimizer_steps=2, **loss), Gradients()
        assert policy.objective.needs_reference
        fit(policy, batches, seen, Prepare(batches))
        results.append(seen)
    assert results[0].losses == results[1].losses
    for one, other in zip(results[0].steps, results[1].steps, strict=True):
        assert_same_gradients(one, other, tolerance=0)
    mix: Any = {"name": "mix", "args": {"usual": NEAR}}
    assert make_policy(policy_loss=mix).objective.needs_reference


@pytest.mark.parametrize("loss", [NEAR, f"{__name__}.advised"])
def test_observations_are_for_losses_that_need_no_policy(loss: str) -> None:
    with refuses("algorithm.policy_loss.args.streams.tools.loss"):
        make_policy(**streams(rl={}, tools={"loss": loss, "tokens": "observations"}))
    make_policy(**streams(rl={}, tools={"loss": PRAISE, "tokens": "observations"}))


def advised(logprobs: Tensor, old_logprobs: Tensor, action_mask: Tensor, advantages: Tensor, **totals: Any) -> Any:
    """REINFORCE."""
    return praise(logprobs * advantages, old_logprobs, action_mask, advantages, **totals)


@pytest.mark.parametrize(("loss", "fits"), [("ppo", False), (NEAR, False), ("sft", True), (PRAISE, True)])
def test_weights_of_tokens_that_the_policy_did_not_write_need_a_loss_for_them(loss: str, fits: bool) -> None:
    experiences = groups()
    mask = torch.zeros(experiences[3].response_length, dtype=torch.bool)
    mask[0] = True
    experiences[3].action_mask, weights = mask, torch.ones(len(mask))
    experiences[3].info = experiences[3].info | {"token_weights": {"praised": weights}}
    add = make_policy(**streams(praised={"loss": loss, "tokens": "weights"})).objective.add_columns
    if fits:
        add(batch := batch_of(experiences))
        assert torch.equal(batch.columns["stream:praised"][3], weights)
        return
    with pytest.raises(ExperienceError, match=rf"{experiences[3].eid}.*token 1 "):
        add(batch_of(experiences))
    weights[1:] = 0
    add(batch_of(experiences))


def test_kl_and_entropy_are_averaged_as_the_loss_of_the_rollouts() -> None:
    """The first term of rollouts, behind one of weights with another average."""
    terms = {
        "praised": {"loss": "sft", "tokens": "weights", "weight": 0.0},
        "rl": {"args": {"loss_agg_mode": "seq-mean-token-mean"}},
    }
    experiences, settings = mixed()[:8], {"kl": KLConfig(name="k2", coef=0.1), "entropy_coef": 0.1}
    one = one_step(experiences, **streams(**terms), **settings)
    other = one_step(experiences, loss_agg_mode="seq-mean-token-mean", **settings)
    assert one[0] == pytest.approx(other[0], rel=1e-5)
    assert_same_gradients(one[1], other[1])


def test_a_supervised_stream_of_weight_0_keeps_its_rows() -> None:
    """Its metric is then a mean over all of its tokens."""
    terms = {"rl": {}, "teacher": {"loss": "teacher_kl", "weight": 0.0}}
    trained = fit(make_policy(**streams(**terms)), [batch_of(mixed()[:8])]).logged_metrics
    assert trained["actor/trained_rows"] == 8
    alone = fit(make_policy(policy_loss="teacher_kl"), [batch_of(mixed()[:8])]).logged_metrics
    torch.testing.assert_close(trained["actor/teacher_loss"], alone["actor/pg_loss"])


def test_settings_that_no_term_of_a_mixture_can_use_are_refused() -> None:
    """A term that uses advantages is enough for their corrections."""
    supervised = {"teacher": {"loss": "teacher_kl"}}
    settings: dict[str, Any] = {"off_policy_mask_threshold": 1.0, "critic": {}}
    for name, value in settings.items():
        with refuses(f"algorithm.{name}"):
            make_policy(**streams(**supervised), **{name: value})
        make_policy(**streams(rl={}, **supervised), **{name: value})
