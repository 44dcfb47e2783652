"""Operators out of a config: every key optional, wrong ones told; no torch is needed for it."""

import pytest
from omegaconf import OmegaConf

from trinity_lightning.config.parts import OnError, OperatorConfig, operator_configs
from trinity_lightning.errors import ConfigError


def test_every_key_is_optional_and_order_is_kept():
    text = """
    length: 7
    operators:
      b: {args: {x: "${length}"}}
      mine: {name: my_module.Mine, on_error: skip}
      a:
      c: {name: null, args: null}
    """
    expected = [
        OperatorConfig("b", {"x": 7}),
        OperatorConfig("my_module.Mine", {}, OnError.skip),
        OperatorConfig("a"),
        OperatorConfig("c"),
    ]
    config = OmegaConf.create(text)
    assert operator_configs(config.operators) == expected
    plain = OmegaConf.to_container(config.operators, resolve=True)
    assert isinstance(plain, dict)
    assert operator_configs({str(key): value for key, value in plain.items()}) == expected


@pytest.mark.parametrize("nothing", [None, {}, OmegaConf.create({})])
def test_nothing(nothing):
    assert operator_configs(nothing) == []


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (
            {"arg": {}},
            r"unknown key 'operators.x.arg'.*Did you mean 'operators.x.args'.*Arguments go into",
        ),
        ({"on_error": "skipp"}, r"unknown operators.x.on_error 'skipp'.*Did you mean 'skip'"),
        ({"args": [1]}, r"operators.x.args is \[1\]"),
        ("reward_filter", "operators.x is 'reward_filter'; give {name, args, on_error}"),
        (3, "operators.x is 3"),
    ],
)
def test_wrong_entries_are_told(entry, message):
    with pytest.raises(ConfigError, match=message):
        operator_configs({"x": entry})
    with pytest.raises(ConfigError, match=message):
        operator_configs(OmegaConf.create({"x": entry}))


def test_a_value_that_has_no_default_is_told():
    config = OmegaConf.create({"x": {"args": {"length": "???"}}})
    with pytest.raises(ConfigError, match=r"operators.x.args.length has no default: give it a value"):
        operator_configs(config)
