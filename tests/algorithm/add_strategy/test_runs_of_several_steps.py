"""A run of several steps is one member of its group, however many calls it took."""

import pytest
import torch
from support.strategies import add, advantages, make, runs_of, scores

from trinity_lightning.algorithm.add_strategy import ADD_STRATEGY, GroupAdvantageStrategy
from trinity_lightning.common.experience import EID, Experience, ExperienceError

# Compare runs by one reward each.
BY_RUN = [
    name
    for name in ADD_STRATEGY
    if issubclass(ADD_STRATEGY.get(name), GroupAdvantageStrategy) and name not in ("on_policy_distill", "critic")
]
FILTERS = ["dapo", "duplicate_informative", "reward_variance"]


@pytest.mark.parametrize("name", BY_RUN)
def test_the_scores_are_those_of_runs_of_one_step(name):
    steps = [5, 1, 2]
    long, plain = runs_of(0, [0.0] * 5, [1.0], [0.5] * 2), runs_of(0, [0.0], [1.0], [0.5])
    (calls, metrics), (_, expected) = add(name, long), add(name, plain)
    if name != "reinforce_plus_plus":  # whitens over tokens, of which a longer run has more
        assert scores(long) == pytest.approx([s for s, n in zip(scores(plain), steps, strict=True) for _ in range(n)])
    assert metrics == pytest.approx(expected)
    assert sum(map(len, calls)) == 8


def test_the_mean_does_not_weigh_runs_by_their_calls():
    exps = runs_of(0, [0.0] * 5, [1.0])
    _, metrics = add("dr_grpo", exps)
    assert metrics["group_advantages/reward_mean/mean"] == 0.5
    assert scores(exps) == [-0.5] * 5 + [0.5]


def test_whitening_counts_all_tokens_of_a_run():
    exps = runs_of(0, [0.0] * 2, [1.0])
    add("reinforce_plus_plus", exps)
    tokens = torch.cat([advantages(exp)[[0, 2]] for exp in exps])
    assert tokens.mean() == pytest.approx(0, abs=1e-6)
    assert tokens.var() == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("name", BY_RUN)
def test_steps_with_rewards_of_their_own_are_refused(name):
    exps = runs_of(0, [0.0, 1.0], [0.0])
    with pytest.raises(ExperienceError, match=r"run 1/0/0.*step_wise_grpo.*gigpo"):
        add(name, exps)


@pytest.mark.parametrize("before", [None, 0.25, float("nan")])
@pytest.mark.parametrize("name", FILTERS)
def test_a_filter_judges_a_run_by_its_last_step(name, before):
    """The strategy behind the filter decides whether the steps before need a reward; step_wise_grpo needs none."""
    calls, _ = add(name, runs_of(0, [before, before, 0.0], [before, before, 1.0]))
    assert sum(map(len, calls)) == 6
    calls, _ = add(name, runs_of(0, [before, before, 1.0], [before, before, 1.0]))
    assert calls == []


@pytest.mark.parametrize("name", FILTERS)
def test_a_filter_compares_runs_not_experiences(name):
    calls, _ = add(name, runs_of(0, [1.0] * 3))
    assert calls == []
    calls, _ = add(name, runs_of(0, [1.0] * 3, [0.0]))
    assert sum(map(len, calls)) == 4


def test_ids_that_do_not_say_which_run_leave_every_experience_its_own():
    exps = [Experience(eid=EID(suffix=str(r)), tokens=[1, 2, 3], prompt_length=2, reward=r) for r in range(4)]
    add("grpo", exps)
    assert scores(exps) == pytest.approx([-1.161894, -0.387298, 0.387298, 1.161894], abs=1e-6)


def test_correct_bias_ranks_a_run_by_all_its_tokens():
    """Run 0: -1 over 2 tokens and -4 over 2 make -2.5, less likely than -2."""
    exps = [
        make(0, 0, 1.0, step=0, logprobs=[-1.0] * 3),
        make(0, 0, 1.0, step=1, logprobs=[-4.0] * 3),
        make(0, 1, 1.0, logprobs=[-2.0] * 3),
    ]
    add("correct_bias", exps)
    assert scores(exps)[0] == scores(exps)[1] > 0 > scores(exps)[2]
