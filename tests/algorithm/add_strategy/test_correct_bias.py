import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.strategies import INVALID, add, advantages, make, scores

from trinity_lightning.common.experience import ExperienceError


def group(rewards, logprobs, task=0):
    """A task's runs, each with one value for all its log-probabilities, or a list of one per token."""
    return [
        make(task, run, reward, logprobs=value if isinstance(value, list) or value is None else [value] * 3)
        for run, (reward, value) in enumerate(zip(rewards, logprobs, strict=True))
    ]


def oracle(rewards, likelihoods, penalty=0.25, epsilon=1e-6):
    """Float64: GRPO on the penalised rewards of one group of at least two."""
    r, lp = np.asarray(rewards, dtype=float), np.asarray(likelihoods, dtype=float)
    rank = np.array([(lp < x).sum() + ((lp == x).sum() - 1) / 2 for x in lp])
    penalised = r * (1 - rank / len(r) * penalty)
    spread = np.ptp(penalised)
    if spread <= 1e-6 * np.abs(penalised).max(initial=0):
        return penalised, np.zeros(len(r))
    return penalised, (penalised - penalised.mean()) / (penalised.std(ddof=1) + epsilon)


def test_numbers_to_meet():
    exps = group([0, 1, 2, 3], [-4.0, -3.0, -2.0, -1.0])
    _, metrics = add("correct_bias", exps, rank_penalty=0.2)
    expected = np.array([0, 0.95, 1.8, 2.55])
    assert metrics["group_advantages/reward_mean/mean"] == pytest.approx(expected.mean())
    assert metrics["group_advantages/reward_std/mean"] == pytest.approx(expected.std(ddof=1))
    assert scores(exps) == pytest.approx((expected - expected.mean()) / (expected.std(ddof=1) + 1e-6), abs=1e-6)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(-3, 3), st.integers(-4, 0)), min_size=2, max_size=12), st.floats(0, 1))
def test_scores_equal_numpy_and_sum_to_zero(rows, penalty):
    exps = group([r for r, _ in rows], [float(lp) for _, lp in rows])
    add("correct_bias", exps, rank_penalty=penalty)
    expected = oracle([r for r, _ in rows], [lp for _, lp in rows], penalty)[1]
    assert scores(exps) == pytest.approx(expected, abs=1e-5)
    assert sum(scores(exps)) == pytest.approx(0, abs=1e-5)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(-3, 3), st.integers(-4, 0)), min_size=2, max_size=12), st.randoms())
def test_order_does_not_matter(rows, random):
    direct, shuffled = [group([r for r, _ in rows], [float(lp) for _, lp in rows]) for _ in range(2)]
    random.shuffle(shuffled)
    add("correct_bias", direct)
    add("correct_bias", shuffled)
    assert scores(sorted(shuffled, key=lambda exp: exp.eid.run)) == pytest.approx(scores(direct), abs=1e-6)


def test_equal_inputs_get_equal_advantages():
    exps = group([1, 1, 0, 1], [-1.0, -1.0, -2.0, -1.0])
    add("correct_bias", exps)
    right, as_likely, wrong, also_as_likely = scores(exps)
    assert right == as_likely == also_as_likely > 0 > wrong


def test_the_order_of_tokens_does_not_matter():
    exps = group([1, 1], [[-0.1, -0.2, -0.7], [-0.7, -0.2, -0.1]])
    add("correct_bias", exps)
    assert scores(exps) == [0, 0]


def test_the_unlikely_is_worth_more():
    exps = group([1, 1], [-0.1, -3.0])
    add("correct_bias", exps)
    assert scores(exps)[0] < 0 < scores(exps)[1]


def test_without_penalty_it_is_grpo():
    rows = ([0, 3, 1], [-1.0, -2.0, -0.5])
    unpenalised, grpo = group(*rows), group(*rows)
    _, metrics = add("correct_bias", unpenalised, rank_penalty=0.0)
    _, expected = add("grpo", grpo)
    assert (scores(unpenalised), metrics) == (scores(grpo), expected)


def test_a_lone_experience_needs_no_logprobs():
    exps = group([7], [None])
    add("correct_bias", exps)
    assert scores(exps) == pytest.approx([6.999993], abs=1e-6)


def test_the_experience_without_logprobs_in_a_group_of_several_is_named():
    exps = group([0, 1], [-1.0, None])
    with pytest.raises(ExperienceError, match=r"1/0/1/0/\w+.*logprobs"):
        add("correct_bias", exps)


@pytest.mark.parametrize(
    "logprobs",
    [[], [-1.0] * 4, [float("nan"), 0.0, 0.0]],
)
def test_the_experience_of_logprobs_that_have_no_order_is_named(logprobs):
    exps = group([0, 1], [-1.0, -1.0])
    exps[1].logprobs = torch.tensor(logprobs)
    with pytest.raises(ExperienceError, match=r"1/0/1/0/\w+.*logprobs"):
        add("correct_bias", exps)


def test_a_group_left_out_needs_no_logprobs():
    exps = group([0, None], [None, None]) + group([0, 1], [-1.0, -2.0], task=1)
    calls, metrics = add("correct_bias", exps)
    assert [call[0].eid.task for call in calls] == [1]
    assert metrics[INVALID] == 1


def test_tokens_of_an_environment_do_not_rank():
    """The second token is not the policy's: 0.0 there made an unlikely answer look likely."""
    exps = group([1, 1], [[-3.0, 0.0, -3.0], [-2.0, -9.0, -2.0]])
    add("correct_bias", exps)
    assert scores(exps)[0] > 0 > scores(exps)[1]


def test_a_response_without_trained_tokens_ranks_by_all_its_tokens():
    exps = group([1, 1], [-3.0, -1.0])
    exps[0].action_mask = torch.zeros(3, dtype=torch.bool)
    add("correct_bias", exps)
    assert advantages(exps[0]).tolist() == [0, 0, 0]
    assert scores(exps)[1] == pytest.approx(-0.707, abs=1e-3)
