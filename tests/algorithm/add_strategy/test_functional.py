import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.errors import refuses

from trinity_lightning.algorithm.add_strategy import functional
from trinity_lightning.common.runs import equal_rewards

REWARDS = st.floats(-5, 5).map(lambda x: round(x, 3))
GROUPED = st.lists(st.tuples(REWARDS, st.integers(-3, 6)), min_size=1, max_size=40)


def tensors(pairs):
    return torch.tensor([r for r, _ in pairs], dtype=torch.float64), torch.tensor([g for _, g in pairs])


def oracle(rewards, groups, score):
    """Float64 numpy, one group after the other; score(rewards of a group of at least two)."""
    out = np.empty(len(rewards))
    for g in set(groups.tolist()):
        rows = groups.numpy() == g
        r = rewards.numpy()[rows]
        out[rows] = score(r) if len(r) > 1 else r
    return out


def logavgexp(r, tau):
    return tau * np.log(np.mean(np.exp(r / tau)))


ORACLES = {
    "grpo": (lambda r, g: functional.grpo_advantages(r, g, 0.1), lambda r: (r - r.mean()) / (r.std(ddof=1) + 0.1)),
    "dr_grpo": (functional.dr_grpo_advantages, lambda r: r - r.mean()),
    "rloo": (functional.rloo_advantages, lambda r: np.array([x - np.delete(r, i).mean() for i, x in enumerate(r)])),
    "asymre": (lambda r, g: functional.asymre_advantages(r, g, 0.3), lambda r: r - (r.mean() + 0.3)),
    "opmd": (functional.opmd_advantages, lambda r: r - r.mean()),
    "logavgexp": (lambda r, g: functional.opmd_advantages(r, g, "logavgexp", 0.7), lambda r: r - logavgexp(r, 0.7)),
}


