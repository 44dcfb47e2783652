import pytest

from trinity_lightning.algorithm.add_strategy import (
    ADD_STRATEGY,
    GRPOAddStrategy,
    OPMDAddStrategy,
    RewardVarianceAddStrategy,
)
from trinity_lightning.common.errors import ConfigError
from trinity_lightning.common.writer import BufferWriter


class NoWriter(BufferWriter):
    def write(self, experiences):
        raise NotImplementedError


@pytest.mark.parametrize(
    ("cls", "expected"),
    [
        (GRPOAddStrategy, {"epsilon": 1e-6}),
        (OPMDAddStrategy, {"opmd_baseline": "mean", "tau": 1.0}),
        (RewardVarianceAddStrategy, {"variance_threshold": 0.0}),
        (ADD_STRATEGY.get("rloo"), {}),
    ],
)
def test_default_args_are_the_constructor_s(cls, expected):
    assert cls.default_args() == expected
    strategy = cls(NoWriter(), **cls.default_args())
    assert {name: getattr(strategy, name) for name in expected} == expected
    assert {name: getattr(cls(NoWriter()), name) for name in expected} == expected


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("grpo", {"epsilon": -1.0}, "epsilon must be a finite number of at least 0, not -1"),
        ("grpo", {"std_threshold": float("nan")}, "std_threshold"),
        ("grpo", {"std_level": "step"}, "unknown std_level 'step'.*batch, group"),
        ("opmd", {"opmd_baseline": "meen"}, "Did you mean 'mean'"),
        ("opmd", {"tau": 0.0}, "tau must be"),
        ("reward_variance", {"variance_threshold": -1}, "variance_threshold"),
    ],
)
def test_values_out_of_range_are_told(name, args, message):
    with pytest.raises(ConfigError, match=message):
        ADD_STRATEGY.get(name)(NoWriter(), **args)


@pytest.mark.parametrize("name", list(ADD_STRATEGY))
def test_unknown_arguments_list_the_valid_ones(name):
    with pytest.raises(TypeError, match=r"unknown argument of .*'epsilom'") as error:
        ADD_STRATEGY.get(name)(NoWriter(), epsilom=1.0)
    for arg in ADD_STRATEGY.get(name).default_args():
        assert arg in str(error.value)


def test_unknown_names_list_the_known_ones():
    with pytest.raises(ValueError, match=r"Did you mean 'grpo'.*opmd.*reward_variance"):
        ADD_STRATEGY.get("grpoo")
