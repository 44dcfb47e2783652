"""Objectives of several terms, each normalised by its own tokens however the batch is cut: streams, and mix."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.errors import refuses
from support.losses import batch, totals_of, with_gradient
from torch import Tensor

from trinity_lightning.algorithm.policy_loss import LOSS_AGG_MODES, create_policy_loss, mix, ppo, sft
from trinity_lightning.algorithm.policy_loss.arguments import ARGS
from trinity_lightning.algorithm.policy_loss.create import needs_of
from trinity_lightning.algorithm.policy_loss.policy_loss import BatchTotals, combine_metrics
from trinity_lightning.algorithm.policy_loss.terms import streams, with_terms
from trinity_lightning.config.algorithm import stream_configs
from trinity_lightning.errors import ArgumentError

STREAMS: dict[str, Any] = {
    "rl": {"loss": "reinforce"},
    "clone": {"loss": "sft", "tokens": "weights", "weight": 0.5},
    "teacher": {"loss": "teacher_kl", "weight": 0.25, "args": {"direction": "forward"}},
}


def weights_of(mask: Tensor, seed: int) -> dict[str, Tensor]:
    """Each stream's own tokens, of any weights."""
    generator = torch.Generator().manual_seed(seed)
    some = torch.rand(mask.shape, generator=generator, dtype=torch.float64)
    return {"rl": mask.double(), "clone": some * (some > 0.5), "teacher": (mask & (some < 0.6)).double()}


def stream_totals_of(weights: dict[str, Tensor]) -> dict[str, BatchTotals]:
    return {
        name: BatchTotals(num_tokens=int((rows != 0).sum()), num_sequences=len(rows), max_response_length=7)
        for name, rows in weights.items()
    }