@pytest.mark.parametrize("name", ORACLES)
@settings(deadline=None)
@given(GROUPED)
def test_advantages_equal_numpy_group_by_group(name, pairs):
    fn, score = ORACLES[name]
    rewards, groups = tensors(pairs)
    expected = oracle(rewards, groups, score)
    if name == "grpo":  # a lone reward has standard deviation 1
        sizes = torch.tensor([int((groups == g).sum()) for g in groups])
        expected = np.where(sizes.numpy() == 1, rewards.numpy() / 1.1, expected)
    np.testing.assert_allclose(fn(rewards, groups).numpy(), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("fn", [functional.grpo_advantages, functional.dr_grpo_advantages, functional.rloo_advantages])
@settings(deadline=None)
@given(GROUPED)
def test_advantages_of_a_group_sum_to_zero(fn, pairs):
    rewards, groups = tensors(pairs)
    advantages = fn(rewards, groups)
    for g in groups.unique():
        if (groups == g).sum() > 1:
            assert abs(advantages[groups == g].sum()) < 1e-6


@settings(deadline=None)
@given(GROUPED, st.floats(-10, 10), st.floats(0.5, 20))
def test_grpo_ignores_shift_and_scale(pairs, shift, scale):
    rewards, _ = tensors(pairs)
    group = torch.zeros(len(rewards), dtype=torch.int64)
    if len(rewards) == 1 or equal_rewards(rewards.tolist()):
        assert torch.equal(
            functional.grpo_advantages(rewards, group), rewards / (1 + 1e-6) if len(rewards) == 1 else rewards * 0
        )
        return
    moved = functional.grpo_advantages(rewards * scale + shift, group, epsilon=0)
    torch.testing.assert_close(moved, functional.grpo_advantages(rewards, group, epsilon=0), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("level", ["group", "batch"])
@settings(deadline=None)
@given(GROUPED, st.randoms(use_true_random=False))
def test_order_does_not_matter(level, pairs, random):
    rewards, groups = tensors(pairs)
    order = random.sample(range(len(pairs)), len(pairs))
    direct = functional.grpo_advantages(rewards, groups, std_level=level)[order]
    torch.testing.assert_close(functional.grpo_advantages(rewards[order], groups[order], std_level=level), direct)


def test_rewards_equal_up_to_rounding_do_not_differ():
    rewards = torch.tensor([0.1 + 0.2, 0.3, 1e6, 1e6 + 1e-4, 0.0, 1.0], dtype=torch.float64)
    groups = torch.tensor([0, 0, 1, 1, 2, 2])
    for epsilon in (1e-6, 0.0):
        advantages = functional.grpo_advantages(rewards, groups, epsilon)
        assert advantages[:4].tolist() == [0, 0, 0, 0]
        assert advantages[4] < -0.7 < 0.7 < advantages[5]
    assert functional.opmd_advantages(rewards, groups, "logavgexp")[:4].tolist() == [0, 0, 0, 0]
    assert functional.rewards_differ(rewards, groups).tolist() == [False] * 4 + [True] * 2


def test_batch_level_std_is_that_of_all_rewards():
    rewards, groups = torch.tensor([0.0, 1.0, 0.0, 4.0, 2.0]), torch.tensor([0, 0, 1, 1, 2])
    std = np.std([0, 1, 0, 4, 2], ddof=1)
    expected = np.array([-0.5, 0.5, -2, 2, 2]) / (std + 1e-6)
    np.testing.assert_allclose(
        functional.grpo_advantages(rewards, groups, std_level="batch").numpy(), expected, rtol=1e-6
    )


def test_batch_level_std_of_lone_equal_rewards_is_one():
    advantages = functional.grpo_advantages(torch.tensor([7.0, 7.0]), torch.tensor([0, 1]), std_level="batch")
    torch.testing.assert_close(advantages, torch.tensor([7.0, 7.0]), rtol=1e-5, atol=0)


@settings(deadline=None)
@given(GROUPED, st.data())
def test_reinforce_plus_plus_is_white_over_tokens(pairs, data):
    rewards, groups = tensors(pairs)
    tokens = data.draw(st.lists(st.integers(0, 5), min_size=len(pairs), max_size=len(pairs)))
    advantages = functional.reinforce_plus_plus_advantages(rewards, groups, torch.tensor(tokens))
    per_token = np.repeat(oracle(rewards, groups, lambda r: r - r.mean()), tokens)
    if len(per_token) > 1:
        expected = (per_token - per_token.mean()) / np.sqrt(per_token.var(ddof=1) + 1e-8)
        np.testing.assert_allclose(np.repeat(advantages.numpy(), tokens), expected, rtol=1e-6, atol=1e-6)
    assert torch.isfinite(advantages).all()


def test_rewards_differ_by_a_variance_above_the_threshold():
    rewards, groups = torch.tensor([0.0, 1.0, 0.0, 0.5, 3.0]), torch.tensor([0, 0, 1, 1, 2])
    assert functional.rewards_differ(rewards, groups).tolist() == [True, True, True, True, False]
    assert functional.rewards_differ(rewards, groups, 0.0625).tolist() == [True, True, False, False, False]


def test_logavgexp_survives_large_rewards():
    rewards, groups = torch.tensor([0.0, 2000.0]), torch.tensor([0, 0])
    assert functional.opmd_baseline(rewards, groups, "logavgexp", 1.0).item() == pytest.approx(2000 - np.log(2))


def test_dtype_follows_the_rewards():
    groups = torch.tensor([0, 0])
    assert functional.grpo_advantages(torch.tensor([0, 1]), groups).dtype == torch.float32
    assert functional.rloo_advantages(torch.tensor([0.0, 1.0]).double(), groups).dtype == torch.float64
    assert functional.grpo_advantages(torch.tensor([]), torch.tensor([], dtype=torch.int64)).shape == (0,)


def test_wrong_arguments_are_named():
    rewards, groups = torch.tensor([0.0, 1.0]), torch.tensor([0, 0])
    with pytest.raises(ValueError, match=r"\(2,\).*\(3,\)"):
        functional.group_stats(rewards, torch.tensor([0, 0, 1]))
    with refuses("std_level"):
        functional.grpo_advantages(rewards, groups, std_level="grup")
    with refuses("opmd_baseline"):
        functional.opmd_advantages(rewards, groups, "median")
    with refuses("tau"):
        functional.opmd_advantages(rewards, groups, "logavgexp", 0.0)


def rank_oracle(likelihoods):
    """Ranks from 0, ties share the average of theirs."""
    return np.array([(likelihoods < x).sum() + ((likelihoods == x).sum() - 1) / 2 for x in likelihoods])


@settings(deadline=None)
@given(st.lists(st.tuples(REWARDS, st.integers(-3, 6), st.integers(-4, 0)), min_size=1, max_size=40))
def test_rank_penalty_equals_numpy_group_by_group(rows):
    rewards, groups = tensors([row[:2] for row in rows])
    likelihoods = torch.tensor([float(row[2]) for row in rows])
    penalised = functional.rank_penalised_rewards(rewards, groups, likelihoods, 0.4).numpy()
    for g in set(groups.tolist()):
        members = groups.numpy() == g
        rank = rank_oracle(likelihoods.numpy()[members])
        expected = rewards.numpy()[members] * (1 - rank / members.sum() * 0.4)
        np.testing.assert_allclose(penalised[members], expected, rtol=1e-12, atol=1e-12)


def test_rank_penalty_of_no_rewards():
    nothing = torch.tensor([])
    assert functional.rank_penalised_rewards(nothing, nothing.long(), nothing).shape == (0,)


STEPS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), REWARDS, st.integers(0, 2)), min_size=1, max_size=30)


