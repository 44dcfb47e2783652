import pytest
from support.errors import refuses

from trinity_lightning.algorithm.add_strategy import (
    ADD_STRATEGY,
    CorrectBiasAddStrategy,
    DuplicateInformativeAddStrategy,
    GiGPOAddStrategy,
    GRPOAddStrategy,
    OPMDAddStrategy,
    RewardVarianceAddStrategy,
    StepWiseGRPOStrategy,
)
from trinity_lightning.algorithm.add_strategy.add_strategy import ListWriter
from trinity_lightning.errors import ArgumentError


@pytest.mark.parametrize(
    ("cls", "expected"),
    [
        (GRPOAddStrategy, {"epsilon": 1e-6}),
        (OPMDAddStrategy, {"opmd_baseline": "mean", "tau": 1.0}),
        (RewardVarianceAddStrategy, {"variance_threshold": 0.0}),
        (ADD_STRATEGY.get("rloo"), {}),
        (ADD_STRATEGY.get("dapo"), {"variance_threshold": 0.0}),
        (ADD_STRATEGY.get("asymre"), {"baseline_shift": -0.1}),
        (ADD_STRATEGY.get("on_policy_distill"), {"kl_coef": 1.0}),
        (CorrectBiasAddStrategy, {"epsilon": 1e-6, "rank_penalty": 0.25}),
        (DuplicateInformativeAddStrategy, {"variance_threshold": 0.0}),
        (StepWiseGRPOStrategy, {"epsilon": 1e-6, "enable_step_norm": False}),
        (
            GiGPOAddStrategy,
            {"epsilon": 1e-6, "step_weight": 1.0, "gamma": 0.95, "std_norm": True, "state_key": "state"},
        ),
    ],
)
def test_default_args_are_the_constructor_s(cls, expected):
    assert cls.default_args() == expected
    strategy = cls(ListWriter(), **cls.default_args())
    assert {name: getattr(strategy, name) for name in expected} == expected
    assert {name: getattr(cls(ListWriter()), name) for name in expected} == expected


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        *(("grpo", "epsilon", value) for value in (-1.0, None, "small", True)),
        *(("grpo", "std_threshold", value) for value in (NAN, "0.1")),
        *(("grpo", "std_level", value) for value in ("step", ["group"])),
        *(("opmd", "opmd_baseline", value) for value in ("meen", None)),
        *(("opmd", "tau", value) for value in (0.0, None)),
        *(("reward_variance", "variance_threshold", value) for value in (-1, None)),
        ("dapo", "metric", 3),
        ("duplicate_informative", "variance_threshold", INF),
        ("duplicate_informative", "seed", 0.5),
        *(("correct_bias", "rank_penalty", value) for value in (-0.1, None)),
        ("correct_bias", "epsilon", -1),
        *(("asymre", "baseline_shift", value) for value in (NAN, None)),
        *(("on_policy_distill", "kl_coef", value) for value in (INF, "1", -1.0)),
        ("step_wise_grpo", "epsilon", -1),
        ("step_wise_grpo", "enable_step_norm", 1),
        ("step_wise_grpo", "std_level", "step"),
        ("step_wise_grpo", "std_threshold", -1),
        *(("gigpo", "gamma", value) for value in (1.5, None)),
        ("gigpo", "step_weight", NAN),
        ("gigpo", "std_norm", "yes"),
        ("gigpo", "state_key", None),
    ],
)
def test_values_out_of_range_are_refused(name, key, value):
    with refuses(key):
        ADD_STRATEGY.get(name)(ListWriter(), **{key: value})


@pytest.mark.parametrize("name", list(ADD_STRATEGY))
def test_unknown_arguments_list_the_valid_ones(name):
    with refuses("epsilom", ArgumentError) as refused:
        ADD_STRATEGY.get(name)(ListWriter(), epsilom=1.0)
    for argument in ADD_STRATEGY.get(name).default_args():
        assert argument in str(refused.value)


def test_unknown_names_list_the_known_ones():
    with pytest.raises(ValueError, match="Did you mean 'grpo'") as error:
        ADD_STRATEGY.get("grpoo")
    assert all(name in str(error.value) for name in ADD_STRATEGY)


def test_correct_bias_has_none_of_grpo_s_further_options():
    with refuses("std_level", ArgumentError):
        ADD_STRATEGY.get("correct_bias")(ListWriter(), std_level="batch")
