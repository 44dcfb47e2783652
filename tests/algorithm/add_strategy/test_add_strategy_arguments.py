import pytest

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
from trinity_lightning.errors import ConfigError


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


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("grpo", {"epsilon": -1.0}, "epsilon is -1.*: give a finite number of 0 or more"),
        ("grpo", {"std_threshold": float("nan")}, "std_threshold"),
        ("grpo", {"std_level": "step"}, "unknown std_level 'step'.*batch, group"),
        ("opmd", {"opmd_baseline": "meen"}, "Did you mean 'mean'"),
        ("opmd", {"tau": 0.0}, "tau is"),
        ("reward_variance", {"variance_threshold": -1}, "variance_threshold"),
        ("duplicate_informative", {"variance_threshold": float("inf")}, "variance_threshold"),
        ("correct_bias", {"rank_penalty": -0.1}, "rank_penalty is -0.1.*: give a finite number of 0 or more"),
        ("correct_bias", {"epsilon": -1}, "epsilon"),
        ("step_wise_grpo", {"epsilon": -1}, "epsilon"),
        ("asymre", {"baseline_shift": float("nan")}, "baseline_shift is nan: give a finite number"),
        ("on_policy_distill", {"kl_coef": float("inf")}, "kl_coef is inf: give a finite number"),
        ("gigpo", {"gamma": 1.5}, "gamma is 1.5: give a number from 0 to 1"),
        ("gigpo", {"step_weight": float("nan")}, "step_weight"),
        ("opmd", {"opmd_baseline": None}, "unknown opmd_baseline 'None'.*logavgexp, mean"),
        ("opmd", {"tau": None}, "tau is None: give a finite number above 0"),
        ("grpo", {"epsilon": None}, "epsilon is None: give"),
        ("grpo", {"epsilon": "small"}, "epsilon is 'small': give"),
        ("grpo", {"epsilon": True}, "epsilon is True: give"),
        ("grpo", {"std_level": ["group"]}, "unknown std_level"),
        ("grpo", {"std_threshold": "0.1"}, "std_threshold is '0.1': give"),
        ("correct_bias", {"rank_penalty": None}, "rank_penalty is None: give"),
        ("asymre", {"baseline_shift": None}, "baseline_shift is None: give"),
        ("on_policy_distill", {"kl_coef": "1"}, "kl_coef is '1': give"),
        ("on_policy_distill", {"kl_coef": -1.0}, "kl_coef is -1.0: give a finite number above 0"),
        ("reward_variance", {"variance_threshold": None}, "variance_threshold is None: give"),
        ("dapo", {"metric": 3}, "metric is 3: give some text"),
        ("duplicate_informative", {"seed": 0.5}, "seed is 0.5: give a whole number of 0 or more"),
        ("step_wise_grpo", {"enable_step_norm": 1}, "enable_step_norm is 1: give true or false"),
        ("step_wise_grpo", {"std_level": "step"}, "unknown std_level 'step'"),
        ("step_wise_grpo", {"std_threshold": -1}, "std_threshold"),
        ("gigpo", {"gamma": None}, "gamma is None: give"),
        ("gigpo", {"std_norm": "yes"}, "std_norm is 'yes': give true or false"),
        ("gigpo", {"state_key": None}, "state_key is None: give some text"),
    ],
)
def test_values_out_of_range_are_refused(name, args, message):
    with pytest.raises(ConfigError, match=message):
        ADD_STRATEGY.get(name)(ListWriter(), **args)


@pytest.mark.parametrize("name", list(ADD_STRATEGY))
def test_unknown_arguments_list_the_valid_ones(name):
    with pytest.raises(TypeError, match=r"unknown argument of .*'epsilom'") as error:
        ADD_STRATEGY.get(name)(ListWriter(), epsilom=1.0)
    for arg in ADD_STRATEGY.get(name).default_args():
        assert arg in str(error.value)


def test_unknown_names_list_the_known_ones():
    with pytest.raises(ValueError, match=r"Did you mean 'grpo'.*opmd.*reward_variance"):
        ADD_STRATEGY.get("grpoo")


def test_correct_bias_has_none_of_grpo_s_further_options():
    with pytest.raises(TypeError, match=r"'std_level'.*Known: epsilon, rank_penalty"):
        ADD_STRATEGY.get("correct_bias")(ListWriter(), std_level="batch")
