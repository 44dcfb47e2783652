"""The mix loss: two terms, each with its own normaliser, however the batch is cut."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.losses import batch, totals_of, with_gradient

from trinity_lightning.algorithm.policy_loss import LOSS_AGG_MODES, create_policy_loss, mix, ppo, sft
from trinity_lightning.algorithm.policy_loss.policy_loss import combine_metrics
from trinity_lightning.errors import ConfigError

EXPERT = torch.tensor([False, True, False, True, False])


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_it_is_both_losses_on_their_own_rows(mode):
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
def test_cutting_and_reordering_change_nothing(mode, seed, cut, order, marks):
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


def test_wrong_arguments_are_refused():
    with pytest.raises(ConfigError, match=r"mu is 1\.5; give a number from 0 to 1"):
        mix(*batch(), mu=1.5)
    for usual in ("dpo", "mix", "streams", "teacher_kl"):
        with pytest.raises(ConfigError, match=rf"unknown algorithm\.policy_loss\.args\.usual '{usual}'"):
            mix(*batch(), usual=usual)
    with pytest.raises(TypeError, match="clip_range_hi"):
        mix(*batch(), usual_args={"clip_range_hi": 0.3})
    with pytest.raises(TypeError, match="expert_mask"):
        create_policy_loss("mix", expert_mask=None)
