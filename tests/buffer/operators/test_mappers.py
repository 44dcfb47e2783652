"""Operators that change experiences or measure them: truncation, penalties, shaping, pass rates."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.errors import refuses
from support.operators import make, rewards, run, step_of

from trinity_lightning.common.experience import Experience, ExperienceError
from trinity_lightning.errors import ConfigError

NAN = float("nan")


def test_truncated_responses_are_not_trained_on():
    shared = torch.ones(2, dtype=torch.bool)
    exps = [make(run=i, truncate_status=status) for i, status in enumerate([None, "response_truncated"])]
    exps += [make(run=2, truncate_status="prompt_truncated", logprobs=[0.0])]
    for exp in exps[:2]:
        exp.action_mask = shared
    mapped, metrics = run("mask_response_truncated", exps)
    assert mapped == exps
    assert exps[1].action_mask is not None
    assert exps[1].action_mask.tolist() == [False, False]
    assert exps[1].action_mask.dtype == torch.bool
    assert shared.tolist() == [True, True]
    assert exps[0].action_mask is shared
    assert metrics == {"masked_truncated_count": 1}


@pytest.mark.parametrize(
    ("length", "penalty"), [(1, 0.0), (6, 0.0), (7, -0.25), (8, -0.5), (9, -0.75), (10, -1.0), (11, -1.0), (30, -1.0)]
)
def test_overlong_penalty_is_linear_over_the_cache(length, penalty):
    exps = [make(response=length, reward=2.0), make(response=1, reward=None)]
    mapped, metrics = run("overlong_penalty", exps, max_length=10, cache_length=4)
    assert mapped == exps
    assert rewards(exps) == [2.0 + penalty, None]
    assert metrics == {"overlong_penalty/mean": penalty / 2}


@settings(deadline=None)
@given(st.integers(2, 40), st.data())
def test_overlong_penalty_equals_the_formula(longest, data):
    cache, length = data.draw(st.integers(1, longest - 1)), data.draw(st.integers(1, 60))
    exp = make(response=length, reward=0.0)
    run("overlong_penalty", [exp], max_length=longest, cache_length=cache)
    expected = 0.0 if length <= longest - cache else -1.0 if length >= longest else (longest - cache - length) / cache
    assert exp.reward == pytest.approx(expected)


def test_what_the_environment_wrote_is_no_length_of_the_response():
    """The policy wrote 7 of the 12 tokens of three turns: at 8 the penalty would begin."""
    mask = [1, 1, 1, 0, 0, 1, 1, 0, 0, 0, 1, 1]
    exps = [Experience(tokens=list(range(15)), prompt_length=3, action_mask=mask, reward=1.0) for _ in range(2)]
    exps[1].truncate_status = "response_truncated"
    mapped, metrics = run("overlong_penalty", exps, max_length=12, cache_length=4)
    assert metrics == {"overlong_penalty/mean": 0.0}
    mapped, _ = run("mask_response_truncated", mapped)
    assert mapped[1].action_mask is not None
    assert not mapped[1].action_mask.any()
    mapped, metrics = run("overlong_penalty", mapped, max_length=9, cache_length=4)
    assert [exp.reward for exp in mapped] == [0.5, 0.5]
    assert metrics == {"overlong_penalty/mean": -0.5}


@pytest.mark.parametrize(
    "args",
    [(4, 4), (4, 5), (4, 0), (0, 0), (4, -1), (4.5, 2), (True, 1)],
)
def test_overlong_penalty_wants_a_cache_below_the_maximum(args):
    with pytest.raises(ConfigError) as refused:
        run("overlong_penalty", [], max_length=args[0], cache_length=args[1])
    assert refused.value.key in (
        "operators.overlong_penalty.args.max_length",
        "operators.overlong_penalty.args.cache_length",
    )


def shape(exps, *rules):
    return run("reward_shaping_mapper", exps, reward_shaping_configs=list(rules))


@pytest.mark.parametrize(("op_type", "expected"), [("ADD", 4.0), ("sub", 2.0), ("Mul", 3.0), ("DIV", 3.0), (None, 4.0)])
def test_shaping_operations_in_any_case(op_type, expected):
    exp = make(reward=3.0, info={"quality": 2})
    rule = {"stats_key": "quality", "weight": 0.5} | ({} if op_type is None else {"op_type": op_type})
    mapped, metrics = shape([exp], rule)
    assert mapped == [exp]
    assert exp.reward == expected
    assert metrics == {
        "skipped_count": 0,
        "reward_diff/mean": expected - 3,
        "reward_diff/min": expected - 3,
        "reward_diff/max": expected - 3,
    }


def test_shaping_rules_follow_each_other():
    exps = [make(run=i, reward=float(i), info={"quality": 4.0, "difficulty": i}) for i in range(3)]
    rules = [{"stats_key": "quality", "op_type": "ADD"}, {"stats_key": "difficulty", "op_type": "MUL", "weight": 0.5}]
    _, metrics = shape(exps, *rules)
    assert rewards(exps) == [0.0, 2.5, 6.0]
    assert metrics["reward_diff/min"] == 0
    assert metrics["reward_diff/max"] == 4
    assert metrics["reward_diff/mean"] == pytest.approx(5.5 / 3)


def test_what_a_rule_does_not_apply_to_stays_as_it_was():
    exps = [
        make(run=0, reward=1.0),
        make(run=1, reward=None, info={"quality": 2}),
        make(run=2, reward=1.0, info={"quality": 0.0}),
        make(run=3, reward=1.0, info={"quality": None}),
        make(run=4, reward=1.0, info={"quality": 4}),
    ]
    mapped, metrics = shape(exps, {"stats_key": "quality", "op_type": "DIV"})
    assert mapped == exps
    assert rewards(exps) == [1.0, None, 1.0, 1.0, 0.25]
    assert metrics["skipped_count"] == 4


def test_a_rule_that_does_not_apply_leaves_the_others():
    exp = make(reward=1.0, info={"quality": 2})
    _, metrics = shape([exp], {"stats_key": "quality"}, {"stats_key": "absent"}, {"stats_key": "quality"})
    assert exp.reward == 5.0
    assert metrics["skipped_count"] == 1


def test_no_rules_change_nothing():
    exps = step_of([1, None])
    mapped, metrics = run("reward_shaping_mapper", exps)
    assert rewards(mapped) == [1, None]
    assert metrics == {"skipped_count": 0, "reward_diff/mean": 0, "reward_diff/min": 0, "reward_diff/max": 0}


def test_an_entry_that_is_no_number_is_told():
    with pytest.raises(ExperienceError, match=r"experience 1/0/0/0/\w+: info\['quality'\] must be a number"):
        shape([make(info={"quality": "good"})], {"stats_key": "quality"})


@pytest.mark.parametrize(
    ("rule", "key"),
    [
        ({"stats_key": "q", "op_type": "POW"}, ".op_type"),
        ({"stats_key": "q", "wieght": 1}, ".wieght"),
        ({"op_type": "ADD"}, ".stats_key"),
        ({"stats_key": "q", "weight": NAN}, ".weight"),
        ("q", ""),
    ],
)
def test_wrong_rules_are_refused_by_their_key(rule, key):
    with refuses(f"operators.reward_shaping_mapper.args.reward_shaping_configs[0]{key}"):
        shape([], rule)


def test_rules_are_a_list():
    with refuses("operators.reward_shaping_mapper.args.reward_shaping_configs"):
        run("reward_shaping_mapper", [], reward_shaping_configs="q")


def indexed(taskset, index, reward, **fields):
    return make(task=index, reward=reward, info={"task_index": {"taskset_id": taskset, "index": index}}, **fields)


def test_pass_rates_go_to_the_task_selector():
    exps = [indexed("sums", 3, 1.0), indexed("sums", 7, 0.0), indexed("sums", 3, 0.0), indexed(1, 3, 0.5)]
    mapped, metrics = run("pass_rate_calculator", exps)
    assert mapped == exps
    assert metrics == {
        "selector_metric": {
            "sums": {"indices": [3, 7], "values": [0.5, 0.0]},
            1: {"indices": [3], "values": [0.5]},
        },
        "selection/task_count": 3,
        "selection/skipped_count": 0,
        "selection/pass_rate/mean": pytest.approx(1 / 3),
        "selection/pass_rate/min": 0.0,
        "selection/pass_rate/max": 0.5,
    }


def test_pass_rates_are_of_valid_rewards():
    exps = [indexed("sums", 3, 1.0), indexed("sums", 3, NAN), indexed("sums", 4, None)]
    _, metrics = run("pass_rate_calculator", exps)
    assert metrics["selector_metric"] == {"sums": {"indices": [3], "values": [1.0]}}
    assert metrics["selection/skipped_count"] == 2


@pytest.mark.parametrize("info", [{}, {"task_index": 3}, {"task_index": {"index": 3}}])
def test_a_missing_task_index_is_told(info):
    with pytest.raises(ExperienceError, match=r"experience 1/0/0/0/\w+: info\['task_index'\] must be"):
        run("pass_rate_calculator", [make(info=info)])
