import logging

import pytest
import torch
from support.strategies import INVALID, add, advantages, make

from trinity_lightning.common.experience import ExperienceError

NAME = "on_policy_distill"


def test_the_advantage_is_the_teacher_s_minus_the_policy_s_log_probability():
    exp = make(0, 0, None, logprobs=[-1.0, -2.0, -3.0], teacher_logprobs=[-0.5, -9.0, -4.0])
    ((written,),), metrics = add(NAME, [exp], kl_coef=2.0)
    assert written is exp
    assert advantages(exp).tolist() == [1.0, 0.0, -2.0]
    assert advantages(exp).dtype == torch.float32
    assert exp.returns is not None
    assert torch.equal(exp.returns, advantages(exp))
    assert exp.returns.data_ptr() != advantages(exp).data_ptr()
    assert metrics["group_advantages/reverse_kl/mean"] == pytest.approx((-0.5 + 1.0) / 2)


def test_no_reward_is_needed_and_groups_are_written_by_task():
    exps = [make(0, 0, None), make(1, 0, 1.0), make(0, 1, 2.0)]
    calls, metrics = add(NAME, exps)
    assert [[exp.eid.tid for exp in call] for call in calls] == [["1/0", "1/0"], ["1/1"]]
    assert metrics[INVALID] == 0


def test_tokens_that_are_not_trained_do_not_matter():
    exp = make(0, 0, None, teacher_logprobs=[-0.5, float("nan"), -0.5])
    _, metrics = add(NAME, [exp])
    assert advantages(exp).tolist() == [0.5, 0.0, 0.5]
    untrained = make(0, 0, None)
    untrained.action_mask = torch.zeros(3, dtype=torch.bool)
    _, metrics = add(NAME, [untrained])
    assert metrics == {INVALID: 0}


@pytest.mark.parametrize(
    "fields",
    [
        {"teacher_logprobs": [-0.5, -1.0, float("-inf")]},
        {"logprobs": [float("nan"), -1.0, -1.0]},
        {"reward": float("nan")},
        {"reward": float("inf")},
    ],
)
def test_numbers_that_are_not_finite_leave_their_group_out(fields, caplog):
    exps = [make(0, 0, 1.0), make(1, 0, **({"reward": 1.0} | fields)), make(1, 1, 1.0)]
    with caplog.at_level(logging.WARNING):
        calls, metrics = add(NAME, exps)
    assert [exp.eid.task for call in calls for exp in call] == [0]
    assert metrics[INVALID] == 1
    assert "1/1" in caplog.text


@pytest.mark.parametrize("name", ["logprobs", "teacher_logprobs"])
def test_the_experience_of_missing_or_misfitting_log_probabilities_is_named(name):
    exp = make(0, 0, 1.0)
    setattr(exp, name, None)
    with pytest.raises(ExperienceError, match=rf"1/0/0/0/\w+.* {name}"):
        add(NAME, [exp])
    setattr(exp, name, torch.zeros(2))
    with pytest.raises(ExperienceError, match=rf"1/0/0/0/\w+.* {name}"):
        add(NAME, [exp])