def candidates(seed: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities of three of five tokens, by policy and teacher [5, 7, 3]."""
    generator = torch.Generator().manual_seed(seed)
    both = torch.randn(2, 5, 7, 5, generator=generator, dtype=torch.float64).log_softmax(-1)[..., :3]
    return both[0], both[1]


def paid(logprobs, old_logprobs, action_mask, advantages, *, terms: str = "none", **totals):
    """A loss of one's own with an argument of that name, which is no mixture."""
    loss = (advantages * logprobs).sum()
    return loss, {"pg_loss": loss.detach(), "terms": terms}


def test_a_loss_is_a_mixture_by_its_streams() -> None:
    name, mixture = f"{__name__}.paid", create_policy_loss("streams", streams=STREAMS)
    paying = create_policy_loss(name)
    loss, terms = with_terms(name, paying, needs_of(name, paying))
    assert list(terms) == [name]
    assert terms[name].loss is loss
    assert loss(*batch())[1]["terms"] == "none"
    assert list(with_terms("streams", mixture, needs_of("streams", mixture))[1]) == list(STREAMS)


def test_it_is_the_sum_of_its_terms_in_numpy() -> None:
    logprobs, old, mask, advantages = batch()
    weights, (policy, teacher) = weights_of(mask, 0), candidates(0)
    loss, metrics = streams(
        *(logprobs, old, mask, advantages),
        stream_weights=weights,
        stream_totals=stream_totals_of(weights),
        top_k_logprobs=policy,
        teacher_top_k_logprobs=teacher,
        streams=STREAMS,
    )
    lp, a = logprobs.numpy(), advantages.numpy()
    rl, clone, kl = (rows.numpy() for rows in weights.values())
    p, q = (np.exp(logs.numpy()) for logs in (policy, teacher))
    p, q = (np.concatenate([masses, 1 - masses.sum(-1, keepdims=True)], -1) for masses in (p, q))
    terms = [
        -(rl * a * lp).sum() / (rl != 0).sum(),
        -(clone * lp).sum() / (clone != 0).sum(),
        (kl * (q * np.log(q / p)).sum(-1)).sum() / (kl != 0).sum(),
    ]
    assert loss.item() == pytest.approx(terms[0] + 0.5 * terms[1] + 0.25 * terms[2], rel=1e-12)
    assert {name: value.item() for name, value in metrics.items()} == pytest.approx(
        {"pg_loss": terms[0], "clone_loss": terms[1], "teacher_loss": terms[2]}
    )


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 1000), cut=st.integers(0, 5), order=st.permutations(range(5)))
def test_cutting_and_reordering_streams_change_nothing(mode: str, seed: int, cut: int, order: list[int]) -> None:
    tensors = batch(seed)
    weights, (policy, teacher) = weights_of(tensors[2], seed), candidates(seed)

    def result(rows: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        return with_gradient(
            streams,
            *(tensor[rows] for tensor in tensors),
            stream_weights={name: of_stream[rows] for name, of_stream in weights.items()},
            stream_totals=stream_totals_of(weights),
            top_k_logprobs=policy[rows],
            teacher_top_k_logprobs=teacher[rows],
            streams=STREAMS,
            loss_agg_mode=mode,
        )

    loss, gradient, metrics = result(slice(None))
    parts = [(rows, result(rows)) for rows in (order[:cut], order[cut:])]
    torch.testing.assert_close(parts[0][1][0] + parts[1][1][0], loss)
    torch.testing.assert_close(combine_metrics(metrics for _, (_, _, metrics) in parts), metrics)
    for rows, (_, part, _) in parts:
        torch.testing.assert_close(part, gradient[rows])


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("loss", ["ppo", "gspo", "cispo", "sapo", "sft", "rec"])
def test_a_weight_multiplies_a_tokens_loss_and_not_its_count(loss: str, mode: str) -> None:
    tensors = batch()
    fn: Any = create_policy_loss("streams", streams={"one": {"loss": loss}}, loss_agg_mode=mode)
    totals = stream_totals_of({"one": tensors[2]})
    whole, half = (
        fn(*tensors, stream_weights={"one": weight * tensors[2].double()}, stream_totals=totals)[0]
        for weight in (1.0, 0.5)
    )
    torch.testing.assert_close(whole, create_policy_loss(loss, loss_agg_mode=mode)(*tensors)[0])
    torch.testing.assert_close(half, 0.5 * whole)


@pytest.mark.parametrize(
    ("streams", "key"),
    [
        ({}, ""),
        ({"rl": "ppo"}, ".rl"),
        ({"rl": {"los": "ppo"}}, ".rl.los"),
        ({"rl": {"loss": "pppo"}}, ".rl.loss"),
        ({"rl": {"loss": "mix"}}, ".rl.loss"),
        ({"rl": {"args": "fast"}}, ".rl.args"),
        ({"rl": {}, "kl": {}}, ".kl"),
        ({"rl": {"tokens": "experts"}}, ".rl.tokens"),
        ({"rl": {"weight": float("nan")}}, ".rl.weight"),
        ({"tools": {"tokens": "observations"}}, ".tools.loss"),
        ({"expert": {"loss": "teacher_kl", "tokens": "expert"}}, ".expert.loss"),
    ],
)
def test_wrong_streams_are_refused(streams: dict[str, Any], key: str) -> None:
    with refuses(f"{ARGS}.streams{key}"):
        stream_configs(streams)


def test_an_argument_that_a_streams_loss_lacks_is_refused() -> None:
    with refuses(f"{ARGS}.streams.rl.args.clip_range_hi", ArgumentError) as refused:
        streams(*batch(), streams={"rl": {"args": {"clip_range_hi": 0.3}}})
    assert str(refused.value).startswith(f"{ARGS}.streams.rl.args.clip_range_hi: ")
    with refuses(f"{ARGS}.streams.rl.loss"):
        streams(*batch(), streams={"rl": {"loss": "no_module.loss"}})


# -- mix ---------------------------------------------------------------------------------------------------------------


EXPERT = torch.tensor([False, True, False, True, False])


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_mix_is_both_losses_on_their_own_rows(mode):
    tensors = batch()
    loss, metrics = mix(*tensors, expert_mask=EXPERT, mu=0.3, loss_agg_mode=mode)
    usual, usual_metrics = ppo(*(t[~EXPERT] for t in tensors), loss_agg_mode=mode)
    expert, _ = sft(*(t[EXPERT] for t in tensors), loss_agg_mode=mode)
    torch.testing.assert_close(loss, 0.7 * usual + 0.3 * expert)
    torch.testing.assert_close(metrics, usual_metrics | {"sft_loss": expert})


def test_the_share_of_expert_tokens_does_not_change_their_weight():
    tensors = batch()
    twice = tuple(torch.cat([t, t[EXPERT]]) for t in tensors)
    marks = torch.cat([EXPERT, torch.ones(2, dtype=torch.bool)])
    torch.testing.assert_close(mix(*twice, expert_mask=marks)[0], mix(*tensors, expert_mask=EXPERT)[0])


@pytest.mark.parametrize("expert", [None, torch.zeros(5, dtype=torch.bool)])
def test_without_expert_data_it_is_a_share_of_the_usual_loss(expert):
    tensors = batch()
    loss, metrics = mix(*tensors, expert_mask=expert)
    torch.testing.assert_close(loss, 0.9 * ppo(*tensors)[0])
    assert metrics["sft_loss"] == 0


def test_expert_data_alone_ignore_advantages():
    logprobs, old, mask, advantages = batch()
    everything = torch.ones(5, dtype=torch.bool)
    loss, metrics = mix(logprobs, old, mask, advantages, expert_mask=everything)
    torch.testing.assert_close(loss, 0.1 * sft(logprobs, old, mask, 0 * advantages)[0])
    assert metrics["pg_loss"] == 0


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@settings(deadline=None, max_examples=15)
@given(
    seed=st.integers(0, 1000),
    cut=st.integers(0, 5),
    order=st.permutations(range(5)),
    marks=st.lists(st.booleans(), min_size=5, max_size=5),
)
def test_cutting_and_reordering_a_mix_change_nothing(mode, seed, cut, order, marks):
    tensors, expert = batch(seed), torch.tensor(marks)
    experts = {"num_expert_tokens": int(tensors[2][expert].sum()), "num_expert_sequences": int(expert.sum())}
    arguments = totals_of(tensors[2]) | experts | {"loss_agg_mode": mode}
    loss, gradient, metrics = with_gradient(mix, *tensors, expert_mask=expert, **arguments)
    alone, _ = mix(*tensors, expert_mask=expert, loss_agg_mode=mode)
    torch.testing.assert_close(alone, loss)
    parts = [
        (rows, with_gradient(mix, *(t[rows] for t in tensors), expert_mask=expert[rows], **arguments))
        for rows in (order[:cut], order[cut:])
    ]
    torch.testing.assert_close(parts[0][1][0] + parts[1][1][0], loss)
    torch.testing.assert_close(combine_metrics(metrics for _, (_, _, metrics) in parts), metrics)
    for rows, (_, part, _) in parts:
        torch.testing.assert_close(part, gradient[rows])


def test_the_usual_loss_is_a_choice_with_arguments_of_its_own():
    tensors = batch()
    fn = create_policy_loss("mix", usual="gspo", usual_args={"clip_range_high": 0.1, "loss_agg_mode": "token-mean"})
    gspo = create_policy_loss("gspo", clip_range_high=0.1, loss_agg_mode="token-mean")
    torch.testing.assert_close(fn(*tensors)[0], 0.9 * gspo(*tensors)[0])


def test_wrong_arguments_of_mix_are_refused():
    with refuses(f"{ARGS}.mu"):
        mix(*batch(), mu=1.5)
    for usual in ("dpo", "mix", "streams", "teacher_kl"):
        with refuses(f"{ARGS}.usual"):
            mix(*batch(), usual=usual)
    with refuses(f"{ARGS}.usual_args.clip_range_hi", ArgumentError):
        mix(*batch(), usual_args={"clip_range_hi": 0.3})
    with refuses(f"{ARGS}.usual"):
        mix(*batch(), usual="no_module.loss")
    with refuses(f"{ARGS}.expert_mask", ArgumentError):
        create_policy_loss("mix", expert_mask=None)