@pytest.mark.parametrize("std_norm", [True, False])
@settings(deadline=None)
@given(STEPS, st.floats(-2, 2))
def test_gigpo_equals_numpy(std_norm, rows, weight):
    episodes = sorted({row[:2] for row in rows})
    returns = torch.tensor([float(i % 3) for i in range(len(episodes))], dtype=torch.float64)
    tasks = torch.tensor([task for task, _ in episodes])
    step_returns = torch.tensor([row[2] for row in rows], dtype=torch.float64)
    states = torch.tensor([row[0] * 10 + row[3] for row in rows])
    of_step = torch.tensor([episodes.index(row[:2]) for row in rows])
    advantages = functional.gigpo_advantages(
        returns, tasks, step_returns, of_step, states, epsilon=0.1, step_weight=weight, std_norm=std_norm
    )

    def normed(r):
        return (r - r.mean()) / (r.std(ddof=1) + 0.1) if std_norm else r - r.mean()

    of_episodes = oracle(returns, tasks, normed)
    if std_norm:  # a lone episode has standard deviation 1
        lone = np.array([(tasks == task).sum().item() == 1 for task in tasks])
        of_episodes = np.where(lone, returns.numpy() / 1.1, of_episodes)
    of_steps = np.zeros(len(rows))
    for state in set(states.tolist()):
        same = states.numpy() == state
        if same.sum() > 1:
            of_steps[same] = normed(step_returns.numpy()[same])
    np.testing.assert_allclose(
        advantages.numpy(), of_episodes[of_step.numpy()] + weight * of_steps, rtol=1e-9, atol=1e-9
    )


def test_gigpo_without_epsilon_is_finite_where_nothing_differs():
    ones, zeros = torch.ones(3), torch.zeros(3, dtype=torch.int64)
    advantages = functional.gigpo_advantages(ones, zeros, ones, torch.arange(3), torch.tensor([0, 0, 1]), epsilon=0.0)
    assert advantages.tolist() == [0, 0, 0]


def test_distillation_is_the_difference_of_log_probabilities():
    advantages = functional.distillation_advantages(torch.tensor([-1.0, -3.0]), torch.tensor([-2.0, -2.5]), 0.5)
    assert advantages.tolist() == [0.5, -0.25]
    assert advantages.dtype == torch.float64
